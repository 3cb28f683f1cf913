"""From a script that ran to the reports on it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from wholestep import tree
from wholestep.audit.counted import running
from wholestep.audit.inquiry import Meaning, UnknownError, inquire, reconstructs
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.report import Report
from wholestep.audit.scout import Scout, Watched
from wholestep.audit.script import Ran
from wholestep.audit.supposing import NoLoss, explains, losses, misfits, name_of
from wholestep.audit.watch import case
from wholestep.errors import SpecificationError, WholestepError


def conclude(ran: Ran) -> list[Report]:
    """Return the reports of the audits that a script made itself, or else the one on its loop.

    Raises:
        UnknownError: it cannot be found out what the loop is to be compared with.
    """
    scout = ran.scout
    if scout.reports:
        return [report for report, _ in scout.reports if report.is_over]
    meaning = inquire(scout)
    watched = meaning.watched
    report = Report()
    made, verdict = _judged(meaning)
    report.close(made, verdict)
    if verdict.evidence and not any(cause.stage == "gradient" for cause in verdict.causes):  # so it got these outputs
        outputs = [each.outputs[0] for each in watched.log.called if len(each.outputs) == 1]
        report.notes.extend(misfits(meaning.loss, outputs))
    report.taken += meaning.told
    report.unseen.extend(meaning.unseen)
    report.notes.extend(_still(scout, watched))
    if verdict.seen is not None:
        report.notes.extend(running(_metrics(scout, watched), watched.log, verdict.seen))
    if ran.how:
        report.unseen.append(f"the rest of the loop: {ran.how}")
    own = {id(layer) for layer in watched.model._flatten_layers()}
    if others := [each for each in scout.watched.values() if id(each.model) not in own and each.log.applied]:
        report.unseen.append(f"{len(others)} more of the script's models: one is looked at")
    return [report]


class _Supposed(NamedTuple):
    """What may be meant: `told` says it in words; none for what is known."""

    data: tuple
    loss: Any
    told: str = ""


def _judged(meaning: Meaning) -> tuple[Case, Verdict]:
    """Return the case by the loss that is meant, or by the first one that explains the gradients, and its verdict."""
    why = _why(meaning)
    for supposed in _supposed(meaning):
        try:
            made = _case(meaning, supposed)
            verdict = made.judge()
        except (WholestepError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            if not supposed.told:
                name = type(error).__name__
                why = f"the script's loss does not take labels and the model's outputs as they are ({name})"
            continue
        if not supposed.told:
            return made, verdict
        if verdict.evidence and explains(verdict.causes):
            told = "as the script's gradients are its own, or are so but for what is named"
            meaning.told.append(f"loss: {supposed.told}, supposed, {told}: if another is meant, say which")
            return made, verdict
    made = _case(meaning, _Supposed(meaning.data, NoLoss()))
    say = "Say which is meant: `with ws.audit(model, data=(x, y), loss=...)`"
    meaning.unseen.append(f"the loss and its gradients: {why}. {say}")
    return made, made.judge()


def _supposed(meaning: Meaning) -> Iterator[_Supposed]:
    """Yield what is meant; or what may be, the most usual first: the labels may be the inputs."""
    if not meaning.is_supposed:
        yield _Supposed(meaning.data, meaning.loss)
        return
    called = [each for each in meaning.watched.log.called if each.outputs]
    outputs = called[0].outputs if called else []
    x, y = tree.leaves(meaning.data[0]), meaning.data[1]
    yield from (_Supposed(meaning.data, loss, name_of(loss)) for loss in meaning.called)
    yield from (_Supposed(meaning.data, loss, loss.name) for loss in losses(outputs, y))
    if y is not x[0] and reconstructs(x, called):
        data = (meaning.data[0], x[0])
        yield from (_Supposed(data, loss, f"{loss.name} of the inputs as labels") for loss in losses(outputs, x[0]))


def _why(meaning: Meaning) -> str:
    """Return why a loss that has to be supposed is not known."""
    if not meaning.called:
        return "the model is not compiled with a loss, the script calls none of Keras, and none gives its gradients"
    names = ", ".join(sorted(map(name_of, meaning.called)))
    return (
        f"the model is not compiled with a loss, and of those that the script calls ({names}) none gives its gradients"
    )


def _case(meaning: Meaning, supposed: _Supposed) -> Case:
    watched = meaning.watched
    try:
        # Not the weights of now: a step of JAX that was ended halfway has given them up.
        given = supposed.data, supposed.loss, watched.log
        made = case(watched.model, *given, optimizer=meaning.optimizer, before=watched.before)
    except SpecificationError as error:
        raise UnknownError(f"what the loop is to be compared with: {error}") from error
    made.supposed = supposed.told
    return made


def _metrics(scout: Scout, watched: Watched) -> list[keras.metrics.Metric]:
    """Return the metrics among the script's names, and those of the model."""
    named = scout.around.of(keras.metrics.Metric)
    return list({id(metric): metric for metric in [*named, *watched.model.metrics]}.values())


def _still(scout: Scout, watched: Watched) -> list[str]:
    """Return notes of other models that are called for a gradient, and that nothing moves."""
    notes = []
    for each in scout.watched.values():
        is_used = any(called.differentiated for called in each.log.called)
        if each is not watched and is_used and not each.log.applied and each.model.trainable_variables:
            num = len(each.model.trainable_variables)
            told = f"The {num} trainable variables of the model {each.model.name!r} are moved by no step"
            notes.append(f"{told}, and a gradient is taken of what comes of its outputs. Are they meant to stay?")
    return notes
