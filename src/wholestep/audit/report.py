"""What an audit says: causes as values, and the text of all of it."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

from wholestep.audit.found import Found, Likely
from wholestep.audit.html import page
from wholestep.audit.html import report as as_html
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.pictures import assert_drawable, can_draw, pictures
from wholestep.audit.printed import as_numbers
from wholestep.audit.text import first, told
from wholestep.audit.views import views
from wholestep.errors import SpecificationError, message


class Report:
    """What an audit found; complete once its `with` has ended.

    >>> from wholestep.audit.report import Report
    >>> print(Report())
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

    @property
    def has_loss(self) -> bool:
        """Whether the gradients were judged; `wholestep audit` cannot, if it does not find out which loss is meant."""
        return self._judged().has_loss

    @property
    def first_line(self) -> str:
        """The report in a line: a cause; a note that is very likely the fault; what was not judged; or what was."""
        return first(self._judged())

    @property
    def has_likely(self) -> bool:
        """Whether a note is very likely the fault; the report begins with it if there is no cause."""
        return any(isinstance(note, Likely) for note in self.notes)

    @property
    def is_judged(self) -> bool:
        """Whether the gradients of updates were judged."""
        return self.has_seen and self.has_loss and not self._judged().unjudged

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

    def close(self, case: Case, verdict: Verdict | None = None) -> None:
        """Take what there is to judge, once the loop has ended; and the verdict, if it is known."""
        self._case, self._verdict = case, verdict
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

    def as_json(self) -> dict[str, Any]:
        """Return the report as data: dicts, lists, strings, numbers and None, as docs/audit.md lists them."""
        verdict = self._judged()
        causes = []
        for cause in verdict.causes:
            line = cause.line and {"file": cause.line.file, "number": cause.line.number, "text": cause.line.text}
            causes.append(asdict(cause) | {"line": line})
        told = {"engine": keras.backend.backend(), "has_seen": verdict.has_seen, "has_loss": verdict.has_loss}
        told |= {"first_line": first(verdict), "judged": verdict.judged}
        lists = {"notes": list(verdict.notes), "unseen": list(verdict.unseen), "taken": list(self.taken)}
        return _plain(told | {"looked_at": verdict.looked_at, "causes": causes} | lists)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report with pictures to a file: one page, without scripts.

        Raises:
            SpecificationError: matplotlib is not installed, or the audit is not over.
        """
        assert_drawable()
        Path(path).write_text(page(self._html()), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return what a notebook shows; without pictures if matplotlib is not installed."""
        return self._html() if self._case is not None else f"<p>{self}</p>"

    def _html(self) -> str:
        verdict = self._judged()
        assert self._case is not None
        drawn = pictures(views(self._case, verdict)) if can_draw() and verdict.has_seen else []
        missing = "" if can_draw() else "The pictures need matplotlib: pip install 'wholestep[demo]'."
        return as_html(verdict, self.taken, self._looked_at(), drawn, missing)

    def _looked_at(self) -> str:
        return f"Looked at {self._judged().looked_at}, on {keras.backend.backend()}."

    def __str__(self) -> str:
        if self._case is None:
            return "The audit is not over: read its report after the `with`."
        verdict = self._judged()
        parts = [first(verdict)]
        parts += [told(i, cause) for i, cause in enumerate(verdict.causes, start=1)]
        lists = ("Taken as meant", self.taken), ("Notes", verdict.notes), ("Not looked at", verdict.unseen)
        for title, lines in lists:
            if lines:
                parts.append("\n".join([f"{title}:", *(f"  - {line}" for line in lines)]))
        parts.append(self._looked_at())
        return "\n\n".join(parts)

    __repr__ = __str__


def _plain(value: Any) -> Any:
    """Return JSON: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
