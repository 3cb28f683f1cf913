"""From a script that ran to the reports on it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.asides import counting_on, padded, still, teachers, used_up
from wholestep.audit.ends import Ended
from wholestep.audit.found import numbers_of
from wholestep.audit.gradients import is_along
from wholestep.audit.inquiry import inquire
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.log import own_fault
from wholestep.audit.report import Report
from wholestep.audit.script import Ran
from wholestep.audit.searching import Meaning, UnknownError, reconstructs
from wholestep.audit.supposing import NoLoss, averaging, explains, is_padded, losses, name_of
from wholestep.audit.watch import case
from wholestep.audit.windows import PAD, Rows
from wholestep.errors import SpecificationError, WholestepError


def conclude(ran: Ran) -> list[Report]:
    """Return the reports of the audits that a script made itself, or else the one on its loop.

    Raises:
        UnknownError: it cannot be found out what the loop is to be compared with.
    """
    scout = ran.scout
    if scout.reports:
        over = [report for report, _ in scout.reports if report.is_over]
        if not over:
            raise UnknownError("the loop: the script's own audit has ended with an error")
        return over
    meaning = inquire(scout)
    watched = meaning.watched
    report = Report()
    has_ended = not (scout.has_stopped or ran.how)
    made, verdict = _judged(meaning, Ended.of(watched.model) if has_ended else None)
    own = {id(layer) for layer in watched.model._flatten_layers()}
    others = [each for each in scout.watched.values() if id(each.model) not in own and each.log.applied]
    apart = _leave_out(verdict, meaning, len(others))
    report.close(made, verdict)
    report.unseen.extend(apart)
    report.taken += meaning.told
    report.unseen.extend(meaning.unseen)
    if verdict.evidence and not any(cause.stage == "gradient" for cause in verdict.causes):
        verdict.add(verdict.look("padding", lambda: ([], padded(made))))
    beside = {
        "generators": lambda: used_up(scout, watched, verdict.seen),
        "other models": lambda: still(scout, watched),
        "models that nothing moves": lambda: teachers(scout, own),
        "the metrics": lambda: counting_on(scout, watched, verdict.seen),
    }
    for what, notes in beside.items():
        verdict.add(verdict.look(what, lambda notes=notes: ([], notes())))  # type: ignore[misc]
    if scout.has_stopped:
        told = (
            f"the rest of the script: it was ended after {scout.num_updates} updates, so nothing is known of what it "
        )
        report.unseen.append(f"{told}writes back at its end; `--updates` lets it run on")
    if ran.how:
        report.unseen.append(f"the rest of the loop: {ran.how}")
    return [report]


def _leave_out(verdict: Verdict, meaning: Meaning, num_others: int) -> list[str]:
    """Return what is not looked at. A gradient that is not known may be of more than the loss that the script calls."""
    told = [f"{num_others} more of the script's models: one is looked at"] * bool(num_others)
    unknown = [c for c in verdict.causes if c.stage == "gradient" and not c.is_listed]
    if not unknown or not (num_others or meaning.loss is not None):
        return told
    verdict.causes = [c for c in verdict.causes if c not in unknown]
    name = "the loss" if meaning.loss is None else name_of(meaning.loss)
    if all(map(is_along, verdict.evidence)):
        verdict.notes.append(f"The gradient is that of {name}, but: {unknown[0].explanation} Is that meant?")
        return told
    verdict.has_loss, verdict.unjudged = False, f"the gradient is not that of {name} alone"
    more = f"if nothing else is meant to be in the loss, something is wrong: {unknown[0].explanation}"
    return [f"the gradient: it is not that of {name} alone; {more}", *told]


class _Supposed(NamedTuple):
    """What may be meant: `told` says it in words; none for what is known."""

    data: tuple
    loss: Any
    told: str = ""


def _judged(meaning: Meaning, ended: Ended | None) -> tuple[Case, Verdict]:
    """Return the case by the loss that is meant, or by the first one that explains the gradients, and its verdict.

    Args:
        ended: the model's values after the script; None for one that was ended before its last line.
    """
    why, first = _why(meaning), None
    for supposed in _supposed(meaning):
        try:
            made = _case(meaning, supposed, ended)
            verdict = made.judge()
        except (UnknownError, WholestepError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            if not supposed.told:
                if isinstance(error, UnknownError):
                    raise
                name = type(error).__name__
                of_script = f"the script's loss does not take labels and the model's outputs as they are ({name})"
                why = own_fault(error) or of_script
            continue
        if not supposed.told and (not verdict.evidence or explains(verdict.causes, verdict.evidence)):
            return made, verdict
        if not supposed.told:
            first = made, verdict
        elif explains(verdict.causes, verdict.evidence):
            told = "as the script's gradients are its own, or are so but for what is named"
            meaning.told.append(f"loss: {supposed.told}, supposed, {told}: if another is meant, say which")
            return made, verdict
    if first is not None:
        return first
    made = _case(meaning, _Supposed(meaning.data, NoLoss()), ended)
    say = "Say which is meant: `with ws.audit(model, data=(x, y), loss=...)`"
    verdict = made.judge()
    verdict.add(verdict.look("the losses of one row", lambda: ([], _side_by_side(meaning))))
    meaning.unseen.append(f"the loss and its gradients: {why}. {say}")
    return made, verdict


def _side_by_side(meaning: Meaning) -> list[str]:
    """Return a note of one row: the script's own loss of it beside the first usual one that fits."""
    x, y, *_ = meaning.data
    called = next((each for each in meaning.watched.log.called if each.outputs and each.inputs), None)
    rows = [] if called is None else Rows(x).find(called.inputs).tolist()
    at = next((i for i, row in enumerate(rows) if row != PAD), None)
    if called is None or at is None or not meaning.own or not meaning.has_labels or not hasattr(y, "shape"):
        return []
    label, out = np.asarray(y)[rows[at]][None], called.outputs[0][at : at + 1]
    usual = next(losses(called.outputs, y), None)
    if usual is None:
        return []
    own, other = (
        float(np.mean(np.asarray(keras.ops.convert_to_numpy(loss(label, out))))) for loss in (meaning.own[0], usual)
    )
    told = f"On row {rows[at]}, label {numbers_of(label)}, output {numbers_of(out)}: "
    return [f"{told}{name_of(meaning.own[0])} of the script is {own:.4g}, {usual.name} is {other:.4g}."]


def _supposed(meaning: Meaning) -> Iterator[_Supposed]:
    """Yield what is meant, if that is known; then what may be, the most usual first."""
    x, y, *weight = meaning.data
    called = [each for each in meaning.watched.log.called if each.outputs]
    outputs = called[0].outputs if called else []
    labels = meaning.labels or ({"": y} if meaning.has_labels else {})
    if not meaning.is_supposed:
        yield _Supposed(meaning.data, meaning.loss)
    elif reconstructs(tree.leaves(x), called):
        labels["the inputs"] = tree.leaves(x)[0]
    if not meaning.is_supposed and not meaning.called:
        return
    weights = {"": weight} | {f" by the weights {name}": [array] for name, array in meaning.weights.items()}
    for of, values in labels.items():
        named = f" of {of} as labels" if of and (len(labels) > 1 or not meaning.has_labels) else ""
        known = [(loss, name_of(loss)) for loss in meaning.called]
        usual = [(loss, loss.name) for loss in losses(outputs, values)] if meaning.is_supposed else []
        for by, own in weights.items():
            yield from (_Supposed((x, values, *own), loss, f"{name}{named}{by}") for loss, name in [*known, *usual])
        if isinstance(values, np.ndarray) and is_padded(values):
            by, own = " at the places whose labels are not 0", (values != 0).astype("float32")
            masked = [(averaging(loss, by_weight=True), loss.name) for loss in losses(outputs, values)]
            yield from (_Supposed((x, values, own), loss, f"{name}{named}{by}") for loss, name in masked)
        if meaning.is_supposed:
            yield from (_Supposed((x, values), loss, f"{name_of(loss)} of the script{named}") for loss in meaning.own)


def _why(meaning: Meaning) -> str:
    """Return why a loss that has to be supposed is not known."""
    if not meaning.called:
        return "the model is not compiled with a loss, the script calls none of Keras, and none gives its gradients"
    names = ", ".join(sorted(map(name_of, meaning.called)))
    return (
        f"the model is not compiled with a loss, and of those that the script calls ({names}) none gives its gradients"
    )


def _case(meaning: Meaning, supposed: _Supposed, ended: Ended | None) -> Case:
    watched = meaning.watched
    try:
        # Not the weights of now: a step of JAX that was ended halfway has given them up.
        given = supposed.data, supposed.loss, watched.log
        made = case(watched.model, *given, optimizer=meaning.optimizer, before=watched.before)
    except SpecificationError as error:
        raise UnknownError(f"what the loop is to be compared with: {error}") from error
    made.supposed, made.is_found, made.ended = supposed.told, True, ended
    return made
