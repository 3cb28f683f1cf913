"""The objective: the user's loss, unreduced, and its terms, which keep values and weights apart.

A loss never returns a mean. It returns values and weights with a leading row axis; their sums are
added over microbatches, replicas and hosts, and divided once.
"""

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.metrics import AUC

from wholestep import tree
from wholestep.errors import SpecificationError, message, shown
from wholestep.keras_private import (
    AutocastScope,
    fn_kwargs,
    get_keras_mask,
    set_keras_mask,
    wrapped,
)
from wholestep.tree import Tensor, Tree


class _Shown:
    """Terms are shown by the shapes of their parts."""

    def __repr__(self) -> str:
        parts = {name: part for name, part in vars(self).items() if part is not None}
        text = ", ".join(f"{name}={shown(part)}" for name, part in parts.items())
        return f"{type(self).__name__}({text})"


@dataclass(frozen=True, repr=False)
class Mean(_Shown):
    """A weighted mean over all rows of the batch: sum(values * weights) / sum(weights).

    Args:
        values: (rows,) or (rows, ...), unreduced.
        weights: the shape of `values`, or its leading part, e.g. (rows,); `None` weighs every value
            1. Weights depend on the batch, not on the parameters. A value of weight 0 has no part
            in the sums, even if it is NaN; as its derivative must be finite, a missing label of
            weight 0 should be a number such as 0.
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
        """Return the scalars (sum of values * weights, sum of weights); row_weights: (rows,)."""
        total, weights = _weighted_sum(self.values, self.weights, row_weights)
        if weights is None:
            num_values = math.prod(ops.shape(self.values))
            return total, ops.cast(num_values, total.dtype)
        return total, ops.sum(weights)


@dataclass(frozen=True, repr=False)
class Sum(_Shown):
    """A weighted sum over all rows of the batch, never divided: sum(values * weights).

    An epoch reports the mean of its updates' sums, each weighted by its number of rows.

    Args:
        values, weights, coefficient: as for `Mean`.

    >>> from keras import ops
    >>> float(Sum(ops.array([1.0, 2.0, 4.0])).sums()[0])
    7.0
    """

    values: Tensor
    weights: Tensor | None = None
    coefficient: float = 1.0

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (sum of values * weights, 1), two scalars."""
        total, _ = _weighted_sum(self.values, self.weights, row_weights)
        return total, ops.ones((), total.dtype)


@dataclass(frozen=True, repr=False)
class ScalarTerm(_Shown):
    """A loss that is a single number, and so cannot be cut."""

    values: Tensor
    coefficient: float = 1.0
    weights: Tensor | None = None

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (the number, 1)."""
        value = wide(self.values)
        return value, ops.ones((), value.dtype)


Computed = Mean | Sum | ScalarTerm


@dataclass(frozen=True, repr=False)
class Whole(_Shown):
    """A term in which rows meet: a function of the outputs of all rows of the batch.

    For contrastive, triplet and ranking losses, correlations, and any loss that is one number. A
    batch in microbatches is computed twice: first the outputs of all rows, then, once, the term
    and its derivative by them, and then the gradient of each microbatch. So a cut changes only
    rounding, and memory holds the outputs of all rows, and activations of one microbatch.

    Args:
        function: (*outputs) -> one number, or a `Mean` or `Sum`. All that has rows comes by its
            arguments; it may read variables, such as a temperature that is trained, but draws no
            random numbers.
        outputs: a tuple or list of nested tensors of shape (rows, ...), also labels and weights.
        coefficient: the factor of the term in the loss; the term is reported without it.
        computed: the term of these outputs, if it is known.

    >>> from keras import ops
    >>> def contrastive(queries, answers):
    ...     scores = queries @ ops.transpose(answers)
    ...     return Mean(-ops.diagonal(ops.log_softmax(scores)))
    >>> rows = ops.array([[3.0, 0.0], [0.0, 3.0]])
    >>> total, weight = Whole(contrastive, (rows, rows)).sums()
    >>> round(float(total / weight), 6)
    0.000123
    """

    function: Callable[..., Any]
    outputs: Sequence[Tree]
    coefficient: float = 1.0
    computed: Computed | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors of the outputs, in one list."""
        return tree.leaves(self.outputs)

    def term(self) -> Computed:
        """Return the term of these rows."""
        if self.computed is not None:
            return self.computed
        found = self.function(*self.outputs)
        return found if isinstance(found, Computed) else ScalarTerm(as_tensor(found))

    def sums(self, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scalars of the term of these rows; no row has a weight."""
        return self.term().sums()


Term = Computed | Whole


def leaves_of(terms: Mapping[str, Whole]) -> list[Tensor]:
    """Return the tensors of the outputs of all terms, in one list."""
    return [leaf for term in terms.values() for leaf in term.leaves]


def with_leaves(terms: Mapping[str, Whole], leaves: list[Tensor]) -> dict[str, Whole]:
    """Return the same terms of other outputs."""
    others = iter(leaves)
    changed = {}
    for label, term in terms.items():
        outputs = tree.map_leaves(lambda _: next(others), term.outputs)
        changed[label] = replace(term, outputs=outputs, computed=None)
    return changed


def check_closes_over_no_rows(term: Whole, label: str) -> None:
    """Refuse a function that reads rows of a microbatch which are none of its arguments.

    Raises:
        SpecificationError: it does.
    """
    num_rows = term.leaves[0].shape[0]
    for name, value in _closed_over(term.function):
        if ops.is_tensor(value) and tuple(value.shape)[:1] == (num_rows,):
            must = f"The function of {_label(label)} must get all that has rows by its arguments."
            received = f"{name!r} of shape {tuple(value.shape)}, from outside of the function"
            attempt = f"add it to the outputs: Whole(function, (..., {name})); a constant as numpy."
            raise SpecificationError(message(must, received, attempt))


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function has beside its arguments."""
    functions = [function]
    for each in functions:  # which grows
        if isinstance(each, functools.partial):
            held = {f"argument {i}": value for i, value in enumerate(each.args)}
            held |= each.keywords | {"function": each.func}
        else:
            names = getattr(getattr(each, "__code__", None), "co_freevars", ())
            cells = getattr(each, "__closure__", None) or ()
            held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        yield from held.items()
        functions += [
            value for value in held.values() if callable(value) and value not in functions
        ]


def check(term: Mean | Sum, label: str, num_rows: int) -> Mean | Sum:
    """Return the term with floating values, after checking its shape.

    Raises:
        SpecificationError: no leading row axis, or weights that do not fit.
    """
    values = _counted(term.values, num_rows)
    weights = None if term.weights is None else _counted(term.weights, num_rows)
    shape = tuple(values.shape)
    if shape[:1] != (num_rows,):
        must = (
            f"The values of {label} must have the {num_rows} rows of the batch on their "
            "leading axis."
        )
        attempt = (
            "return the losses unreduced, one per row, e.g. "
            "Mean(keras.losses.mean_squared_error(y, prediction))."
        )
        raise SpecificationError(message(must, f"values of shape {shape}", attempt))
    if weights is not None and not _may_lead(tuple(weights.shape), shape):
        must = f"The weights of {label} must have the shape of its values, or its leading part."
        received = f"values of shape {shape} and weights of shape {tuple(weights.shape)}"
        attempt = "return weights of shape (rows,) or of the values' own shape."
        raise SpecificationError(message(must, received, attempt))
    if "float" not in str(values.dtype):
        values = ops.cast(values, "float32")
    return replace(term, values=values, weights=weights)


def _counted(values: Tensor, num_rows: int) -> Any:
    """Return values with the static number of rows, which a layer may have lost."""
    if len(values.shape) == 0 or values.shape[0] is not None:
        return values
    return ops.reshape(values, (num_rows, *ops.shape(values)[1:]))  # not -1, which could mix rows


def _may_lead(weights: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """Whether axes of weights fit the leading axes of values, as far as lengths are known."""
    if not 0 < len(weights) <= len(values) or weights[0] != values[0]:
        return False
    for weight, value in zip(weights[1:], values[1:], strict=False):
        if weight not in (None, 1, value) and value is not None:
            return False
    return True


def _align(weights: Tensor, values: Tensor) -> Tensor:
    """Broadcast weights of shape (rows, ...) to the values: their axes are the leading ones."""
    weights = lengthened(weights, len(values.shape))
    return ops.broadcast_to(ops.cast(weights, values.dtype), ops.shape(values))


def _weighted_sum(
    values: Tensor, weights: Tensor | None, row_weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return sum(values * weights), and the weights, broadcast; None if all are 1."""
    values = wide(values)
    given = [_align(w, values) for w in (weights, row_weights) if w is not None]
    if not given:
        return ops.sum(values), None
    product = given[0] if len(given) == 1 else given[0] * given[1]
    return ops.sum(selected(values, product)), product


def selected(values: Tensor, weights: Tensor) -> Tensor:
    """Return values * weights, and 0 for a value of weight 0: by selection, as 0 * NaN is NaN."""
    return ops.where(weights == 0, ops.zeros_like(values), values) * weights


def lengthened(weights: Tensor, rank: int) -> Tensor:
    """Return weights with axes of length 1 at the end, so that theirs are the leading axes."""
    added = [1] * (rank - len(weights.shape))
    return ops.reshape(weights, (*ops.shape(weights), *added))


def as_tensor(value: Tensor) -> Tensor:
    """Return a number as a tensor; Keras would read TensorFlow's variables out of scope."""
    if isinstance(value, keras.Variable):
        value = value.value
    return ops.convert_to_tensor(value)


def wide(value: Tensor) -> Tensor:
    """Return a value in floatx or wider, not in the compute dtype: float16 ends at 65504."""
    if str(value.dtype).endswith("float64"):
        return value
    return ops.cast(value, keras.config.floatx())


def checked(terms: dict[str, Term], num_rows: int) -> dict[str, Term]:
    """Return the terms of an objective, each with one value per row."""
    good: dict[str, Term] = {}
    for label, term in terms.items():
        if isinstance(term, Mean | Sum):
            good[label] = check(term, _label(label), num_rows)
        elif isinstance(term, Whole):
            good[label] = _checked_outputs(term, _label(label), num_rows)
        else:
            good[label] = term
    return good


def _checked_outputs(term: Whole, label: str, num_rows: int) -> Whole:
    """Return the term, after checking that its outputs have rows.

    Raises:
        SpecificationError: they are no tuple or list of tensors, or one has no leading axis of
            rows.
    """
    if not isinstance(term.outputs, tuple | list) or not term.leaves:
        must = f"The outputs of {label} must be a tuple or list, the arguments of its function."
        attempt = "Whole(function, (queries, answers))."
        raise SpecificationError(message(must, shown(term.outputs), attempt))
    outputs = tree.map_leaves(ops.convert_to_tensor, term.outputs)
    for leaf in tree.leaves(outputs):
        shape = tuple(leaf.shape)
        if shape[:1] not in ((num_rows,), (None,)):
            must = (
                f"The outputs of {label} must have the {num_rows} rows of the batch on their "
                "leading axis."
            )
            attempt = "pass what each row contributes, and let the function combine the rows."
            raise SpecificationError(message(must, f"an output of shape {shape}", attempt))
    return replace(term, outputs=outputs)


def refuse_broadcasts(shorter: dict[str, Term], num_rows: int) -> None:
    """Refuse labels (rows,) broadcast against predictions (rows, 1), to (rows, rows).

    Args:
        shorter: the terms on one row less; those whose second axis has shrunk, too, are refused.
    """
    for label, term in shorter.items():
        assert isinstance(term, Mean | Sum)
        if term.values.shape[1] != num_rows - 1:
            continue
        must = (
            f"The values of {_label(label)} must be one per row; labels of shape (rows,) broadcast "
            "against predictions of shape (rows, 1) to (rows, rows)."
        )
        received = f"values of shape {(num_rows, num_rows)}"
        attempt = (
            "give labels and predictions the same rank; for a loss over pairs, sum over the second "
            "axis."
        )
        raise SpecificationError(message(must, received, attempt))


def by_row(term: Term) -> tuple[Tensor, Tensor]:
    """Return (values, weights) of every row, both (rows,). Of a `Whole`, a value of its outputs."""
    if isinstance(term, ScalarTerm):
        return term.values[None], ops.ones((1,))
    if isinstance(term, Whole):
        first, *others = map(_mixed_row, term.leaves)
        values = sum(others, first)
        return values, ops.ones_like(values)
    values = term.values
    weights = ops.ones_like(values) if term.weights is None else term.weights
    weights = ops.cast(weights, values.dtype)
    return _sum_of_row(values), _sum_of_row(weights)


def _sum_of_row(values: Tensor) -> Tensor:
    axes = range(1, len(values.shape))
    return ops.sum(values, axis=tuple(axes))


def _mixed_row(values: Tensor) -> Tensor:
    """Return a number for each row that depends on all its values."""
    rows = ops.reshape(wide(values), (values.shape[0], -1))
    return ops.matmul(rows, ops.cast(np.cos(1.0 + np.arange(rows.shape[1])), rows.dtype))


def _label(name: str) -> str:
    return f"term {name!r}" if name else "the loss"


class Objective(ABC):
    """A user-defined loss. Subclass it and return values and weights, never a mean.

    `__call__` gets the model, the batch as the source nests it (leaves of shape (rows, ...)) and
    `training`, and returns

    - a `Mean`, a `Sum`, or, if rows meet in the loss, a `Whole`, or
    - a mapping of named ones, whose sum (each times its coefficient) is reported as "loss", or
    - a pair (either of these, metrics), where metrics maps names to a `Mean` or `Sum` to report, or
      to a tuple (y_true, y_pred[, sample_weight]) for the Keras metric of that name in
      `Trainer(metrics=...)`.

    The model's own regularisation is added once by the update. Row i of the result must belong to
    row i of the batch.

    Any other `keras.Variable` that it reads (of another model, a metric or an optimizer, or
    free-standing) has its newest value whenever updates are sent to the device; a variable that it
    assigns is state, kept from update to update. Python numbers and bare arrays are read once: a
    changing value must be a `keras.Variable` or in the batch.

    >>> import keras, wholestep as ws
    >>> class Squared(ws.Objective):
    ...     def __call__(self, model, batch, training):
    ...         error = model(batch["x"], training=training) - batch["y"]
    ...         return ws.Mean(error**2, batch["weight"])
    """

    @abstractmethod
    def __call__(self, model: keras.Model, batch: Any, training: bool) -> Any:
        """Return the unreduced loss of the batch."""


def mask_of(value: Tensor) -> Tensor | None:
    """Return the mask that Keras keeps for a value; None if there is none."""
    return get_keras_mask(value)


def with_mask_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the mask that Keras keeps for another one."""
    if value is not other and (mask := get_keras_mask(other)) is not None:
        set_keras_mask(value, mask)
    return value


def with_mask(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return a value with this mask, as Keras keeps it."""
    if mask is not None:
        set_keras_mask(value, mask)
    return value


def uncast() -> AbstractContextManager[object]:
    """Return a scope in which variables are read in their own dtype, not in the compute dtype."""
    return AutocastScope(None)


@dataclass(frozen=True)
class MetricUpdate:
    """The arguments of one Keras metric's update on a batch."""

    metric: keras.metrics.Metric
    y_true: Tree
    y_pred: Any  # a tree
    weight: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the metric is a function that does not return one value per row."""
        fn = wrapped(self.metric)
        if not isinstance(self.metric, keras.metrics.MeanMetricWrapper) or fn is None:
            return False
        options = fn_kwargs(self.metric)
        rank = len(getattr(self.y_pred, "shape", ()))
        if options.get("axis") in (0, -rank):
            return True
        values = fn(self.y_true, self.y_pred, **options)
        num_rows = tuple(getattr(values, "shape", ()))[:1]
        return num_rows not in ((tree.num_rows(self.y_pred),), (None,))

    def part(self, rows: slice) -> "MetricUpdate":
        """Return the update on these rows."""

        def part(data: Tree) -> Any:
            return tree.map_leaves(lambda leaf: leaf[rows], data)

        y_pred = part(self.y_pred)
        if (mask := get_keras_mask(self.y_pred)) is not None:
            set_keras_mask(y_pred, mask[rows])
        return MetricUpdate(self.metric, part(self.y_true), y_pred, part(self.weight))

    def run(self, row_weights: Tensor | None) -> None:
        """Update the metric; rows of weight 0 count for nothing."""
        given = [w for w in (self.weight, row_weights) if w is not None]
        if not given or self.is_whole:
            self.metric.update_state(self.y_true, self.y_pred)
            return
        rank = max(self._least_rank, *(len(w.shape) for w in given))
        floatx = keras.config.floatx()
        weight = math.prod(ops.cast(lengthened(w, rank), floatx) for w in given)
        if isinstance(self.metric, keras.metrics.IoU):  # which flattens labels and weights
            shape = self._shape_of_classes(rank)
            weight = ops.broadcast_to(lengthened(weight, len(shape)), shape)
            if self.weight is None:
                weight = ops.cast(weight, self.metric.dtype)
        self.metric.update_state(self.y_true, self.y_pred, sample_weight=weight)

    @property
    def _least_rank(self) -> int:
        """The least rank of weights that lead the values' axes: Keras aligns others at the end.

        It is the mask's rank; for AUC and its kin, the predictions' rank minus 1, as they add the
        last axis.
        """
        if any(kind.__module__ == AUC.__module__ for kind in type(self.metric).__mro__):
            return max(1, len(self.y_pred.shape) - 1)
        mask = get_keras_mask(self.y_pred)
        return 1 if mask is None else len(mask.shape)

    def _shape_of_classes(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the class numbers, with axes of length 1 up to the weights' rank."""
        shape = [*ops.shape(self.y_true)]
        if not self.metric.sparse_y_true:
            del shape[self.metric.axis]
        return (*shape, *[1] * (rank - len(shape)))


def leave_rows_out(metrics: list[keras.metrics.Metric] | None) -> bool | None:
    """Whether all metrics ignore rows of weight 0; None if an experiment must decide.

    Keras' metrics do. A user-defined `update_state` may take weights and not use them.
    """
    if metrics is None:
        return False
    functions = [m.update_state for m in metrics]
    if not all("sample_weight" in inspect.signature(f).parameters for f in functions):
        return False
    modules = [type(m).update_state.__module__ for m in metrics]
    are_keras = all(module.split(".")[0] == "keras" for module in modules)
    return are_keras or None


class LabelRange(NamedTuple):
    """The class numbers that one leaf of the labels may hold."""

    leaf: int
    num_classes: int
    ignored: int | None


class ObjectiveOutput(NamedTuple):
    """The normalised result of an objective.

    Args:
        reported: terms that are reported, and no part of the loss.
        is_complete: whether the terms already include the model's regularisation and `add_loss`.
        divisors: the leaves of the sample weights by which a mean is divided.
    """

    terms: dict[str, Term]
    reported: dict[str, Term]
    metric_updates: list[MetricUpdate]
    is_complete: bool = False
    label_ranges: tuple[LabelRange, ...] = ()
    divisors: tuple[int, ...] = ()


def read(result: object, metrics: dict[str, keras.metrics.Metric]) -> ObjectiveOutput:
    """Normalise the result of an objective.

    Raises:
        SpecificationError: the result is neither a Mean, a Sum nor a mapping of them.
    """
    if isinstance(result, ObjectiveOutput):
        return result
    loss: Any = result
    extra: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        loss, extra = result
    named = loss if isinstance(loss, Mapping) else {"": loss}
    terms = {label: _term(term, label) for label, term in named.items()}
    reported: dict[str, Term] = {}
    updates = []
    for label, value in extra.items():
        if isinstance(value, Mean | Sum | Whole):
            reported[label] = value
        else:
            updates.append(_metric_update(label, value, metrics))
    names = [*filter(None, terms), *extra]
    if "loss" in names:
        must = "'loss' is the name of the total: no term and no metric may have it."
        attempt = "rename it; or return a single Mean or Sum without a name."
        raise SpecificationError(message(must, names, attempt))
    if len(set(names)) < len(names):
        must = "Terms and metrics must have distinct names."
        raise SpecificationError(message(must, names, "rename them."))
    return ObjectiveOutput(terms, reported, updates)


def _term(term: object, label: str) -> Term:
    if isinstance(term, Term):
        return term
    shape = getattr(term, "shape", None)
    received = type(term).__name__ if shape is None else f"an array of shape {tuple(shape)}"
    of_term = f" (term {label!r})" if label else ""
    must = f"An objective must return a Mean, a Sum, a Whole or a mapping of them{of_term}."
    attempt = (
        "return Mean(values, weights) with one unreduced value per row; the update divides once."
    )
    raise SpecificationError(message(must, received, attempt))


def _metric_update(
    label: str, arguments: object, metrics: dict[str, keras.metrics.Metric]
) -> MetricUpdate:
    if label not in metrics or not isinstance(arguments, tuple):
        must = (
            f"The metric {label!r} must be a Mean, a Sum, or a tuple for a Keras metric of "
            "that name."
        )
        attempt = f"pass Trainer(metrics=[...]) with one named {label!r}; it has {sorted(metrics)}."
        raise SpecificationError(message(must, type(arguments).__name__, attempt))
    return MetricUpdate(metrics[label], *arguments)
