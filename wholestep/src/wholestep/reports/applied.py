"""The outcome of the updates that were sent: applied, skipped, or the end of the run; and why one
was not applied.
"""

import atexit
import contextlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np

from wholestep import tree
from wholestep.data import Block, digest_of
from wholestep.embeddings.rows import Lookups
from wholestep.engines import Engine
from wholestep.errors import NonFiniteError, message, warn
from wholestep.reports.report import Report
from wholestep.run import Run
from wholestep.state import State, Values, Variables
from wholestep.tree import Tensor, Tree
from wholestep.update import Update


class Counts(Protocol):
    """Counts the applied updates: an optimizer, or the custom steps of a model."""

    iterations: Any


class Applied:
    """The outcome of the updates of one optimizer, read on demand.

    Args:
        skips: whether non-finite updates are skipped; else one ends the run.
        why: a weak reference to the function that returns the error of update i of a dispatch.
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
        self._unnoted: deque[Callable[[], Report | None]] = deque()  # which may have failed updates
        # The number of an update, the digest of its batch, the state of the stream.
        self._last: tuple[int, str, Any] = (0, "", None)
        self._iterations: Tensor | None = None

    def note_sent(self, report: Report) -> None:
        """Record updates that were sent. Does not wait."""
        sent = weakref.ref(report)  # weak, so as not to keep its batch
        self._latest = sent if report.in_call else self._latest
        if self._skips or report.in_call:
            while self._unnoted and ((first := self._unnoted[0]()) is None or first.is_noted):
                self._unnoted.popleft()
            self._unnoted.append(sent)

    def note_written(self) -> None:
        """Record that an update has written the optimizer's variables."""
        self._iterations = self._optimizer.iterations._value

    def note_last(self, run: Run) -> None:
        """Record the last batch that was used, if the user made it: a resumed run compares it."""
        if (latest := self._latest()) is not None:
            last = latest.block.batches[-1]
            is_ready = last.ids is None and not last.is_resident
            self._last = run.number, digest_of(last.host) if is_ready else "", last.state

    @property
    def was_moved(self) -> bool:
        """Whether other code has updated the optimizer since its variables were written, if this
        can be seen.

        It is not seen on TensorFlow: the variable's value is always the same object, and reading
        its number would wait.
        """
        return self._iterations is not self._optimizer.iterations._value

    def recount(self, run: Run) -> None:
        """Set the run's number to the optimizer's `iterations` plus the skipped updates. Waits."""
        self.note_skipped(run, self._sent())
        is_last = self._last[0] == run.number
        run.counted(self._num_applied + run.num_skipped, run.num_skipped)
        self._last = (run.number, *self._last[1:]) if is_last else self._last
        self._iterations = self._optimizer.iterations._value

    @property
    def is_counted(self) -> bool:
        """Whether the run's number is right without a look at the optimizer: if all its updates
        were seen.
        """
        is_seen = (
            self._engine.variables.watch is not None and not self._skips and not self.was_moved
        )
        return is_seen and not isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer)

    def count_skipped(self, run: Run) -> int:
        """Return the number of skipped updates, including unread reports. Waits."""
        self.settle(run)
        self.note_skipped(run, self._sent())
        return run.num_skipped

    def check_loop(self, run: Run) -> None:
        """Check the unread updates of a loop whose body begins others, which would clear the
        device's flag. Waits.

        Raises:
            NonFiniteError: one was not applied. The run is at the position before it, and its data
                once the loop ends.
        """
        for report in self._sent() if not self._skips else ():
            if (failed := self.note_failures(run, report)) is not None:
                raise self.failure(run, report, failed)

    def forget(self) -> None:
        """Drop all unread reports: their updates are no part of the run any more."""
        self._unread = None
        self._latest = lambda: None
        self._unnoted.clear()
        if self._ending is not None:
            self._ending.last = None

    def end_loop(self, run: Run, unread: Iterable[Report]) -> None:
        """Count the skipped updates of a loop that ends; what else it has not read belongs to no
        loop.
        """
        self.note_skipped(run, unread)
        if not self._skips:
            self._unnoted.clear()

    def _sent(self) -> list[Report]:
        return [report for each in self._unnoted if (report := each()) is not None]

    def count_exactly(self, run: Run) -> int:
        """Return the number of skipped updates, also unread ones, and store the last numbers in
        `run.place`. Waits.

        Raises:
            NonFiniteError: an update was not applied, which was not reported yet.
        """
        self.settle(run)
        self.note_last(run)
        latest = self._latest()
        last, state = self._last[1:] if self._last[0] == run.number else ("", None)
        run.noted(last, state, None if latest is None else latest.numbers(latest.block.num - 1))
        if isinstance(self._optimizer, keras.optimizers.LossScaleOptimizer):
            return run.num_skipped  # it skips updates without counting them
        if not self._skips and run.number > self._num_applied + run.num_skipped:
            first = self._num_applied + run.num_skipped + 1
            failed = None if latest is None else latest.first_failure
            if latest is not None and failed is not None and latest.first + failed == first:
                raise self.failure(run, latest, failed)
            must = (
                f"Update {first} must have a finite loss and gradient. It was not applied, nor "
                "was any after it."
            )
            told = message(must, "one not finite", "read the steps' numbers: that names the rows.")
            raise NonFiniteError(told, first)
        self.recount(run)  # other code may have updated the optimizer
        return run.num_skipped

    def hand_over(self, run: Run, report: Report) -> None:
        """Keep the report of a single update until it is read; if it never is, check it at the
        script's end.
        """
        self._unread = report
        if self._engine.processes.count == 1 and not self._skips:
            self._ending = self._ending or Ending(self, run)
            self._ending.last = report.first, report.verdict

    def settle(self, run: Run, report: Report | None = None) -> None:
        """Check that the last single update was applied, unless its numbers were read.

        Args:
            report: the report of the update to check; None for the last.

        Raises:
            NonFiniteError: it was not applied.
        """
        if self._unread is None or report not in (None, self._unread):
            return
        last = self._unread
        self._unread = None
        if self._ending is not None:
            self._ending.last = None
        if self.note_failures(run, last) is not None:
            last.error = self.failure(run, last, 0)
            raise last.error

    def note_failures(self, run: Run, report: Report) -> int | None:
        """Count the skipped updates; return the index of the first failed one if that ends the
        run.
        """
        if not self._skips:
            report.is_noted = True
            if (failed := report.first_failure) is not None:
                run.failed(report.first + failed, in_call=report.in_call)
                # its batch, or one after it, is not the last that was used
                self._latest = lambda: None
            return failed
        num = 0 if report.is_noted else report.num_failures
        if num and not self._has_told:
            self._has_told = True
            self._tell(run, report)
        run.counted(run.number, run.num_skipped + num)
        report.is_noted = True
        return None

    def _tell(self, run: Run, report: Report) -> None:
        """Warn that an update was skipped, the first time only."""
        first = report.first_failure
        if first is None or self._engine.processes.index:
            return
        place = f" (in epoch {run.place.epoch + 1})" if run.place.call else ""
        told = (
            f"Update {report.first + first}{place} was skipped (on_nonfinite='skip'): its loss, "
            "gradient or moving "
            "statistics are not finite. Later skips are counted in trainer.num_skipped without a "
            "warning."
        )
        warn(told)

    def note_skipped(self, run: Run, reports: Iterable[Report]) -> None:
        """Count the skipped updates in unread reports, if updates may be skipped. Waits for the
        last.
        """
        if self._skips:
            for report in reports:
                self.note_failures(run, report)

    def failure(self, run: Run, report: Report, i: int) -> NonFiniteError:
        """Return the error that explains why update i was not applied. The run is at the state
        before it.
        """
        why = self._why()
        assert why is not None, "the executor is gone, but its updates are requested"
        return why(run, report, i)

    @property
    def _num_applied(self) -> int:
        return int(self._engine.variables.values([self._optimizer.iterations])[0])


class Ending:
    """Prints to stderr that the last update was not applied, if its report has not been read.

    Holds its owner weakly, and the update's report on the device: it keeps no model alive. Never
    raises.

    Args:
        owner: its `settle(run)` raises the error to print.
    """

    def __init__(self, owner: Applied, run: Run):
        # The update's number, and its report: 1 at the end if it was applied.
        self.last: tuple[int, Tensor] | None = None
        self._run = run
        self._owner = weakref.ref(owner)
        # a callback of a weak reference would be called at the end
        weakref.finalize(owner, self._leave).atexit = False
        self._process = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        """Print the error at the end of the script."""
        owner = self._owner()
        if self.last is None or owner is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            try:
                owner.settle(self._run)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    def _leave(self) -> None:
        """Print the error after the owner is gone, without the rows, which only the owner can
        find.
        """
        atexit.unregister(self._end)
        if self.last is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            number, report = self.last
            if np.asarray(report)[0, -1] != 1:
                must = f"Update {number} must have a finite loss and gradient. It was not applied."
                received = "a loss or gradient that is not finite, in a report that was not read"
                print(
                    f"NonFiniteError: {message(must, received, 'read it: it names the rows.')}",
                    file=sys.stderr,
                )


def diagnose(update: Update, state: State, report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was not applied.

    Args:
        state: the state before update i.
    """
    engine = update.engine
    block = report.block
    number = report.first + i
    forward = block.program.forward
    names = block.names(i)
    count = len(names)
    terms, after = _by_piece(update, state, report, i)
    before = _fetched(engine, lambda state: finite_flags(engine, forward.variables, state), state)
    reasons = []
    bad = np.zeros((0,), int)
    for label, (values, weights) in terms.items():
        rows_of_term = (
            np.flatnonzero(~np.isfinite(values)) if len(values) == count else np.zeros((0,), int)
        )
        bad = np.union1d(bad, rows_of_term)
        name = f"term {label!r}" if label else "the loss"
        if rows_of_term.size:
            reasons.append(f"{name} is not finite in rows {_few(_numbers(names, rows_of_term))}")
        elif forward.facts.terms[label].is_mean and np.sum(weights) == 0:
            reasons.append(f"the weights of {name} sum to zero")
    if not reasons and after:
        reasons = [
            f"{_few(after)} would not be finite after it, though every row's loss is: inputs may "
            "be too large"
        ]
    attempt = (
        "look at these rows, lower the learning rate, clip gradients, or pass "
        'Trainer(on_nonfinite="skip").'
    )
    if not reasons:
        reasons = ["the gradient is not finite, though every row's loss is"]
        if spoilt := _spoilt(block, i):
            reasons += [
                f"{label} is not finite in rows {_few(_numbers(names, rows))}"
                for label, rows in spoilt.items()
            ]
            bad = np.unique(np.concatenate([*spoilt.values()]))
            attempt = (
                "replace these values, also in rows of weight 0, as 0 times the derivative of "
                "NaN is NaN."
            )
    if paths := unsound(forward.variables, before, are_rows_left=bad.size < count):
        verb = "is" if len(paths) == 1 else "are"
        reasons = [
            f"{_few(paths)} {verb} not finite, before this update already: no row is to blame"
        ]
        bad = bad[:0]
        attempt = (
            "check the source of these weights: a file, an assignment, a learning rate that is "
            "too high."
        )
    told = message(
        f"Update {number} must have a finite loss and gradient. It was not applied; the weights "
        "are those after "
        f"update {number - 1}.",
        "; ".join(reasons),
        attempt,
    )
    return NonFiniteError(told, number, tuple(_numbers(names, bad.astype(int))))


def _by_piece(
    update: Update, state: State, report: Report, i: int
) -> tuple[dict[str, tuple], list[str]]:
    """Return each row's values and weights by term, computed by microbatch, and the buffers that
    become non-finite.
    """
    engine = update.engine
    block = report.block
    forward = block.program.forward
    cut = block.program.cut
    count = len(block.names(i))
    table = block.table.rows[block.first + i]
    lookups = Lookups(update.row_planner.tables, engine)

    def piece(state: State, data: Tree, rows: Tensor, first: Tensor) -> tuple:
        batch = engine.replicas.batch(data, rows)
        values = Values(engine.variables.params(state), state.buffers, state.metrics)
        found = forward.rows(values, batch, first, lookups=lookups)
        floats = [
            _floating(forward.variables, buffers) for buffers in (state.buffers, found.buffers)
        ]
        return found.values, [
            [engine.ops.is_finite([buffer]) for buffer in buffers] for buffers in floats
        ]

    paths = [variable.path for variable in _floating(forward.variables, forward.variables.buffers)]
    programs: dict[int, Callable] = {}
    terms: dict[str, list[tuple]] = {}
    spoiled: dict[str, None] = {}
    for start, size in cut.pieces:
        if start < count:
            arguments = (
                state,
                block.data,
                *engine.devices.place((table[start : start + size], np.int32(start))),
            )
            if size not in programs:
                programs[size] = engine.programs.compile(piece, arguments, spends=False).call
            found, (before, after) = engine.devices.fetch(programs[size](*arguments))
            for label, values in found.items():
                own = min(size, count - start) if len(values[0]) == size else None
                terms.setdefault(label, []).append(tuple(part[:own] for part in values))
            spoiled |= {
                path: None
                for path, was, is_good in zip(paths, before, after, strict=True)
                if was > is_good
            }
    return {
        label: tuple(map(np.concatenate, zip(*parts, strict=True)))
        for label, parts in terms.items()
    }, [*spoiled]


def _spoilt(block: Block, i: int) -> dict[str, np.ndarray]:
    """Return the rows of update i whose data are not finite, by the name of the leaf."""
    batch = block.batches[0 if block.batches[0].is_resident else i]
    rows = (
        block.table.rows[block.first + i][: len(block.names(i))]
        if batch.is_resident
        else slice(None)
    )
    leaves = [
        (name, leaf) for name, leaf in tree.named_leaves(batch.host) if leaf.dtype.kind == "f"
    ]
    finite = {
        name: np.isfinite(leaf[rows].reshape(len(leaf[rows]), -1)).all(axis=1)
        for name, leaf in leaves
    }
    return {name: np.flatnonzero(~good) for name, good in finite.items() if not good.all()}


def _fetched(engine: Engine, function: Callable, state: State) -> Any:
    return engine.devices.fetch(
        engine.programs.compile(function, (state,), spends=False).call(state)
    )


def finite_flags(engine: Engine, variables: Variables, state: State) -> list[tuple[Tensor, Tensor]]:
    """Return (is finite, has NaN) of every parameter, then of every floating buffer."""
    values = [*engine.variables.params(state), *_floating(variables, state.buffers)]
    return [(engine.ops.is_finite([value]), keras.ops.any(value != value)) for value in values]


def unsound(variables: Variables, found: list[tuple], *, are_rows_left: bool) -> list[str]:
    """Return the paths of non-finite variables.

    A buffer may be infinite on purpose, as masks are: it counts only if it has NaN, or no row is
    finite.
    """
    known = [*variables.params, *_floating(variables, variables.buffers)]
    paths = []
    for i, (variable, (is_finite, has_nan)) in enumerate(zip(known, found, strict=True)):
        if not is_finite and (i < len(variables.params) or has_nan or not are_rows_left):
            paths.append(variable.path)
    return paths


def _floating(variables: Variables, buffers: list) -> list:
    return [buffer for buffer, is_float in zip(buffers, variables.floats, strict=True) if is_float]


def _numbers(names: np.ndarray, places: np.ndarray) -> list[int]:
    """Return the user's row numbers at these places of an update; a packed row has several."""
    return [int(row) for place in places for row in np.atleast_1d(names[place])]


def _few(names: list) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
