"""The loop: a block of updates goes to the device, and the numbers of the one before are read while it works."""

import time
from collections.abc import Iterator

from wholestep.callbacks import Watch
from wholestep.feed import Feed
from wholestep.machine import Machine, Report
from wholestep.state import State

_SECONDS_PER_DISPATCH = 0.1


class Pace:
    """How many updates to send in one dispatch: about a tenth of a second's worth. Cannot change a bit of them."""

    def __init__(self, single: bool):
        self.single = single
        self.size = 1
        self._since = time.perf_counter()

    def note(self, report: Report) -> None:
        """Take note that the updates of a report have just finished."""
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / len(report.block.counts), now
        if not self.single:
            self.size = int(min(max(1, _SECONDS_PER_DISPATCH / seconds), 4 * self.size, report.most))


def run_epoch(
    machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch
) -> tuple[State, dict]:
    """
    Carry out `num` updates (None: to the end of the epoch); return the state and the logs of the last one.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    pace, late, done = Pace(watch.needs_state), None, 0
    logs: dict = {}
    try:
        for block in feed.blocks(num, lambda: pace.size):
            state, report = machine.dispatch(state, feed, block, first + done)
            feed.batches.position = block.position
            for ready in _ready(late, report, watch.needs_state):
                machine.give(state) if watch.needs_state else None
                logs = _tell(machine, state, ready, first, watch) or logs
                state = machine.take(state) if watch.needs_state else state
                pace.note(ready)
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
    logs: dict = {}
    for i in range(len(report.block.counts)):
        failed = not report.applied(i)
        logs = report.logs(i)
        seen = logs | {"loss": report.loss(i)} if failed else logs
        watch.tell(report.first + i - first, seen)
        machine.num_skipped += failed
        if failed and machine.options.on_nonfinite == "raise":
            if watch.stops:  # TerminateOnNaN and its like end the run in their own way
                return logs
            raise machine.failure(state, report, i)
    return logs
