"""Numbers about an update that are computed and logged only when the user asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import keras
from keras import ops
from keras.optimizers import Optimizer

from wholestep.engines import Engine
from wholestep.errors import invalid
from wholestep.slices import Gradient, Slices
from wholestep.state import State, TableRows, Variables
from wholestep.tree import Tensor


class Logged(StrEnum):
    """A number about an update, by its name in the logs."""

    GRADIENT_NORM = "gradient_norm"
    CLIPPED_GRADIENT_NORM = "clipped_gradient_norm"
    UPDATE_NORM = "update_norm"
    LEARNING_RATE = "learning_rate"
    LOSS_SCALE = "loss_scale"


LOGGED = frozenset(Logged)
Logs = dict[str, Tensor]


@dataclass(frozen=True)
class AskedLogs:
    """The numbers about an update that the user asks for, in terms of the engine.

    Args:
        names: of the numbers, in the order of the logs.
    """

    names: tuple[Logged, ...]
    engine: Engine
    optimizer: Optimizer
    variables: Variables

    def __post_init__(self) -> None:
        of_one = {Logged.LEARNING_RATE, Logged.CLIPPED_GRADIENT_NORM} & {*self.names}
        if of_one and hasattr(self.optimizer, "optimizers"):
            must = "One optimizer must train all weights, to log its rate or its clips."
            received = f"a {type(self.optimizer).__name__}, and {', '.join(sorted(of_one))}"
            raise invalid(must, received, "leave these names out of log.")

    def shapes(self, scalar: Tensor) -> Logs:
        """Return the logs with a scalar in place of each number."""
        return {name.value: scalar for name in self.names}

    def before(self, state: State, grads: list[Gradient], scale: Tensor) -> Logs:
        """Return the numbers that are known before the optimizer is applied.

        Args:
            grads: the gradient of the whole batch, regularised, times the loss scale.
            scale: the loss scale.
        """
        if not self.names:
            return {}
        unscaled = [_unscaled(grad, scale) for grad in grads]
        logs: Logs = {Logged.LOSS_SCALE: scale}
        if Logged.GRADIENT_NORM in self.names:
            params = self.variables.params
            whole = [_whole(grad, v) for grad, v in zip(unscaled, params, strict=True)]
            logs[Logged.GRADIENT_NORM] = norm(whole)
        if Logged.CLIPPED_GRADIENT_NORM in self.names:
            logs[Logged.CLIPPED_GRADIENT_NORM] = norm(self.engine.optimizer.clipped(unscaled))
        if Logged.LEARNING_RATE in self.names:
            slots = zip(self.variables.slots, state.slots, strict=False)
            with keras.StatelessScope(list(slots)):
                logs[Logged.LEARNING_RATE] = ops.convert_to_tensor(self.optimizer.learning_rate)
        return logs

    def after(
        self, logs: Logs, params: list[Tensor], state: State, touched: Sequence[TableRows]
    ) -> Logs:
        """Return all numbers, once the optimizer is applied.

        Args:
            logs: those from before.
            params: the parameters before it, with the touched rows in place of their tables.
        """
        if Logged.UPDATE_NORM in self.names:
            logs = logs | {Logged.UPDATE_NORM: self._distance(params, state, touched)}
        return {name.value: logs[name] for name in self.names}

    def _distance(self, params: list[Tensor], state: State, touched: Sequence[TableRows]) -> Tensor:
        """Return how far the parameters moved."""
        tables = {rows.table.param: rows for rows in touched}
        moves = []
        now = self.engine.variables.params(state, tables)
        for i, (before, after) in enumerate(zip(params, now, strict=True)):
            rows = tables.get(i)
            moves.append(after - before if rows is None else _moved_rows(before, after, rows))
        return norm(moves)


def check_names(names: Sequence[Logged], logs: Logs) -> None:
    """Refuse a term or metric with the name of a number that the user asks for.

    Raises:
        SpecificationError: there is one.
    """
    if taken := [name for name in names if name in logs]:
        must = "A number that `log` asks for needs a name that no term and no metric has."
        raise invalid(must, f"another {taken[0].value!r}", "rename the term or the metric.")


def norm(values: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all numbers together."""
    dtype = keras.config.floatx()
    squares = [ops.sum(ops.square(ops.cast(value, dtype))) for value in values]
    return ops.sqrt(sum(squares, ops.zeros((), dtype)))


def _unscaled(grad: Gradient, scale: Tensor) -> Gradient:
    dtype = keras.config.floatx()
    factor = ops.cast(scale, dtype)
    if isinstance(grad, Slices):
        return grad._replace(values=tuple(ops.cast(v, dtype) / factor for v in grad.values))
    return ops.cast(grad, dtype) / factor


def _whole(grad: Gradient, variable: keras.Variable) -> Tensor:
    return grad.dense(variable.shape[0]) if isinstance(grad, Slices) else grad


def _moved_rows(before: Tensor, table: Tensor, touched: TableRows) -> Tensor:
    """Return the change of the touched rows, of equal ones once."""
    moves = ops.take(table, touched.rows, axis=0) - before
    slots = touched.row_slots
    is_first = slots == ops.arange(slots.shape[0], dtype=slots.dtype)
    return ops.where(is_first[:, None], moves, ops.zeros_like(moves))
