"""What became of the updates that were sent: applied, left out, or the end of the run."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np

from wholestep.data.facts import digest_of
from wholestep.engines.protocol import Engine
from wholestep.errors import NonFiniteError, message, warn
from wholestep.reports.report import Report
from wholestep.run import Run
from wholestep.safety.ending import Ending
from wholestep.tree import Tensor


class Counts(Protocol):
    """Whoever counts the updates that are applied: an optimizer, or a model's own steps."""

    iterations: Any


class Applied:
    """Knows what became of the updates of one optimizer, as soon as somebody asks.

    Args:
        skips: whether updates that are not finite are left out; else one ends the run.
        why: holds weakly what returns the error that says why update i of a dispatch was not applied.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Counts,
        why: Callable[[], Callable[[Run, Report, int], NonFiniteError] | None],
        *,
        skips: bool,
    ):
        self._engine = engine
        self._optimizer = optimizer
        self._why = why
        self._skips = skips
        self._has_told = False
        self._unread: Report | None = None
        self._ending: Ending | None = None
        self._latest: Callable[[], Report | None] = lambda: None
        self._unnoted: deque[Callable[[], Report | None]] = deque()  # which may have left updates out
        # Of an update its number, its batch's digest, the stream's state.
        self._last: tuple[int, str, Any] = (0, "", None)
        self._iterations: Tensor | None = None

    def note_sent(self, report: Report) -> None:
        """Take note of updates that were sent; nothing waits."""
        self._latest = weakref.ref(report)  # weakly, not to keep its batch
        if self._skips:
            while self._unnoted and ((first := self._unnoted[0]()) is None or first.is_noted):
                self._unnoted.popleft()
            self._unnoted.append(self._latest)

    def note_written(self) -> None:
        """Take note that the optimizer's variables hold what an update has made of them."""
        self._iterations = self._optimizer.iterations.value

    def note_last(self, run: Run) -> None:
        """Take note of the last batch that was used, if it came ready-made: whoever goes on compares it."""
        if (latest := self._latest()) is not None:
            last = latest.block.batches[-1]
            is_ready = last.ids is None and not last.is_resident
            self._last = run.number, digest_of(last.host) if is_ready else "", last.state

    @property
    def was_moved(self) -> bool:
        """Whether somebody else has moved the optimizer since its variables were written, as far as they tell.

        On TensorFlow it does not: it is one object for good, and reading its value would wait for the device.
        """
        return self._iterations is not self._optimizer.iterations.value

    def recount(self, run: Run) -> None:
        """Let the run's number be the optimizer's `iterations`, and what was left out. Waits."""
        if (latest := self._latest()) is not None and self._skips:
            self.note_failures(run, latest)
        run.counted(self._num_applied + run.num_skipped, run.num_skipped)
        self._iterations = self._optimizer.iterations.value

    def count_skipped(self, run: Run) -> int:
        """Return how many updates were left out, also of those that nobody has read yet. Waits."""
        self.settle(run)
        self.note_skipped(run, filter(None, [report() for report in self._unnoted]))
        return run.num_skipped

    def count_exactly(self, run: Run) -> int:
        """Return how many updates were left out, also unseen ones; `run.place` has the numbers of the last. Waits.

        Raises:
            NonFiniteError: an update was not applied, and nobody has seen so.
        """
        self.settle(run)
        self.note_last(run)
        latest = self._latest()
        last, state = self._last[1:] if self._last[0] == run.number else ("", None)
        run.noted(last, state, None if latest is None else latest.numbers(latest.block.num - 1))
        if isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            return run.num_skipped  # it leaves out what it does not count
        if self._skips:
            return run.number - self._num_applied
        if run.number != self._num_applied + run.num_skipped:
            first = self._num_applied + run.num_skipped + 1
            failed = None if latest is None else latest.first_failure
            if latest is not None and failed is not None and latest.first + failed == first:
                raise self.failure(run, latest, failed)
            must = f"Update {first} must have a finite loss and gradient. It was not applied, nor was any after it."
            told = message(must, "one of them not finite", "read the steps' numbers: that names the rows.")
            raise NonFiniteError(told, first)
        return run.num_skipped

    def hand_over(self, run: Run, report: Report) -> None:
        """Keep the report of an update in hand until somebody asks for it; told at the end, if nobody does."""
        self._unread = report
        if self._engine.processes.count == 1 and not self._skips:
            self._ending = self._ending or Ending(self, run)
            self._ending.last = report.first, report.verdict

    def settle(self, run: Run, report: Report | None = None) -> None:
        """Make sure that the last update in hand was applied, if nobody has read its numbers yet.

        Args:
            report: of which update; None for whichever was the last.

        Raises:
            NonFiniteError: it was not applied.
        """
        if self._unread is None or report not in (None, self._unread):
            return
        last, self._unread = self._unread, None
        if self._ending is not None:
            self._ending.last = None
        if self.note_failures(run, last) is not None:
            last.error = self.failure(run, last, 0)
            raise last.error

    def note_failures(self, run: Run, report: Report) -> int | None:
        """Count the updates that were left out; return the first failed one if that ends the run."""
        if not self._skips:
            if (failed := report.first_failure) is not None:
                run.failed(report.first + failed, in_call=report.in_call)
            return failed
        num = 0 if report.is_noted else report.num_failures
        if num and not self._has_told:
            self._has_told = True
            self._tell(run, report)
        run.counted(run.number, run.num_skipped + num)
        report.is_noted = True
        return None

    def _tell(self, run: Run, report: Report) -> None:
        """Say that an update was left out, the first time alone."""
        first = report.first_failure
        if first is None or self._engine.processes.index:
            return
        place = f" (in epoch {run.place.epoch + 1})" if run.place.call else ""
        told = (
            f"Update {report.first + first}{place} was left out, as on_nonfinite='skip' asks: its loss, gradient or "
            "moving statistics are not finite. Further ones are counted without a word: see trainer.num_skipped."
        )
        warn(told)

    def note_skipped(self, run: Run, reports: Iterable[Report]) -> None:
        """Count what was left out of updates that nobody has looked at, if anything may be. Waits for the last."""
        if self._skips:
            for report in reports:
                self.note_failures(run, report)

    def failure(self, run: Run, report: Report, i: int) -> NonFiniteError:
        """Return the error that says why update i of a dispatch was not applied. The run stands before it."""
        why = self._why()
        assert why is not None, "the executor is gone, and its updates are asked for"
        return why(run, report, i)

    @property
    def _num_applied(self) -> int:
        return int(np.asarray(self._optimizer.iterations))
