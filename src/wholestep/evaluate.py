"""The same line without an update: the sums of a data set, and the predictions of a model."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.compilations import Compilations
from wholestep.compiled import unpack
from wholestep.cut import Cut
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block, stage
from wholestep.data.feed import Feed
from wholestep.engines.protocol import Engine
from wholestep.forward import Forward
from wholestep.interrupts import uninterrupted
from wholestep.misfit import named
from wholestep.plan import MOST_UPDATES, Program
from wholestep.repeat import NONE, several, span
from wholestep.run import Run, updates
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree

_MOST_BYTES = 64 << 20  # of outputs in one dispatch

Step = Callable[[State, State, Any, Any], tuple[State, Tree]]


class Evaluation:
    """The programs that look at batches in evaluation mode. Every batch keeps its own shape.

    A program takes the state in two parts: what it moves, which is spent, and the rest.
    """

    def __init__(self, engine: Engine, forward: Forward):
        self.engine = engine
        self.forward = forward
        self.epoch_sums = EpochSums(forward)
        self.compilations = Compilations()
        self._sums = engine.traced(forward.sums)
        self._programs: dict[tuple, Program] = {}

    def plan(self, run: Run, batches: Batches, *, predicts: bool = False, is_whole: bool = False) -> Callable:
        """Return what finds the program for each batch of these.

        Args:
            predicts: whether a program returns the model's outputs, and not the numbers of an evaluation.
            is_whole: whether a batch is (x, y, ...), of which the first part is the input.
        """
        most = len(batches) if batches.arrays is not None and not batches.shapes else 1
        kind = ("predict", is_whole) if predicts else ("evaluate",)
        return partial(self._program, run, kind, most, len(batches.shapes))

    def send(self, run: Run, feed: Feed, block: Block) -> tuple[Any, Block]:
        """Send a block of batches to the device; return what was found of each on the device, and the block."""
        engine, program = self.engine, block.program
        assert run.state is not None
        moved, rest = self._parts(run.state._replace(captured=engine.read_captured(program.captured, run.state)))
        which = engine.place(span(block.first, block.num, begins=run.begins))
        with engine.processes.dispatching("evaluating"), uninterrupted():
            moved, found = program.call(moved, rest, block.data, *block.table.placed, which)
            run.state = rest._replace(metrics=moved.metrics, sums=moved.sums, stopped=moved.stopped, captured=())
            if self.forward.moves_buffers:
                run.state = run.state._replace(buffers=moved.buffers)
                engine.write_buffers(self.forward.variables, moved.buffers)
            run.number, run.begins, feed.batches.position = run.number + block.num, False, block.end
        return found, block

    def logs(self, found: Tree, i: int) -> dict[str, Any]:
        """Return the numbers of an evaluation up to batch i of a block. Waits for the device."""
        return self.epoch_sums.layout.unpack(self.engine.fetch(found)[i])

    def _program(self, run: Run, kind: tuple, most: int, num_shapes: int, batch: Batch) -> Program:
        self.compilations.num_batches += 1
        if (key := self._key(kind, batch)) not in self._programs:
            with named(batch), self.compilations.watched(batch, num_shapes):
                self.engine.processes.set_status("compiling")
                program = self._compile(run, kind, most, batch)
                key = self._key(kind, batch)  # which knows of what was found meanwhile
                self._programs[key] = program
                self.engine.processes.set_status("at work (reading data, or in a callback)")
        return self._programs[key]

    def _key(self, kind: tuple, batch: Batch) -> tuple:
        forward = self.forward
        found = len(forward.variables.buffers), forward.moves_buffers, len(forward.inputs)
        return kind, batch.signature, batch.num_rows, found

    def _compile(self, run: Run, kind: tuple, most: int, batch: Batch) -> Program:
        engine, forward, cut = self.engine, self.forward, Cut(((1, batch.num_rows),), batch.num_rows)
        data, rows = stage(engine, batch, cut)
        (rows,) = engine.place((rows,))
        if kind[0] == "evaluate":
            step: Step = self._add
            traced = partial(engine.shapes, self._outcome)
        else:
            step = partial(self._predict, kind[1])
            traced = partial(engine.shapes, lambda state, metrics, data, rows: step(*self._parts(state), data, rows))
        assert run.state is not None
        state = forward.learn(engine, run.state, lambda s: traced(s, s.metrics, data, rows))
        if kind[0] == "evaluate" and not state.sums:
            state = state._replace(sums=engine.place(self.epoch_sums.empty()))
        run.state, parts = state._replace(captured=()), self._parts(state)
        found = engine.shapes(step, *parts, data, rows)[1]

        def each(moved: State, rest: State, data: Tree, rows: Tensor, *_: Tensor) -> tuple[State, Tree]:
            return step(moved, rest, data, rows)

        length = max(1, min(most, MOST_UPDATES, _MOST_BYTES // max(1, _num_bytes(found))))
        slowly = engine.loops_slowly(step, *parts, data, rows)
        length, loops = 1 if slowly else length, not slowly and (length > 1 or engine.loops_once)
        table = engine.place((np.zeros((length, cut.places), np.int32), np.zeros((length,), np.int32)))
        examples = (*parts, data, *table, engine.place(NONE))
        call = engine.compile(several(engine, each, found if loops else None, length), examples, repeats=loops)
        return Program(call, cut, length, None, [], forward.inputs, "")

    def _parts(self, state: State) -> tuple[State, State]:
        """Return what a batch moves of the state, and the rest."""
        moves = self.forward.moves_buffers
        moved = State([], [], state.buffers if moves else [], state.metrics, state.sums, state.stopped, [])
        rest = state._replace(metrics=[], sums=(), stopped=[], scratch=[], buffers=[] if moves else state.buffers)
        return moved, rest

    def _add(self, moved: State, rest: State, data: Tree, rows: Any) -> tuple[State, Any]:
        state = rest._replace(buffers=moved.buffers or rest.buffers)
        outcome = self._outcome(state, moved.metrics, data, rows)
        once = outcome.extra
        if self.forward.has_penalty:
            once = once + self.forward.penalty(self.engine.params(state), state.captured)
        sums = self.epoch_sums.add(moved.sums, outcome.sums, once, ops.full((), rows.shape[0], "int32"))
        logs = self.epoch_sums.logs(sums, outcome.metrics, state.captured)
        metrics = self.forward.tracking(outcome.metrics, logs)
        buffers = outcome.buffers if moved.buffers else []
        return moved._replace(metrics=metrics, sums=sums, buffers=buffers), self.epoch_sums.layout.pack(logs)

    def _outcome(self, state: State, metrics: list, data: Tree, rows: Any) -> Any:
        values = self.engine.params(state), state.buffers, metrics, state.captured
        return self._sums(*values, self.engine.batch(data, rows), None)

    def _predict(self, is_whole: bool, moved: State, rest: State, data: Tree, rows: Any) -> tuple[State, Tree]:
        values = self.engine.params(rest), moved.buffers or rest.buffers, moved.metrics, rest.captured
        batch = self.engine.batch(data, rows)
        outputs, after = self.forward.predict(*values, unpack(batch)[0] if is_whole else batch)
        return moved._replace(buffers=after if moved.buffers else []), outputs


@dataclass(frozen=True)
class Pass:
    """A data set that may be gone through in evaluation mode several times, always from its first batch on.

    Args:
        run: where such a pass stands: `number` counts batches, and `state` is a copy that no training sees.
        predicts: whether outputs are wanted, and not the numbers of an evaluation.
    """

    run: Run
    feed: Feed
    predicts: bool

    def updates(
        self, evaluation: Evaluation, num: int | None, size: Callable[[], int], before: Callable[[], None]
    ) -> Generator[tuple[Any, Block], None, None]:
        """Go through `num` batches (None: all); see `wholestep.line.updates`."""
        return updates(evaluation, self.run, self.feed, num, size, once=True, before=before)


def _num_bytes(found: Tree) -> int:
    """Return the bytes of arrays of such shapes."""
    return sum(8 * int(np.prod(leaf.shape)) for leaf in tree.leaves(found))


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *outputs)
