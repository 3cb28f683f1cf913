"""The loop: a block of updates goes to the device, and the numbers of the one before are read while it works."""

from wholestep.callbacks import Watch
from wholestep.feed import Feed
from wholestep.machine import Machine, Report
from wholestep.state import State


def run_epoch(
    machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch
) -> tuple[State, dict]:
    """Carry out `num` updates (None: to the end of the epoch); return the state and the logs of the last one.

    The Keras variables hold the state after every dispatch, so also when this ends, however it ends.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    run = _run_watched if watch.needs_state else _run
    _, step = feed.batches.position
    state, logs = run(machine, state, feed, num, first, watch)
    if step > 0 and not logs:  # it was left after the last batch of a stream: the epoch is the next one
        state, logs = run(machine, state, feed, num, first, watch)
    machine.meet(feed)
    return state, logs


def _run(machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch) -> tuple[State, dict]:
    """Nobody looks at the state: several updates to a dispatch, and numbers one dispatch late."""
    pace, late, done = machine.pace, None, 0
    logs: dict = {}
    pace.start()
    for block in feed.blocks(num, lambda: pace.size):
        state, report = machine.dispatch(state, feed, block, first + done)
        if late is not None:
            logs = _tell(machine, state, feed, late, first, watch)
            pace.note(len(late.block.counts), late.program.length)
        late, done = report, done + len(block.counts)
        if watch.stops:
            break
    if late is not None:
        logs = _tell(machine, state, feed, late, first, watch)
    return state, logs


def _run_watched(
    machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch
) -> tuple[State, dict]:
    """Somebody looks at the state, or changes it, between any two updates."""
    logs: dict = {}
    for i, block in enumerate(feed.blocks(num, lambda: 1)):
        watch.begin(i)
        state, report = machine.dispatch(machine.take(state), feed, block, first + i)
        logs = _tell(machine, state, feed, report, first, watch)
        if watch.stops:
            break
    return machine.take(state), logs


def _tell(machine: Machine, state: State, feed: Feed, report: Report, first: int, watch: Watch) -> dict:
    """Tell the watchers of a dispatch's updates; return the last logs. The first failed update ends the run."""
    failure = machine.note_failures(report)
    last = len(report.block.counts) - 1 if failure is None else failure
    for i in range(last + 1) if watch.has_hooks else ():
        logs = report.logs(i)
        watch.tell(report.first + i - first, logs | {"loss": report.loss(i)} if i == failure else logs)
    if failure is not None:
        feed.go_back(report.block, failure)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and not watch.stops:
        raise machine.failure(state, report, failure)
    return report.logs(last)
