"""What an audit says: causes as values, and the text of all of it."""

import keras
import numpy as np

from wholestep.audit.found import Found
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.printed import as_numbers
from wholestep.errors import SpecificationError, message


class Report:
    """What an audit found; complete once its `with` has ended.

    >>> import wholestep.audit.report as report
    >>> print(report.Report())
    The audit is not over: read its report after the `with`.
    """

    def __init__(self) -> None:
        self._case: Case | None = None
        self._verdict: Verdict | None = None
        self._printed: list[float] = []
        self._has_failed = False
        self.taken: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended, so that there is something to read."""
        return self._case is not None

    @property
    def causes(self) -> list[Found]:
        """What is wrong, the first stage that differs first. Empty: nothing was found in what was seen."""
        return self._judged().causes

    @property
    def notes(self) -> list[str]:
        """What is no cause, or may be meant."""
        return self._judged().notes

    @property
    def unseen(self) -> list[str]:
        """What the audit could not look at."""
        return self._judged().unseen

    @property
    def has_seen(self) -> bool:
        """Whether at least one update on rows of the data was seen."""
        return self._judged().has_seen

    def printed(self, *, loss: object) -> None:
        """Tell the audit what the loop prints: the loss of each pass over the data, or of the last one.

        Raises:
            SpecificationError: these are no numbers.
        """
        try:
            numbers = as_numbers(loss)
        except (TypeError, ValueError) as error:
            must, attempt = (
                "loss must be a number, or one for each pass over the data.",
                "report.printed(loss=[0.7, 0.5]).",
            )
            raise SpecificationError(message(must, type(loss).__name__, attempt)) from error
        if not numbers or not np.all(np.isfinite(numbers)):
            must, attempt = "Printed losses must be finite numbers.", "leave out those that are not."
            raise SpecificationError(message(must, loss, attempt))
        self._printed = numbers
        if self._case is not None:
            self._case.printed, self._verdict = numbers, None

    def close(self, case: Case) -> None:
        """Take what there is to judge, once the loop has ended."""
        self._case = case
        case.printed = self._printed

    def fail(self) -> None:
        """Note that the loop has ended with an error."""
        self._has_failed = True

    def _judged(self) -> Verdict:
        if self._verdict is None:
            if self._case is None:
                ended = "one whose loop ended with an error" if self._has_failed else "one inside its `with`"
                must, attempt = "A report is read after its audit.", "read it after the `with`."
                raise SpecificationError(message(must, ended, attempt))
            self._verdict = self._case.judge()
        return self._verdict

    def __str__(self) -> str:
        if self._case is None:
            return "The audit is not over: read its report after the `with`."
        verdict = self._judged()
        parts = [_first(verdict)]
        if self.taken:
            parts.append("\n".join(["Taken for meant:", *(f"  - {line}" for line in self.taken)]))
        parts += [_told(i, cause) for i, cause in enumerate(verdict.causes, start=1)]
        for title, lines in (("Notes", verdict.notes), ("Not looked at", verdict.unseen)):
            if lines:
                parts.append("\n".join([f"{title}:", *(f"  - {line}" for line in lines)]))
        parts.append(f"Looked at {verdict.looked_at}, on {keras.backend.backend()}.")
        return "\n\n".join(parts)

    __repr__ = __str__


def _first(verdict: Verdict) -> str:
    if verdict.causes:
        cause = verdict.causes[0]
        name = (
            f"{cause.name[0].upper()}{cause.name[1:]}"
            if cause.is_known
            else f"Not known, but in the stage: {cause.stage}"
        )
        return f"{name}. {cause.explanation}"
    if not verdict.has_seen:
        return "Nothing can be said: no update on rows of the data was seen."
    return "No cause found."


def _told(number: int, cause: Found) -> str:
    lines = [f"{number}. {cause.stage}: {cause.name}"]
    if number > 1:
        lines.append(f"   {cause.explanation}")
    if cause.detail:
        lines.append(f"   {cause.detail}")
    if cause.is_known:
        lines.append(f"   distance from the reference {cause.without:.2g}; with this change {cause.with_change:.2g}")
    else:
        lines.append(f"   distance from the reference {cause.without:.2g}; no known change reproduces it")
    shown = ", ".join(map(str, cause.updates[:8])) + (", ..." if len(cause.updates) > 8 else "")
    lines.append(f"   updates: {shown}")
    if cause.line is not None:
        lines.append(f"   your code: {cause.line}")
    lines.append(f"   change: {cause.fix}")
    return "\n".join(lines)
