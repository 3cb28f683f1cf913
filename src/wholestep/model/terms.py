"""Mean and Sum: values and weights, kept apart until the whole batch is known.

A loss never returns a mean. It returns values and weights with a leading row axis; their sums are added over
microbatches, replicas and hosts, and divided once.
"""

from dataclasses import dataclass

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
    weights: Tensor = None
    coefficient: float = 1.0

    def sums(self, row_weights: Tensor = None) -> tuple[Tensor, Tensor]:
        """Return (sum of values * weights, sum of weights), two scalars; `row_weights` is (rows,) or None."""
        weights = _weigh(self.values, self.weights, row_weights)
        if weights is None:
            return ops.sum(self.values), ops.cast(_size(self.values), self.values.dtype)
        return _dot(self.values, weights), ops.sum(weights)


@dataclass(frozen=True, repr=False)
class Sum(_Shown):
    """A weighted sum over all rows of the batch, never divided: sum(values * weights).

    >>> from keras import ops
    >>> float(Sum(ops.array([1.0, 2.0, 4.0])).sums()[0])
    7.0
    """

    values: Tensor
    weights: Tensor = None
    coefficient: float = 1.0

    def sums(self, row_weights: Tensor = None) -> tuple[Tensor, Tensor]:
        """Return (sum of values * weights, 1), two scalars."""
        weights = _weigh(self.values, self.weights, row_weights)
        total = ops.sum(self.values) if weights is None else _dot(self.values, weights)
        return total, ops.ones((), total.dtype)


@dataclass(frozen=True, repr=False)
class Whole(_Shown):
    """A loss that is a single number, and so cannot be cut."""

    values: Tensor
    coefficient: float = 1.0
    weights: Tensor = None

    def sums(self, row_weights: Tensor = None) -> tuple[Tensor, Tensor]:
        """Return (the number, 1)."""
        return self.values, ops.ones((), self.values.dtype)


Term = Mean | Sum | Whole


def check(term: Term, label: str, num_rows: int) -> Term:
    """Return the term with floating values, after checking its shape.

    Raises:
        SpecificationError: no leading row axis, or weights that do not fit.
    """
    term = _with_rows(term, num_rows)
    shape = tuple(term.values.shape)
    if not shape or shape[0] != num_rows:
        raise SpecificationError(
            message(
                f"The values of {label} must have the {num_rows} rows of the batch on their leading axis.",
                f"values of shape {shape}",
                "return the losses unreduced, one per row, e.g. Mean(keras.losses.mean_squared_error(y, prediction)).",
            )
        )
    _check_weights(term, label, shape)
    if "float" not in str(term.values.dtype):
        return type(term)(ops.cast(term.values, "float32"), weights=term.weights, coefficient=term.coefficient)
    return term


def _with_rows(term: Term, num_rows: int) -> Term:
    """Return the term with a static number of rows, where a layer has lost it."""
    weights = term.weights
    if isinstance(term, Whole) or None not in (term.values.shape[:1] + (() if weights is None else weights.shape[:1])):
        return term
    weights = None if weights is None else _counted(weights, num_rows)
    return type(term)(_counted(term.values, num_rows), weights=weights, coefficient=term.coefficient)


def _counted(values: Tensor, num_rows: int) -> Tensor:
    """Return values with the static number of rows set if it is unknown; other unknown sizes stay unknown."""
    if len(values.shape) == 0 or values.shape[0] is not None:
        return values
    return ops.reshape(values, (num_rows, *ops.shape(values)[1:]))  # not -1, which could mix rows


def _check_weights(term: Term, label: str, shape: tuple) -> None:
    if term.weights is None:
        return
    weights = tuple(term.weights.shape)
    fits = 0 < len(weights) <= len(shape) and all(map(_may_fit, weights[1:], shape[1:]))
    if not fits or weights[0] != shape[0]:
        raise SpecificationError(
            message(
                f"The weights of {label} must have the shape of its values, or its leading part.",
                f"values of shape {shape} and weights of shape {weights}",
                "return weights of shape (rows,) or of the values' own shape.",
            )
        )


def _may_fit(weights: int | None, values: int | None) -> bool:
    """Whether an axis of weights fits an axis of values, as far as the static lengths show."""
    return weights in (None, 1, values) or values is None


def _size(values: Tensor) -> Tensor | int:
    size = 1
    for length in ops.shape(values):
        size *= length
    return size


def _align(weights: Tensor, values: Tensor) -> Tensor:
    """Broadcast weights of shape (rows, ...) to the values: their axes are the leading ones."""
    missing = len(values.shape) - len(weights.shape)
    weights = ops.reshape(weights, ops.shape(weights) + (1,) * missing)
    return ops.broadcast_to(ops.cast(weights, values.dtype), ops.shape(values))


def _weigh(values: Tensor, weights: Tensor, row_weights: Tensor) -> Tensor:
    given = [_align(w, values) for w in (weights, row_weights) if w is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else given[0] * given[1]


def _dot(values: Tensor, weights: Tensor) -> Tensor:
    # By selection, not by multiplication alone: 0 * NaN is NaN.
    return ops.sum(ops.where(weights == 0, ops.zeros_like(values), values) * weights)


def accumulate(total: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add `value` to a running total of two floats, exactly (Knuth's two-sum): a count never stops growing at 2^24."""
    high, low = total
    new = high + value
    back = new - high
    return new, low + ((high - (new - back)) + (value - back))


def ratio(high: Tensor, low: Tensor) -> Tensor:
    """Return values / weights of running totals of shape (2, ...); 0 where nothing has been weighed yet."""
    values, weights = high[0] + low[0], high[1] + low[1]
    return ops.where(weights == 0, ops.zeros_like(weights), values / ops.where(weights == 0, 1.0, weights))


def as_tensor(value: Tensor) -> Tensor:
    """Return a number as a tensor. Keras takes TensorFlow's variables for tensors, and reads them out of scope."""
    return ops.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def checked(terms: dict[str, Term], num_rows: int) -> dict[str, Term]:
    """Return the terms of an objective, each with one value per row."""
    return {k: t if isinstance(t, Whole) else check(t, _label(k), num_rows) for k, t in terms.items()}


def refuse_broadcasts(shorter: dict[str, Term], num_rows: int) -> None:
    """Refuse values whose second axis grows with the rows: labels (rows,) broadcast against predictions (rows, 1)."""
    for label, term in shorter.items():
        if term.values.shape[1] == num_rows - 1:
            raise SpecificationError(
                message(
                    f"The values of {_label(label)} must be one per row; labels of shape (rows,) broadcast against "
                    "predictions of shape (rows, 1) to (rows, rows).",
                    f"values of shape {(num_rows, num_rows)}",
                    "give labels and predictions the same rank; for a loss over pairs, sum over the second axis.",
                )
            )


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
