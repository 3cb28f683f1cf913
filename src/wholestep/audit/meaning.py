"""The loss that was meant, as an objective over (x, y[, sample_weight]), and the losses that it is mistaken for."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import keras
from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import unpack
from wholestep.model.losses import CompiledObjective
from wholestep.model.objective import Objective
from wholestep.model.reduction import LossCall, unreduced
from wholestep.model.terms import Term
from wholestep.tree import Tensor, Tree


class _Function(keras.losses.Loss):
    """A plain function as a Keras loss; labels and outputs are given the same rank, as Keras does."""

    def __init__(self, function: Callable):
        super().__init__(name=getattr(function, "__name__", None))
        self._function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's values; of one that returns a single number, its number for each row by itself."""
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = ops.expand_dims(y_true, -1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, -1)
        values = self._function(y_true, y_pred)
        if len(values.shape):
            return values
        num = y_pred.shape[0]
        return ops.stack([self._function(y_true[i : i + 1], y_pred[i : i + 1]) for i in range(num)])


class _Twice(keras.losses.Loss):
    """A loss of logits, of what a softmax (or sigmoid) makes of them."""

    def __init__(self, loss: keras.losses.Loss):
        super().__init__(name=loss.name, reduction=loss.reduction)
        self._loss = loss

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the loss's values, of the outputs after the activation that it has in itself."""
        is_binary = "Binary" in type(self._loss).__name__  # written out, as Keras would undo its own activations
        return self._loss.call(y_true, 1 / (1 + ops.exp(-y_pred)) if is_binary else ops.exp(ops.log_softmax(y_pred)))


class LossObjective(Objective):
    """One Keras loss, on the model's one output."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Term:
        """Return the loss before its reduction, with what Keras would have divided by."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training)
        return unreduced(LossCall(self.loss, 1.0, "loss", y, y_pred, weight))


def meant(model: keras.Model, loss: Any) -> Objective:
    """Return the objective that is meant.

    Raises:
        SpecificationError: there is no loss, or none that can be understood.
    """
    if isinstance(loss, Objective):
        return loss
    if loss is None:
        if not getattr(model, "compiled", False) or model._compile_loss is None:
            must, attempt = "The audit needs the loss that is meant.", "ws.audit(model, data=(x, y), loss=...)."
            raise SpecificationError(message(must, "loss=None, and a model without a compiled loss", attempt))
        loss = model.loss
        if isinstance(loss, dict | list | tuple):
            return CompiledObjective(model, [])
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        return LossObjective(loss)
    if callable(loss):
        return LossObjective(_Function(loss))
    must = "loss must be a Keras loss, a function of labels and outputs, or an Objective."
    raise SpecificationError(message(must, type(loss).__name__, "loss=keras.losses.MeanSquaredError()."))


def mistaken(objective: Objective) -> dict[str, Objective]:
    """Return the losses that the one meant is mistaken for, by the name of the cause."""
    loss = getattr(objective, "loss", None)
    if not isinstance(objective, LossObjective) or loss is None:
        return {}
    found = {}
    function = getattr(loss, "_function", None)
    if function is None:
        config = loss.get_config()
        if "from_logits" in config:
            found["from_logits"] = type(loss).from_config(config | {"from_logits": not config["from_logits"]})
        if config.get("from_logits"):
            found["softmax twice"] = _Twice(loss)
        if config.get("label_smoothing"):
            found["smoothing missing"] = type(loss).from_config(config | {"label_smoothing": 0.0})
    elif "from_logits" in signature(function).parameters:
        flipped = not getattr(function, "keywords", {}).get("from_logits", False)
        found["from_logits"] = _Function(partial(function, from_logits=flipped))
    return {name: LossObjective(other) for name, other in found.items()}
