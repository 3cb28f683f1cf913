"""Updates sent ahead: several in one dispatch, handed out singly, until a variable is accessed.

Where updates are short, sending one alone costs three times the update. So several go in one
dispatch. An access to a variable in between finds the state after the last update that was handed
out: the updates up to it are computed again, from a copy of the state before the first.
(Speculative execution; without it, updates have the same bits.)
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from wholestep import tree
from wholestep.data import Block
from wholestep.engines import Engine
from wholestep.processes import Processes
from wholestep.program import GOES_ON, MOST_UPDATES
from wholestep.reports.report import PackedLogs
from wholestep.run import Run
from wholestep.safety import uninterrupted
from wholestep.state import State, Variables

_MOST_BYTES = 64 << 20  # of state copied for a dispatch
_MOST_SECONDS = 1e-3  # of an update: a longer one gains nothing noticeable

# a state to variables and run; then call the last
Write = Callable[[Run, Variables, State, Callable[[], None]], None]


@dataclass
class _HeldUpdates:
    """Updates of one dispatch, handed out singly; the variables are not written yet.

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

    def is_next(self, run: Run, block: Block) -> bool:
        """Whether the updates of a block are the next ones to hand out."""
        first = self.block
        if run is not self.run or run.begins != GOES_ON or self.done + block.num > self.num:
            return False
        if block.table is not first.table or block.first != first.first + self.done:
            return False
        return block.program is first.program and block.data is first.data


class Ahead:
    """Decides how many updates go ahead, holds them, and ends them at the first access to a
    variable.

    Nothing is sent ahead on an engine that does not see accesses to variables, nor by several
    processes: they would have to agree on the time of an update, and on accesses.

    Args:
        write: writes a state.
    """

    def __init__(self, engine: Engine, write: Write):
        self._watch = engine.variables.watch if engine.processes.count == 1 else None
        self._write = write
        self._forecast = AccessForecast()
        self._pace = DispatchSize(engine.processes)
        self._shortest = math.inf  # seconds of an update, with little time around it
        self._handed_out = 0  # updates since the latest dispatch, including it
        self._held: _HeldUpdates | None = None
        # Held while variables get values that were held back, which may be computed once more for
        # it.
        self._lock = threading.RLock()

    def is_holding(self, run: Run) -> bool:
        """Whether the variables are not written yet, as none was accessed since the run's last
        update.
        """
        held = self._held  # read once: another thread may read a variable, which ends it
        return held is not None and held.run is run

    def num(self) -> int:
        """Return the number of updates to send in one dispatch now, if available; at least 1."""
        return (
            max(1, min(self._forecast.wanted, self._pace.size))
            if self._pace.seconds <= _MOST_SECONDS
            else 1
        )

    def num_to_send(self, block: Block, state: State) -> int:
        """Return the number of updates to send for a block, at least the block's; 0 to send it and
        watch nothing.
        """
        if self._watch is None:
            return 0
        is_worth = self._pace.seconds <= _MOST_SECONDS and self._forecast.wanted > 0
        is_possible = block.may_be_read and block.program.again is not None
        if not is_possible or not is_worth or tree.num_bytes(list(state)) > _MOST_BYTES:
            self._forecast.note_end(block.num, 0, self._shortest)
            return 0
        return max(1, min(self.num(), block.num + block.follow) // block.num) * block.num

    def hand_out(self, run: Run, block: Block) -> tuple[PackedLogs, int] | None:
        """Return the numbers of updates that were sent ahead, with the index of a block's first;
        None if it was not.
        """
        if self._held is None:
            return None
        with self._lock:
            held = self._held
            if held is None or not held.is_next(run, block):
                return None
            at = held.done
            held.done = held.done + block.num
            # a signal handler may read a variable before they are counted
            if held.seen not in (None, held.done):
                return None
            self._handed_out += block.num
            return held.numbers, at

    def withhold(
        self,
        run: Run,
        block: Block,
        num: int,
        numbers: PackedLogs,
        state: State,
        redo: Callable[[int], State],
    ) -> None:
        """Write a state to the variables only when one is accessed."""
        assert run.variables is not None
        assert self._watch is not None
        watch = self._watch(run.variables.all, block.program.captured, self._on_access, self._lock)
        self._held = _HeldUpdates(
            run, block, num, numbers, state, run.variables, redo, watch.end, block.num
        )
        watch.begin()

    def note_dispatch(self, num: int) -> None:
        """Record that `num` updates are sent now, and the time of the latest, with the caller's
        work between them.
        """
        if self._watch is None:
            return
        if self._handed_out:
            self._pace.note(self._handed_out)
            self._shortest = min(self._shortest, self._pace.seconds)
        else:
            self._pace.start()
        self._handed_out = num

    def _on_access(self) -> None:
        """Write the variables before any is accessed."""
        if self.catch_up():
            self._forecast.note_access()

    def finish(self) -> None:
        """Write the variables at the end of a loop."""
        self.catch_up()
        self._handed_out = 0

    def catch_up(self) -> bool:
        """Write the state after the last update handed out to variables and run; return whether it
        was pending.

        If the updates cannot be computed again, nothing has changed, and the next access tries once
        more.
        """
        if self._held is None:
            return False
        with self._lock, uninterrupted():
            held = self._held
            if held is None:
                return False
            done = held.done
            state = held.state if done == held.num else held.redo(done)
            self._write(held.run, held.variables, state, held.unwatch)
            held.seen = done
            self._held = None
            self._forecast.note_end(done, 0 if done == held.num else held.num, self._shortest)
            return True


_MOST_DEBT = -64.0
_MOST_CREDIT = 256.0  # dispatches saved, minus the cost of discarded updates
_REST = 64
_LONGEST_REST = 4096  # updates
_WATCH = 0.5  # the cost of watching for an access where nothing was sent ahead
_SAVED = 150e-6  # extra seconds of an update that is sent alone (docs/notes/log.md)


class AccessForecast:
    """Forecasts the number of updates before the next access to a variable.

    It is the shortest recent distance between accesses; without accesses, it doubles. Where
    accesses cannot be forecast and cost more than was saved, updates are sent singly for a while,
    each time for longer.

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
        # whether all accesses since the last one were seen, so that their distance is known
        self._has_seen = False
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
        self._since = 0
        self._has_seen = True
        self._note_gain(-_WATCH)

    def note_end(self, num: int, in_vain: int, seconds: float) -> None:
        """Record a finished dispatch of `num` useful updates; `in_vain` updates were computed again
        or discarded.

        Args:
            seconds: the time of an update.
        """
        if self._rest > 0:
            self._rest = max(0, self._rest - num)  # accesses are not seen meanwhile
        else:
            self._latest = num
            self._since = self._since + num
            self._note_gain(num - 1 - in_vain * min(max(0.5, seconds / _SAVED), 8.0))

    def _note_gain(self, gain: float) -> None:
        self._balance = min(self._balance + gain, _MOST_CREDIT)
        if self._balance < _MOST_DEBT:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._balance = _MOST_DEBT / 2
            self._since = 0
            self._latest = 1
            self._has_seen = False
        elif self._balance > 0:
            self._next_rest = _REST


_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """The number of updates to send in one dispatch: about 0.1 s of them. It cannot change a bit of
    the updates.

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
        self.seconds = (now - self._since) / num
        self._since = now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(
                min(max(1, _SECONDS_PER_DISPATCH / self.seconds), 8 * self.size, MOST_UPDATES)
            )
            self.size = self._processes.broadcast(size, "sharing how many updates go in a dispatch")
