"""The compiled losses of a Keras model as an objective, with Keras' meaning of every loss, weight
and mask.

Keras matches outputs, labels and losses; we take over before its reduction
(keras/src/losses/loss.py).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message, warn
from wholestep.model.compiled import distinct, is_overridden, unpack
from wholestep.model.objective import (
    LabelRange,
    Mean,
    Objective,
    Reading,
    Score,
    Sum,
    Term,
    Whole,
    lengthened,
    selected,
)
from wholestep.tree import Tensor, Tree

# Keras' losses that compare element by element; its others check shapes themselves, or take other
# shapes by design.
_ELEMENTWISE = (
    *(
        "mean_squared_error",
        "mean_absolute_error",
        "mean_absolute_percentage_error",
        "mean_squared_logarithmic_error",
    ),
    *(
        "cosine_similarity",
        "huber",
        "log_cosh",
        "hinge",
        "squared_hinge",
        "categorical_hinge",
        "kl_divergence",
        "poisson",
    ),
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
    """The arguments of `model.compile(...)` as an objective over batches (x, y) or (x, y,
    sample_weight).
    """

    def __init__(self, metrics: list):
        self.extra_metrics = metrics
        self._has_told = False
        self._has_told_of_labels = False

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Reading:
        """Return the terms of the compiled losses and the updates of the compiled metrics."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        scores = [
            *_scores(model, y, y_pred, weight),
            *(Score(m, y, y_pred) for m in self.extra_metrics),
        ]
        if is_overridden(model, "compute_loss"):
            loss = model._compute_loss(x, y, y_pred, weight, training=training)
            return Reading({"": _own_loss(model, loss)}, {}, scores, is_complete=True)
        calls = self.calls(model, y, y_pred, weight)
        if training and not calls and not model.losses:
            must = "Training needs a loss."
            received = "a model that was compiled without a loss, and whose layers add none"
            attempt = (
                'compile("adam", loss="mse"), call add_loss in a layer, or pass an Objective '
                "to the Trainer."
            )
            raise SpecificationError(message(must, received, attempt))
        if not self._has_told_of_labels:
            told = [warn_of_broadcast(call) for call in calls]
            self._has_told_of_labels = any(told)
        ranges = tuple(found for call in calls for found in label_ranges(call, tree.leaves(y)))
        dividing = [
            call.weight
            for call in calls
            if getattr(call.loss, "reduction", None) == "mean_with_sample_weight"
        ]
        divisors = tuple(
            i for i, leaf in enumerate(tree.leaves(weight)) if any(leaf is w for w in dividing)
        )
        names = (
            distinct([f"{call.name}_loss" for call in calls])
            if len(calls) > 1
            else [""] * len(calls)
        )
        terms = {name: unreduced(call) for name, call in zip(names, calls, strict=True)}
        return Reading(terms, {}, scores, label_ranges=ranges, divisors=divisors)

    def calls(self, model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[LossCall]:
        """Return the losses that Keras minimises, each with its output, labels and weights."""
        return self._that_count(_calls(model, y, y_pred, weight), y, y_pred)

    def _that_count(self, calls: list[LossCall], y: Tree, y_pred: Tree) -> list[LossCall]:
        """Return the losses that Keras minimises: only the first of several for one output and one
        leaf of labels.
        """
        if len(calls) < 2 or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
            return calls
        if not self._has_told:
            self._has_told = True
            told = (
                f"The model has one output, and {len(calls)} losses: as in Keras, all but the "
                "first have no effect. "
            )
            warn(f"{told}To minimise their sum, write one function that adds them.")
        return calls[:1]


def _calls(model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[LossCall]:
    """Let Keras match outputs, labels and weights, but record each loss call instead of reducing
    it.
    """
    compile_loss = model._compile_loss
    calls = list[LossCall]()
    if compile_loss is None:
        return calls
    entries = compile_loss._flat_losses
    metrics = compile_loss._metrics

    def recorder(entry: Any) -> Any:
        def record(y_true: Tensor, y_pred: Tensor, weight: Tensor | None = None) -> float:
            coefficient = 1.0 if entry.loss_weights is None else entry.loss_weights
            calls.append(LossCall(entry.loss, coefficient, entry.name, y_true, y_pred, weight))
            return 0.0

        return entry._replace(loss=record, loss_weights=None)

    compile_loss._flat_losses = [recorder(entry) for entry in entries]
    compile_loss._metrics = [None] * len(entries)
    try:
        compile_loss(y, y_pred, weight)
    finally:
        compile_loss._flat_losses = entries
        compile_loss._metrics = metrics
    return calls


def _own_loss(model: keras.Model, loss: Tensor | None) -> Whole:
    shape = None if loss is None else tuple(ops.shape(loss))
    if shape != ():
        received = "None" if shape is None else f"shape {shape}"
        attempt = (
            "return keras.ops.mean(...) there; or write the loss as a wholestep.Objective, "
            "which may be cut."
        )
        must = f"`compute_loss` of {type(model).__name__} must return one number."
        raise SpecificationError(message(must, received, attempt))
    return Whole(ops.convert_to_tensor(loss))


def _scores(model: keras.Model, y: Tree, outputs: Tree, weight: Tree) -> list[Score]:
    compiled = model._compile_metrics
    if compiled is None:
        return []
    y_true = compiled._flatten_y(y)
    y_pred = compiled._flatten_y(outputs)
    weights = [None] if weight is None else compiled._flatten_y(weight)
    weights = weights if len(weights) == len(y_true) else [weights[0]] * len(y_true)
    plain = [
        (group, t, p, None)
        for group, t, p in zip(compiled._flat_metrics, y_true, y_pred, strict=False)
    ]
    weighted = list(zip(compiled._flat_weighted_metrics, y_true, y_pred, weights, strict=False))
    return [
        Score(m, t, p, w) for group, t, p, w in plain + weighted if group for m in group.metrics
    ]


# ---- one loss before its reduction: its values, with Keras' divisor as weights ----


def unreduced(call: LossCall) -> Term:
    """Return one compiled loss before its reduction, with Keras' divisor as weights."""
    loss = call.loss
    dtype = call.loss.dtype
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Whole(loss(call.y_true, call.y_pred, call.weight), call.coefficient)
    y_pred = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_pred)
    y_true = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_true)
    values = loss.call(y_true, y_pred)
    if len(getattr(values, "shape", ())) == 0:  # a Python number, of an output that does not count
        return Whole(ops.cast(loss(call.y_true, call.y_pred, call.weight), dtype), call.coefficient)
    mask = _both(get_keras_mask(call.y_pred), get_keras_mask(values))
    values = ops.cast(values, dtype)
    return _reduce(values, _checked(_fit(call.weight, values), values), _fit(mask, values), call)


def _reduce(values: Tensor, weight: Tensor | None, mask: Tensor | None, call: LossCall) -> Term:
    reduction = call.loss.reduction
    if reduction == "sum":
        return Sum(values, _product(weight, mask), call.coefficient)
    if reduction == "mean_with_sample_weight":
        weights = _product(weight, mask)
        return Mean(_sum_broadcast(values, weights), weights, call.coefficient)
    if reduction in ("sum_over_batch_size", "mean"):
        # Keras weighs the values by sample_weight and divides by the count of unmasked values, not
        # by their weight.
        values = (
            values if weight is None else selected(values, lengthened(weight, len(values.shape)))
        )
        return Mean(values, mask, call.coefficient)
    must = f"The loss {call.name!r} must have a reduction."
    attempt = 'use "sum_over_batch_size", "mean_with_sample_weight" or "sum".'
    raise SpecificationError(message(must, f"reduction={reduction!r}", attempt))


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a & b if a is not None and b is not None else (b if a is None else a)


def _fit(weight: Tensor | None, values: Tensor) -> Tensor | None:
    """Drop the trailing axes of length 1 that Keras would squeeze, so that weights lead the values'
    axes.
    """
    while weight is not None and len(weight.shape) > len(values.shape) and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, axis=-1)
    return None if weight is None else ops.cast(weight, values.dtype)


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
    """Sum the values over the axes that the weights lack: Keras divides by the sum of the
    unbroadcast weights.
    """
    if weights is None:
        return values
    axes = [
        a for a in range(1, len(values.shape)) if a >= len(weights.shape) or weights.shape[a] == 1
    ]
    values = (
        ops.sum(values, axis=[a for a in axes if a < len(weights.shape)], keepdims=True)
        if axes
        else values
    )
    return ops.sum(values, axis=[a for a in axes if a >= len(weights.shape)]) if axes else values


# ---- labels that do not fit the outputs ----


def label_ranges(call: LossCall, labels: list) -> list[LabelRange]:
    """Return the range of class numbers that a loss has outputs for, by leaf of the labels that it
    is called with.
    """
    if getattr(call.loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
        return []
    options = call.loss._fn_kwargs
    found = [i for i, leaf in enumerate(labels) if leaf is call.y_true]
    axis = options.get("axis", -1)
    ignored = options.get("ignore_class")
    return [LabelRange(i, int(call.y_pred.shape[axis]), ignored) for i in found]


def warn_of_broadcast(call: LossCall) -> bool:
    """Warn if one of Keras' losses broadcasts labels against an output; return whether it does."""
    is_elementwise = any(
        getattr(call.loss, "fn", None) is getattr(keras.losses, name) for name in _ELEMENTWISE
    )
    given, made = (tuple(getattr(each, "shape", ())) for each in (call.y_true, call.y_pred))
    if not is_elementwise or _are_alike(given, made):
        return False
    shapes = [f"({', '.join(['rows', *map(str, shape[1:])])})" for shape in (given, made)]
    must = f"The labels of the loss {call.name!r} must have the shape of the output."
    received = (
        f"labels of shape {shapes[0]}, outputs of shape {shapes[1]}: the loss broadcasts them, "
        "as in Keras"
    )
    warn(
        message(
            must,
            received,
            "pass labels of the output's shape, or give the last layer as many units as labels.",
        )
    )
    return True


def _are_alike(given: tuple, made: tuple) -> bool:
    """Whether shapes are equal as far as they are known; Keras adds or drops a last axis of length
    1.
    """
    if abs(len(given) - len(made)) == 1:
        longer = max(given, made, key=len)
        given, made = (
            shape[:-1] if shape is longer and shape[-1] == 1 else shape for shape in (given, made)
        )
    pairs = list(zip(given[1:], made[1:], strict=False))
    return len(given) == len(made) and all(a == b or a is None or b is None for a, b in pairs)


def check_labels(
    ranges: Collection[LabelRange], batch: Tree, numbers: np.ndarray | None = None
) -> None:
    """Refuse class numbers that the model has no output for: backends would count them as nothing,
    or as garbage.

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
        label, _ = tree.named_leaves(unpack(batch)[1], "y")[place]
        good = (values >= 0) & (values < num_classes)
        good = good if values.dtype.kind != "f" else good & (values == np.floor(values))
        good = good if ignored is None else good | (values == ignored)
        bad = np.flatnonzero(~np.reshape(good, (len(values), -1)).all(axis=1))
        if bad.size:
            must = (
                f"Class numbers in {label} must be whole and lie in 0..{num_classes - 1}: the "
                f"model has {num_classes} "
            )
            must += "outputs."
            received = f"{values[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            attempt = "renumber the classes, widen the last layer, or set ignore_class."
            raise BatchError(message(must, received, attempt))
