"""ONE update by a model's custom `train_step`: run unchanged, then checked, and undone if it is not finite.

`update_of` selects it, or the gradient of an objective.
"""

import copy
import math
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from wholestep.custom.steps import CustomSteps, logs_of, with_reads
from wholestep.cut import Cut
from wholestep.embeddings.rows import RowPlan
from wholestep.engines import Engine
from wholestep.errors import NonFiniteError, message
from wholestep.model import Forward
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.reports.report import Report
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree
from wholestep.update import ObjectiveUpdate, Update, with_verdict


class CustomUpdate(Update):
    """An update by the `train_step` of one model.

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
    """

    suits_xla = False  # XLA draws other random numbers than Keras' step without it
    assigns = True

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps, *, stops: bool):
        super().__init__(engine, forward, NOTHING_TOLD, None, stops=stops)
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
        forward = with_reads(self.forward, self._read)
        if layout == self.layout and forward is self.forward:
            return self
        found = copy.copy(self)
        found.layout = layout
        found.forward = forward
        found.epoch_sums = EpochSums(found.forward)
        if forward is not self.forward:
            found._take = self.engine.programs.traced(found._taking(found.forward))
        return found

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, captured, data, rows, count) -> (state, report): one whole update."""
        engine = self.engine

        def whole_update(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor
        ) -> tuple[State, Tensor]:
            batch = engine.replicas.batch(data, rows)

            def attempt(state: State) -> tuple[State, Tensor, dict[str, Tensor]]:
                new, logs = self._stepped(state._replace(captured=captured), batch)
                losses = [ops.cast(value, keras.config.floatx()) for name, value in logs.items() if is_loss(name)]
                good = engine.ops.is_finite([*losses, *engine.variables.params(new)])
                return new._replace(captured=()), good & (state.stopped == 0), logs

            state, ok, logs = engine.steps.attempt(attempt, state, self.forward.variables)
            loss = next((v for k, v in logs.items() if is_loss(k) and v.shape == ()), ops.full((), math.nan))
            return self._reported(state, logs, loss, ok)

        return whole_update

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


def update_of(
    engine: Engine, forward: Forward, optimizer: keras.optimizers.Optimizer | None, steps: CustomSteps, *, stops: bool
) -> Update:
    """Return the update of a model: ours, or its custom `train_step`."""
    if steps.trains:
        return CustomUpdate(engine, forward, steps, stops=stops)
    return ObjectiveUpdate(engine, forward, optimizer, stops=stops)


def undone(report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was undone."""
    number = report.first + i
    bad = {k: v for k, v in report.numbers(i).items() if is_loss(k) and not np.all(np.isfinite(v))}
    received = ", ".join(f"{name}={value}" for name, value in bad.items()) or "weights that are not finite"
    told = message(
        f"Update {number} must have a finite loss and finite new weights. It was undone; the weights are those after "
        f"update {number - 1}.",
        f"{received}, from the model's train_step, which does not report single rows",
        'look at the batch, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip"); a '
        "number that may be NaN needs a name that does not end with 'loss'.",
    )
    return NonFiniteError(told, number)


def is_loss(name: str) -> bool:
    """Whether a number of this name must be finite.

    >>> [is_loss(name) for name in ("loss", "d_loss", "accuracy")]
    [True, True, False]
    """
    return name.endswith("loss")
