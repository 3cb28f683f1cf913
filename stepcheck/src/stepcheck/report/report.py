"""The report of a watched loop."""

import os
from typing import Any

import numpy as np

from stepcheck.errors import (
    SpecificationError,
    attempt,
    message,
    notify_if_long,
)
from stepcheck.faults import Stage
from stepcheck.judge import REQUIRED, Case, Verdict
from stepcheck.progress import shown
from stepcheck.report import schema, text
from stepcheck.report.page import assert_drawable, write_page
from stepcheck.values import Finding, Unjudged

PATIENCE = 5.0  # seconds


class Report:
    """The findings on a loop, and the stages that were judged; complete once its `with`
    has ended.

    >>> from stepcheck.report.report import Report
    >>> print(Report())
    The loop is not over: read its report after the `with`.
    """

    def __init__(self) -> None:
        self._case: Case | None = None
        self._verdict: Verdict | None = None
        self._printed: list[float] = []
        # where the report is, if another process judges the loop
        self.elsewhere = ""

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended, so that the report can be read."""
        return self._case is not None or bool(self.elsewhere)

    @property
    def findings(self) -> list[Finding]:
        """The differences from the update that was meant, in the order of the stages."""
        return self._judged().findings

    @property
    def unjudged(self) -> list[Unjudged]:
        """The parts that were not judged, and why."""
        return self._judged().unjudged

    @property
    def judged(self) -> list[Stage]:
        """The stages that were judged."""
        return self._judged().judged

    @property
    def failures(self) -> dict[Stage, str]:
        """The tracebacks of errors inside of stepcheck, by the stage that has ended in
        one.
        """
        return self._judged().failures

    @property
    def has_seen(self) -> bool:
        """Whether at least one update on rows of the data was seen."""
        return self._judged().has_seen

    @property
    def is_right(self) -> bool:
        """Whether all stages were judged, and nothing was found: `unjudged` has updates
        that were not.

        False in a process that does not judge: `require` raises in process 0 alone.
        """
        return not self.findings and {*REQUIRED} <= {*self.judged}

    @property
    def first_line(self) -> str:
        """The report in a line."""
        return self.elsewhere or text.first_line(self._judged())

    def require(self, *stages: str) -> None:
        """Raise unless each stage was judged, and nothing was found in it: for a test
        of a loop.

        Of several processes, process 0 judges the loop and raises; the others require
        nothing.

        Args:
            stages: of rows, mode, gradient, step, state; all of them by default.

        Raises:
            AssertionError: a stage was not judged, or something was found in it; its
                text is the report.
            SpecificationError: there is no such stage.
        """
        unknown = {*stages} - {*REQUIRED}
        if unknown:
            must = f"Stages must be of {', '.join(REQUIRED)}."
            given = ", ".join(sorted(unknown))
            raise SpecificationError(
                message(must, given, "report.require('step').")
            )
        if self.elsewhere:
            return
        wanted = {*stages} or {*REQUIRED}
        wrong = wanted & {finding.stage for finding in self.findings}
        if wrong or not wanted <= {*self.judged}:
            raise AssertionError(str(self))

    def printed(self, *, loss: object) -> None:
        """State the losses that the loop prints: of each pass over the data, or of the
        last one.

        Raises:
            SpecificationError: these are no numbers.
        """
        given, _ = attempt(lambda: np.ravel(np.asarray(loss, "float64")))
        if given is None or not given.size or not np.all(np.isfinite(given)):
            must = "Printed losses must be finite numbers, one for each pass or the last."
            raise SpecificationError(message(must, loss, "loss=[0.7, 0.5]."))
        numbers = given.tolist()
        self._printed = numbers
        if self._case is not None:
            self._case.printed, self._verdict = numbers, None

    def close(self, case: Case) -> None:
        """Take the case to judge, once the loop has ended."""
        self._case, self._verdict = case, None
        case.printed = self._printed

    def as_json(self) -> dict[str, Any]:
        """Return the report as data: dicts, lists, strings, numbers and None, as in
        docs/json.md.

        Of several processes, those that do not judge have the version of the schema,
        and `elsewhere`, which says where the report is.
        """
        if self.elsewhere:
            return {"schema": schema.VERSION, "elsewhere": self.elsewhere}
        return schema.as_json(self._own_case(), self._judged())

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report with pictures to a file: one page, without scripts.

        Raises:
            SpecificationError: matplotlib is not installed, or the loop is not over.
        """
        assert_drawable()
        if not self.elsewhere:
            write_page(path, "A training loop, checked", self._repr_html_())

    def _repr_html_(self) -> str:
        """Return the report for a notebook; without pictures if matplotlib is not
        installed.
        """
        if self._case is None:
            return f"<p>{self}</p>"
        return text.html(self._case, self._judged())

    def _own_case(self) -> Case:
        if self._case is None:
            must = "A report is read after its loop."
            given = "one inside its `with`"
            try_this = "read it after the `with`."
            raise SpecificationError(message(must, given, try_this))
        return self._case

    def _judged(self) -> Verdict:
        if self.elsewhere:
            return Verdict()
        if self._verdict is None:
            case = self._own_case()
            num = case.log.num_updates
            line = f"stepcheck: judging {num} updates of the loop, which may take a while."
            with notify_if_long(line, PATIENCE), shown():
                self._verdict = case.judge()
        return self._verdict

    def __str__(self) -> str:
        if self._case is not None:
            return text.text(self._case, self._judged())
        running = "The loop is not over: read its report after the `with`."
        return self.elsewhere or running

    __repr__ = __str__
