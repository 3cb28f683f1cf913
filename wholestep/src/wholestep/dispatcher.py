"""Sends blocks of updates to the device, and commits: the state is written to the variables of
Keras and to the run.
"""

import time
from collections.abc import Callable
from functools import lru_cache, partial

from wholestep.data import Block, Feed, SingleBatches
from wholestep.engines import Devices, Engine
from wholestep.processes import Processes
from wholestep.program import MOST_UPDATES, Program, span
from wholestep.reports.report import Report
from wholestep.reports.update_ledger import UpdateLedger
from wholestep.run import Run
from wholestep.safety import uninterrupted
from wholestep.state import State
from wholestep.tree import Tensor, Tree

# the state that a program spends next, and captured values
InputsFor = Callable[[Run, Program], tuple[State, Tree]]


def _placed_span(devices: Devices, first: int, num: int, begins: int) -> Tensor:
    return devices.place(span(first, num, begins))


class Dispatcher:
    """Sends blocks to the device, and commits. The visible state is never ahead of the requested
    updates.

    Args:
        ledger: is notified of reports, and when the optimizer's variables have been written.
        inputs_for: a weak reference to the function that returns a program's inputs: its owner has
            the dispatcher.
    """

    def __init__(
        self, engine: Engine, ledger: UpdateLedger, inputs_for: Callable[[], InputsFor | None]
    ):
        self._devices = engine.devices
        self._processes = engine.processes
        self._variables = engine.variables
        self._ledger = ledger
        self._inputs_for = inputs_for
        # Kept on the device: a loop of single updates needs the same spans in every epoch.
        self._span = lru_cache(maxsize=1024)(partial(_placed_span, engine.devices))

    def send(
        self, run: Run, feed: Feed | SingleBatches, block: Block, *, in_call: bool = True
    ) -> Report:
        """Send one block of updates to the device, without waiting. Spends the run's state.

        From then on, reading a Keras variable returns its new value, and the run and the batches
        are at the end of the block. If an error is raised, nothing has changed; only if the program
        itself fails, the spent state is lost.
        """
        program = block.program
        processes = self._processes
        first = run.number + 1
        with processes.dispatching(f"computing update {first}"), uninterrupted():
            inputs_for = self._inputs_for()
            assert inputs_for is not None
            begins = run.begins
            state, captured = inputs_for(run, program)
            updates = self._span(block.first, block.num, begins)
            state, logs = program.call(state, captured, block.data, *block.table.placed, updates)
            assert run.variables is not None
            self._variables.write(run.variables, state)
            run.set_state(state)
            self._ledger.note_written()
            run.count_sent(block.num, program.layout, in_call=in_call)
            feed.advance(block)
        report = Report(self._devices, logs, program.layout, block, first, in_call=in_call)
        self._ledger.note_sent(report)
        processes.set_status(f"at work after update {run.number} (reading data, or in a callback)")
        return report


_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """The number of updates to send in one dispatch: about 0.1 s of them. It cannot change a bit of
    the updates.

    All processes use the number of process 0, which is broadcast after 1, 2, 4, 8, ... dispatches.
    """

    def __init__(self, processes: Processes) -> None:
        self.size = 1
        self._processes = processes
        self._notes = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, num: int) -> None:
        """Record that `num` updates have just finished."""
        now = time.perf_counter()
        seconds = (now - self._since) / num
        self._since = now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / seconds), 8 * self.size, MOST_UPDATES))
            self.size = self._processes.broadcast(size, "sharing how many updates go in a dispatch")
