"""From a script that ran to the reports on it."""

from wholestep.audit.inquiry import UnknownError, inquire
from wholestep.audit.report import Report
from wholestep.audit.script import Ran
from wholestep.audit.watch import case
from wholestep.errors import SpecificationError


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
    try:
        # Not the weights of now: a step of JAX that was ended halfway has given them up.
        given = meaning.data, meaning.loss, watched.log
        made = case(watched.model, *given, optimizer=meaning.optimizer, before=watched.before)
    except SpecificationError as error:
        raise UnknownError(f"what the loop is to be compared with: {error}") from error
    report = Report()
    report.close(made)
    report.taken += meaning.told
    report.unseen.extend(meaning.unseen)
    if ran.how:
        report.unseen.append(f"the rest of the loop: {ran.how}")
    if len(others := [each for each in scout.watched.values() if each is not watched and each.log.applied]):
        report.unseen.append(f"{len(others)} more of the script's models: one is looked at")
    return [report]
