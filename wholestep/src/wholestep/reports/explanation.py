"""How updates run, in words: `Trainer.explain`."""

import math
from collections.abc import Iterable

import keras

from wholestep.cut import Cut
from wholestep.engines import Engine
from wholestep.keras_private import trainable_variables
from wholestep.model import Coupling, Forward, layers
from wholestep.plan import Planner

_UNSEEN = (
    "behind Keras' back, as tf.random, jax.random and numpy do, or in a tf.function of its own"
)


def explain(planner: Planner, sharded: list[str], data: str) -> str:
    """Return a description of how an update runs.

    Args:
        sharded: the sharded variables.
        data: the place of the data, as text.
    """
    coupling = planner.findings.coupling
    programs = list(planner.programs.values())
    # of those with the most rows, the newest
    program = max(reversed(programs), key=lambda program: program.cut.rows)
    num_programs = len(programs)
    lines = []
    if num_programs > 1:
        lines.append(
            f"{num_programs} programs for updates of several shapes; that of the most rows:"
        )
    lines += [
        f"One update takes {program.cut}.",
        *_spread(program.cut, planner.engine),
        _padding(program.cut, planner.pads_short),
        data,
        _dispatched(program.most),
        program.how,
        _trained(program.forward),
    ]
    if sharded:
        lines.append(f"Sharded, never gathered for the update: {', '.join(sharded)}.")
    if program.memory is not None:
        needs = program.memory / 2**20
        limit = planner.limit / 2**20
        lines.append(
            f"Besides data and weights, the program needs {needs:.1f} MiB, of {limit:.0f} it may "
            "use."
        )
    lines += program.table_notes
    draws = _drawn(coupling, program.forward)
    if coupling is not None:
        if not (coupling.cut_is_exact and draws):
            is_cut = any(each.cut.num_microbatches > 1 for each in programs)
            lines.append(coupling.explanation(program.forward.movers, is_cut=is_cut))
        if coupling.custom:
            lines.append(
                "The model's step is run unchanged: without microbatches, replicas or padding, "
                "whose exactness cannot be guaranteed for it. Its losses and the weights are "
                "checked afterwards."
            )
    lines += [draws, program.function.form_of_gradients()]
    return "\n".join(filter(None, lines))


def _dispatched(most: int) -> str:
    backend = keras.backend.backend()
    if most == 1:
        return f"Each update is a separate dispatch ({backend})."
    return f"Up to {most} updates go to the device in one dispatch ({backend})."


def _trained(forward: Forward) -> str:
    """Return a line about the weights that train, if others are frozen; statistics do not count."""
    trained = forward.variables.params
    could_train = dict[int, keras.Variable]()
    for layer in layers(forward.model):
        could_train |= {id(v): v for v in trainable_variables(layer)}
    if len(trained) >= len(could_train):
        return ""
    weights = f"{_num_weights(trained):,} of {_num_weights(could_train.values()):,} weights"
    return f"Trains {weights}, in {len(trained)} of {len(could_train)} variables."


def _num_weights(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _drawn(coupling: Coupling | None, forward: Forward) -> str:
    """Return a line about random draws that do not belong to rows, if there are any."""
    facts = forward.facts.draws
    reasons = [f"keras.random.{fact.name} ({fact.why})" for fact in facts if fact.why]
    if reasons:
        return f"Random draws differ between cuts: {'; '.join(dict.fromkeys(reasons))}."
    if coupling is None or not coupling.draws:
        return ""
    if any(fact.axis is not None for fact in facts):
        reasons.append("an axis that is a multiple of the rows does not hold them outermost")
    if any(fact.axis is None for fact in facts):
        reasons.append("rows take parts of a draw whose shape does not grow with them")
    reasons.append(f"something draws {_UNSEEN}")
    return f"Random draws differ between cuts: {', or '.join(reasons)}."


def _spread(cut: Cut, engine: Engine) -> list[str]:
    """Return lines about the spread of rows over hosts and replicas, if there are several."""
    replicas = engine.devices.num_replicas
    hosts = engine.processes.count
    if replicas == 1:
        return []
    parts = []
    for num, size in cut.sections:
        rows = f"{-(-size // replicas)} rows"
        parts.append(rows if num == 1 else f"{num} microbatches x {rows}")
    shares = f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]
    many = f"{hosts} {'host' if hosts == 1 else 'hosts'} x {replicas / hosts:g} replicas"
    is_even = all(size % replicas == 0 for _, size in cut.sections)
    layout = f"= {many} x {shares}" if is_even else f"on {many}, at most {shares} on each"
    sums = "Arrays are global: every replica sees the statistics of all rows."
    if cut.split:
        sums = (
            "Each replica sums over its own rows; the sums of all go over the wire once an update."
        )
    return [f"{cut.places} places {layout}.", sums]


def _padding(cut: Cut, pads_short: bool | None) -> str:
    lines = []
    extra = cut.places - cut.rows
    if extra:
        places = "place is" if extra == 1 else f"{extra} places are"
        lines.append(f"The last {places} padding of weight 0.")
    if cut.padded:
        shorter = {
            True: "Shorter batches are filled up with rows of weight 0.",
            False: "Shorter batches run in their own shape, as padding would count.",
            None: "Whether shorter batches can be filled up with rows of weight 0 is tried when "
            "one comes.",
        }
        lines.append(shorter[pads_short])
    return " ".join(lines) or "No row is padding."
