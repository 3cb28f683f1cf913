"""Sends updates to the device: the requested updates and, where updates are short, some of the next ones ahead.

Where updates are short, sending one alone costs three times the update. So several go in one dispatch, and are handed
out singly. An access to a variable in between finds the state after the last update that was handed out: the
updates up to it are computed again, from a copy of the state before the first. (Speculative execution; how updates are
grouped into dispatches changes no bit of them.)
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import keras

from wholestep import tree
from wholestep.data import Block, Feed, SingleBatches
from wholestep.engines import Devices, Engine
from wholestep.processes import Processes
from wholestep.program import GOES_ON, MOST_UPDATES, Program, span
from wholestep.reports.applied import Applied
from wholestep.reports.report import PackedLogs, Report
from wholestep.run import Run
from wholestep.safety import uninterrupted
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree

_MOST_BYTES = 64 << 20  # of state copied for a dispatch
_MOST_SECONDS = 1e-3  # of an update: a longer one gains nothing noticeable

_copies = partial(keras.tree.map_structure, keras.ops.copy)  # of a state

StateFor = Callable[[Run, Program], tuple[State, Tree]]  # the state that a program spends next, and captured values


def _placed_span(devices: Devices, first: int, num: int, begins: int) -> Tensor:
    return devices.place(span(first, num, begins))


@dataclass
class _Ahead:
    """Updates of one dispatch, handed out singly.

    Args:
        run: the run that they advance.
        block: the block of the first update.
        num: the number of updates.
        numbers: the numbers of each update.
        state: the state after the last update.
        variables: the variables that are not written yet.
        redo: returns the state after a number of updates; only once, unless it fails.
        unwatch: ends the watch on the variables.
        done: the number of updates handed out.
        seen: the number of updates before the first access to a variable, which ends this.
    """

    run: Run
    block: Block
    num: int
    numbers: PackedLogs
    state: State
    variables: Variables
    redo: Callable[[int], State]
    unwatch: Callable[[], None]
    done: int
    seen: int | None = None

    def holds(self, run: Run, block: Block) -> bool:
        """Whether the updates of a block are the next ones to hand out."""
        first = self.block
        if run is not self.run or run.begins != GOES_ON or self.done + block.num > self.num:
            return False
        if block.table is not first.table or block.first != first.first + self.done:
            return False
        return block.program is first.program and block.data is first.data


class Dispatcher:
    """Sends blocks to the device, and commits. The visible state is never ahead of the requested updates.

    Args:
        applied: is notified of reports, and when the optimizer's variables have been written.
        given: returns the function that returns the arguments of a program (weakly: its owner has the dispatcher).
    """

    def __init__(self, engine: Engine, applied: Applied, given: Callable[[], StateFor | None]):
        self._devices, self._variables, self._processes = engine.devices, engine.variables, engine.processes
        self._applied = applied
        self._given = given
        self._sees_access = engine.variables.watch is not None and engine.processes.count == 1
        self._forecast = AccessForecast()
        self._pace = DispatchSize(engine.processes)
        self._shortest = math.inf  # seconds of an update, with little time around it
        self._handed_out = 0  # updates since the latest dispatch, including it
        self._ahead: _Ahead | None = None
        # Held while variables get values that were held back; not while updates are computed.
        self._lock = threading.RLock()
        # Kept on the device: a loop of single updates needs the same spans in every epoch.
        self._span = lru_cache(maxsize=1024)(partial(_placed_span, engine.devices))
        self._copied = engine.programs.traced(_copies)

    def is_ahead(self, run: Run) -> bool:
        """Whether the variables are not written yet, as none was accessed since the run's last update."""
        return self._ahead is not None and self._ahead.run is run

    def send(self, run: Run, feed: Feed | SingleBatches, block: Block, *, in_call: bool = True) -> Report:
        """Send one block of updates to the device unless they were sent ahead, without waiting. Spends the run's state.

        From then on, reading a Keras variable returns its new value, and the run and the batches are at the end of the
        block. If an error is raised, nothing has changed; only if the program itself fails, the spent state is lost.
        """
        program, first, processes = block.program, run.number + 1, self._processes
        with processes.dispatching(f"computing update {first}"), uninterrupted():
            sent = self._hand_out(run, block)
            if sent is None:
                self._note_pace()
                given = self._given()
                assert given is not None
                begins, (state, captured) = run.begins, given(run, program)
                goes_ahead = block.may_be_read and program.again is not None and self._goes_ahead_from(state)
                num = self._num_to_send(block) if goes_ahead else block.num
                kept = self._copied(state) if num > block.num else state
                arguments = captured, block.data, *block.table.placed
                state, reports = program.call(state, *arguments, self._span(block.first, num, begins))
                sent, self._handed_out = (PackedLogs(self._devices, reports), 0), block.num
                if goes_ahead:
                    redo = partial(_redone, program, kept, arguments, block.first, begins)
                    self._hold_back(run, block, num, sent[0], state, redo)
                else:
                    assert run.variables is not None
                    self._write(run, run.variables, state)
                    self._forecast.note_end(block.num, 0, self._shortest)
            run.sent(block.num, program.layout, in_call=in_call)
            feed.advance(block)
        report = Report(*sent, program.layout, block, first, in_call=in_call)
        self._applied.note_sent(report)
        processes.set_status(f"at work after update {run.number} (reading data, or in a callback)")
        return report

    def _hand_out(self, run: Run, block: Block) -> tuple[PackedLogs, int] | None:
        """Return the numbers of updates that were sent ahead, with the index of a block's first; None if it was not."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or not ahead.holds(run, block):
                return None
            at, ahead.done = ahead.done, ahead.done + block.num
            if ahead.seen not in (None, ahead.done):  # a signal handler may read a variable before they are counted
                return None
            self._handed_out += block.num
            return ahead.numbers, at

    def _hold_back(
        self, run: Run, block: Block, num: int, numbers: PackedLogs, state: State, redo: Callable[[int], State]
    ) -> None:
        """Write a state to the variables only when one is accessed."""
        assert self._variables.watch is not None
        assert run.variables is not None
        watch = self._variables.watch(run.variables.all, block.program.captured, self._on_access, self._lock)
        self._ahead = _Ahead(run, block, num, numbers, state, run.variables, redo, watch.end, block.num)
        watch.begin()

    def num_ahead(self) -> int:
        """Return the number of updates to send in one dispatch now, if available; at least 1."""
        is_worth = self._sees_access and self._pace.seconds <= _MOST_SECONDS
        return max(1, min(self._forecast.wanted, self._pace.size)) if is_worth else 1

    def _goes_ahead_from(self, state: State) -> bool:
        """Whether updates may be sent ahead now, or at least the variables are to be watched."""
        is_worth = self._sees_access and self._pace.seconds <= _MOST_SECONDS and self._forecast.wanted > 0
        return is_worth and tree.num_bytes(list(state)) <= _MOST_BYTES

    def _num_to_send(self, block: Block) -> int:
        """Return the number of updates to send for a block, at least the block's."""
        num = min(self.num_ahead(), block.num + block.follow)
        return max(1, num // block.num) * block.num

    def _note_pace(self) -> None:
        """Record the time of the latest dispatch's updates, including the caller's work between them."""
        if not self._sees_access:
            return  # several processes would have to agree on one measurement
        if self._handed_out:
            self._pace.note(self._handed_out)
            self._shortest = min(self._shortest, self._pace.seconds)
        else:
            self._pace.start()

    def _on_access(self) -> None:
        """Write the variables before any is accessed."""
        if self.catch_up():
            self._forecast.note_access()

    def finish(self) -> None:
        """Write the variables at the end of a loop."""
        self.catch_up()
        self._handed_out = 0

    def catch_up(self) -> bool:
        """Write the state after the last update handed out to variables and run; return whether it was pending.

        If the updates cannot be computed again, nothing has changed, and the next access tries once more.
        """
        if self._ahead is None:
            return False
        with self._lock, uninterrupted():
            ahead = self._ahead
            if ahead is None:
                return False
            done = ahead.done
            state = ahead.state if done == ahead.num else ahead.redo(done)
            self._write(ahead.run, ahead.variables, state, ahead.unwatch)
            ahead.seen, self._ahead = done, None
            self._forecast.note_end(done, 0 if done == ahead.num else ahead.num, self._shortest)
            return True

    def _write(self, run: Run, variables: Variables, state: State, unwatch: Callable[[], None] = lambda: None) -> None:
        """Write a state to variables and run."""
        self._variables.write(variables, state)
        run.hold(state)
        unwatch()  # before the optimizer's variables are read
        self._applied.note_written()


def _redone(program: Program, state: State, arguments: tuple, first: int, begins: int, num: int) -> State:
    """Return the state after `num` updates of a dispatch, computed again."""
    assert program.again is not None
    again = program.again
    return _apart(lambda: again(state, *arguments, span(first, num, begins))[0])


def _apart(function: Callable[[], Any]) -> Any:
    """Return the function's result, computed in a new thread: the reader of a variable may be inside a trace."""
    if sys.is_finalizing():  # no other thread runs any more
        return function()
    found: list = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="wholestep-again")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        return function()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


_MOST_DEBT, _MOST_CREDIT = -64.0, 256.0  # dispatches saved, minus the cost of discarded updates
_REST, _LONGEST_REST = 64, 4096  # updates
_WATCH = 0.5  # the cost of watching for an access where nothing was sent ahead
_SAVED = 150e-6  # extra seconds of an update that is sent alone (docs/notes/log.md)


class AccessForecast:
    """Forecasts the number of updates before the next access to a variable.

    It is the shortest recent distance between accesses; without accesses, it doubles. Where accesses cannot be
    forecast and cost more than was saved, updates are sent singly for a while, each time for longer.

    >>> forecast = AccessForecast()
    >>> sizes = []
    >>> for _ in range(5):
    ...     sizes.append(forecast.wanted)
    ...     forecast.note_end(sizes[-1], 0, seconds=1e-4)
    >>> sizes
    [2, 4, 8, 16, 32]
    >>> forecast.note_access()
    >>> forecast.note_end(50, 0, seconds=1e-4)
    >>> forecast.note_access()  # 50 updates later
    >>> forecast.wanted
    50
    """

    def __init__(self) -> None:
        self._since = 0  # updates since the last access
        self._has_seen = False  # whether all accesses since the last one were seen, so that their distance is known
        self._gaps: deque[int] = deque(maxlen=4)  # updates between accesses
        self._latest = 1
        self._balance = 0.0
        self._rest = 0  # updates still to be sent singly
        self._next_rest = _REST

    @property
    def wanted(self) -> int:
        """The number of updates worth sending at once; 0 to send them singly, without a watch."""
        if self._rest > 0:
            return 0
        to_look = min(self._gaps) - self._since if self._gaps and self._has_seen else 0
        return to_look if to_look > 0 else 2 * self._latest

    def note_access(self) -> None:
        """Record an access after all recorded updates."""
        if self._has_seen:
            self._gaps.append(self._since)
        self._since, self._has_seen = 0, True
        self._note_gain(-_WATCH)

    def note_end(self, num: int, in_vain: int, seconds: float) -> None:
        """Record a finished dispatch of `num` useful updates; `in_vain` updates were computed again or discarded.

        Args:
            seconds: the time of an update.
        """
        if self._rest > 0:
            self._rest = max(0, self._rest - num)  # accesses are not seen meanwhile
        else:
            self._latest, self._since = num, self._since + num
            self._note_gain(num - 1 - in_vain * min(max(0.5, seconds / _SAVED), 8.0))

    def _note_gain(self, gain: float) -> None:
        self._balance = min(self._balance + gain, _MOST_CREDIT)
        if self._balance < _MOST_DEBT:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._balance, self._since, self._latest, self._has_seen = _MOST_DEBT / 2, 0, 1, False
        elif self._balance > 0:
            self._next_rest = _REST


_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """The number of updates to send in one dispatch: about 0.1 s of them. It cannot change a bit of the updates.

    All processes use the number of process 0, which is broadcast after 1, 2, 4, 8, ... dispatches.
    """

    def __init__(self, processes: Processes) -> None:
        self.size = 1
        self.seconds = math.inf  # of an update in the latest dispatch
        self._processes = processes
        self._notes = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, num: int) -> None:
        """Record that `num` updates have just finished."""
        now = time.perf_counter()
        self.seconds, self._since = (now - self._since) / num, now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / self.seconds), 8 * self.size, MOST_UPDATES))
            self.size = self._processes.broadcast(size, "sharing how many updates go in a dispatch")
