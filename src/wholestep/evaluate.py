"""The same line without an update: the sums of a data set, and the predictions of a model."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.cut import Cut
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block, stage
from wholestep.data.feed import Feed
from wholestep.dispatch.repeat import MOST_UPDATES, compiled, several, span
from wholestep.engines.protocol import Engine
from wholestep.model.compiled import unpack
from wholestep.model.forward import Forward
from wholestep.model.misfit import named
from wholestep.program import Program
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout, check_same
from wholestep.run import Run, updates
from wholestep.safety.compilations import Compilations
from wholestep.safety.interrupts import uninterrupted
from wholestep.state import State
from wholestep.sums import EpochSums, first_logs
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


class Values(NamedTuple):
    """The values with which a model is called."""

    params: list
    buffers: list
    metrics: list
    captured: list


def _values(engine: Engine, state: State) -> Values:
    return Values(engine.params(state), state.buffers, state.metrics, state.captured)


def _parts(forward: Forward, state: State) -> tuple[State, State]:
    """Return what a batch moves of the state, and the rest."""
    moves = forward.facts.moves_buffers
    moved = State([], [], state.buffers if moves else [], state.metrics, state.sums, state.stopped, [])
    rest = state._replace(metrics=[], sums=(), stopped=[], scratch=[], buffers=[] if moves else state.buffers)
    return moved, rest


def _joined(moved: State, rest: State) -> State:
    """Return the two parts as one."""
    return rest._replace(buffers=moved.buffers or rest.buffers, metrics=moved.metrics, sums=moved.sums)


class Scoring:
    """What an evaluation does with one batch: (what it moves of the state, the rest, data, rows) -> (that, numbers).

    Args:
        forward: the objective, with what is known of it.
        layout: of the numbers.
    """

    def __init__(self, engine: Engine, forward: Forward, layout: ReportLayout = NOTHING_TOLD):
        self.forward = forward
        self.layout = layout
        self._engine = engine
        self._epoch_sums = EpochSums(forward)

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Scoring":
        """Return the same with what is found by tracing it."""
        layout = self.layout

        def trace(forward: Forward) -> None:
            def once(state: State, data: Tree, rows: Tensor) -> Tensor:
                nonlocal layout
                batch = self._engine.batch(data, rows)
                logs = first_logs(forward, *_values(self._engine, state), batch, None)
                layout = ReportLayout.of(logs)
                return logs["loss"]

            self._engine.shapes(once, state, data, rows)

        return Scoring(self._engine, self.forward.learned(trace), layout)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tensor]:
        """Return what is moved, and the numbers of the data so far."""
        forward, values = self.forward, _values(self._engine, _joined(moved, rest))
        outcome = forward.sums(*values, self._engine.batch(data, rows), None)
        once = outcome.extra
        if forward.has_penalty:
            once = once + forward.penalty(values.params, values.captured)
        sums = self._epoch_sums.add(moved.sums, outcome.sums, once, ops.full((), rows.shape[0], "int32"))
        logs = self._epoch_sums.logs(sums, outcome.metrics, values.captured)
        metrics = forward.tracking(outcome.metrics, logs)
        buffers = outcome.buffers if moved.buffers else []
        return moved._replace(metrics=metrics, sums=sums, buffers=buffers), self.layout.pack(logs)


class Predicting:
    """What a prediction does with one batch: (what it moves of the state, the rest, data, rows) -> (that, outputs).

    Args:
        forward: the model, with what is known of it.
        is_whole: see `Look`.
    """

    layout = NOTHING_TOLD

    def __init__(self, engine: Engine, forward: Forward, is_whole: bool):
        self.forward = forward
        self._engine = engine
        self._is_whole = is_whole

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Predicting":
        """Return the same with what is found by tracing it."""

        def trace(forward: Forward) -> None:
            moved = State([], [], [], [], (), [], [])
            self._engine.shapes(Predicting(self._engine, forward, self._is_whole), moved, state, data, rows)

        return Predicting(self._engine, self.forward.learned(trace), self._is_whole)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return what is moved, and the outputs."""
        batch = self._engine.batch(data, rows)
        inputs = unpack(batch)[0] if self._is_whole else batch
        outputs, after = self.forward.predict(*_values(self._engine, _joined(moved, rest)), inputs)
        return moved._replace(buffers=after if moved.buffers else []), outputs


class Evaluation:
    """The programs that look at batches in evaluation mode. Every batch keeps its own shape.

    A program takes the state in two parts: what it moves, which is spent, and the rest.
    """

    def __init__(self, engine: Engine, forward: Forward):
        self.engine = engine
        self.compilations = Compilations()
        self._scoring = Scoring(engine, forward)
        self._predicting = {is_whole: Predicting(engine, forward, is_whole) for is_whole in (False, True)}
        self._learned: dict[tuple, Scoring | Predicting] = {}
        self.programs: dict[tuple, Program] = {}

    def state(self, metrics: list[np.ndarray], look: Look) -> State:
        """Return where a pass begins: with the values of the variables as they are, these metrics, and empty sums."""
        forward = self._step(look).forward
        summed = ([], ()) if look.predicts else (metrics, EpochSums(forward).empty())
        (metrics, sums), stopped = self.engine.place((summed, np.int32(0)))
        params, slots, buffers = self.engine.read_variables(forward.variables)
        return State(params, slots, buffers, metrics, sums, stopped, [])

    def _step(self, look: Look) -> Scoring | Predicting:
        return self._predicting[look.is_whole] if look.predicts else self._scoring

    def plan(self, run: Run, batches: Batches, look: Look) -> Callable:
        """Return what finds the program for each batch of these."""
        is_resident = batches.arrays is not None and not batches.shapes
        most = len(batches) if is_resident and not look.one_by_one else 1
        return partial(self._program, run, look, most, len(batches.shapes))

    def send(self, run: Run, feed: Feed, block: Block) -> tuple[Any, Block]:
        """Send a block of batches to the device; return what was found of each on the device, and the block."""
        engine, program = self.engine, block.program
        assert run.state is not None
        forward, state = program.forward, run.state
        if run.number:
            check_same(run.layout, program.layout)
        elif state.sums:
            state = state._replace(sums=EpochSums(forward).fitting(engine, state.sums))
        moved, rest = _parts(forward, state._replace(captured=engine.read_captured(program.captured, state)))
        which = engine.place(span(block.first, block.num))
        with engine.processes.dispatching("evaluating"), uninterrupted():
            moved, found = program.call(moved, rest, block.data, *block.table.placed, which)
            run.state = rest._replace(metrics=moved.metrics, sums=moved.sums, stopped=moved.stopped, captured=())
            if forward.facts.moves_buffers:
                run.state = run.state._replace(buffers=moved.buffers)
                engine.write_buffers(forward.variables, moved.buffers)
            if moved.metrics:
                engine.write_metrics(forward.variables, moved.metrics)
            run.number, run.layout, feed.batches.position = run.number + block.num, program.layout, block.end
        return found, block

    def logs(self, found: Tensor, block: Block) -> dict[str, Any]:
        """Return the numbers of an evaluation up to the last batch of a block. Waits for the device."""
        return block.program.layout.unpack(self.engine.fetch(found)[block.num - 1])

    def _program(self, run: Run, look: Look, most: int, num_shapes: int, batch: Batch) -> Program:
        self.compilations.num_batches += 1
        most = most if batch.num_rows == batch.full else 1  # the short one comes once
        key = self._key(look, most, batch)
        if key not in self.programs:
            with named(batch), self.compilations.watched(batch, num_shapes):
                self.engine.processes.set_status("compiling")
                program = self._compile(run, look, most, batch)
                key = self._key(look, most, batch)  # which knows of what was found meanwhile
                self.programs[key] = program
                self.engine.processes.set_status("at work (reading data, or in a callback)")
        return self.programs[key]

    def _key(self, look: Look, most: int, batch: Batch) -> tuple:
        num_buffers = len(self._step(look).forward.variables.buffers)
        return look.predicts, look.is_whole, most > 1, batch.signature, batch.num_rows, num_buffers

    def _compile(self, run: Run, look: Look, most: int, batch: Batch) -> Program:
        engine, cut = self.engine, Cut(((1, batch.num_rows),), batch.num_rows)
        data, rows = stage(engine, batch, cut)
        (rows,) = engine.place((rows,))
        assert run.state is not None
        state, step = self._learned_step(run.state, look, batch.signature, data, rows)
        parts = _parts(step.forward, state._replace(captured=engine.read_captured(step.forward.inputs, state)))
        found = engine.shapes(step, *parts, data, rows)[1]

        def each(moved: State, rest: State, data: Tree, rows: Tensor, *_: Tensor) -> tuple[State, Tree]:
            return step(moved, rest, data, rows)

        length = max(1, min(most, MOST_UPDATES, _MOST_BYTES // max(1, _num_bytes(found))))
        loops = _can_loop(found) and not engine.loops_slowly(step, *parts, data, rows)
        length, loops = length if loops else 1, loops and (length > 1 or engine.always_xla)
        program = several(engine, each, found if loops else None, length)
        call = compiled(engine, program, *parts, data, (length, cut.places), repeats=engine.always_xla)
        run.state = state
        return Program(call, cut, length, 1, None, [], step.forward, step.layout, "")

    def _learned_step(
        self, state: State, look: Look, signature: tuple, data: Tree, rows: Tensor
    ) -> tuple[State, Scoring | Predicting]:
        """Return what such a pass does with batches like this one, and the state with all that is state then."""
        engine, step = self.engine, self._step(look)
        before, like = step.forward, (look.predicts, look.is_whole, signature)
        if like not in self._learned:
            captured = engine.read_captured(before.inputs, state)
            step = step.learned(state._replace(captured=captured), data, rows)
            if step.forward.variables is not before.variables:  # of which the others know nothing
                self._learned = {key: known for key, known in self._learned.items() if key[0] != look.predicts}
            self._learned[like] = step
        step = self._learned[like]
        if isinstance(step, Scoring):
            self._scoring = step
        else:
            self._predicting[look.is_whole] = step
        if step.forward.variables is not before.variables:
            state = state._replace(buffers=engine.read_variables(step.forward.variables)[2])
        if isinstance(step, Scoring):
            state = state._replace(sums=EpochSums(step.forward).fitting(engine, state.sums))
        return state, step


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
