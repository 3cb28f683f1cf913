"""The compiled losses of a Keras model as an objective, with Keras' meaning of every loss, weight and mask.

Keras matches outputs, labels and losses; we take over before its reduction (keras/src/losses/loss.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import keras
from keras import ops

from wholestep import tree
from wholestep.errors import SpecificationError, message, warn
from wholestep.model.compiled import distinct, is_overridden, unpack
from wholestep.model.labels import LabelRange, label_ranges, warn_of_broadcast
from wholestep.model.objective import Objective, Reading, Score
from wholestep.model.reduction import LossCall, unreduced
from wholestep.model.terms import Whole
from wholestep.tree import Tensor, Tree


class CompiledObjective(Objective):
    """The arguments of `model.compile(...)` as an objective over batches (x, y) or (x, y, sample_weight).

    `label_ranges` and `divisors` (the leaves of the sample weights by which a mean is divided) are valid once the
    objective has been traced.
    """

    def __init__(self, model: keras.Model, metrics: list):
        self.extra_metrics = metrics
        self.label_ranges: list[LabelRange] = []
        self.divisors: set[int] = set()
        self._has_told = False
        self._has_told_of_labels = False

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Reading:
        """Return the terms of the compiled losses and the updates of the compiled metrics."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
        scores = [*_scores(model, y, y_pred, weight), *(Score(m, y, y_pred) for m in self.extra_metrics)]
        if is_overridden(model, "compute_loss"):
            loss = model._compute_loss(x, y, y_pred, weight, training=training)
            return Reading({"": _own_loss(model, loss)}, {}, scores, is_complete=True)
        calls = self._that_count(_calls(model, y, y_pred, weight), y, y_pred)
        if training and not calls and not model.losses:
            must = "Training needs a loss."
            received = "a model that was compiled without a loss, and whose layers add none"
            attempt = 'compile("adam", loss="mse"), call add_loss in a layer, or pass an Objective to the Trainer.'
            raise SpecificationError(message(must, received, attempt))
        if not self._has_told_of_labels:
            told = [warn_of_broadcast(call) for call in calls]
            self._has_told_of_labels = any(told)
        self.label_ranges = [found for call in calls for found in label_ranges(call, tree.leaves(y))]
        dividing = [call.weight for call in calls if getattr(call.loss, "reduction", None) == "mean_with_sample_weight"]
        self.divisors = {i for i, leaf in enumerate(tree.leaves(weight)) if any(leaf is w for w in dividing)}
        names = distinct([f"{call.name}_loss" for call in calls]) if len(calls) > 1 else [""] * len(calls)
        return Reading({name: unreduced(call) for name, call in zip(names, calls, strict=True)}, {}, scores)

    def _that_count(self, calls: list[LossCall], y: Tree, y_pred: Tree) -> list[LossCall]:
        """Return the losses that Keras minimises: only the first of several for one output and one leaf of labels."""
        if len(calls) < 2 or keras.tree.is_nested(y) or keras.tree.is_nested(y_pred):
            return calls
        if not self._has_told:
            self._has_told = True
            told = f"The model has one output, and {len(calls)} losses: as in Keras, all but the first have no effect. "
            warn(f"{told}To minimise their sum, write one function that adds them.")
        return calls[:1]


class _Entry(Protocol):
    """Keras' record of one loss, a named tuple."""

    loss: keras.losses.Loss
    loss_weights: float | None
    name: str

    def _replace(self, **fields: object) -> "_Entry": ...


@contextmanager
def _recording(model: keras.Model, calls: list[LossCall]) -> Iterator[None]:
    """Let Keras match outputs, labels and weights, but record each loss call instead of reducing it."""
    compile_loss = model._compile_loss
    entries, metrics = compile_loss._flat_losses, compile_loss._metrics

    def recorder(entry: _Entry) -> _Entry:
        def record(y_true: Tensor, y_pred: Tensor, weight: Tensor = None) -> float:
            calls.append(LossCall(entry.loss, _coefficient(entry.loss_weights), entry.name, y_true, y_pred, weight))
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


def _coefficient(given: float | None) -> float:
    return 1.0 if given is None else given


def _calls(model: keras.Model, y: Tree, y_pred: Tree, weight: Tree) -> list[LossCall]:
    calls: list[LossCall] = []
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
