"""What the objective adds on some rows: summed up, or row by row."""

from typing import NamedTuple

import keras
from keras import ops

from wholestep.tree import Tensor


class Outcome(NamedTuple):
    """What one microbatch adds: sums by term as (value, weight), the model's other losses, and the new state.

    `assigned` are the new values of the parameters that the forward pass assigned, in the order of `facts.assigned`.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list


class Rows(NamedTuple):
    """The same, row by row: each term's (values, weights), both (rows,). For the probe and for naming bad rows."""

    values: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list


def values_after(scope: keras.StatelessScope, variables: list, before: list) -> list:
    """Return the values that variables have at the end of a scope; those of before, if they have no others."""
    return [_or(scope.get_current_value(v), old) for v, old in zip(variables, before, strict=True)]


def _or(value: Tensor, otherwise: Tensor) -> Tensor:
    return otherwise if value is None else value


def wide(value: Tensor) -> Tensor:
    """Sums are kept in floatx or wider, whatever the model computes in."""
    return value if str(value.dtype).endswith("float64") else ops.cast(value, keras.config.floatx())
