"""Evaluation and prediction of one batch."""

from functools import cached_property

from keras import ops

from wholestep.engines import Engine
from wholestep.model import Forward, unpack
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.state import State, Values
from wholestep.sums import EpochSums, first_logs
from wholestep.tree import Tensor, Tree


def _values(engine: Engine, state: State) -> Values:
    return Values(engine.variables.params(state), state.buffers, state.metrics, state.captured)


def parted(forward: Forward, state: State) -> tuple[State, State]:
    """Return the part of the state that a batch changes, and the rest."""
    moves = forward.facts.moves_buffers
    moved = State([], [], state.buffers if moves else [], state.metrics, state.sums, state.stopped, [])
    rest = state._replace(metrics=[], sums=(), stopped=[], scratch=[], buffers=[] if moves else state.buffers)
    return moved, rest


def joined(moved: State, rest: State) -> State:
    """Return the two parts as one state."""
    return rest._replace(buffers=moved.buffers or rest.buffers, metrics=moved.metrics, sums=moved.sums)


class Scoring:
    """The evaluation of one batch: (moved state, rest of the state, data, rows) -> (moved state, numbers).

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
        forward, values = self.forward, _values(self._engine, joined(moved, rest))
        outcome = forward.sums(values, self._engine.replicas.batch(data, rows), None)
        once = outcome.extra
        if forward.has_penalty:
            once = once + forward.penalty(values.params, values.captured)
        sums = self._epoch_sums.add(moved.sums, outcome.sums, once, ops.full((), rows.shape[0], "int32"))
        logs = self._epoch_sums.logs(sums, outcome.metrics, values.captured)
        metrics = forward.tracking(outcome.metrics, logs)
        buffers = outcome.buffers if moved.buffers else []
        return moved._replace(metrics=metrics, sums=sums, buffers=buffers), self.layout.pack(logs)


class Predicting:
    """The prediction of one batch: (moved state, rest of the state, data, rows) -> (moved state, outputs).

    Args:
        forward: the model, with its known properties.
        is_whole: see `Look`.
    """

    layout, no_sums = NOTHING_TOLD, ()

    def __init__(self, engine: Engine, forward: Forward, is_whole: bool):
        self.forward = forward
        self._engine = engine
        self._is_whole = is_whole

    def learned(self, state: State, data: Tree, rows: Tensor) -> "Predicting":
        """Return this function with the properties that its trace finds."""

        def trace(forward: Forward) -> None:
            moved = State([], [], [], [], (), [], [])
            self._engine.programs.shapes(Predicting(self._engine, forward, self._is_whole), moved, state, data, rows)

        return Predicting(self._engine, self.forward.learned(trace), self._is_whole)

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state, and the outputs."""
        batch = self._engine.replicas.batch(data, rows)
        inputs = unpack(batch)[0] if self._is_whole else batch
        outputs, after = self.forward.predict(_values(self._engine, joined(moved, rest)), inputs)
        return moved._replace(buffers=after if moved.buffers else []), outputs
