"""The outcome of the updates that were sent: applied or not, and the reason if not."""

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from wholestep import tree
from wholestep.data import Block, digest_of
from wholestep.embeddings.rows import Lookups
from wholestep.engines import Engine
from wholestep.errors import NonFiniteError, message, warn
from wholestep.model import Forward
from wholestep.nonfinite import Skip
from wholestep.reports.report import Report
from wholestep.run import Run
from wholestep.state import State, Values, Variables
from wholestep.tree import Tensor, Tree
from wholestep.update import Update

_MOST_NAMED = 8  # rows or variables in a message


class HasIterations(Protocol):
    """Counts the applied updates: an optimizer, or the custom steps of a model."""

    iterations: Any


class UpdateLedger:
    """The outcome of the updates of one optimizer, read on demand.

    Args:
        explain: a weak reference to the function that returns the error of update i of a dispatch.
        on_nonfinite: how many non-finite updates are skipped before one ends the run.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: HasIterations,
        explain: Callable[[], Callable[[Run, Report, int], NonFiniteError] | None],
        on_nonfinite: Skip,
    ):
        self._engine = engine
        self._optimizer = optimizer
        self._explain = explain
        self._skips = not on_nonfinite.raises
        self._ends = on_nonfinite.has_bound
        self._has_warned = False
        self._scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._deferred: Report | None = None
        self._at_exit: UnreadFailure | None = None
        self._latest: Callable[[], Report | None] = lambda: None
        # reports are referenced weakly, as they hold their batches
        self._unchecked: weakref.WeakSet[Report] = weakref.WeakSet()
        self._last_number = 0
        self._last_batch: tuple[str, Any] = ("", None)  # its digest, the state of its stream
        self._iterations: Tensor | None = None

    def note_sent(self, report: Report) -> None:
        """Record updates that were sent. Does not wait."""
        if report.in_call:
            self._latest = weakref.ref(report)
        if self._skips or report.in_call:
            self._unchecked.add(report)

    def note_written(self) -> None:
        """Record that an update has written the optimizer's variables."""
        self._iterations = self._optimizer.iterations._value

    def note_last(self, run: Run) -> None:
        """Record the last used batch, if the user made it: a resumed run compares it."""
        latest = self._latest()
        if latest is None:
            return
        last = latest.block.batches[-1]
        is_user_made = last.ids is None and not last.is_resident
        self._last_number = run.number
        self._last_batch = digest_of(last.host) if is_user_made else "", last.state

    @property
    def was_moved(self) -> bool:
        """Whether other code has updated the optimizer since an update wrote its variables, if the
        engine's variables show it.
        """
        return self._iterations is not self._optimizer.iterations._value

    def sync_update_count(self, run: Run) -> None:
        """Set the run's number to the optimizer's `iterations` plus the skipped updates. Waits."""
        self.note_skipped(run, self._sent())
        is_last = self._last_number == run.number
        run.set_counts(self._num_applied + run.num_skipped, run.num_skipped)
        if is_last:
            self._last_number = run.number
        self.note_written()

    @property
    def is_counted(self) -> bool:
        """Whether the run's number is known to be right without reading the optimizer."""
        was_seen = self._engine.variables.shows_changes and not self.was_moved
        return was_seen and not self._skips and not self._scales_loss

    def count_skipped(self, run: Run) -> int:
        """Return the number of skipped updates, including unread reports. Waits."""
        self.raise_pending_failure(run)
        self.note_skipped(run, self._sent())
        return run.num_skipped

    def check_loop(self, run: Run) -> None:
        """Check the unread updates of a loop before an update in its body clears the device's flag.

        Waits.

        Raises:
            NonFiniteError: one was not applied. The run is at the position before it, and its data
                once the loop ends.
        """
        if not self._ends:
            return
        for report in self._sent():
            failed = self.note_failures(run, report)
            if failed is not None:
                raise self.failure(run, report, failed)

    def forget(self) -> None:
        """Drop all unread reports: their updates no longer belong to the run."""
        self._take_deferred()
        self._latest = lambda: None
        self._unchecked.clear()

    def end_loop(self, run: Run, unread: Iterable[Report]) -> None:
        """Count the skipped updates of a loop that ends, and drop its unread reports."""
        self.note_skipped(run, unread)
        if not self._skips:
            self._unchecked.clear()

    def _sent(self) -> list[Report]:
        return sorted(self._unchecked, key=attrgetter("first"))

    def count_exactly(self, run: Run) -> int:
        """Return the number of skipped updates, and record the last batch and logs in the run.

        Waits for unread reports.

        Raises:
            NonFiniteError: an update was not applied, which was not reported yet.
        """
        self.raise_pending_failure(run)
        self.note_last(run)
        latest = self._latest()
        is_last = self._last_number == run.number
        digest, state = self._last_batch if is_last else ("", None)
        run.note_last(
            digest, state, None if latest is None else latest.numbers(latest.block.num - 1)
        )
        if self._scales_loss:
            return run.num_skipped  # a loss scale skips updates without counting them
        if not self._skips:
            self._check_count(run, latest)
        self.sync_update_count(run)  # other code may have updated the optimizer
        return run.num_skipped

    def _check_count(self, run: Run, latest: Report | None) -> None:
        """Raise if the optimizer has applied fewer updates than the run has sent."""
        first = self._num_applied + run.num_skipped + 1
        if run.number < first:
            return
        if latest is not None and latest.first_failure == first - latest.first:
            raise self.failure(run, latest, first - latest.first)
        text = message(
            f"Update {first} must have a finite loss and gradient. It was not applied, nor "
            "was any after it.",
            "one not finite",
            "read the steps' numbers: that names the rows.",
        )
        raise NonFiniteError(text, first)

    def defer_report(self, run: Run, report: Report) -> None:
        """Keep the report of a single update until it is read, or check it at the script's end."""
        self._deferred = report
        if self._engine.processes.count == 1 and not self._skips:
            self._at_exit = self._at_exit or UnreadFailure(self, run)
            self._at_exit.last = report.first, report.on_device

    def _take_deferred(self) -> Report | None:
        report = self._deferred
        self._deferred = None
        if self._at_exit is not None:
            self._at_exit.last = None
        return report

    def raise_pending_failure(self, run: Run, report: Report | None = None) -> None:
        """Check that the last single update was applied, unless its numbers were read.

        Args:
            report: the report of the update to check; None for the last.

        Raises:
            NonFiniteError: it was not applied.
        """
        if self._deferred is None or report not in (None, self._deferred):
            return
        last = self._take_deferred()
        assert last is not None
        if self.note_failures(run, last) is not None:
            last.error = self.failure(run, last, 0)
            raise last.error

    def note_failures(self, run: Run, report: Report) -> int | None:
        """Count skipped updates; return the index of the first failed one if it ends the run."""
        failed = report.first_failure
        if failed is not None and self._skips:
            if not report.is_noted:
                self._count_failures(run, report, failed)
            failed = report.end
        report.is_noted = True
        if failed is None or self._skips:
            self._unchecked.discard(report)
        if failed is not None:
            run.move_before(report.first + failed, in_call=report.in_call)
            self._latest = lambda: None  # its batch, or one after it, is not the last that was used
        return failed

    def _count_failures(self, run: Run, report: Report, first: int) -> None:
        """Add the report's skipped updates to the run's. Warn of the first."""
        run.set_counts(run.number, run.num_skipped + report.num_skipped)
        if self._has_warned or not report.num_skipped:
            return
        self._has_warned = True
        if self._engine.processes.index == 0:
            place = f" (in epoch {run.place.epoch + 1})" if run.place.call else ""
            warn(
                f"Update {report.first + first}{place} was skipped (on_nonfinite='skip'): its "
                "loss, gradient or moving statistics are not finite. Later skips are counted in "
                "trainer.num_skipped without a warning."
            )

    def note_skipped(self, run: Run, reports: Iterable[Report]) -> None:
        """Count the skipped updates in unread reports, if updates may be skipped. Waits."""
        if self._skips:
            for report in reports:
                self.note_failures(run, report)

    def failure(self, run: Run, report: Report, i: int) -> NonFiniteError:
        """Return the error of update i, which was not applied. The run is at the state before."""
        explain = self._explain()
        assert explain is not None, "the executor is gone, but its updates are requested"
        return explain(run, report, i)

    @property
    def _num_applied(self) -> int:
        return int(self._engine.variables.values([self._optimizer.iterations])[0])


class UnreadFailure:
    """Prints to stderr that the last update was not applied, if its report has not been read.

    Holds its ledger weakly, and the update's report on the device: it keeps no model alive. Never
    raises.

    Args:
        ledger: its `raise_pending_failure(run)` raises the error to print.
    """

    def __init__(self, ledger: UpdateLedger, run: Run):
        # The update's number, and its report: 1 at the end if it was applied.
        self.last: tuple[int, Tensor] | None = None
        self._run = run
        self._ledger = weakref.ref(ledger)
        # Not at exit: finalizers run after the engine has ended.
        weakref.finalize(ledger, self._leave).atexit = False
        self._process = os.getpid()
        atexit.register(self._print)

    def _leave(self) -> None:
        atexit.unregister(self._print)
        self._print()

    def _print(self) -> None:
        """Print the error at the script's end, or when the ledger is gone."""
        if self.last is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            error = self._error(*self.last)
            if error is not None:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    def _error(self, number: int, report: Tensor) -> Exception | None:
        """Return the error to print; without a ledger, it does not name the rows."""
        ledger = self._ledger()
        if ledger is not None:
            try:
                ledger.raise_pending_failure(self._run)
            except Exception as error:
                return error
        elif np.asarray(report)[0, -1] != 1:
            text = message(
                f"Update {number} must have a finite loss and gradient. It was not applied.",
                "a loss or gradient that is not finite, in a report that was not read",
                "read it: it names the rows.",
            )
            return NonFiniteError(text, number)
        return None


class _Cause(NamedTuple):
    """Why an update was not applied: reasons, the indexes of the bad rows, the remedy."""

    reasons: list[str]
    rows: set[int]
    attempt: str = "look at these rows, lower the learning rate, clip gradients, or {way_out}."


def diagnose(update: Update, state: State, report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was not applied.

    Args:
        state: the state before update i.
    """
    block = report.block
    forward = block.program.forward
    number = report.first + i
    names = block.names(i)
    terms, before, are_finite_after = _recomputed(update, state, report, i)
    variables = _floating(forward.variables)
    spoiled = [
        variable.path
        for variable, (was_finite, _), is_finite in zip(
            variables, before, are_finite_after, strict=True
        )
        if was_finite and not is_finite
    ]
    cause = _cause_in_terms(forward, terms, names)
    if not cause.reasons:
        cause = _cause_in_buffers(spoiled) if spoiled else _cause_in_gradient(block, i)
    has_finite_rows = len(cause.rows) < len(names)
    paths = nonfinite_paths(forward.variables, before, has_finite_rows=has_finite_rows)
    if paths:
        cause = _cause_in_weights(paths)
    text = message(
        f"Update {number} must have a finite loss and gradient{update.on_nonfinite.reached}. It "
        f"was not applied; the weights are those after update {number - 1}.",
        "; ".join(cause.reasons),
        cause.attempt.format(way_out=update.on_nonfinite.way_out),
    )
    return NonFiniteError(text, number, tuple(_row_numbers(names, sorted(cause.rows))))


def _cause_in_terms(forward: Forward, terms: dict[str, list], names: np.ndarray) -> _Cause:
    cause = _Cause([], set())
    for label, (values, weights) in terms.items():
        has_rows = len(values) == len(names)
        rows = np.flatnonzero(~np.isfinite(values)).tolist() if has_rows else []
        cause.rows.update(rows)
        name = f"term {label!r}" if label else "the loss"
        if rows:
            cause.reasons.append(_not_finite(name, names, rows))
        elif forward.facts.terms[label].is_mean and np.sum(weights) == 0:
            cause.reasons.append(f"the weights of {name} sum to zero")
    return cause


def _cause_in_buffers(paths: list[str]) -> _Cause:
    reason = (
        f"{_few(paths)} would not be finite after it, though every row's loss is: inputs may "
        "be too large"
    )
    return _Cause([reason], set())


def _cause_in_gradient(block: Block, i: int) -> _Cause:
    reasons = ["the gradient is not finite, though every row's loss is"]
    names = block.names(i)
    batch = block.batches[0]
    if batch.is_resident:
        slots = block.table.rows[block.first + i][: len(names)]
    else:
        batch = block.batches[i]
        slots = slice(None)
    bad: set[int] = set()
    for name, leaf in tree.named_leaves(batch.host):
        if leaf.dtype.kind == "f":
            rows = [j for j, row in enumerate(leaf[slots]) if not np.isfinite(row).all()]
            bad.update(rows)
            reasons += [_not_finite(name, names, rows)] if rows else []
    if not bad:
        return _Cause(reasons, bad)
    return _Cause(
        reasons,
        bad,
        "replace these values, also in rows of weight 0, as 0 times the derivative of NaN is NaN.",
    )


def _cause_in_weights(paths: list[str]) -> _Cause:
    verb = "is" if len(paths) == 1 else "are"
    return _Cause(
        [f"{_few(paths)} {verb} not finite, before this update already: no row is to blame"],
        set(),
        "check the source of these weights: a file, an assignment, a learning rate that is "
        "too high.",
    )


def _recomputed(
    update: Update, state: State, report: Report, i: int
) -> tuple[dict[str, list], list[tuple], np.ndarray]:
    """Run update i again by microbatch, without its optimizer step.

    Returns:
        Each row's values and weights by term, `finite_flags` before it, is finite after it.
    """
    block = report.block
    count = len(block.names(i))
    pieces = [(start, size) for start, size in block.program.cut.pieces if start < count]
    num_slots = sum(size for _, size in pieces)
    outcomes = _run_pieces(update, state, report, i, pieces)
    parts, before, after = zip(*outcomes, strict=True)
    terms = {
        label: _joined([part[label] for part in parts], num_slots, count) for label in parts[0]
    }
    flags = np.reshape(after, (len(after), -1, 2))
    return terms, before[0], np.all(flags[..., 0], axis=0)


def _run_pieces(
    update: Update, state: State, report: Report, i: int, pieces: list[tuple[int, int]]
) -> list[tuple]:
    """Return the results of `_microbatch` for each piece of update i, on the host."""
    engine = update.engine
    block = report.block
    microbatch = _microbatch(update, block.program.forward)
    table = block.table.rows[block.first + i]
    programs: dict[int, Callable] = {}
    outcomes = []
    for start, size in pieces:
        slots = table[start : start + size]
        arguments = (state, block.data, *engine.devices.place((slots, np.int32(start))))
        if size not in programs:
            programs[size] = engine.programs.compile(microbatch, arguments, spends=False).call
        outcomes.append(engine.devices.fetch(programs[size](*arguments)))
    return outcomes


def _joined(parts: list, num_slots: int, count: int) -> list[np.ndarray]:
    """Return the (values, weights) of several microbatches, without padding if they have rows."""
    columns = map(np.concatenate, zip(*parts, strict=True))
    return [column[:count] if len(column) == num_slots else column for column in columns]


def _microbatch(update: Update, forward: Forward) -> Callable:
    """Return (state, data, rows, first) -> (values of the rows, flags before, flags after)."""
    engine = update.engine
    lookups = Lookups(update.row_planner.tables, engine)

    def microbatch(state: State, data: Tree, rows: Tensor, first: Tensor) -> tuple:
        batch = engine.replicas.batch(data, rows)
        values = Values(engine.variables.params(state), state.buffers, state.metrics)
        outcome = forward.rows(values, batch, first, lookups=lookups)
        after = state._replace(buffers=outcome.buffers)
        flags = [finite_flags(engine, forward.variables, each) for each in (state, after)]
        return outcome.values, *flags

    return microbatch


def finite_flags(engine: Engine, variables: Variables, state: State) -> list[tuple[Tensor, Tensor]]:
    """Return (is finite, has NaN) of every parameter, then of every floating buffer."""
    values = [*engine.variables.params(state), *compress(state.buffers, variables.floats)]
    return [(engine.ops.is_finite([value]), keras.ops.any(value != value)) for value in values]


def nonfinite_paths(
    variables: Variables, flags: list[tuple], *, has_finite_rows: bool
) -> list[str]:
    """Return the paths of non-finite variables.

    A buffer may be infinite on purpose, as masks are: it counts only if it has NaN, or no row is
    finite.

    Args:
        flags: see `finite_flags`.
    """
    paths = []
    for i, (variable, flag) in enumerate(zip(_floating(variables), flags, strict=True)):
        is_finite, has_nan = flag
        is_param = i < len(variables.params)
        if not is_finite and (is_param or has_nan or not has_finite_rows):
            paths.append(variable.path)
    return paths


def _floating(variables: Variables) -> list[keras.Variable]:
    return [*variables.params, *compress(variables.buffers, variables.floats)]


def _not_finite(name: str, names: np.ndarray, rows: list[int]) -> str:
    return f"{name} is not finite in rows {_few(_row_numbers(names, rows))}"


def _row_numbers(names: np.ndarray, rows: list[int]) -> list[int]:
    """Return the user's numbers of these rows of an update; a packed row has several."""
    return [int(number) for row in rows for number in np.atleast_1d(names[row])]


def _few(names: list) -> str:
    shown = ", ".join(map(str, names[:_MOST_NAMED]))
    num_more = len(names) - _MOST_NAMED
    return f"{shown} and {num_more} more" if num_more > 0 else shown
