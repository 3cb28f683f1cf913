"""Evaluation and prediction: one batch, and the programs of several."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.custom import CustomEvaluation, CustomSteps
from wholestep.cut import Cut
from wholestep.data import (
    Batch,
    Batches,
    Block,
    Feed,
    SingleBatches,
    most_in_a_dispatch,
    stack,
    stage,
)
from wholestep.engines import Engine
from wholestep.model import Forward, named, unpack
from wholestep.program import MOST_UPDATES, Program, ProgramCache, compiled, loop_updates, span
from wholestep.reports.compilations import Compilations
from wholestep.reports.report import NOTHING_TOLD, ReportLayout, check_same
from wholestep.safety import uninterrupted
from wholestep.state import State, Values, Variables, merged
from wholestep.sums import EpochSums, first_logs
from wholestep.tree import Tensor, Tree


def _values(engine: Engine, state: State) -> Values:
    return Values(engine.variables.params(state), state.buffers, state.metrics, state.captured)


def parted(forward: Forward, state: State) -> tuple[State, State]:
    """Return the part of the state that a batch changes, and the rest."""
    moves = forward.facts.moves_buffers
    moved = State(
        [], [], state.buffers if moves else [], state.metrics, state.sums, state.stopped, []
    )
    rest = state._replace(
        metrics=[], sums=(), stopped=[], scratch=[], buffers=[] if moves else state.buffers
    )
    return moved, rest


class Scoring:
    """The evaluation of one batch: (moved state, rest of the state, data, rows) -> (moved state,
    numbers).

    Args:
        forward: the objective, with its known properties.
        layout: the layout of the numbers.
    """

    def __init__(self, engine: Engine, forward: Forward, layout: ReportLayout = NOTHING_TOLD):
        self.forward = forward
        self.layout = layout
        self._engine = engine
        self._epoch_sums = EpochSums(forward)

    @cached_property
    def no_sums(self) -> tuple:
        """The sums before the first batch, on the device; () before a trace."""
        return self._engine.devices.place(self._epoch_sums.empty())

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Scoring":
        """Return this function with the properties that its trace finds."""
        layout = self.layout

        def trace(forward: Forward) -> None:
            def once(state: State, data: Tree, rows: Tensor) -> Tensor:
                nonlocal layout
                batch = self._engine.replicas.batch(data, rows)
                logs = first_logs(forward, _values(self._engine, state), batch, None)
                layout = ReportLayout.of(logs)
                return logs["loss"]

            self._engine.programs.shapes(once, state, data, rows)

        return Scoring(self._engine, self.forward.learned(trace), layout)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tensor]:
        """Return the moved state, and the numbers of the data so far."""
        forward = self.forward
        values = _values(self._engine, merged(moved, rest))
        outcome = forward.sums(values, self._engine.replicas.batch(data, rows), None)
        once = outcome.extra
        if forward.has_penalty:
            once = once + forward.penalty(values.params, values.captured)
        sums = self._epoch_sums.add(
            moved.sums, outcome.sums, once, ops.full((), rows.shape[0], "int32")
        )
        logs = self._epoch_sums.logs(sums, outcome.metrics, values.captured)
        metrics = forward.tracking(outcome.metrics, logs)
        buffers = outcome.buffers if moved.buffers else []
        return moved._replace(metrics=metrics, sums=sums, buffers=buffers), self.layout.pack(logs)


class Predicting:
    """The prediction of one batch: (moved state, rest of the state, data, rows) -> (moved state,
    outputs).

    Args:
        forward: the model, with its known properties.
        is_whole: see `EvalOptions`.
    """

    layout = NOTHING_TOLD
    no_sums = ()

    def __init__(self, engine: Engine, forward: Forward, is_whole: bool):
        self.forward = forward
        self._engine = engine
        self._is_whole = is_whole

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Predicting":
        """Return this function with the properties that its trace finds."""

        def trace(forward: Forward) -> None:
            moved = State([], [], [], [], (), [], [])
            self._engine.programs.shapes(
                Predicting(self._engine, forward, self._is_whole), moved, state, data, rows
            )

        return Predicting(self._engine, self.forward.learned(trace), self._is_whole)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state, and the outputs."""
        batch = self._engine.replicas.batch(data, rows)
        inputs = unpack(batch)[0] if self._is_whole else batch
        outputs, after = self.forward.predict(_values(self._engine, merged(moved, rest)), inputs)
        return moved._replace(buffers=after if moved.buffers else []), outputs


_MOST_BYTES = 64 << 20  # of outputs in one dispatch


class EvalOptions(NamedTuple):
    """The options of a pass over a data set in evaluation mode.

    Args:
        predicts: whether to return the model's outputs, not the numbers of an evaluation.
        is_whole: whether a batch is (x, y, ...), the first part of which is the input.
        one_by_one: whether the results of each batch are read before the next batch.
    """

    predicts: bool = False
    is_whole: bool = False
    one_by_one: bool = False


CheckKind = Callable[[Batch], None]
BatchFunction = Scoring | Predicting | CustomEvaluation


def _function_of(
    engine: Engine, forward: Forward, steps: CustomSteps, *, predicts: bool, is_whole: bool
) -> BatchFunction:
    """Return the function of a batch: ours, or the model's custom `test_step` or `predict_step`."""
    if steps.predicts if predicts else steps.tests:
        return CustomEvaluation(engine, forward, steps, predicts=predicts, is_whole=is_whole)
    return Predicting(engine, forward, is_whole) if predicts else Scoring(engine, forward)


class Evaluation:
    """The programs of evaluation mode. Batches are not padded.

    A program takes the state in two parts: the moved part and the rest.
    """

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps):
        self.engine = engine
        self.compilations = Compilations()
        self._functions = {
            (predicts, is_whole): _function_of(
                engine, forward, steps, predicts=predicts, is_whole=is_whole
            )
            for predicts, is_whole in ((False, False), (True, False), (True, True))
        }
        self._learned = ProgramCache()
        self.programs = ProgramCache()
        self.row_tables = ProgramCache()  # of loaded batches, the same for every pass
        self._span = lru_cache(maxsize=1024)(
            lambda first, num: engine.devices.place(span(first, num))
        )
        # of passes that predict or not: metrics, and the same on the device
        self._empty: dict[bool, tuple] = {}

    def state(self, metrics: list[np.ndarray], options: EvalOptions) -> State:
        """Return the initial state of a pass: the current values of the variables, these metrics,
        and no sums.
        """
        known, (placed, stopped) = self._empty.get(options.predicts, (None, ([], None)))
        if known is not metrics:
            placed, stopped = self.engine.devices.place((metrics, np.int32(0)))
            self._empty[options.predicts] = metrics, (placed, stopped)
        params, slots, buffers = self.engine.variables.read(
            self._function(options).forward.variables
        )
        return State(params, slots, buffers, placed, (), stopped, [])

    def _function(self, options: EvalOptions) -> BatchFunction:
        return self._functions[options.predicts, options.is_whole]

    def plan(
        self,
        run: "PassRun",
        batches: Batches | None,
        options: EvalOptions,
        steps: int | None,
        check: CheckKind,
    ) -> Callable:
        """Return the function that finds the program of a batch, for a pass over `steps` batches
        (None: all).

        Args:
            batches: None for single batches.
            check: checks a batch of a new kind.
        """
        if batches is None:
            return partial(self._program, run, options, 1, 0, check)
        most = len(batches) if batches.arrays is not None and not batches.shapes else MOST_UPDATES
        most = 1 if options.one_by_one or steps == 1 else most
        return partial(self._program, run, options, most, len(batches.shapes), check)

    def send(self, run: "PassRun", feed: Feed | SingleBatches, block: Block) -> tuple[Any, Block]:
        """Send a block of batches to the device; return the results, still on the device, and the
        block.
        """
        engine = self.engine
        program = block.program
        assert run.state is not None
        forward = program.forward
        state = run.state
        if run.number:
            check_same(run.layout, program.layout)
        else:
            state = state._replace(sums=program.function.no_sums)
        moved, rest = parted(
            forward, state._replace(captured=engine.variables.captured(program.captured, state))
        )
        which = self._span(block.first, block.num)
        with engine.processes.dispatching("evaluating"), uninterrupted():
            moved, found = program.call(moved, rest, block.data, *block.table.placed, which)
            engine.variables.write(_moved_variables(forward, moved), moved)
            after = rest._replace(
                metrics=moved.metrics, sums=moved.sums, stopped=moved.stopped, captured=()
            )
            after = after._replace(buffers=moved.buffers) if forward.facts.moves_buffers else after
            run.state = after
            run.number = run.number + block.num
            run.layout = program.layout
            feed.advance(block)
        return found, block

    def logs(self, found: Tensor, block: Block) -> dict[str, Any]:
        """Return the numbers of an evaluation up to the last batch of a block. Waits for the
        device.
        """
        return block.program.layout.unpack(self.engine.devices.fetch(found)[block.num - 1])

    def _program(
        self,
        run: "PassRun",
        options: EvalOptions,
        most: int,
        num_shapes: int,
        check: CheckKind,
        batch: Batch,
    ) -> Program:
        self.compilations.num_batches += 1
        most = most if batch.num_rows == batch.full else 1  # a short batch comes once
        key = self._key(options, most, batch)
        if key not in self.programs:
            compiling = (
                nullcontext()
                if self.engine.programs.is_eager
                else self.compilations.watched(batch, num_shapes)
            )
            with named(batch), compiling, uninterrupted(twice=False):
                check(batch)
                self.engine.processes.set_status("compiling")
                program = self._compile(run, options, most, batch)
                key = self._key(options, most, batch)  # which includes the buffers found meanwhile
                self.programs[key] = program
                self.engine.processes.set_status("at work (reading data, or in a callback)")
        return self.programs[key]

    def _key(self, options: EvalOptions, most: int, batch: Batch) -> tuple:
        num_buffers = len(self._function(options).forward.variables.buffers)
        return (
            options.predicts,
            options.is_whole,
            most > 1,
            *batch.program_key,
            batch.num_rows,
            num_buffers,
        )

    def _compile(self, run: "PassRun", options: EvalOptions, most: int, batch: Batch) -> Program:
        engine = self.engine
        cut = Cut(((1, batch.num_rows),), batch.num_rows)
        data, rows = stage(engine.devices, batch, cut)
        (rows,) = engine.devices.place((rows,))
        assert run.state is not None
        state, function = self._learned_function(run.state, options, batch.program_key, data, rows)
        captured = engine.variables.captured(function.forward.inputs, state)
        parts = parted(function.forward, state._replace(captured=captured, sums=function.no_sums))
        found = (
            None
            if engine.programs.is_eager
            else engine.programs.shapes(function, *parts, data, rows)[1]
        )

        def each(
            moved: State, rest: State, data: Tree, rows: Tensor, _: Tensor
        ) -> tuple[State, Tree]:
            return function(moved, rest, data, rows)

        most = most_in_a_dispatch(engine.devices, batch, most)
        length = max(1, min(most, MOST_UPDATES, _MOST_BYTES // max(1, _num_bytes(found))))
        loops = (
            found is not None
            and _can_loop(found)
            and not engine.programs.loops_slowly(function, *parts, data, rows)
        )
        most = length if loops else 1
        loops = loops and (length > 1 or engine.programs.always_xla)
        length, num_stacked = (length, 1) if batch.is_resident else (most, most)
        if num_stacked > 1:
            data = engine.devices.stage(stack([batch], num_stacked))
        program = loop_updates(engine, each, found if loops else None, most)
        program = engine.variables.load_and_store(
            program, _moved_variables(function.forward, parts[0])
        )
        always_xla = engine.programs.always_xla
        arguments = (*parts, data)
        # Not spent: the state before the first batch serves every pass.
        made = compiled(
            engine, program, arguments, (length, cut.places), repeats=always_xla, spends=False
        )
        run.state = state
        return Program(*made, cut, length, most, num_stacked, [], function)

    def _learned_function(
        self, state: State, options: EvalOptions, program_key: tuple, data: Tree, rows: Tensor
    ) -> tuple[State, BatchFunction]:
        """Return the traced function of such a pass for batches like this one, and the state with
        new variables.
        """
        engine = self.engine
        function = self._function(options)
        before = function.forward
        like = (options.predicts, options.is_whole, program_key)
        if like not in self._learned:
            captured = engine.variables.captured(before.inputs, state)
            function = function.learned(state._replace(captured=captured), data, rows)
            if function.forward.variables is not before.variables:  # unknown to the other functions
                for other in [key for key in self._learned if key[0] == options.predicts]:
                    del self._learned[other]
                self._functions[options.predicts, options.is_whole] = function
            self._learned[like] = function
        function = self._learned[like]
        if function.forward.variables is not before.variables:
            state = state._replace(buffers=engine.variables.read(function.forward.variables)[2])
        return state, function


@dataclass
class PassRun:
    """How far a pass has got.

    Args:
        state: the values after its last batch: a copy that no training sees.
        number: how many batches have been sent.
        layout: of the numbers that are added up, once a batch has been sent.
    """

    state: State | None = None
    number: int = 0
    layout: ReportLayout | None = None

    def begin(self, state: State) -> None:
        """Begin with these values."""
        self.state = state
        self.number = 0

    def end(self) -> None:
        """Drop the values: a run that waits for its next batch keeps no copy of the weights."""
        self.state = None


@dataclass(frozen=True)
class Pass:
    """A data set for repeated passes in evaluation mode, each from its first batch.

    Args:
        run: the progress of the pass: `number` counts batches, and `state` is separate from the
            training's.
        options: the options of the pass.
    """

    run: PassRun
    feed: Feed
    options: EvalOptions


def _moved_variables(forward: Forward, moved: State) -> Variables:
    """Return the variables of the part of the state that a batch changes."""
    buffers = forward.variables.buffers if forward.facts.moves_buffers else []
    return Variables([], [], buffers, forward.variables.metrics if moved.metrics else [])


def _num_bytes(found: Tree) -> int:
    """Return the bytes of arrays of such shapes; unknown sizes count 0."""
    return sum(8 * int(np.prod([size or 0 for size in leaf.shape])) for leaf in tree.leaves(found))


def _can_loop(found: Tree) -> bool:
    """Whether arrays of such shapes can be collected in a loop: all sizes are known and not 0."""
    return all(len(leaf.shape) > 0 and all(leaf.shape) for leaf in tree.leaves(found))


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(
        lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *outputs
    )


def rows_of(found: Tensor, num: int) -> Tensor:
    """Return the outputs of the first `num` batches as one array of rows."""
    return keras.ops.reshape(found[:num], (num * found.shape[1], *found.shape[2:]))


def joined(*outputs: Tensor) -> Tensor:
    """Return the outputs of a few batches as one array."""
    return outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs)
