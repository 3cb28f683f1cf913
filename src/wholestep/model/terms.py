"""Mean and Sum: values and weights, kept apart until the whole batch is known.

A loss never returns a mean. It returns values and weights with a leading row axis; their sums are added over
microbatches, replicas and hosts, and divided once.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import ops

from wholestep.errors import SpecificationError, message, shown
from wholestep.tree import Tensor


class _Shown:
    """Terms are shown by the shapes of their parts."""

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={shown(part)}" for name, part in vars(self).items() if part is not None)
        return f"{type(self).__name__}({parts})"


@dataclass(frozen=True, repr=False)
class Mean(_Shown):
    """A weighted mean over all rows of the batch: sum(values * weights) / sum(weights).

    Args:
        values: (rows,) or (rows, ...), unreduced.
        weights: the shape of `values`, or its leading part, e.g. (rows,); `None` weighs every value 1. Weights depend
            on the batch, not on the parameters. A value of weight 0 is never looked at, even if it is NaN.
        coefficient: the factor of the term in the loss; the term is reported without it.

    >>> from keras import ops
    >>> term = Mean(ops.array([[1.0, 2.0], [3.0, 9.0]]), ops.array([[1.0, 1.0], [1.0, 0.0]]))
    >>> total, weight = term.sums()
    >>> float(total), float(weight)
    (6.0, 3.0)
    """

    values: Tensor
    weights: Tensor | None = None
    coefficient: float = 1.0

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (sum of values * weights, sum of weights), two scalars; `row_weights` is (rows,) or None."""
        values = wide(self.values)
        weights = _weigh(values, self.weights, row_weights)
        if weights is None:
            return ops.sum(values), ops.cast(math.prod(ops.shape(values)), values.dtype)
        return ops.sum(selected(values, weights)), ops.sum(weights)


@dataclass(frozen=True, repr=False)
class Sum(_Shown):
    """A weighted sum over all rows of the batch, never divided: sum(values * weights).

    An epoch reports the mean of its updates' sums, each weighted by its number of rows.

    >>> from keras import ops
    >>> float(Sum(ops.array([1.0, 2.0, 4.0])).sums()[0])
    7.0
    """

    values: Tensor
    weights: Tensor | None = None
    coefficient: float = 1.0

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (sum of values * weights, 1), two scalars."""
        values = wide(self.values)
        weights = _weigh(values, self.weights, row_weights)
        total = ops.sum(values if weights is None else selected(values, weights))
        return total, ops.ones((), total.dtype)


@dataclass(frozen=True, repr=False)
class Whole(_Shown):
    """A loss that is a single number, and so cannot be cut."""

    values: Tensor
    coefficient: float = 1.0
    weights: Tensor | None = None

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (the number, 1)."""
        return wide(self.values), ops.ones((), wide(self.values).dtype)


Term = Mean | Sum | Whole


def check(term: Term, label: str, num_rows: int) -> Term:
    """Return the term with floating values, after checking its shape.

    Raises:
        SpecificationError: no leading row axis, or weights that do not fit.
    """
    term = replace(term, values=_counted(term.values, num_rows), weights=_counted(term.weights, num_rows))
    shape = tuple(term.values.shape)
    if not shape or shape[0] != num_rows:
        must = f"The values of {label} must have the {num_rows} rows of the batch on their leading axis."
        attempt = "return the losses unreduced, one per row, e.g. Mean(keras.losses.mean_squared_error(y, prediction))."
        raise SpecificationError(message(must, f"values of shape {shape}", attempt))
    weights = shape if term.weights is None else tuple(term.weights.shape)
    fits = 0 < len(weights) <= len(shape) and all(map(_may_fit, weights[1:], shape[1:]))
    if not fits or weights[0] != shape[0]:
        must = f"The weights of {label} must have the shape of its values, or its leading part."
        attempt = "return weights of shape (rows,) or of the values' own shape."
        raise SpecificationError(message(must, f"values of shape {shape} and weights of shape {weights}", attempt))
    is_float = "float" in str(term.values.dtype)
    return term if is_float else replace(term, values=ops.cast(term.values, "float32"))


def _counted(values: Tensor | None, num_rows: int) -> Any:
    """Return values with the static number of rows, which a layer may have lost; other unknown sizes stay unknown."""
    if values is None or len(values.shape) == 0 or values.shape[0] is not None:
        return values
    return ops.reshape(values, (num_rows, *ops.shape(values)[1:]))  # not -1, which could mix rows


def _may_fit(weights: int | None, values: int | None) -> bool:
    """Whether an axis of weights fits an axis of values, as far as the static lengths show."""
    return weights in (None, 1, values) or values is None


def _align(weights: Tensor, values: Tensor) -> Tensor:
    """Broadcast weights of shape (rows, ...) to the values: their axes are the leading ones."""
    weights = lengthened(weights, len(values.shape))
    return ops.broadcast_to(ops.cast(weights, values.dtype), ops.shape(values))


def _weigh(values: Tensor, weights: Tensor | None, row_weights: Tensor | None) -> Tensor | None:
    given = [_align(w, values) for w in (weights, row_weights) if w is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else given[0] * given[1]


def selected(values: Tensor, weights: Tensor) -> Tensor:
    """Return values * weights, and 0 for a value of weight 0: by selection, as 0 * NaN is NaN."""
    return ops.where(weights == 0, ops.zeros_like(values), values) * weights


def lengthened(weights: Tensor, rank: int) -> Tensor:
    """Return weights with axes of length 1 added at the end, so that theirs are the leading axes of the values."""
    return ops.reshape(weights, tuple(ops.shape(weights)) + (1,) * (rank - len(weights.shape)))


def as_tensor(value: Tensor) -> Tensor:
    """Return a number as a tensor. Keras takes TensorFlow's variables for tensors, and reads them out of scope."""
    return ops.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def wide(value: Tensor) -> Tensor:
    """Return a value in floatx or wider, independent of the model's compute dtype: float16 counts to 65504."""
    return value if str(value.dtype).endswith("float64") else ops.cast(value, keras.config.floatx())


def checked(terms: dict[str, Term], num_rows: int) -> dict[str, Term]:
    """Return the terms of an objective, each with one value per row."""
    return {k: t if isinstance(t, Whole) else check(t, _label(k), num_rows) for k, t in terms.items()}


def refuse_broadcasts(shorter: dict[str, Term], num_rows: int) -> None:
    """Refuse values whose second axis grows with the rows: labels (rows,) broadcast against predictions (rows, 1)."""
    for label, term in shorter.items():
        if term.values.shape[1] == num_rows - 1:
            must = f"The values of {_label(label)} must be one per row; labels of shape (rows,) broadcast against "
            must += "predictions of shape (rows, 1) to (rows, rows)."
            attempt = "give labels and predictions the same rank; for a loss over pairs, sum over the second axis."
            raise SpecificationError(message(must, f"values of shape {(num_rows, num_rows)}", attempt))


def by_row(term: Term) -> tuple[Tensor, Tensor]:
    """Return (values, weights) of every row, both (rows,)."""
    if isinstance(term, Whole):
        return term.values[None], ops.ones((1,))
    values, weights = term.values, term.weights
    weights = ops.ones_like(values) if weights is None else weights
    axes = tuple(range(1, len(values.shape)))
    others = tuple(range(1, len(weights.shape)))
    return ops.sum(values, axis=axes), ops.sum(ops.cast(weights, values.dtype), axis=others)


def _label(name: str) -> str:
    return f"term {name!r}" if name else "the loss"
