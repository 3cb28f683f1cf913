"""The loop: a block of updates goes to the device, and the numbers of the one before are read while it works."""

from collections.abc import Iterator

from wholestep.callbacks import Watch
from wholestep.feed import Feed
from wholestep.machine import Machine, Report
from wholestep.state import State


def run_epoch(
    machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch
) -> tuple[State, dict]:
    """
    Carry out `num` updates (None: to the end of the epoch); return the state and the logs of the last one.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    pace, late, done = machine.pace, None, 0
    logs: dict = {}
    pace.start()
    try:
        for block in feed.blocks(num, lambda: 1 if watch.needs_state else pace.size):
            state, report = machine.dispatch(state, feed, block, first + done)
            feed.batches.position = block.position
            for ready in _ready(late, report, watch.needs_state):
                machine.give(state) if watch.needs_state else None
                logs = _tell(machine, state, ready, first, watch) or logs
                state = machine.take(state) if watch.needs_state else state
                pace.note(len(ready.block.counts), ready.most)
            late, done = report, done + len(block.counts)
            if watch.stops:
                break
        if late is not None and not watch.needs_state:
            logs = _tell(machine, state, late, first, watch) or logs
    finally:
        machine.give(state)
    return state, logs


def _ready(late: Report | None, now: Report, needs_state: bool) -> Iterator[Report]:
    """Which reports to read: this dispatch's if somebody needs the state behind it, else the last one's."""
    if needs_state:
        yield now
    elif late is not None:
        yield late


def _tell(machine: Machine, state: State, report: Report, first: int, watch: Watch) -> dict:
    """Tell the watchers of a dispatch's updates; return the last logs. The first failed update ends the run."""
    failure, stops = report.first_failure, machine.options.on_nonfinite == "raise"
    machine.num_skipped += report.num_failures if failure is None or not stops else 1
    last = len(report.block.counts) - 1 if failure is None or not stops else failure
    for i in range(last + 1) if watch.has_hooks else ():
        logs = report.logs(i)
        watch.tell(report.first + i - first, logs | {"loss": report.loss(i)} if i == failure else logs)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and stops and not watch.stops:
        raise machine.failure(state, report, failure)
    return report.logs(last)
