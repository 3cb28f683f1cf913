"""The compiled losses of a Keras model as an objective.

Keras matches outputs, labels and losses; we take over before its reduction
(keras/src/losses/loss.py).
"""

import functools
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message, warn
from wholestep.keras_private import (
    compile_loss,
    compile_metrics,
    compute_loss,
    flat_losses,
    flat_metrics,
    flat_weighted_metrics,
    flatten_y,
    fn_kwargs,
    get_keras_mask,
)
from wholestep.model.compiled import distinct, is_overridden, outputs_of, unpack
from wholestep.model.objective import (
    Computed,
    LabelRange,
    Mean,
    MetricUpdate,
    Objective,
    ObjectiveOutput,
    ScalarTerm,
    Sum,
    Term,
    Whole,
    lengthened,
    selected,
    with_mask,
)
from wholestep.patches import replaced
from wholestep.tree import Tensor, Tree

# Keras' losses that compare element by element; its others check shapes themselves, or take other
# shapes by design.
_ELEMENTWISE = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "cosine_similarity",
    "huber",
    "log_cosh",
    "hinge",
    "squared_hinge",
    "categorical_hinge",
    "kl_divergence",
    "poisson",
)


class LossCall(NamedTuple):
    """One loss with the arguments of Keras' call and its coefficient."""

    loss: keras.losses.Loss
    coefficient: float
    name: str
    y_true: Tensor
    y_pred: Tensor
    weight: Tensor | None


class CompiledObjective(Objective):
    """The losses and metrics of `model.compile(...)` on batches (x, y[, sample_weight]).

    Args:
        joins: whether the losses are functions of all rows together, even with a value for each.
    """

    def __init__(self, metrics: list, *, joins: bool = False):
        self.extra_metrics = metrics
        self.joins = joins
        self._has_warned_of_losses = False
        self._has_warned_of_labels = False

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> ObjectiveOutput:
        """Return the terms of the compiled losses and the updates of the compiled metrics."""
        x, y, weight = unpack(batch)
        y_pred = outputs_of(model, x, training=training)
        updates = _metric_updates(model, y, y_pred, weight)
        updates += [MetricUpdate(m, y, y_pred) for m in self.extra_metrics]
        if is_overridden(model, "compute_loss"):
            loss = compute_loss(model)(x, y, y_pred, weight, training=training)
            return ObjectiveOutput({"": _custom_loss(model, loss)}, {}, updates, is_complete=True)
        calls = self.calls(model, y, y_pred, weight)
        if training and not calls and not model.losses:
            must = "Training needs a loss."
            received = "a model that was compiled without a loss, and whose layers add none"
            attempt = (
                'compile("adam", loss="mse"), call add_loss in a layer, or pass an Objective '
                "to the Trainer."
            )
            raise SpecificationError(message(must, received, attempt))
        if not self._has_warned_of_labels:
            self._has_warned_of_labels = any(list(map(warn_of_broadcast, calls)))
        labels = tree.leaves(y)
        ranges = [label_range for call in calls for label_range in label_ranges(call, labels)]
        return ObjectiveOutput(
            {name: self._term(call, tree.num_rows(x)) for name, call in _named(calls).items()},
            {},
            updates,
            label_ranges=tuple(ranges),
            divisors=_divisors(calls, tree.leaves(weight)),
        )

    def _term(self, call: LossCall, num_rows: int) -> Term:
        """Return the term of a loss: a function of all rows if it is one number, or `joins`."""
        term = unreduced(call)
        outputs = call.y_true, call.y_pred, call.weight, get_keras_mask(call.y_pred)
        lengths = {tuple(leaf.shape)[:1] for leaf in tree.leaves(outputs)}
        has_rows = lengths <= {(num_rows,), (None,)}
        if not has_rows or not (self.joins or isinstance(term, ScalarTerm)):
            return term
        function = functools.partial(_of_all_rows, call)
        return Whole(function, outputs, call.coefficient, term)

    def calls(self, model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[LossCall]:
        """Return the losses that Keras minimises, each with its output, labels and weights.

        Of several for one output and one leaf of labels, it is only the first.
        """
        calls = _calls(model, y, y_pred, weight)
        if len(calls) < 2 or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
            return calls
        if not self._has_warned_of_losses:
            self._has_warned_of_losses = True
            warn(
                f"The model has one output, and {len(calls)} losses: as in Keras, all but the "
                "first have no effect. To minimise their sum, write one function that adds them."
            )
        return calls[:1]


def joining(objective: Objective) -> Objective:
    """Return the compiled losses as functions of all rows together; other objectives unchanged."""
    if not isinstance(objective, CompiledObjective) or objective.joins:
        return objective
    return CompiledObjective(objective.extra_metrics, joins=True)


def _named(calls: list[LossCall]) -> dict[str, LossCall]:
    names = [""] if len(calls) == 1 else distinct([f"{call.name}_loss" for call in calls])
    return dict(zip(names, calls, strict=True))


def _of_all_rows(
    call: LossCall, y_true: Tensor, y_pred: Tensor, weight: Tensor | None, mask: Tensor | None
) -> Computed:
    y_pred = with_mask(y_pred, mask)
    return unreduced(call._replace(y_true=y_true, y_pred=y_pred, weight=weight))


def _divisors(calls: list[LossCall], weights: list[Tensor]) -> tuple[int, ...]:
    """Return the leaves of the sample weights by which a mean is divided."""
    kind = "mean_with_sample_weight"
    dividing = [call.weight for call in calls if getattr(call.loss, "reduction", None) == kind]
    return tuple(i for i, leaf in enumerate(weights) if any(leaf is w for w in dividing))


def _calls(model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[LossCall]:
    """Let Keras match outputs, labels and weights, and record each call of a loss."""
    losses = compile_loss(model)
    calls = list[LossCall]()
    if losses is None:
        return calls

    def recorder(entry: Any) -> Any:
        def record(y_true: Tensor, y_pred: Tensor, weight: Tensor | None = None) -> float:
            coefficient = 1.0 if entry.loss_weights is None else entry.loss_weights
            calls.append(LossCall(entry.loss, coefficient, entry.name, y_true, y_pred, weight))
            return 0.0

        return entry._replace(loss=record, loss_weights=None)

    recorders = [recorder(entry) for entry in flat_losses(losses)]
    with replaced(losses, _flat_losses=recorders, _metrics=[None] * len(recorders)):
        losses(y, y_pred, weight)
    return calls


def _custom_loss(model: keras.Model, loss: Tensor | None) -> ScalarTerm:
    shape = None if loss is None else tuple(ops.shape(loss))
    if shape != ():
        must = f"`compute_loss` of {type(model).__name__} must return one number."
        received = "None" if shape is None else f"shape {shape}"
        attempt = (
            "return keras.ops.mean(...) there; or write the loss as a wholestep.Objective, "
            "which may be cut."
        )
        raise SpecificationError(message(must, received, attempt))
    return ScalarTerm(ops.convert_to_tensor(loss))


def _metric_updates(model: keras.Model, y: Tree, outputs: Tree, weight: Tree) -> list[MetricUpdate]:
    compiled = compile_metrics(model)
    if compiled is None:
        return []
    y_true = flatten_y(compiled)(y)
    y_pred = flatten_y(compiled)(outputs)
    no_weights = [None] * len(y_true)
    weights = no_weights if weight is None else flatten_y(compiled)(weight)
    if len(weights) != len(y_true):
        weights = [weights[0]] * len(y_true)
    plain = zip(flat_metrics(compiled), y_true, y_pred, no_weights, strict=False)
    weighted = zip(flat_weighted_metrics(compiled), y_true, y_pred, weights, strict=False)
    updates = []
    for group, *arguments in (*plain, *weighted):
        metrics = group.metrics if group else []
        updates += [MetricUpdate(metric, *arguments) for metric in metrics]
    return updates


# ---- one loss before its reduction: its values, with Keras' divisor as weights ----


def unreduced(call: LossCall) -> Computed:
    """Return one compiled loss before its reduction, with Keras' divisor as weights."""
    loss = call.loss
    dtype = loss.dtype
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return ScalarTerm(loss(call.y_true, call.y_pred, call.weight), call.coefficient)

    def converted(labels: Tree) -> Tree:
        return tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), labels)

    y_pred = converted(call.y_pred)
    values = loss.call(converted(call.y_true), y_pred)
    if len(getattr(values, "shape", ())) == 0:  # a Python number, of an output that does not count
        reduced = ops.cast(loss(call.y_true, call.y_pred, call.weight), dtype)
        return ScalarTerm(reduced, call.coefficient)
    masks = [get_keras_mask(call.y_pred), get_keras_mask(values)]
    masks = [mask for mask in masks if mask is not None]
    values = ops.cast(values, dtype)
    weight = _checked(_fit(call.weight, values), values)
    mask = _fit(functools.reduce(operator.and_, masks) if masks else None, values)
    return _reduce(values, weight, mask, call)


def _reduce(
    values: Tensor, weight: Tensor | None, mask: Tensor | None, call: LossCall
) -> Mean | Sum:
    reduction = call.loss.reduction
    if reduction == "sum":
        return Sum(values, _product(weight, mask), call.coefficient)
    if reduction == "mean_with_sample_weight":
        weights = _product(weight, mask)
        return Mean(_sum_broadcast(values, weights), weights, call.coefficient)
    if reduction in ("sum_over_batch_size", "mean"):
        # Keras weighs the values by sample_weight and divides by the count of unmasked values, not
        # by their weight.
        if weight is not None:
            values = selected(values, lengthened(weight, len(values.shape)))
        return Mean(values, mask, call.coefficient)
    must = f"The loss {call.name!r} must have a reduction."
    attempt = 'use "sum_over_batch_size", "mean_with_sample_weight" or "sum".'
    raise SpecificationError(message(must, f"reduction={reduction!r}", attempt))


def _fit(weight: Tensor | None, values: Tensor) -> Tensor | None:
    """Return weights without the last axes of length 1 that Keras would squeeze."""
    if weight is None:
        return None
    while len(weight.shape) > len(values.shape) and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, axis=-1)
    return ops.cast(weight, values.dtype)


def _checked(weight: Tensor | None, values: Tensor) -> Tensor | None:
    """Refuse weights of more axes than the values: weights of a single row would broadcast."""
    if weight is not None and len(weight.shape) > len(values.shape):
        must = (
            "sample_weight must hold one number for each row, or for each of the places that "
            "the loss tells apart."
        )
        received = (
            f"weights of shape {tuple(weight.shape)} beside losses of shape {tuple(values.shape)}"
        )
        raise BatchError(message(must, received, "pass weights of shape (rows,)."))
    return weight


def _product(weight: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if weight is None or mask is None:
        return mask if weight is None else weight
    rank = max(len(weight.shape), len(mask.shape))
    return lengthened(weight, rank) * lengthened(mask, rank)


def _sum_broadcast(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the values over the axes that the weights lack: Keras divides by the weights' sum."""
    if weights is None:
        return values
    rank = len(weights.shape)
    single = [axis for axis in range(1, rank) if weights.shape[axis] == 1]
    missing = list(range(max(1, rank), len(values.shape)))
    if single or missing:
        values = ops.sum(ops.sum(values, axis=single, keepdims=True), axis=missing)
    return values


# ---- labels that do not fit the outputs ----


def label_ranges(call: LossCall, labels: list) -> list[LabelRange]:
    """Return the class numbers that a loss has outputs for, by the leaf of its labels."""
    if getattr(call.loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
        return []
    options = fn_kwargs(call.loss)
    num_classes = int(call.y_pred.shape[options.get("axis", -1)])
    ignored = options.get("ignore_class")
    indices = [i for i, leaf in enumerate(labels) if leaf is call.y_true]
    return [LabelRange(i, num_classes, ignored) for i in indices]


def warn_of_broadcast(call: LossCall) -> bool:
    """Warn if one of Keras' losses broadcasts labels against an output; return whether it does."""
    functions = [getattr(keras.losses, name) for name in _ELEMENTWISE]
    labels = tuple(getattr(call.y_true, "shape", ()))
    outputs = tuple(getattr(call.y_pred, "shape", ()))
    one, two = axes_to_compare(labels, outputs)
    are_alike = len(one) == len(two)
    for a, b in zip(one, two, strict=False):
        are_alike &= a == b or a is None or b is None
    if getattr(call.loss, "fn", None) not in functions or are_alike:
        return False
    must = f"The labels of the loss {call.name!r} must have the shape of the output."
    received = (
        f"labels of shape {text_of_shape(labels)}, outputs of shape {text_of_shape(outputs)}: the "
        "loss broadcasts them, as in Keras"
    )
    attempt = "pass labels of the output's shape, or give the last layer as many units as labels."
    warn(message(must, received, attempt))
    return True


def text_of_shape(shape: tuple) -> str:
    """Return a shape as text, with "rows" in place of their number."""
    return f"({', '.join(['rows', *map(str, shape[1:])])})"


def axes_to_compare(one: tuple, two: tuple) -> tuple[tuple, tuple]:
    """Return two shapes without their rows, and without a last axis of 1 that only one has."""
    if len(one) == len(two) + 1 and one[-1] == 1:
        one = one[:-1]
    if len(two) == len(one) + 1 and two[-1] == 1:
        two = two[:-1]
    return one[1:], two[1:]


def check_labels(
    ranges: Collection[LabelRange], batch: Tree, numbers: np.ndarray | None = None
) -> None:
    """Refuse class numbers that have no output: backends would ignore them, or return garbage.

    Args:
        numbers: the row numbers to report; None to count from 0.

    Raises:
        BatchError: a class number has no output; the message names the first such row.
    """
    leaves = tree.leaves(unpack(batch)[1]) if ranges else []
    for place, num_classes, ignored in ranges:
        values = leaves[place]
        if values.dtype.kind in "iu" and values.min() >= 0 and values.max() < num_classes:
            continue
        good = (values >= 0) & (values < num_classes)
        if values.dtype.kind == "f":
            good &= values == np.floor(values)
        if ignored is not None:
            good |= values == ignored
        by_row = np.reshape(good, (len(values), -1))
        bad = np.flatnonzero(~by_row.all(axis=1))
        if bad.size:
            name, _ = tree.named_leaves(unpack(batch)[1], "y")[place]
            must = (
                f"Class numbers in {name} must be whole and lie in 0..{num_classes - 1}: the model "
                f"has {num_classes} outputs."
            )
            received = f"{values[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            attempt = "renumber the classes, widen the last layer, or set ignore_class."
            raise BatchError(message(must, received, attempt))
