"""Evaluation and prediction: one batch, and the programs of several."""

import math
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
from wholestep.program import (
    MOST_UPDATES,
    Program,
    ProgramCache,
    compiled,
    garbage_kept,
    loop_updates,
    span,
)
from wholestep.reports.compile_notices import Compilations
from wholestep.reports.report import NO_LOGS, ReportLayout, check_same_layout
from wholestep.safety import uninterrupted
from wholestep.state import State, Values, Variables, merged
from wholestep.sums import EpochSums, first_logs
from wholestep.tree import Tensor, Tree


def _values(engine: Engine, state: State) -> Values:
    return Values(engine.variables.params(state), state.buffers, state.metrics, state.captured)


def parted(forward: Forward, state: State) -> tuple[State, State]:
    """Return the part of the state that a batch changes, and the rest."""
    moved = state._replace(params=[], slots=[], scratch=[], captured=())
    rest = state._replace(metrics=[], sums=(), stopped=[], scratch=[])
    if forward.facts.moves_buffers:
        return moved, rest._replace(buffers=[])
    return moved._replace(buffers=[]), rest


class Scoring:
    """The evaluation of a batch: (moved state, rest of the state, data, rows) -> (moved state,
    numbers).

    Args:
        forward: the objective, with its known properties.
        layout: the layout of the numbers.
    """

    def __init__(self, engine: Engine, forward: Forward, layout: ReportLayout = NO_LOGS):
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
        extra = outcome.extra
        if forward.has_penalty:
            extra = extra + forward.penalty(values.params, values.captured)
        num_rows = ops.full((), rows.shape[0], "int32")
        sums = self._epoch_sums.add(moved.sums, outcome.sums, extra, num_rows)
        logs = self._epoch_sums.logs(sums, outcome.metrics, values.captured)
        metrics = forward.tracking(outcome.metrics, logs)
        if moved.buffers:
            moved = moved._replace(buffers=outcome.buffers)
        return moved._replace(metrics=metrics, sums=sums), self.layout.pack(logs)


class Predicting:
    """The prediction of a batch: (moved state, rest of the state, data, rows) -> (moved state,
    outputs).

    Args:
        forward: the model, with its known properties.
        is_whole: see `EvalOptions`.
    """

    layout = NO_LOGS
    no_sums = ()

    def __init__(self, engine: Engine, forward: Forward, is_whole: bool):
        self.forward = forward
        self._engine = engine
        self._is_whole = is_whole

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Predicting":
        """Return this function with the properties that its trace finds."""
        moved = State([], [], [], [], (), [], [])

        def trace(forward: Forward) -> None:
            function = Predicting(self._engine, forward, self._is_whole)
            self._engine.programs.shapes(function, moved, state, data, rows)

        return Predicting(self._engine, self.forward.learned(trace), self._is_whole)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state, and the outputs."""
        batch = self._engine.replicas.batch(data, rows)
        inputs = unpack(batch)[0] if self._is_whole else batch
        outputs, buffers = self.forward.predict(_values(self._engine, merged(moved, rest)), inputs)
        return moved._replace(buffers=buffers if moved.buffers else []), outputs


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


class Evaluation:
    """The programs of evaluation mode. Batches are not padded.

    A program takes the state in two parts: the moved part and the rest.
    """

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps):
        self.engine = engine
        self.compilations = Compilations()
        self._functions: dict[tuple[bool, bool], BatchFunction] = {}  # by (predicts, is_whole)
        scoring = Scoring(engine, forward)
        self._functions[False, False] = (
            CustomEvaluation(engine, forward, steps, predicts=False) if steps.tests else scoring
        )
        for is_whole in (False, True):
            self._functions[True, is_whole] = (
                CustomEvaluation(engine, forward, steps, predicts=True, is_whole=is_whole)
                if steps.predicts
                else Predicting(engine, forward, is_whole)
            )
        self._learned = ProgramCache()
        self.programs = ProgramCache()
        self.row_tables = ProgramCache()  # of loaded batches, the same for every pass
        self._span = lru_cache(maxsize=1024)(
            lambda first, num: engine.devices.place(span(first, num))
        )
        # by whether a pass predicts: metrics, and (metrics, not stopped) on the device
        self._placed: dict[bool, tuple] = {}

    def state(self, metrics: list[np.ndarray], options: EvalOptions) -> State:
        """Return the initial state of a pass: the variables' current values, these metrics."""
        cached = self._placed.get(options.predicts)
        if cached is None or cached[0] is not metrics:
            cached = metrics, self.engine.devices.place((metrics, np.int32(0)))
            self._placed[options.predicts] = cached
        placed, stopped = cached[1]
        variables = self._function(options).forward.variables
        return State(*self.engine.variables.read(variables), placed, (), stopped, [])

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
        """Return the function that finds the program of a batch.

        Args:
            batches: None for single batches.
            steps: the number of batches of the pass; None for all.
            check: checks a batch of a new kind.
        """
        if batches is None:
            return partial(self._program, run, options, 1, 0, check)
        is_one_size = batches.arrays is not None and not batches.shapes
        most = len(batches) if is_one_size else MOST_UPDATES
        if options.one_by_one or steps == 1:
            most = 1
        return partial(self._program, run, options, most, len(batches.shapes), check)

    def send(self, run: "PassRun", feed: Feed | SingleBatches, block: Block) -> tuple[Any, Block]:
        """Send a block of batches to the device; return it with its results, on the device."""
        engine = self.engine
        program = block.program
        forward = program.forward
        state = run.state
        assert state is not None
        if run.number:
            check_same_layout(run.layout, program.layout)
        else:
            state = state._replace(sums=program.function.no_sums)
        captured = engine.variables.captured(program.captured, state)
        moved, rest = parted(forward, state._replace(captured=captured))
        which = self._span(block.first, block.num)
        with engine.processes.dispatching("evaluating"), uninterrupted():
            moved, results = program.call(moved, rest, block.data, *block.table.placed, which)
            engine.variables.write(_moved_variables(forward, moved), moved)
            run.state = merged(moved, rest)._replace(stopped=moved.stopped, captured=())
            run.number = run.number + block.num
            run.layout = program.layout
            feed.advance(block)
        return results, block

    def logs(self, results: Tensor, block: Block) -> dict[str, Any]:
        """Return the numbers of an evaluation up to the last batch of a block. Waits."""
        last = self.engine.devices.fetch(results)[block.num - 1]
        return block.program.layout.unpack(last)

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
        if batch.num_rows < batch.full:
            most = 1  # a short batch comes once
        key = self._key(options, most, batch)
        if key in self.programs:
            return self.programs[key]
        processes = self.engine.processes
        watched = self.compilations.watched(batch, num_shapes)
        compiling = nullcontext() if self.engine.programs.is_eager else watched
        with named(batch), compiling, uninterrupted(twice=False), garbage_kept():
            check(batch)
            processes.set_status("compiling")
            program = self._compile(run, options, most, batch)
            # another key: it includes the buffers that the compilation has found
            self.programs[self._key(options, most, batch)] = program
            processes.set_status("at work (reading data, or in a callback)")
        return program

    def _key(self, options: EvalOptions, most: int, batch: Batch) -> tuple:
        num_buffers = len(self._function(options).forward.variables.buffers)
        kind = (options.predicts, options.is_whole, most > 1)
        return *kind, *batch.program_key, batch.num_rows, num_buffers

    def _compile(self, run: "PassRun", options: EvalOptions, most: int, batch: Batch) -> Program:
        engine = self.engine
        programs = engine.programs
        cut = Cut(((1, batch.num_rows),), batch.num_rows)
        data, rows = _staged(engine, batch, cut)
        assert run.state is not None
        state, function = self._learned_function(run.state, options, batch.program_key, data, rows)
        parts = self._parts(function, state)
        inputs = (*parts, data, rows)
        results = None if programs.is_eager else programs.shapes(function, *inputs)[1]
        can_loop = _can_loop(results) and not programs.loops_slowly(function, *inputs)
        length = _most_in_dispatch(engine, batch, most, results)
        most = length if can_loop else 1
        loops = can_loop and (length > 1 or programs.always_xla)
        num_stacked = 1
        if not batch.is_resident:
            length = num_stacked = most
        if num_stacked > 1:
            data = engine.devices.stage(stack([batch], num_stacked))
        program = self._looped(function, parts[0], results if loops else None, most)
        # Not spent: the state before the first batch serves every pass.
        how = {"repeats": programs.always_xla, "spends": False}
        made = compiled(engine, program, (*parts, data), (length, cut.places), **how)
        run.state = state
        return Program(*made, cut, length, most, num_stacked, [], function)

    def _parts(self, function: BatchFunction, state: State) -> tuple[State, State]:
        """Return the inputs of the first batch: the moved part and the rest."""
        captured = self.engine.variables.captured(function.forward.inputs, state)
        state = state._replace(captured=captured, sums=function.no_sums)
        return parted(function.forward, state)

    def _looped(
        self, function: BatchFunction, moved: State, results: Tree | None, most: int
    ) -> Callable:
        """Return the program of `most` batches; `results`: see `program.several`."""

        def each(
            moved: State, rest: State, data: Tree, rows: Tensor, _: Tensor
        ) -> tuple[State, Tree]:
            return function(moved, rest, data, rows)

        program = loop_updates(self.engine, each, results, most)
        variables = _moved_variables(function.forward, moved)
        return self.engine.variables.load_and_store(program, variables)

    def _learned_function(
        self, state: State, options: EvalOptions, program_key: tuple, data: Tree, rows: Tensor
    ) -> tuple[State, BatchFunction]:
        """Return the function traced for such batches, and the state with its new variables."""
        variables = self.engine.variables
        function = self._function(options)
        before = function.forward
        key = (options.predicts, options.is_whole, program_key)
        if key not in self._learned:
            captured = variables.captured(before.inputs, state)
            function = function.learned(state._replace(captured=captured), data, rows)
            if function.forward.variables is not before.variables:  # unknown to the other functions
                for other in [other for other in self._learned if other[0] == options.predicts]:
                    del self._learned[other]
                self._functions[options.predicts, options.is_whole] = function
            self._learned[key] = function
        function = self._learned[key]
        if function.forward.variables is not before.variables:
            state = state._replace(buffers=variables.read(function.forward.variables)[2])
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


def _staged(engine: Engine, batch: Batch, cut: Cut) -> tuple[Tree, Tensor]:
    """Return the batch and its rows on the device."""
    data, rows = stage(engine.devices, batch, cut)
    (rows,) = engine.devices.place((rows,))
    return data, rows


def _most_in_dispatch(engine: Engine, batch: Batch, most: int, results: Tree) -> int:
    """Return the number of batches like this one in a dispatch, at most `most`."""
    most = min(most_in_a_dispatch(engine.devices, batch, most), MOST_UPDATES)
    return max(1, min(most, _MOST_BYTES // max(1, _num_bytes(results))))


def _num_bytes(results: Tree) -> int:
    """Return the bytes of arrays of such shapes; unknown sizes count 0."""
    shapes = [[size or 0 for size in leaf.shape] for leaf in tree.leaves(results)]
    return 8 * sum(map(math.prod, shapes))


def _can_loop(results: Tree) -> bool:
    """Whether arrays of such shapes can be collected in a loop: all sizes are known and not 0."""
    shapes = [leaf.shape for leaf in tree.leaves(results)]
    return results is not None and all(len(shape) > 0 and all(shape) for shape in shapes)


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *outputs)


def rows_of(results: Tensor, num: int) -> Tensor:
    """Return the outputs of the first `num` batches as one array of rows."""
    _, num_rows, *shape = results.shape
    return ops.reshape(results[:num], (num * num_rows, *shape))


def joined(*outputs: Tensor) -> Tensor:
    """Return the outputs of a few batches as one array."""
    return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs)
