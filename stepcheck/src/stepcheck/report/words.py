"""The text of findings, and of parts that were not judged: by value, from `faults.toml`
and the tables here.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from stepcheck.faults import Fault, Stage
from stepcheck.report import changes
from stepcheck.values import Change, Finding, Number, Reason, Shown, Unjudged

NUM_NAMED = 8  # rows, updates or names that a list shows
JAX, TENSORFLOW, TORCH = "jax", "tensorflow", "torch"
_STAGES = {
    Stage.ROWS: "rows",
    Stage.MODE: "forward pass",
    Stage.GRADIENT: "gradient",
    Stage.STEP: "optimizer step",
    Stage.STATE: "state",
    Stage.PRINTED: "printed loss",
}
_SHOWN = {
    Shown.GRADIENT_LENGTH: "length of the gradient",
    Shown.GRADIENT: "gradient of {}",
    Shown.OUTPUT: "output {}",
    Shown.RATE: "learning rate of update {}",
    Shown.LOSS: "printed loss {}",
    Shown.DERIVATIVE: "derivative of the loss by the output of row {}",
    Shown.WEIGHT: "{}",
    Shown.MOVE: "move of {}",
    Shown.STATE: "{} afterwards",
}
_REASONS = {
    Reason.NO_UPDATE: "no optimizer step was made, and no weight moved",
    Reason.OUTLINED: (
        "the weights moved, and no update was seen: begin before the first step, so "
        "that functions which "
        "were traced or compiled earlier are not used"
    ),
    Reason.NO_FORWARD_PASS: (
        "no forward pass of this model was seen before them, as where layers are "
        "called one by one, or by another model: watch that one"
    ),
    Reason.OTHER_INPUTS: (
        "the model's inputs are no rows of `data`, bit for bit: state the arrays "
        "that the model gets"
    ),
    Reason.OWN_STEP: (
        "the weights do not move by the steps of the stated optimizer, or of a known one, "
        "on the gradients that were meant"
    ),
    Reason.SEVERAL_STEPS: (
        "the parameters have several optimizers or learning rates, and one is stated"
    ),
    Reason.STEP_UNKNOWN: (
        "the step of this optimizer is not known; the framework makes a few again"
    ),
    Reason.OWN_TRAINER: (
        "they are made by `wholestep.Trainer`, whose `explain()` shows how they run"
    ),
    Reason.FEW_PASSES: "too few whole passes over the data were seen",
    Reason.BY_CHANCE: "the data have so few batches that two passes may have one order by chance",
    Reason.WRITTEN: (
        "weights or slots were written beside the optimizer's steps, which is not stated"
    ),
    Reason.NOT_HANDED: "the loss has a gradient of trainable variables that no optimizer step gets",
    Reason.SKIPPED: "forward passes before them have no step, and are not in their gradients",
    Reason.EQUAL_ROWS: "rows of the data have equal inputs, and which was meant cannot be told",
    Reason.DATA_AS_GIVEN: "no data are stated",
    Reason.UNLIKE_OUTPUTS: (
        "the outputs are not those of the model in either mode, as with draws "
        "outside of its seeds"
    ),
    Reason.RARE_SHAPES: "their batches have shapes that few others have",
    Reason.NOT_KEPT: "their numbers were not kept, to spare memory",
    Reason.NO_GRADIENT: "no gradient could be computed again",
    Reason.COUPLED: (
        "each has several batches, and the loss of one is not the mean of its rows' "
        "losses: state a loss that returns (values, weights)"
    ),
    Reason.IN_TURN: "the losses of several outputs are applied in turn, each in a separate update",
    Reason.MOVING: "the weights move between their microbatches, or in a forward pass",
    Reason.THAWED: "which variables are trainable changes inside of the loop",
    Reason.REMADE: "the model has other variables than when they were made",
    Reason.NOT_FINITE: "their gradients are not finite",
    Reason.ENDED: "the loop ended with an error",
    Reason.OTHER_WEIGHTS: "`fit` is called again, with other weights of rows",
    Reason.WEIGHTS_NOT_STATED: "`fit` got sample weights: state them, data=(x, y, sample_weight)",
    Reason.LOSS_FAILED: "the loss cannot be computed from the model's outputs and the labels",
    Reason.LOSS_OF_OTHER_AXIS: (
        "the rows are not the first axis of the outputs, as they are of the inputs"
    ),
    Reason.LOSS_WITHOUT_LABELS: "no labels of a pass are known: state data=(x, y)",
    Reason.LOSS_OF_MODEL: (
        "the model computes the loss, and it is none that is known of its logits and "
        "labels"
    ),
    Reason.LOSS_OF_ONE_OUTPUT: (
        "the model returns several outputs: state a function that takes its own"
    ),
    Reason.LOSS_WITH_PARAMETERS: "the loss has parameters of its own, which may move",
    Reason.NOT_REPLAYED: "a copy of the model does not run a pass again",
    Reason.OTHER_WEIGHTS_OF_MODEL: (
        "passes with other weights than the module's (`functional_call`)"
    ),
    Reason.CLOSURE: "optimizer steps run the model more than once, by a closure",
    Reason.NO_TENSOR: "an output has no tensor",
    Reason.PROCESS_MISSING: "the record of another process is missing",
    Reason.PROCESSES_APART: (
        "the processes begin with different weights, or make different numbers of steps"
    ),
    Reason.CUT: "no more is kept",
    Reason.FAILED: "an error inside of stepcheck; please report it",
    Reason.BLIND: "code ran that reports no values",
    Reason.PENALTY_BY_HAND: (
        "multiples of the weights are added to what was meant: a penalty that is not "
        "stated, as a loss of model and batch (`stepcheck.Objective`) states it"
    ),
    Reason.CHANGED_BY_HAND: (
        "they are set to zero, or passes are skipped, by hand, which is not stated"
    ),
    Reason.CLIPPED_BY_HAND: (
        "the bound by which the loop clips them is not stated; but for it they are as "
        "meant"
    ),
    Reason.ROUNDED: (
        "rounding alone changes them by more than 4 %, as the model makes it grow: "
        "run a few updates in float64"
    ),
    Reason.PRINTED_UNLIKE: (
        "the numbers are not those of the loss that is meant, nor of an error that "
        "is known"
    ),
}


@cache
def _texts() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("faults.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def name(fault: Fault) -> str:
    """Return the name of a fault in the field.

    >>> name(Fault.MEAN_OF_MEANS), name(Fault.FROM_LOGITS)
    ('mean of means', 'from_logits')
    """
    plain = fault.name.lower().replace("_", " ")
    return _texts()[fault.id].get("name", plain)


def stage(of: Stage) -> str:
    """Return the name of a stage."""
    return _STAGES[of]


def sentence(finding: Finding) -> str:
    """Return a finding in a sentence."""
    change, where = finding.change, finding.where
    told = _texts()[finding.fault.id].get("says", "")
    if not told:
        is_unlike = not change.is_known and where.parameters
        differing = (
            f" It differs in {listed(where.parameters)}." if is_unlike else ""
        )
        return f"{changes.sentence(change)}{differing}"
    places = {
        "rows": listed(where.rows),
        "parameters": listed(where.parameters or change.names),
        "outputs": listed(where.outputs or change.outputs),
    }
    return told.format(*change.numbers, **places)


def fix(change: Change, framework: str) -> str:
    """Return what to do, for one of the frameworks jax, tensorflow and torch; "" if
    nothing is proposed.
    """
    fixes = _texts()[change.fault.id].get("fix", {})
    of_keras = "" if framework == TORCH else fixes.get("keras", "")
    return fixes.get(framework) or of_keras or fixes.get("all", "")


def number(of: Number) -> str:
    """Return the name of a number of a proof."""
    return _SHOWN[of.what].format(of.of)


def reason(unjudged: Unjudged) -> str:
    """Return in words which part was not judged, and why.

    >>> reason(Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, 2))
    'gradient of 2 updates: their gradients are not finite'
    """
    num = many(unjudged.updates, "update")
    if unjudged.stage is None:
        some = f"after {num}" if unjudged.updates else "the updates"
    else:
        some = stage(unjudged.stage) + f" of {num}" * bool(unjudged.updates)
    more = f" ({unjudged.told})" if unjudged.told else ""
    return f"{some}: {_REASONS[unjudged.reason]}{more}"


def listed(parts: tuple, num: int = NUM_NAMED) -> str:
    """Return the first parts in words.

    >>> listed((3, 1, 2)), listed(tuple("abc"), 2)
    ('3, 1, 2', 'a, b, ...')
    """
    words = [*map(str, parts)]
    return ", ".join(words[:num]) + (", ..." if len(words) > num else "")


def many(num: int, one: str, more: str = "") -> str:
    """Return a number with its noun.

    >>> many(1, "update"), many(2, "batch", "batches")
    ('1 update', '2 batches')
    """
    return f"{num} {one if num == 1 else more or one + 's'}"
