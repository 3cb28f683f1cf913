"""The same line without an update: the sums of a data set, and the predictions of a model."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.compilations import Compilations
from wholestep.cut import Cut
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block, stage
from wholestep.data.feed import Feed
from wholestep.engines.protocol import Engine
from wholestep.model.compiled import unpack
from wholestep.model.forward import Forward
from wholestep.model.misfit import named
from wholestep.plan import MOST_UPDATES, Program
from wholestep.repeat import NONE, several, span
from wholestep.run import Run, updates
from wholestep.safety.interrupts import uninterrupted
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree

_MOST_BYTES = 64 << 20  # of outputs in one dispatch


class Look(NamedTuple):
    """What is wanted of a pass over a data set in evaluation mode.

    Args:
        predicts: the model's outputs, and not the numbers of an evaluation.
        is_whole: a batch is (x, y, ...), of which the first part is the input.
        one_by_one: somebody looks at what is found of each batch before the next.
    """

    predicts: bool = False
    is_whole: bool = False
    one_by_one: bool = False


BatchFunction = Callable[[State, State, Any, Any], tuple[State, Tree]]


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

    @property
    def programs(self) -> list[Program]:
        """All that have been compiled."""
        return list(self._programs.values())

    def plan(self, run: Run, batches: Batches, look: Look) -> Callable:
        """Return what finds the program for each batch of these."""
        is_resident = batches.arrays is not None and not batches.shapes
        most = len(batches) if is_resident and not look.one_by_one else 1
        kind = ("predict" if look.predicts else "evaluate", look.is_whole)
        return partial(self._program, run, kind, most, len(batches.shapes))

    def send(self, run: Run, feed: Feed, block: Block) -> tuple[Any, Block]:
        """Send a block of batches to the device; return what was found of each on the device, and the block."""
        engine, program = self.engine, block.program
        assert run.state is not None
        moved, rest = self._parts(run.state._replace(captured=engine.read_captured(program.captured, run.state)))
        which = engine.place(span(block.first, block.num))
        with engine.processes.dispatching("evaluating"), uninterrupted():
            moved, found = program.call(moved, rest, block.data, *block.table.placed, which)
            run.state = rest._replace(metrics=moved.metrics, sums=moved.sums, stopped=moved.stopped, captured=())
            if self.forward.moves_buffers:
                run.state = run.state._replace(buffers=moved.buffers)
                engine.write_buffers(self.forward.variables, moved.buffers)
            if moved.metrics:
                engine.write_metrics(self.forward.variables, moved.metrics)
            run.number, feed.batches.position = run.number + block.num, block.end
        return found, block

    def logs(self, found: Tree, i: int) -> dict[str, Any]:
        """Return the numbers of an evaluation up to batch i of a block. Waits for the device."""
        return self.epoch_sums.layout.unpack(self.engine.fetch(found)[i])

    def _program(self, run: Run, kind: tuple, most: int, num_shapes: int, batch: Batch) -> Program:
        self.compilations.num_batches += 1
        most = most if batch.num_rows == batch.full else 1  # the short one comes once
        if (key := self._key(kind, most, batch)) not in self._programs:
            with named(batch), self.compilations.watched(batch, num_shapes):
                self.engine.processes.set_status("compiling")
                program = self._compile(run, kind, most, batch)
                key = self._key(kind, most, batch)  # which knows of what was found meanwhile
                self._programs[key] = program
                self.engine.processes.set_status("at work (reading data, or in a callback)")
        return self._programs[key]

    def _key(self, kind: tuple, most: int, batch: Batch) -> tuple:
        forward = self.forward
        found = len(forward.variables.buffers), forward.moves_buffers, len(forward.inputs)
        return kind, most > 1, batch.signature, batch.num_rows, found

    def _compile(self, run: Run, kind: tuple, most: int, batch: Batch) -> Program:
        engine, forward, cut = self.engine, self.forward, Cut(((1, batch.num_rows),), batch.num_rows)
        data, rows = stage(engine, batch, cut)
        (rows,) = engine.place((rows,))
        if kind[0] == "evaluate":
            step: BatchFunction = self._add
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
        loops = _can_loop(found) and not engine.loops_slowly(step, *parts, data, rows)
        length, loops = length if loops else 1, loops and (length > 1 or engine.always_xla)
        table = engine.place((np.zeros((length, cut.places), np.int32), np.zeros((length,), np.int32)))
        examples = (*parts, data, *table, engine.place(NONE))
        call = engine.compile(
            several(engine, each, found if loops else None, length), examples, repeats=engine.always_xla
        )
        return Program(call, cut, length, 1, None, [], forward.inputs, "")

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
        look: what is wanted of the pass.
    """

    run: Run
    feed: Feed
    look: Look

    def updates(
        self, evaluation: Evaluation, num: int | None, size: Callable[[], int], before: Callable[[], None]
    ) -> Generator[tuple[Any, Block], None, None]:
        """Go through `num` batches (None: all); see `wholestep.run.updates`."""
        return updates(evaluation, self.run, self.feed, num, size, once=True, before=before)


def _num_bytes(found: Tree) -> int:
    """Return the bytes of arrays of such shapes; of what is not known, none."""
    return sum(8 * int(np.prod([size or 0 for size in leaf.shape])) for leaf in tree.leaves(found))


def _can_loop(found: Tree) -> bool:
    """Whether arrays of such shapes can be collected in a loop: known ones, that hold anything."""
    return all(len(leaf.shape) > 0 and all(leaf.shape) for leaf in tree.leaves(found))


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *outputs)
