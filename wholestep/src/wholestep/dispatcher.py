"""Sends blocks of updates to the device, and commits: the state is written to the variables of
Keras and to the run.
"""

import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import keras

from wholestep.ahead import Ahead
from wholestep.data import Block, Feed, SingleBatches
from wholestep.engines import Devices, Engine
from wholestep.program import Program, span
from wholestep.reports.report import PackedLogs, Report
from wholestep.reports.update_ledger import UpdateLedger
from wholestep.run import Run
from wholestep.safety import uninterrupted
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree

_copies = partial(keras.tree.map_structure, keras.ops.copy)  # of a state

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
        self._ledger = ledger
        self._inputs_for = inputs_for
        # not a method: `Ahead` would keep this alive
        self._write = partial(_write, engine, ledger)
        self.ahead = Ahead(engine, self._write)
        # Kept on the device: a loop of single updates needs the same spans in every epoch.
        self._span = lru_cache(maxsize=1024)(partial(_placed_span, engine.devices))
        self._copied = engine.programs.traced(_copies)

    def send(
        self, run: Run, feed: Feed | SingleBatches, block: Block, *, in_call: bool = True
    ) -> Report:
        """Send one block of updates to the device unless they were sent ahead, without waiting.
        Spends the run's state.

        From then on, reading a Keras variable returns its new value, and the run and the batches
        are at the end of the block. If an error is raised, nothing has changed; only if the program
        itself fails, the spent state is lost.
        """
        program = block.program
        ahead = self.ahead
        processes = self._processes
        first = run.number + 1
        with processes.dispatching(f"computing update {first}"), uninterrupted():
            sent = ahead.hand_out(run, block)
            if sent is None:
                inputs_for = self._inputs_for()
                assert inputs_for is not None
                ahead.note_dispatch(block.num)
                begins, (state, captured) = run.begins, inputs_for(run, program)
                num = ahead.num_to_send(block, state)
                kept = self._copied(state) if num > block.num else state
                arguments = captured, block.data, *block.table.placed
                state, reports = program.call(
                    state, *arguments, self._span(block.first, num or block.num, begins)
                )
                sent = PackedLogs(self._devices, reports), 0
                if num:
                    redo = partial(_redone, program, kept, arguments, block.first, begins)
                    ahead.withhold(run, block, num, sent[0], state, redo)
                else:
                    assert run.variables is not None
                    self._write(run, run.variables, state)
            run.count_sent(block.num, program.layout, in_call=in_call)
            feed.advance(block)
        report = Report(*sent, program.layout, block, first, in_call=in_call)
        self._ledger.note_sent(report)
        processes.set_status(f"at work after update {run.number} (reading data, or in a callback)")
        return report


def _write(
    engine: Engine,
    ledger: UpdateLedger,
    run: Run,
    variables: Variables,
    state: State,
    unwatch: Callable[[], None] = lambda: None,
) -> None:
    """Write a state to variables and run."""
    engine.variables.write(variables, state)
    run.set_state(state)
    unwatch()  # before the optimizer's variables are read
    ledger.note_written()


def _redone(
    program: Program, state: State, arguments: tuple, first: int, begins: int, num: int
) -> State:
    """Return the state after `num` updates of a dispatch, computed again."""
    assert program.again is not None
    again = program.again
    return _apart(lambda: again(state, *arguments, span(first, num, begins))[0])


def _apart(function: Callable[[], Any]) -> Any:
    """Return the function's result, computed in a new thread: the reader of a variable may be
    inside a trace.
    """
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
