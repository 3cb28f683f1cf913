"""From a script that ran to the reports on it."""

from typing import Any

import keras

from wholestep.audit.counted import running
from wholestep.audit.inquiry import Meaning, UnknownError, inquire
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.report import Report
from wholestep.audit.scout import Scout, Watched
from wholestep.audit.script import Ran
from wholestep.audit.supposing import NoLoss, explains, losses, misfits
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
    if len(others := [each for each in scout.watched.values() if each is not watched and each.log.applied]):
        report.unseen.append(f"{len(others)} more of the script's models: one is looked at")
    return [report]


def _case(meaning: Meaning, loss: Any, supposed: str = "") -> Case:
    watched = meaning.watched
    try:
        # Not the weights of now: a step of JAX that was ended halfway has given them up.
        given = meaning.data, loss, watched.log
        made = case(watched.model, *given, optimizer=meaning.optimizer, before=watched.before)
    except SpecificationError as error:
        raise UnknownError(f"what the loop is to be compared with: {error}") from error
    made.supposed = supposed
    return made


def _judged(meaning: Meaning) -> tuple[Case, Verdict]:
    """Return the case by the loss that is meant, or by the first one that explains the gradients, and its verdict."""
    called = [each for each in meaning.watched.log.called if each.outputs]
    why = "the model is not compiled with a loss, the script calls none of Keras, and none gives its gradients"
    for loss in losses(called[0].outputs if called else [], meaning.data[1]) if meaning.is_supposed else [meaning.loss]:
        supposed = loss.name if meaning.is_supposed else ""
        try:
            made = _case(meaning, loss, supposed)
            verdict = made.judge()
        except (WholestepError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            if not supposed:
                name = type(error).__name__
                why = f"the script's loss does not take labels and the model's outputs as they are ({name})"
            continue
        if not supposed:
            return made, verdict
        if verdict.evidence and explains(verdict.causes):
            told = "as the script's gradients are its own, or are so but for what is named"
            meaning.told.append(f"loss: {supposed}, supposed, {told}: if another is meant, say which")
            return made, verdict
    made = _case(meaning, NoLoss())
    say = "Say which is meant: `with ws.audit(model, data=(x, y), loss=...)`"
    meaning.unseen.append(f"the loss and its gradients: {why}. {say}")
    return made, made.judge()


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
