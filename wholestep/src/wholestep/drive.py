"""The only loop, of updates or of an evaluation; `fit`, `steps`, `evaluate` and `predict` are its
policies.
"""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints import Saver, Unsaved
from wholestep.data import Block, Feed
from wholestep.errors import BatchError, message, warn
from wholestep.evaluation import Pass, join, joined, rows_of
from wholestep.executor import Executor
from wholestep.program import MOST_UPDATES
from wholestep.reports.report import Report
from wholestep.run import Run
from wholestep.safety import Guard, TerminatedWaiting
from wholestep.sums import OWN, visible

At = TypeVar("At", contravariant=True)
Sent = TypeVar("Sent")
Sends = TypeVar("Sends", covariant=True)

_MOST_UNREAD = 3  # updates of `steps` in flight, with the newest: with fewer, the device waits
_MOST_SENT = 16  # dispatches of `fit`: enough where each is a single update


class Lane(Protocol[At, Sends]):
    """Sends blocks to the device: a dispatcher's updates, or an evaluation's batches."""

    def send(self, run: At, feed: Feed, block: Block) -> Sends:
        """Send a block and advance the run; return the block's report, or an evaluation's
        results.
        """


class Policy(Generic[Sent]):
    """The number of updates in a dispatch, and the actions before each dispatch and on its
    results.
    """

    # whether callbacks may read the state after each dispatch
    reads_state = False

    def size(self) -> int:
        """Return the most updates in the next dispatch."""
        return MOST_UPDATES

    def before(self, read: Callable[[], bool]) -> bool:
        """Act before a dispatch; return whether the loop ends. `read` reads all dispatches, and
        returns the same.
        """
        return False

    def is_due(self, unread: "deque[Sent]") -> bool:
        """Whether to read the oldest of these dispatches before the next is sent, which may wait
        for the device.
        """
        return True

    def read(self, sent: Sent) -> bool:
        """Read the results of a dispatch; return whether the loop ends."""
        return False

    def stops(self) -> bool:
        """Whether a callback asks to stop."""
        return False

    def on_error(self, unread: "deque[Sent]") -> None:
        """Find where the run is after an error."""

    def close(self, unread: "deque[Sent]") -> None:
        """End the loop, however it ends."""


def drive(
    lane: Lane[At, Sent],
    run: At,
    feed: Feed,
    policy: Policy[Sent],
    num: int | None,
    *,
    once: bool = True,
) -> Generator[Sent, None, None]:
    """Send the updates of a feed, and yield the result of each block as soon as it is sent.

    Args:
        num: the number of updates (None: to the end of the epoch).
        once: whether to end with the epoch, even after fewer than `num` updates.
    """
    unread = deque[Sent]()
    blocks = deque[Block]()

    def read(*, only_due: bool = False) -> bool:
        while unread and (not only_due or policy.is_due(unread)):
            if policy.read(unread.popleft()):
                return True
            feed.note_read(blocks.popleft())
        return False

    try:
        try:
            for block in feed.blocks(num, policy.size, once=once, reads_state=policy.reads_state):
                if policy.before(read):
                    return
                sent = lane.send(run, feed, block)
                unread.append(sent)
                blocks.append(block)
                feed.note_sent(block)  # may draw, and be interrupted
                if read(only_due=True):
                    return
                yield sent
                if policy.stops():
                    break
            read()
        except TerminatedWaiting:
            read()  # the run is saved where it is, which the callbacks must have received
            raise
    except (Exception, KeyboardInterrupt):  # of the data, a callback or the user
        policy.on_error(unread)
        raise
    finally:
        policy.close(unread)


class _Training(Policy[Report]):
    """A loop of updates. The first update that is not applied ends it; no later one is applied."""

    def __init__(self, executor: Executor, run: Run, feed: Feed, saver: Saver | Unsaved):
        self._executor = executor
        self._ledger = executor.ledger
        self._run = run
        self._feed = feed
        self._saver = saver
        self.has_failed = False

    def read(self, sent: Report) -> bool:
        """Read the report of a dispatch.

        Raises:
            NonFiniteError: an update was not applied. The run and the data are at the position
                before it.
        """
        failure = self._note(sent)
        self._tell(sent, failure)
        if failure is None:
            return False
        if not self.stops():  # TerminateOnNaN and similar callbacks end the run themselves
            raise self._ledger.failure(self._run, sent, failure)
        return True

    def _tell(self, report: Report, failure: int | None) -> None:
        """Pass the numbers on, up to update `failure`, which was not applied."""

    def close(self, unread: deque[Report]) -> None:
        """Count skipped updates."""
        # by an update in the loop's body, which raised an error
        if any(report.is_noted for report in unread):
            self.on_error(unread)
        self._ledger.end_loop(self._run, unread)

    def on_error(self, unread: deque[Report]) -> None:
        """Note the first failed update among the unread ones, so that the run and the data are
        before it.
        """
        while unread and not self.has_failed:
            self._note(unread.popleft())

    def _note(self, report: Report) -> int | None:
        """Return the first update that was not applied; the run and the data are then at the
        position before it.
        """
        failure = self._ledger.note_failures(self._run, report)
        self.has_failed = failure is not None
        if failure is not None:
            self._feed.go_back(report.block, failure)
        return failure


class _Fitting(_Training):
    """An epoch of `fit`: callbacks are called up to 0.1 s of updates late, unless they read the
    state.

    The run is saved before a dispatch, after the callbacks have received all earlier updates.
    """

    def __init__(
        self,
        executor: Executor,
        run: Run,
        feed: Feed,
        saver: Saver | Unsaved,
        watch: CallbackRunner,
    ):
        super().__init__(executor, run, feed, saver)
        self._watch = watch
        self._pace = executor.dispatch_size
        # of the epoch's updates; others may be made in between, by callbacks
        self._num_told = run.place.done
        self.reads_state = watch.needs_state
        self.logs: Callable[[], dict[str, Any]] = dict
        self._pace.start()

    def size(self) -> int:
        """Return the most updates in the next dispatch; 1 if a callback has asked to stop since the
        epoch's begin.
        """
        if self.stops():
            return 1
        most = (
            self._watch.left(self._run.place.done) if self._watch.needs_state else self._pace.size
        )
        return min(most, self._saver.left())

    def before(self, read: Callable[[], bool]) -> bool:
        """Save the run if a save is due; call the begin hooks if they may read the state."""
        if self._saver.is_due():
            if read():
                return True
            self._saver.save()
            self._pace.start()
        if self._watch.needs_state:
            self._watch.begin(self._run.place.done)
        return False

    def is_due(self, unread: deque[Report]) -> bool:
        """Whether 0.1 s of updates follow the oldest dispatch: with fewer, a late host leaves the
        device idle.
        """
        if self._watch.needs_state or len(unread) > _MOST_SENT:
            return True
        oldest = unread[0]
        newest = unread[-1]
        return newest.first + newest.block.num - oldest.first - oldest.block.num >= self._pace.size

    def _tell(self, report: Report, failure: int | None) -> None:
        last = report.block.num - 1 if failure is None else failure
        first = self._num_told
        self._num_told += last + 1
        self.logs = partial(_numbers, report, last, failure)
        self._watch.note(report, last + 1, first + last, lambda: visible(self.logs()))
        for i in range(last + 1 if self._watch.has_hooks else 0):
            numbers = _numbers(report, i, failure)
            logs = (
                self._executor.show_update(numbers) if self._watch.needs_state else visible(numbers)
            )
            self._watch.tell(first + i, logs)
        if failure is not None:
            self._watch.end()
        elif not self._watch.needs_state:
            self._pace.note(report.block.num)

    def stops(self) -> bool:
        """Whether a callback asks to stop."""
        return self._watch.stops


def _numbers(report: Report, i: int, failure: int | None) -> dict[str, Any]:
    """Return the numbers of update i. The loss of a failed update is its own, as the sums do not
    include it.
    """
    numbers = report.numbers(i)
    if i == failure:
        numbers |= {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers}
    return numbers


def fit_epoch(
    executor: Executor,
    run: Run,
    feed: Feed,
    num: int | None,
    watch: CallbackRunner,
    saver: Saver | Unsaved,
    *,
    once: bool,
) -> dict[str, Any]:
    """Run `num` updates (None: to the end of the epoch); return the logs of the last one.

    Args:
        once: whether to end with the pass over the data, even after fewer than `num` updates.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    (epoch, step), place, numbers = feed.batches.position, run.place, {}
    is_same_pass = epoch == place.began  # otherwise a resumed epoch may have no updates left
    is_left = is_same_pass if num is None else place.done < num and (is_same_pass or not once)
    if place.done == 0 or (is_left and not watch.stops):
        left = None if num is None else num - place.done
        policy = _fit(executor, run, feed, left, watch, saver, once=once)
        # resumed after a stream's last batch: the next epoch
        if step > 0 and not (place.done or policy.has_failed):
            policy = _fit(executor, run, feed, left, watch, saver, once=once)
        numbers = policy.logs()
        if not policy.has_failed:
            watch.end()
            executor.ledger.note_last(run)
    executor.barrier_at_position(feed)
    return executor.show(numbers or place.latest)


def _fit(
    executor: Executor,
    run: Run,
    feed: Feed,
    num: int | None,
    watch: CallbackRunner,
    saver: Saver | Unsaved,
    *,
    once: bool,
) -> _Fitting:
    """Run `num` updates (None: to the end of the epoch); return the policy after them."""
    policy = _Fitting(executor, run, feed, saver, watch)
    for _ in drive(executor.dispatcher, run, feed, policy, num, once=once):
        pass
    return policy


class _Stepping(_Training):
    """An epoch of a custom loop: each update is yielded once it is sent, and read when it is
    ready.
    """

    def size(self) -> int:
        """Return 1."""
        return 1

    def before(self, read: Callable[[], bool]) -> bool:
        """Count the updates of other code since the last step; save the run if a save is due."""
        self._ledger.raise_pending_failure(self._run)
        if self._ledger.was_moved:
            read()
            self._ledger.sync_update_count(self._run)
        if self._saver.is_due():
            read()
            self._saver.save()
        return False

    def is_due(self, unread: deque[Report]) -> bool:
        """Whether too many updates are unread, or reading the oldest would not wait."""
        return len(unread) > _MOST_UNREAD or (len(unread) > 1 and unread[0].is_ready)


def step_epoch(
    executor: Executor, run: Run, feed: Feed, saver: Saver | Unsaved, guard: Guard
) -> Generator[Report, None, None]:
    """Run the updates of an epoch one after the other; yield the report of each. `guard` is
    released in between.
    """
    policy = _Stepping(executor, run, feed, saver)
    with closing(drive(executor.dispatcher, run, feed, policy, None)) as sending:
        while True:
            with guard:
                report = next(sending, None)
            if report is None:
                return
            yield report


class _ForwardPasses(Policy[tuple[Any, Block]]):
    """A pass over data in evaluation mode. Its dispatches are read as soon as they are sent."""

    def __init__(self, executor: Executor, through: Pass, watch: CallbackRunner):
        self._executor = executor
        self._watch = watch
        self._through = through
        self._hooks = watch.predict if through.options.predicts else watch.test
        executor.begin_evaluation(through.run, through.options)
        through.feed.batches.rewind()

    def size(self) -> int:
        """Return the most batches in the next dispatch."""
        return 1 if self._through.options.one_by_one else MOST_UPDATES

    def before(self, read: Callable[[], bool]) -> bool:
        """Call the hook of a batch's begin."""
        self._hooks.begin(self._through.run.number)
        return False

    def run(self, steps: int | None) -> None:
        """Send `steps` batches (None: all)."""
        run = self._through.run
        lane = self._executor.evaluation
        for _ in drive(lane, run, self._through.feed, self, steps):
            pass
        self._hooks.close()
        if not run.number:
            raise BatchError(
                message(
                    "There must be at least one batch.", "none", "pass data that are not exhausted."
                )
            )
        if not self.stops() and steps is not None and run.number < steps:
            warn(f"The data ended after {run.number} of {steps} batches.")


class _Evaluating(_ForwardPasses):
    """A pass of `evaluate`, or of validation; `poll` is called after each dispatch, and its
    exceptions end the pass.
    """

    def __init__(
        self, executor: Executor, through: Pass, watch: CallbackRunner, poll: Callable[[], None]
    ):
        super().__init__(executor, through, watch)
        self._poll = poll
        self.logs: Callable[[], dict[str, Any]] = dict

    def read(self, sent: tuple[Any, Block]) -> bool:
        """Call the hook of a batch's end, with the logs up to it if a callback reads them."""
        self._poll()
        self.logs = partial(self._executor.show_evaluation, *sent)
        self._hooks.end(
            self._through.run.number - 1, self.logs() if self._watch.has_test_hooks else None
        )
        return False

    def stops(self) -> bool:
        """Whether a callback asks to stop."""
        return self._executor.model.stop_evaluating


def run_evaluation(
    executor: Executor,
    through: Pass,
    steps: int | None,
    watch: CallbackRunner,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the logs over `steps` batches (None: all); `poll` is called after each dispatch."""
    executor.model.stop_evaluating = False
    watch.callbacks.on_test_begin()
    policy = _Evaluating(executor, through, watch, poll)
    policy.run(steps)
    logs = policy.logs()
    watch.callbacks.on_test_end(logs)
    executor.engine.processes.barrier(f"evaluated {through.run.number} batches")
    return logs


class _Predicting(_ForwardPasses):
    """A pass of `predict`."""

    def __init__(self, executor: Executor, through: Pass, watch: CallbackRunner):
        super().__init__(executor, through, watch)
        self.outputs: list[Any] = []

    def read(self, sent: tuple[Any, Block]) -> bool:
        """Keep the outputs; call the hook of a batch's end, with the outputs of its group if a
        callback reads them.
        """
        (found, block), watch, last = sent, self._watch, self._through.run.number - 1
        self.outputs.append(keras.tree.map_structure(lambda leaf: rows_of(leaf, block.num), found))
        several = (
            self.outputs[len(self.outputs) - 1 - last % watch.each :]
            if watch.has_predict_hooks
            else []
        )
        self._hooks.end(
            last, {"outputs": keras.tree.map_structure(joined, *several)} if several else None
        )
        return False

    def stops(self) -> bool:
        """Whether a callback asks to stop."""
        return self._executor.model.stop_predicting


def run_prediction(
    executor: Executor, through: Pass, steps: int | None, watch: CallbackRunner
) -> Any:
    """Return the outputs for the rows of `steps` batches (None: all)."""
    executor.model.stop_predicting = False
    watch.callbacks.on_predict_begin()
    policy = _Predicting(executor, through, watch)
    policy.run(steps)
    watch.callbacks.on_predict_end()
    executor.engine.processes.barrier(f"predicted {through.run.number} batches")
    return join(executor.engine.devices.fetch(policy.outputs))
