"""The results of the objective on some rows: as sums, or row by row."""

from typing import NamedTuple

import keras
from keras import ops

from wholestep.tree import Tensor


class Outcome(NamedTuple):
    """The results of one microbatch: sums by term as (value, weight), the model's other losses, and the new state.

    `assigned` are the new values of the parameters that the forward pass assigned, in the order of `facts.assigned`.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list


class Rows(NamedTuple):
    """The results of each row: (values, weights) by term, both (rows,). For the probe and for naming bad rows."""

    values: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list


def values_after(scope: keras.StatelessScope, variables: list, before: list) -> list:
    """Return the values of variables at the end of a scope; unassigned variables keep their value in `before`."""
    return [_or(scope.get_current_value(v), old) for v, old in zip(variables, before, strict=True)]


def _or(value: Tensor, otherwise: Tensor) -> Tensor:
    return otherwise if value is None else value


def wide(value: Tensor) -> Tensor:
    """Return a sum in floatx or wider, independent of the model's compute dtype."""
    return value if str(value.dtype).endswith("float64") else ops.cast(value, keras.config.floatx())
