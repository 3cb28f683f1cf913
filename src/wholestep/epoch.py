"""One epoch of `fit`: its updates, who is told of them, and when the run is saved."""

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
    """Carry out `num` updates (None: to the end of the epoch); return the logs of the last one.

    Args:
        once: whether fewer than `num` are carried out where the pass over the data ends before.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    epoch, step = feed.batches.position
    place, numbers = run.place, {}
    if place.done == 0 or (_is_left(place, epoch, num, once=once) and not watch.stops):
        left = None if num is None else num - place.done
        numbers = _carry_out(executor, run, feed, left, watch, saver, once=once)
        if place.done == 0 and step > 0:  # it was left after the last batch of a stream: the epoch is the next one
            numbers = _carry_out(executor, run, feed, left, watch, saver, once=once)
    executor.meet(feed)
    return executor.show(numbers or place.latest)


def _is_left(place: Place, epoch: int, num: int | None, *, once: bool) -> bool:
    """Whether updates may be left of an epoch in the middle of which the run goes on."""
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
    """Carry out the updates of an epoch, and tell the watchers: one dispatch late, unless they look at the state.

    The run is saved before a block is sent, when all updates before it have been told.
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
        """Tell of the oldest dispatch; return whether it ends the epoch, as what was sent after it was not applied."""
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
    except BaseException:
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
    """Tell the watchers of a dispatch's updates; return what tells the last numbers, and whether one failed."""
    failure = executor.applied.note_failures(run, report)
    last = report.block.num - 1 if failure is None else failure
    for i in range(last + 1 if watch.has_hooks else 0):
        numbers = _numbers(report, i, failure)
        logs = executor.show_update(numbers) if watch.needs_state else shown(numbers)
        watch.tell(report.first + i - begin, logs)
    if failure is not None:
        watch.end()
        feed.go_back(report.block, failure)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and not watch.stops:
        raise executor.applied.failure(run, report, failure)
    return partial(_numbers, report, last, failure), failure is not None


def _numbers(report: Report, i: int, failure: int | None) -> dict:
    """Return the numbers of update i; those of a failed one end with its own loss, which the sums do not hold."""
    numbers = report.numbers(i)
    if i == failure:
        numbers |= {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers}
    return numbers
