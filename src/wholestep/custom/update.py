"""ONE update by a model's custom `train_step`: run unchanged, then checked, and undone if it is not finite.

`CustomUpdate` has the methods of `wholestep.update.Update`, and the same program around them.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import keras
import numpy as np
from keras import ops

from wholestep.custom.steps import CustomSteps, logs_of
from wholestep.cut import Cut
from wholestep.dispatch.repeat import begun, several
from wholestep.embeddings.lookups import Lookups
from wholestep.embeddings.rows import RowPlan
from wholestep.engines import Engine
from wholestep.model.forward import Forward
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree
from wholestep.update import Update, with_verdict


class WholeTables:
    """Plans no rows of embedding tables, which a custom step updates itself."""

    tables: tuple = ()

    def scratch(self) -> tuple[()]:
        """Return no scratch."""
        return ()

    def plan(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> tuple[RowPlan, dict[str, str]]:
        """Return a plan without tables."""
        return RowPlan(Lookups([])), {}


class CustomUpdate:
    """The functions of an update by the `train_step` of one model on one engine.

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
        layout: the layout of an update's report, known once the step has been traced.
        stops: whether the first non-finite update stops all later ones ("raise"), or is skipped ("skip").
    """

    suits_xla = False  # XLA draws other random numbers than Keras' step without it

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps, *, stops: bool):
        self.engine = engine
        self.forward = forward
        self.layout: ReportLayout = NOTHING_TOLD
        self.stops = stops
        self.epoch_sums = EpochSums(forward)
        self.row_planner = WholeTables()
        self._steps = steps
        self._num_own_slots = len(steps.own_slots)
        self._read: list[keras.Variable] = []
        self._take = engine.programs.traced(self._taking(forward))

    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> "CustomUpdate":
        """Return this update with the results of a trace: the step's logs, and the other variables it reads."""
        layout = self.layout

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            logs = self._stepped(state, self.engine.replicas.batch(data, rows))[1]
            layout = ReportLayout.of(with_verdict(logs, ops.zeros(()), ops.zeros(())))
            return ops.zeros(())

        self.engine.programs.shapes(once, self.engine.variables.between_programs(state), data, rows)
        known = self.forward.facts.captured
        new = [v for v in {id(v): v for v in self._read}.values() if not any(v is k for k in known)]
        if layout == self.layout and not new:
            return self
        found = copy.copy(self)
        found.layout = layout
        found.forward = replace(self.forward, facts=replace(self.forward.facts, captured=(*known, *new)))
        found.epoch_sums = EpochSums(found.forward)
        if new:
            found._take = self.engine.programs.traced(found._taking(found.forward))
        return found

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, data, rows, count) -> (state, report): one whole update."""
        engine = self.engine

        def whole_update(state: State, data: Tree, rows: Tensor, count: Tensor) -> tuple[State, Tensor]:
            batch, captured = engine.replicas.batch(data, rows), state.captured

            def attempt(state: State) -> tuple[State, Tensor, dict[str, Tensor]]:
                new, logs = self._stepped(state._replace(captured=captured), batch)
                losses = [ops.cast(value, keras.config.floatx()) for name, value in logs.items() if is_loss(name)]
                good = engine.ops.is_finite([*losses, *engine.variables.params(new)])
                return new._replace(captured=()), good & (state.stopped == 0), logs

            state, ok, logs = engine.steps.attempt(attempt, state._replace(captured=()), self.forward.variables)
            stopped = ops.where(ok, state.stopped, ops.ones_like(state.stopped)) if self.stops else state.stopped
            loss = next((v for k, v in logs.items() if is_loss(k) and v.shape == ()), ops.full((), math.nan))
            told = with_verdict(logs, loss, ops.cast(ok, keras.config.floatx()))
            return state._replace(stopped=stopped), self.layout.pack(told)

        return whole_update

    def program(self, whole_update: Callable, length: int, empty: list[np.ndarray], *, loops: bool) -> Callable:
        """Return the program (state, captured, data, rows, counts, span) -> (state, reports), see `several`.

        Args:
            empty: the metrics' values before the first row.
        """

        def each(state: State, captured: list, data: Tree, rows: Tensor, count: Tensor, begins: Tensor) -> tuple:
            state = begun(state, begins, self.epoch_sums.empty(), empty)
            return whole_update(state._replace(captured=captured), data, rows, count)

        return several(self.engine, each, self.layout.empty() if loops else None, length, unreached=math.nan)

    def _taking(self, forward: Forward) -> Callable:
        """Return the function (values of groups of variables, batch) -> (logs, values): the step itself."""
        v, num = forward.variables, self._num_own_slots
        groups = [v.params, v.buffers, v.slots[:num], v.metrics, v.slots[num:], list(forward.facts.captured)]
        step = self._steps.function("train_step")

        def take(values: list[list], batch: Tree) -> tuple[dict[str, Tensor], list[list]]:
            found, values = self.engine.steps.call(step, groups, values, 4, batch, self._read.append)
            return logs_of(found, "train_step"), values

        return take

    def _stepped(self, state: State, batch: Tree) -> tuple[State, dict[str, Tensor]]:
        num = self._num_own_slots
        groups = [state.params, state.buffers, state.slots[:num], state.metrics, state.slots[num:], [*state.captured]]
        logs, (params, buffers, own, metrics, beside, _) = self._take([list(group) for group in groups], batch)
        return state._replace(params=params, buffers=buffers, slots=[*own, *beside], metrics=metrics), logs


AnyUpdate = Update | CustomUpdate


def update_of(
    engine: Engine,
    forward: Forward,
    optimizer: keras.optimizers.Optimizer | None,
    steps: CustomSteps,
    *,
    stops: bool,
) -> AnyUpdate:
    """Return the update of a model: ours, or its custom `train_step`."""
    if steps.trains:
        return CustomUpdate(engine, forward, steps, stops=stops)
    dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scales = dynamic or getattr(optimizer, "loss_scale_factor", None) is not None
    return Update(engine, forward, optimizer, scales=scales, guards_gradients=not dynamic, stops=stops)


def is_loss(name: str) -> bool:
    """Whether a number of this name must be finite.

    >>> [is_loss(name) for name in ("loss", "d_loss", "accuracy")]
    [True, True, False]
    """
    return name.endswith("loss")
