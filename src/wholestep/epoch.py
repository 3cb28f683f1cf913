"""One epoch of `fit`: its updates, their callbacks, and the saves of the run."""

from collections import deque
from collections.abc import Callable
from functools import partial

from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints.place import Place
from wholestep.checkpoints.saver import Saver
from wholestep.checkpoints.unsaved import Unsaved
from wholestep.data.feed import Feed
from wholestep.executor import Executor
from wholestep.reports.report import Report
from wholestep.run import Run, updates
from wholestep.safety.interrupts import TerminatedWaiting
from wholestep.sums import OWN, shown


def run_epoch(
    executor: Executor,
    run: Run,
    feed: Feed,
    num: int | None,
    watch: CallbackRunner,
    saver: Saver | Unsaved,
    *,
    once: bool,
) -> dict:
    """Run `num` updates (None: to the end of the epoch); return the logs of the last one.

    Args:
        once: whether to end with the pass over the data, even after fewer than `num` updates.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    epoch, step = feed.batches.position
    place, numbers = run.place, {}
    if place.done == 0 or (_is_left(place, epoch, num, once=once) and not watch.stops):
        left = None if num is None else num - place.done
        numbers = _carry_out(executor, run, feed, left, watch, saver, once=once)
        if place.done == 0 and step > 0:  # resumed after the last batch of a stream: the epoch is the next one
            numbers = _carry_out(executor, run, feed, left, watch, saver, once=once)
    executor.meet(feed)
    return executor.show(numbers or place.latest)


def _is_left(place: Place, epoch: int, num: int | None, *, once: bool) -> bool:
    """Whether a resumed epoch may have updates left."""
    is_same_pass = epoch == place.began
    return is_same_pass if num is None else place.done < num and (is_same_pass or not once)


def _carry_out(
    executor: Executor,
    run: Run,
    feed: Feed,
    num: int | None,
    watch: CallbackRunner,
    saver: Saver | Unsaved,
    *,
    once: bool,
) -> dict:
    """Run the updates of an epoch, and call the callbacks: one dispatch late, unless they read the state.

    The run is saved before a block is sent, after the callbacks have received all earlier updates.
    """
    begin, pace = run.number + 1 - run.place.done, executor.dispatch_size
    logs: Callable[[], dict] = dict
    late, untold = 0 if watch.needs_state else 1, deque[Report]()
    ahead = executor.dispatcher.num_ahead if watch.needs_state else None

    def size() -> int:
        if watch.stops:  # since the epoch's beginning: Keras stops after one update
            return 1
        most = watch.left(run.number + 1 - begin) if watch.needs_state else pace.size
        return min(most, saver.left())

    def tell() -> bool:
        """Report the oldest dispatch to the callbacks; return whether it failed: then no later update was applied."""
        nonlocal logs
        report = untold.popleft()
        logs, failed = _tell(executor, run, feed, report, begin, watch)
        if late:
            pace.note(report.block.num)
        return failed

    def before() -> bool:
        if saver.is_due():
            while untold:
                if tell():
                    return False
            saver.save()
            pace.start()
        if watch.needs_state:
            watch.begin(run.number + 1 - begin)
        return True

    pace.start()
    try:
        for report in updates(executor, run, feed, num, size, once=once, before=before, ahead=ahead):
            untold.append(report)
            if len(untold) > late and tell():
                return logs()
            if watch.stops:
                break
    except BaseException as error:
        # The caller saves the run with the state of its callbacks, which must receive all updates first.
        while isinstance(error, TerminatedWaiting) and untold and not tell():
            pass
        executor.applied.note_skipped(run, untold)
        raise
    finally:
        executor.dispatcher.finish()
    if untold:
        tell()
    watch.end()
    executor.applied.note_last(run)
    return logs()


def _tell(
    executor: Executor, run: Run, feed: Feed, report: Report, begin: int, watch: CallbackRunner
) -> tuple[Callable[[], dict], bool]:
    """Report a dispatch to the callbacks; return a function for the last update's logs, and whether one failed."""
    failure = executor.applied.note_failures(run, report)
    last = report.block.num - 1 if failure is None else failure
    for i in range(last + 1 if watch.has_hooks else 0):
        numbers = _numbers(report, i, failure)
        logs = executor.show_update(numbers) if watch.needs_state else shown(numbers)
        watch.tell(report.first + i - begin, logs)
    if failure is not None:
        watch.end()
        feed.go_back(report.block, failure)
    # TerminateOnNaN and similar callbacks end the run themselves.
    if failure is not None and not watch.stops:
        raise executor.applied.failure(run, report, failure)
    return partial(_numbers, report, last, failure), failure is not None


def _numbers(report: Report, i: int, failure: int | None) -> dict:
    """Return the numbers of update i. The loss of a failed update is its own, as the sums do not include it."""
    numbers = report.numbers(i)
    if i == failure:
        numbers |= {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers}
    return numbers
