"""The same line without an update; prediction beside it."""

from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.compiled import unpack
from wholestep.feed import Block, arrange
from wholestep.forward import Forward
from wholestep.state import State
from wholestep.step import Cut
from wholestep.tally import Tally

Tree = Any


class Evaluation:
    """The sums of a data set, and the predictions of a model, in evaluation mode. Every batch keeps its own shape."""

    def __init__(self, engine: Any, forward: Forward):
        self.engine = engine
        self.forward = forward
        self.tally = Tally(forward)
        self._sums = engine.traced(forward.sums)
        self._programs: dict = {}

    def begin(self, state: State, block: Block) -> Tree:
        """Return what an evaluation starts from: the metrics and sums of no batch."""
        if not self.forward.facts:
            arguments = (state, *self._arranged(block))
            self.engine.shapes(lambda s, d, r: self._outcome(s, s.metrics, d, r), *arguments)
        return state.metrics, self.engine.place(self.tally.empty())

    def add(self, total: Tree, state: State, block: Block) -> tuple[Tree, Any]:
        """Add one batch. Spends `total`; returns the new one and its logs, packed."""
        arguments = (total, state, *self._arranged(block))
        program = self._program("add", self._add, arguments, spends=True)
        with self.engine.peers.dispatching("evaluating"):
            return program(*arguments)

    def logs(self, report: Any) -> dict[str, Any]:
        """Return the logs of a report. Waits for the device."""
        return self.tally.layout.unpack(self.engine.fetch(report))

    def predict(self, state: State, block: Block, is_whole: bool) -> Tree:
        """Return the model's outputs for these rows, on the device; of whole batches, the first part is the input."""
        if is_whole:
            parts = [part if part is None else unpack(part)[0] for part in (block.data, block.host)]
            block = block._replace(data=parts[0], host=parts[1])
        arguments = (state, *self._arranged(block))
        program = self._program("predict", self._predict, arguments, spends=False)
        with self.engine.peers.dispatching("predicting"):
            return program(*arguments)

    def _arranged(self, block: Block) -> tuple[Any, Any]:
        num_rows = block.rows.shape[1]
        data, rows = arrange(self.engine, block, Cut(((1, num_rows),), num_rows))
        return data, self.engine.place(rows[0])

    def _add(self, total: Tree, state: State, data: Any, rows: Any) -> tuple[Tree, Any]:
        metrics, sums = total
        outcome = self._outcome(state, metrics, data, rows)
        once = outcome.extra
        if self.forward.has_penalty:
            once = once + self.forward.penalty(self.engine.params(state))
        sums = self.tally.add(sums, outcome.sums, once, ops.full((), rows.shape[0], "int32"))
        return (outcome.metrics, sums), self.tally.layout.pack(self.tally.logs(sums, outcome.metrics))

    def _outcome(self, state: State, metrics: list, data: Any, rows: Any) -> Any:
        batch = self.engine.batch(data, rows)
        return self._sums(self.engine.params(state), state.buffers, metrics, batch, None)

    def _predict(self, state: State, data: Any, rows: Any) -> Tree:
        return self.forward.predict(self.engine.params(state), state.buffers, self.engine.batch(data, rows))

    def _program(self, name: str, function: Any, arguments: tuple, spends: bool) -> Any:
        key = (name, *((tuple(leaf.shape), str(leaf.dtype)) for leaf in tree.leaves(arguments[-2:])))
        if key not in self._programs:
            self.engine.peers.at("compiling")
            self._programs[key] = self.engine.compile(function, arguments, spends=spends)
            self.engine.peers.at("at work (reading data, or in a callback)")
        return self._programs[key]


def join(outputs: list[Tree]) -> Tree:
    """Return the outputs of several batches as one, with numpy leaves."""
    return keras.tree.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *outputs)
