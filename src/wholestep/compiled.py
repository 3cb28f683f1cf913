"""A compiled Keras model is an objective by itself, with Keras' own meaning of every loss, weight, mask and metric.

The only module that looks inside Keras (`keras.Model.compile` keeps what it was given in private attributes). Keras
decides which output meets which label and loss; we take over before it reduces (keras/src/losses/loss.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, say
from wholestep.mean import Mean, Sum, Term, Whole
from wholestep.objective import Objective, Reading, Score

Tensor = Any


class LabelRange(NamedTuple):
    """The class numbers that one leaf of the labels may hold."""

    leaf: int
    num_classes: int
    ignored: int | None


class _Call(NamedTuple):
    loss: keras.losses.Loss
    coefficient: float
    name: str
    y_true: Tensor
    y_pred: Tensor
    weight: Tensor


class CompiledObjective(Objective):
    """What `model.compile(...)` said, as an objective over batches (x, y) or (x, y, sample_weight).

    `label_ranges` is valid once the objective has been traced.
    """

    def __init__(self, model: keras.Model, metrics: list):
        _refuse_overrides(model)
        self.extra_metrics = metrics
        self.label_ranges: list[LabelRange] = []

    def __call__(self, model: keras.Model, batch: Any, training: bool) -> Reading:
        """Return the compiled losses' terms and the compiled metrics' updates."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        scores = [*_scores(model, y, y_pred, weight), *(Score(m, y, y_pred) for m in self.extra_metrics)]
        if type(model).compute_loss is not keras.Model.compute_loss:
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=training)
            return Reading({"": Whole(loss)}, {}, scores)
        calls = _calls(model, y, y_pred, weight)
        self.label_ranges = [found for call in calls for found in _label_range(call, tree.leaves(y))]
        many = len(calls) > 1
        return Reading({f"{call.name}_loss" if many else "": _term(call) for call in calls}, {}, scores)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Return (x, y, sample_weight) of a batch, None for what it does not have."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(parts) > 3:
        raise SpecificationError(
            say(
                "A batch must be x, (x, y) or (x, y, sample_weight).",
                f"{len(parts)} parts",
                "nest several inputs in x.",
            )
        )
    return (*parts, None, None, None)[:3]


def build(model: keras.Model, batch: Any) -> None:
    """Create the variables of the model, its losses and its metrics from the shapes of one batch.

    Raises:
        BatchError: the model was compiled with a loss, and there are no labels.
    """
    x, y, weight = unpack(batch)
    if y is None and model._compile_loss is not None:
        must = "A model that was compiled with a loss needs labels."
        raise BatchError(say(must, "a batch without y", "pass y, or batches of (x, y); or compile without a loss."))
    model._symbolic_build(data_batch=(x, y, weight))


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and all layers in it."""
    return list(model._flatten_layers())


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics to carry: all but the loss trackers, whose place our own sums take."""
    losses = model._compile_loss.metrics if model._compile_loss is not None else []
    trackers = [model._loss_tracker, *losses]
    return [m for m in model.metrics if not any(m is t for t in trackers)]


def made_of(model: keras.Model, extra: list) -> list:
    """Return what compiled programs depend on, the things themselves: an id alone may come again."""
    compiled = [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]
    flags = [part for layer in layers(model) for part in (layer, layer.trainable)]
    carried = [v for metric in (*metrics_of(model), *extra) for v in metric.variables]
    return [*compiled, *model.trainable_variables, *carried, *flags]


def are_same(one: list, two: list) -> bool:
    """Whether two lists hold the very same things."""
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def known_metrics(model: keras.Model, extra: list) -> list[keras.metrics.Metric] | None:
    """Return the metrics that are updated by compiled ones and `extra`; None if layers update others themselves."""
    compiled = model._compile_metrics
    if any(m is not compiled and not any(m is k for k in extra) for m in metrics_of(model)):
        return None
    return [*(compiled.metrics if compiled is not None else []), *extra]


def check_labels(ranges: list[LabelRange], batch: Any) -> None:
    """Refuse class numbers that the model has no output for: backends would count them as nothing, or as garbage.

    Raises:
        BatchError: as said, naming the first row.
    """
    labels = tree.named_leaves(unpack(batch)[1], "y")
    for place, num_classes, ignored in ranges:
        label, values = labels[place]
        outside = (values < 0) | (values >= num_classes)
        outside = outside if ignored is None else outside & (values != ignored)
        bad = np.flatnonzero(np.reshape(outside, (len(values), -1)).any(axis=1))
        if bad.size:
            raise BatchError(
                say(
                    f"Class numbers in {label} must lie in 0..{num_classes - 1}: the model has {num_classes} outputs.",
                    f"{values[bad[0]]} in row {bad[0]}",
                    "renumber the classes, widen the last layer, or set ignore_class.",
                )
            )


def _refuse_overrides(model: keras.Model) -> None:
    for method in ("train_step", "test_step", "compute_metrics"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise SpecificationError(
                say(
                    f"A model trained by its compiled losses must not override `{method}`.",
                    type(model).__name__,
                    "write the loss as a wholestep.Objective and pass Trainer(model, MyObjective(), optimizer=...).",
                )
            )


@contextmanager
def _recording(compile_loss: Any, calls: list[_Call]) -> Iterator[None]:
    """Let Keras match outputs, labels and weights as ever, but note each loss call instead of reducing it."""
    entries, metrics = compile_loss._flat_losses, compile_loss._metrics

    def recorder(entry: Any) -> Any:
        def record(y_true: Tensor, y_pred: Tensor, weight: Tensor = None) -> float:
            calls.append(_Call(entry.loss, _coefficient(entry.loss_weights), entry.name, y_true, y_pred, weight))
            return 0.0

        return entry._replace(loss=record, loss_weights=None)

    compile_loss._flat_losses = [recorder(entry) for entry in entries]
    compile_loss._metrics = [None] * len(entries)
    try:
        yield
    finally:
        compile_loss._flat_losses, compile_loss._metrics = entries, metrics


def _coefficient(given: float | None) -> float:
    return 1.0 if given is None else given


def _calls(model: keras.Model, y: Any, y_pred: Any, weight: Any) -> list[_Call]:
    calls: list[_Call] = []
    if model._compile_loss is not None:
        with _recording(model._compile_loss, calls):
            model._compile_loss(y, y_pred, weight)
    return calls


def _scores(model: keras.Model, y: Any, y_pred: Any, weight: Any) -> list[Score]:
    compiled = model._compile_metrics
    if compiled is None:
        return []
    y_true, y_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    weights = [None] if weight is None else compiled._flatten_y(weight)
    weights = weights if len(weights) == len(y_true) else [weights[0]] * len(y_true)
    plain = [(group, t, p, None) for group, t, p in zip(compiled._flat_metrics, y_true, y_pred, strict=False)]
    weighted = list(zip(compiled._flat_weighted_metrics, y_true, y_pred, weights, strict=False))
    return [Score(m, t, p, w) for group, t, p, w in plain + weighted if group for m in group.metrics]


def _term(call: _Call) -> Term:
    """Return one compiled loss before its reduction, with what Keras would have divided by as weights."""
    loss, dtype = call.loss, call.loss.dtype
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Whole(loss(call.y_true, call.y_pred, call.weight), call.coefficient)
    y_pred = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_pred)
    y_true = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_true)
    values = loss.call(y_true, y_pred)
    if len(values.shape) == 0:
        return Whole(ops.cast(loss(call.y_true, call.y_pred, call.weight), dtype), call.coefficient)
    mask = _both(get_keras_mask(call.y_pred), get_keras_mask(values))
    return _reduce(ops.cast(values, dtype), _fit(call.weight, values), _fit(mask, values), call)


def _reduce(values: Tensor, weight: Tensor, mask: Tensor, call: _Call) -> Term:
    reduction = call.loss.reduction
    if reduction == "sum":
        return Sum(values, _product(weight, mask, values), call.coefficient)
    if reduction == "mean_with_sample_weight":
        weights = _product(weight, mask, values)
        return Mean(_sum_broadcast(values, weights), weights, call.coefficient)
    if reduction in ("sum_over_batch_size", "mean"):
        # Keras weighs the values by sample_weight and divides by the count of unmasked values, not by their weight.
        return Mean(values if weight is None else _weighed(values, weight), mask, call.coefficient)
    raise SpecificationError(
        say(
            f"The loss {call.name!r} must have a reduction.",
            f"reduction={reduction!r}",
            'use "sum_over_batch_size", "mean_with_sample_weight" or "sum".',
        )
    )


def _both(a: Tensor, b: Tensor) -> Tensor:
    return a & b if a is not None and b is not None else (b if a is None else a)


def _fit(weight: Tensor, values: Tensor) -> Tensor:
    """Drop the trailing axes of length 1 that Keras would squeeze, so that weights lead the values' axes."""
    while weight is not None and len(weight.shape) > len(values.shape) and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, axis=-1)
    return None if weight is None else ops.cast(weight, values.dtype)


def _extend(weight: Tensor, values: Tensor) -> Tensor:
    return ops.reshape(weight, tuple(weight.shape) + (1,) * (len(values.shape) - len(weight.shape)))


def _product(weight: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    if weight is None or mask is None:
        return mask if weight is None else weight
    longer = weight if len(weight.shape) >= len(mask.shape) else mask
    return _extend(weight, longer) * _extend(mask, longer)


def _weighed(values: Tensor, weight: Tensor) -> Tensor:
    weight = _extend(weight, values)
    return ops.where(weight == 0, ops.zeros_like(values), values) * weight


def _sum_broadcast(values: Tensor, weights: Tensor) -> Tensor:
    """Sum the values over axes that the weights do not have: Keras divides by the sum of the weights as given."""
    if weights is None:
        return values
    axes = [a for a in range(1, len(values.shape)) if a >= len(weights.shape) or weights.shape[a] == 1]
    values = ops.sum(values, axis=[a for a in axes if a < len(weights.shape)], keepdims=True) if axes else values
    return ops.sum(values, axis=[a for a in axes if a >= len(weights.shape)]) if axes else values


def _label_range(call: _Call, labels: list) -> list[LabelRange]:
    loss = call.loss
    fn = getattr(loss, "fn", None)
    if fn is not keras.losses.sparse_categorical_crossentropy:
        return []
    axis = loss._fn_kwargs.get("axis", -1) if hasattr(loss, "_fn_kwargs") else -1
    found = [i for i, leaf in enumerate(labels) if leaf is call.y_true]
    return [LabelRange(i, int(call.y_pred.shape[axis]), loss._fn_kwargs.get("ignore_class")) for i in found]
