"""The same line without an update; prediction beside it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.compilations import Compilations
from wholestep.compiled import unpack
from wholestep.cut import Cut
from wholestep.data.feed import Block, stage
from wholestep.forward import Forward
from wholestep.interrupts import uninterrupted
from wholestep.misfit import named
from wholestep.state import State
from wholestep.sums import EpochSums

Tree = Any


class Evaluation:
    """The sums of a data set, and the predictions of a model, in evaluation mode. Every batch keeps its own shape."""

    def __init__(self, engine: Any, forward: Forward):
        self.engine = engine
        self.forward = forward
        self.epoch_sums = EpochSums(forward)
        self._sums = engine.traced(forward.sums)
        self._programs: dict = {}
        self.compilations = Compilations()

    def begin(self, state: State, block: Block) -> State:
        """Return the state that an evaluation starts from: the metrics and sums of no batch."""
        if not self.forward.is_traced:
            data, rows = self._arranged(block)
            trace = partial(self.engine.shapes, lambda s, d, r: self._outcome(s, s.metrics, d, r))
            with named(block):
                state = self.forward.learn(self.engine, state, lambda s: trace(s, data, rows))
        return state._replace(sums=self.engine.place(self.epoch_sums.empty()), stopped=[], scratch=[])

    def add(self, state: State, block: Block) -> tuple[State, Any]:
        """Add one batch. Spends the state; returns the new one and its logs, packed."""
        state, program, arguments = self._prepared("add", self._add, self._to_add, state, block)
        with self.engine.processes.dispatching("evaluating"), uninterrupted():
            (metrics, sums, buffers), report = program(*arguments)
            state = self._given(state._replace(metrics=metrics, sums=sums), buffers)
        return state, report

    def _to_add(self, state: State) -> tuple[tuple, State]:
        """Return what a batch spends of the state, and the rest."""
        moves = self.forward.moves_buffers
        spent = state.metrics, state.sums, state.buffers if moves else []
        return spent, state._replace(metrics=[], sums=[], buffers=[] if moves else state.buffers)

    def _to_predict(self, state: State) -> tuple[list, State]:
        return (state.buffers, state._replace(buffers=[])) if self.forward.moves_buffers else ([], state)

    def _given(self, state: State, buffers: list) -> State:
        """Return the state with the buffers that a forward pass has moved, which the Keras variables hold as well."""
        if self.forward.moves_buffers:
            state = state._replace(buffers=buffers)
            self.engine.write_variables(self.forward.variables, state)
        return state

    def logs(self, report: Any) -> dict[str, Any]:
        """Return the logs of a report. Waits for the device."""
        return self.epoch_sums.layout.unpack(self.engine.fetch(report))

    def predict(self, state: State, block: Block, is_whole: bool) -> tuple[State, Tree]:
        """Return the state, which is spent, and the outputs for these rows on the device.

        Args:
            is_whole: whether a batch is (x, y, ...), of which the first part is the input.
        """
        if is_whole:
            parts = [part if part is None else unpack(part)[0] for part in (block.data, block.host)]
            block = block._replace(data=parts[0], host=parts[1])
        state, program, arguments = self._prepared("predict", self._predict, self._to_predict, state, block)
        with self.engine.processes.dispatching("predicting"), uninterrupted():
            buffers, outputs = program(*arguments)
            state = self._given(state, buffers)
        return state, outputs

    def _arranged(self, block: Block) -> tuple[Any, Any]:
        num_rows = block.rows.shape[1]
        data, rows = stage(self.engine, block, Cut(((1, num_rows),), num_rows))
        return data, self.engine.place(rows[0])

    def _add(self, spent: tuple, state: State, data: Any, rows: Any) -> tuple[tuple, Any]:
        metrics, sums, buffers = spent
        state = state._replace(buffers=buffers or state.buffers)
        outcome = self._outcome(state, metrics, data, rows)
        once = outcome.extra
        if self.forward.has_penalty:
            once = once + self.forward.penalty(self.engine.params(state), state.captured)
        sums = self.epoch_sums.add(sums, outcome.sums, once, ops.full((), rows.shape[0], "int32"))
        report = self.epoch_sums.layout.pack(self.epoch_sums.logs(sums, outcome.metrics, state.captured))
        return (outcome.metrics, sums, outcome.buffers if buffers else []), report

    def _outcome(self, state: State, metrics: list, data: Any, rows: Any) -> Any:
        values = self.engine.params(state), state.buffers, metrics, state.captured
        return self._sums(*values, self.engine.batch(data, rows), None)

    def _predict(self, buffers: list, state: State, data: Any, rows: Any) -> tuple[list, Tree]:
        values = self.engine.params(state), buffers or state.buffers, state.metrics, state.captured
        outputs, after = self.forward.predict(*values, self.engine.batch(data, rows))
        return after if buffers else [], outputs

    def _prepared(
        self, name: str, function: Callable, split: Callable, state: State, block: Block
    ) -> tuple[State, Callable, tuple]:
        """Return the state with the newest values of what is read besides, the program for a block, and its arguments.

        Args:
            split: what the program spends of the state, and the rest.
        """
        data, rows = self._arranged(block)
        state = state._replace(captured=self.engine.read_captured(self.forward.inputs, state))
        key = _key(name, split(state), data, rows)
        with named(block), self.compilations.watched(block, is_new=key not in self._programs):
            if key not in self._programs:
                self.engine.processes.set_status("compiling")
                trace = partial(self.engine.shapes, function)
                state = self.forward.learn(self.engine, state, lambda s: trace(*split(s), data, rows))
                key = _key(name, split(state), data, rows)
            if key not in self._programs:
                self._programs[key] = self.engine.compile(function, (*split(state), data, rows))
                self.engine.processes.set_status("at work (reading data, or in a callback)")
        return state, self._programs[key], (*split(state), data, rows)


def _key(name: str, parts: tuple[Any, State], data: Any, rows: Any) -> tuple:
    """Return what tells programs apart: the structure of the state, in its two parts, and the shapes of the batch."""
    structure = tuple(tuple(len(f) if isinstance(f, list | tuple) else 1 for f in part) for part in parts)
    return name, structure, *((tuple(leaf.shape), str(leaf.dtype)) for leaf in tree.leaves((data, rows)))


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *outputs)
