"""A compiled Keras model is an objective by itself, with Keras' own meaning of every loss, weight, mask and metric.

The only module that looks inside Keras (`keras.Model.compile` keeps what it was given in private attributes). Keras
decides which output meets which label and loss; we take over before it reduces (keras/src/losses/loss.py).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.model.objective import Objective, Reading, Score
from wholestep.model.terms import Mean, Sum, Term, Whole
from wholestep.tree import Tensor, Tree

_STEPS = {
    "train_step": "if `train_step` accumulates gradients, delete it and pass Trainer(model, microbatch_size=...); if "
    "it has a loss of its own (a VAE, a GAN), write that as a wholestep.Objective, as docs/recipes.md shows, and pass "
    "Trainer(model, MyObjective(), optimizer=...).",
    "test_step": "if `test_step` has the loss of such a `train_step`, the objective is evaluated in its place; else "
    "delete it.",
    "compute_metrics": "give `compute_metrics`' metrics to compile(metrics=...), or to Trainer(metrics=...) with an "
    "objective that feeds them by name.",
}


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

    `label_ranges` and `divisors` (the leaves of the sample weights by which a mean is divided) are valid once the
    objective has been traced.
    """

    def __init__(self, model: keras.Model, metrics: list):
        self.extra_metrics = metrics
        self.label_ranges: list[LabelRange] = []
        self.divisors: set[int] = set()
        self._has_told = False

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Reading:
        """Return the compiled losses' terms and the compiled metrics' updates."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        scores = [*_scores(model, y, y_pred, weight), *(Score(m, y, y_pred) for m in self.extra_metrics)]
        if is_overridden(model, "compute_loss"):
            loss = model._compute_loss(x, y, y_pred, weight, training=training)
            return Reading({"": _own_loss(model, loss)}, {}, scores, is_complete=True)
        calls = self._that_count(_calls(model, y, y_pred, weight), y, y_pred)
        self.label_ranges = [found for call in calls for found in _label_range(call, tree.leaves(y))]
        dividing = [call.weight for call in calls if getattr(call.loss, "reduction", None) == "mean_with_sample_weight"]
        self.divisors = {i for i, leaf in enumerate(tree.leaves(weight)) if any(leaf is w for w in dividing)}
        names = _distinct([f"{call.name}_loss" for call in calls]) if len(calls) > 1 else [""] * len(calls)
        return Reading({name: _term(call) for name, call in zip(names, calls, strict=True)}, {}, scores)

    def _that_count(self, calls: list[_Call], y: Tree, y_pred: Tree) -> list[_Call]:
        """Return what Keras minimises: of several losses for one output and one leaf of labels the first alone."""
        if len(calls) < 2 or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
            return calls
        if not self._has_told:
            self._has_told = True
            told = f"The model has one output, and {len(calls)} losses: as in Keras, all but the first have no effect. "
            warnings.warn(f"{told}To minimise their sum, write one function that adds them.", UserWarning, stacklevel=2)
        return calls[:1]


def unpack(batch: Tree) -> tuple[Tree, Tree, Tree]:
    """Return (x, y, sample_weight) of a batch, None for what it does not have."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(parts) > 3:
        raise SpecificationError(
            message(
                "A batch must be x, (x, y) or (x, y, sample_weight).",
                f"{len(parts)} parts",
                "nest several inputs in x.",
            )
        )
    return (*parts, None, None, None)[:3]


def build(model: keras.Model, batch: Tree) -> None:
    """Create the variables of the model, its losses and its metrics from the shapes of one batch.

    Raises:
        BatchError: the model was compiled with a loss, and there are no labels.
    """
    x, y, weight = unpack(batch)
    if y is None and model._compile_loss is not None:
        must = "A model that was compiled with a loss needs labels."
        raise BatchError(message(must, "a batch without y", "pass y, or batches of (x, y); or compile without a loss."))
    model._symbolic_build(data_batch=(x, y, weight))


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the model and all layers in it."""
    return list(model._flatten_layers())


def is_overridden(model: keras.Model, name: str) -> bool:
    """Whether a model has a method of its own in place of Keras'."""
    return getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics to carry: all but the loss trackers, whose place our own sums take.

    Those of single losses are carried if a `compute_loss` of the model's own may move them.
    """
    trackers = loss_trackers(model).values()
    return [m for m in model.metrics if not any(m is t for t in trackers)]


def loss_trackers(model: keras.Model) -> dict[str, keras.metrics.Mean]:
    """Return the metrics whose place our own sums take, by what they are called in the logs."""
    if not model.compiled:
        return {}
    has_own = is_overridden(model, "compute_loss") or model._compile_loss is None
    losses = [] if has_own else model._compile_loss.metrics
    return {"loss": model._loss_tracker, **dict(zip(_distinct([m.name for m in losses]), losses, strict=True))}


def resets_on_the_host(metric: keras.metrics.Metric) -> bool:
    """Whether a metric has a `reset_state` of its own, which may do anything; so may a metric in it."""
    own = type(metric).reset_state.__module__.split(".")[0] != "keras"
    return own or any(map(resets_on_the_host, getattr(metric, "metrics", ())))


def tracked(model: keras.Model, numbers: dict[str, Tensor | float]) -> list[tuple[keras.Variable, Tensor | float]]:
    """Return the variables of the loss trackers, and what they hold where these are the numbers of an epoch."""
    found = [(tracker, numbers[name]) for name, tracker in loss_trackers(model).items() if name in numbers]
    return [pair for tracker, number in found for pair in ((tracker.total, number), (tracker.count, 1))]


def own_results(model: keras.Model) -> dict[str, Tensor]:
    """Return what a `get_metrics_result` of the model's own says of its metrics now; nothing, if it has none."""
    return dict(model.get_metrics_result()) if is_overridden(model, "get_metrics_result") else {}


def in_order(model: keras.Model, logs: dict[str, Tensor | float]) -> Tensor | float | list:
    """Return what `evaluate` returns of these logs: a number, or the list of `keras.Model.evaluate`."""
    trackers = [] if model._compile_loss is None else model._compile_loss.metrics
    renamed = dict(zip(map(id, trackers), _distinct([m.name for m in trackers]), strict=True))
    names = []
    for metric in model.metrics:
        parts = metric.metrics if metric is model._compile_metrics else [metric]
        names += [renamed.get(id(part), part.name) for part in parts]
    values = [logs[name] for name in names if name in logs] + [logs[k] for k in sorted(logs) if k not in names]
    return values[0] if len(values) == 1 else values


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


def check_labels(ranges: list[LabelRange], batch: Tree, numbers: np.ndarray | None = None) -> None:
    """Refuse class numbers that the model has no output for: backends would count them as nothing, or as garbage.

    Args:
        numbers: what the rows are called, if not by their places.

    Raises:
        BatchError: as said, naming the first row.
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
                f"Class numbers in {label} must be whole and lie in 0..{num_classes - 1}: the model has {num_classes}"
            )
            received = f"{values[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            attempt = "renumber the classes, widen the last layer, or set ignore_class."
            raise BatchError(message(f"{must} outputs.", received, attempt))


def refuse_overrides(model: keras.Model) -> None:
    """Refuse steps of the user's own, which are not ours to cut, in the words of who may have written them."""
    own = [m for m in _STEPS if getattr(type(model), m) is not getattr(keras.Model, m)]
    if own:
        steps = " and ".join(f"`{m}`" for m in own)
        raise SpecificationError(
            message(
                f"A model trained by its compiled losses must not override {' or '.join(f'`{m}`' for m in _STEPS)}.",
                f"{steps} of {type(model).__name__}",
                " ".join(_STEPS[m] for m in own),
            )
        )


@contextmanager
def _recording(model: keras.Model, calls: list[_Call]) -> Iterator[None]:
    """Let Keras match outputs, labels and weights as ever, but note each loss call instead of reducing it."""
    compile_loss = model._compile_loss
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


def _own_loss(model: keras.Model, loss: Tensor | None) -> Whole:
    shape = None if loss is None else tuple(ops.shape(loss))
    if shape != ():
        received = "None" if shape is None else f"shape {shape}"
        attempt = "return keras.ops.mean(...) there; or write the loss as a wholestep.Objective, which may be cut."
        raise SpecificationError(
            message(f"`compute_loss` of {type(model).__name__} must return one number.", received, attempt)
        )
    return Whole(ops.convert_to_tensor(loss))


def _distinct(names: list[str]) -> list[str]:
    """Number names that come again, as Keras does with metrics.

    >>> _distinct(["mse_loss", "mse_loss", "a_loss"])
    ['mse_loss', 'mse_loss_1', 'a_loss']
    """
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}_{count}" if count else name for name, count in zip(names, counts, strict=True)]


def _coefficient(given: float | None) -> float:
    return 1.0 if given is None else given


def _calls(model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[_Call]:
    calls: list[_Call] = []
    if model._compile_loss is not None:
        with _recording(model, calls):
            model._compile_loss(y, y_pred, weight)
    return calls


def _scores(model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[Score]:
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
    if len(getattr(values, "shape", ())) == 0:  # a Python number, of an output that shall not count
        return Whole(ops.cast(loss(call.y_true, call.y_pred, call.weight), dtype), call.coefficient)
    mask = _both(get_keras_mask(call.y_pred), get_keras_mask(values))
    return _reduce(ops.cast(values, dtype), _checked(_fit(call.weight, values), values), _fit(mask, values), call)


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
        message(
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


def _checked(weight: Tensor, values: Tensor) -> Tensor:
    """Refuse weights of more axes than the values have: those of a single row would broadcast."""
    if weight is not None and len(weight.shape) > len(values.shape):
        must = "sample_weight must hold one number for each row, or for each of the places that the loss tells apart."
        received = f"weights of shape {tuple(weight.shape)} beside losses of shape {tuple(values.shape)}"
        raise BatchError(message(must, received, "pass weights of shape (rows,)."))
    return weight


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
