"""The loss that is meant, as an objective over (x, y[, sample_weight])."""

from inspect import isclass
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.losses import Loss
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss

from stepcheck import port, tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.port import OneLoss
from stepcheck.seams import replaced
from stepcheck.tree import Tensor, Tree
from wholestep.model import (
    CompiledObjective,
    LossCall,
    Mean,
    Objective,
    ScalarTerm,
    Sum,
    Term,
    checked,
    is_overridden,
    unpack,
    unreduced,
)

_FEW_ROWS = 16  # that show whether a loss is one of rows
_ALIKE, _SAME = 3e-4, 1e-2  # of rows' numbers, and of how they differ


class Function(Loss):
    """A plain function as a loss of Keras, which gives labels and outputs one rank."""

    def __init__(self, function: Any):
        super().__init__(name=getattr(function, "__name__", None))
        self.function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Return the function's values, or its (values, weights)."""
        if hasattr(y_true, "shape") and hasattr(y_pred, "shape"):
            y_true, y_pred = squeeze_or_expand_to_same_rank(y_true, y_pred)
        return self.function(y_true, y_pred)


class LossObjective(OneLoss, Objective):
    """One Keras loss, on the model's one output, by the mask that the model makes or
    without.

    A loss of one number for a batch is the mean or the sum of its rows' losses, or else
    a `ScalarTerm`: `loss.kind` says so once it is settled.
    """

    def __init__(self, loss: Any, *, is_masked: bool = True):
        self.loss, self.is_masked = loss, is_masked

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Term:
        """Return the loss before its reduction, with the divisor of Keras."""
        x, y, weight = unpack(batch)
        y_pred = model(x, training=training)
        if not self.is_masked:
            # without its mask
            y_pred = tree.map_leaves(lambda leaf: leaf + 0, y_pred)
        return self.of(y, y_pred, weight)

    def of(self, y: Tree, y_pred: Tree, weight: Any = None) -> Term:
        """Return the loss of outputs."""
        if isinstance(self.loss, Function):
            found = self.loss.call(y, y_pred)
            if isinstance(found, tuple | list):
                values, weights = found
                return _weighed(values, weights, weight)
        term = unreduced(LossCall(self.loss, 1.0, "loss", y, y_pred, weight))
        kind = getattr(self.loss, "kind", ScalarTerm)
        if kind is ScalarTerm or not isinstance(term, ScalarTerm):
            return term
        num = tree.leaves(y_pred)[0].shape[0]
        return kind(
            ops.stack([self._alone([i], y, y_pred) for i in range(num)])
        )

    def _alone(self, rows: Any, y: Tree, y_pred: Tree) -> Tensor:
        """Return the one number of some rows."""
        labels, made = (
            tree.map_leaves(lambda leaf: ops.take(leaf, rows, axis=0), part)
            for part in (y, y_pred)
        )
        return unreduced(
            LossCall(self.loss, 1.0, "loss", labels, made, None)
        ).values

    def kind_of(self, y: Tree, y_pred: Tree, weight: Any) -> type | None:
        """Return whether the loss of a batch is the mean or the sum of its rows' losses,
        or neither; None if its rows are alike.
        """
        self.loss.kind = ScalarTerm
        num = len(tree.leaves(y_pred)[0])
        (term,) = checked({"loss": self.of(y, y_pred, weight)}, num).values()
        if not isinstance(term, ScalarTerm):
            return Mean
        if weight is not None:
            raise ValueError(
                "a loss of one number has no place for weights of rows"
            )
        some = np.unique(np.linspace(0, num - 1, _FEW_ROWS).astype(int))
        found, _ = attempt(
            lambda: [
                float(self._alone(own, y, y_pred))
                for own in (some, *some[:, None])
            ]
        )
        if found is None:  # an error: of a loss of batches of one size
            return ScalarTerm
        number, *alone = found
        size, spread = _ALIKE * np.mean(np.abs(alone)), np.std(alone)
        near = _SAME * max(spread, size)
        for kind, divisor in ((Mean, 1), (Sum, len(some))):
            if abs(number / divisor - np.mean(alone)) <= near:
                return kind if spread > size or num == 1 else None
        return ScalarTerm


def _weighed(values: Tensor, weights: Tensor, given: Any) -> Mean:
    """Return values with weights of their own, times those of the data."""
    weights = ops.cast(ops.stop_gradient(weights), values.dtype)
    if given is not None:
        missing = len(weights.shape) - len(given.shape)
        given = ops.cast(given, values.dtype)
        weights = weights * ops.reshape(given, (*given.shape, *[1] * missing))
    return Mean(values, weights)


class _AsCompiled(CompiledObjective):
    """Several losses, as `compile` takes them, in place of the model's compiled losses."""

    def __init__(self, model: keras.Model, loss: Any, x: Tree, y: Tree):
        super().__init__([])
        self._loss = CompileLoss(
            loss, output_names=getattr(model, "output_names", None)
        )
        self._loss.build(y, outputs(model, x))

    def __call__(self, model: keras.Model, batch: Tree, training: bool) -> Any:
        """Return the terms of these losses."""
        with replaced(model, "_compile_loss", self._loss):
            return super().__call__(model, batch, training)


def meant(model: keras.Model, loss: Any, x: Tree, y: Tree) -> Objective:
    """Return the objective that is meant, on these data.

    Raises:
        SpecificationError: there is no loss, or it is not a loss.
    """
    if isinstance(loss, Objective):
        return loss
    if loss is None:
        loss = _compiled_loss(model)
        is_own = is_overridden(model, "compute_loss")
        if is_own or isinstance(loss, dict | list | tuple):
            # as `fit` does before its first batch
            build = model._compile_loss.build
            if not model._compile_loss.built:
                attempt(lambda: build(y, outputs(model, x)))
            return CompiledObjective([])
    if isinstance(loss, dict | list | tuple):
        try:
            return _AsCompiled(model, loss, x, y)
        except (TypeError, ValueError, KeyError) as error:
            must = "Several losses must fit the model's outputs and the labels, as in compile."
            received = f"{loss}: {error}"
            raise SpecificationError(
                message(must, received, "one for each.")
            ) from error
    return _one_loss(loss)


def _compiled_loss(model: keras.Model) -> Any:
    if not getattr(model, "compiled", False) or model._compile_loss is None:
        must = "The loss that is meant must be stated."
        received = "loss=None, and a model without a compiled loss"
        advice = "watch(model, data, loss=...)."
        raise SpecificationError(message(must, received, advice))
    return model.loss


def _one_loss(stated: Any) -> LossObjective:
    loss = stated
    if isinstance(stated, str):
        loss, _ = attempt(lambda: keras.losses.get(stated))
    loss = _of_function(loss)
    if isinstance(loss, Loss):
        loss = _copied(loss)
        if loss.reduction in (None, "none"):  # the script takes the mean
            loss.reduction = "sum_over_batch_size"
        return LossObjective(loss)
    if callable(loss) and not isclass(loss):
        return LossObjective(Function(loss))
    must = "loss must be a Keras loss, a function of labels and outputs, or an Objective."
    advice = "loss=keras.losses.MeanSquaredError()."
    raise SpecificationError(message(must, repr(stated), advice))


def _copied(loss: Loss) -> Loss:
    """Return the loss itself once more: its configuration may not be whole."""
    found = object.__new__(type(loss))
    vars(found).update(vars(loss))
    return found


def _of_function(loss: Any) -> Any:
    """Return Keras' loss of one of its functions; anything else unchanged."""
    kinds = [each for each in vars(keras.losses).values() if isclass(each)]
    made = [
        kind() for kind in kinds if issubclass(kind, Loss) and kind is not Loss
    ]
    return next(
        (each for each in made if getattr(each, "fn", None) is loss), loss
    )


def outputs(model: keras.Model, x: Tree) -> Tree:
    """Return the outputs for one row as symbols."""
    symbols = tree.map_leaves(
        lambda leaf: keras.KerasTensor((1, *leaf.shape[1:]), leaf.dtype), x
    )
    return model.compute_output_spec(symbols)


def tensors(outputs: Tree) -> list[Tensor]:
    """Return the tensors in a model's outputs; others may be text or objects."""
    return [
        *map(ops.convert_to_tensor, filter(ops.is_tensor, tree.leaves(outputs)))
    ]


class NoLoss(port.NoLoss, Objective):
    """Placeholder for an unknown loss: gradients are not judged."""

    def __call__(self, model: keras.Model, batch: Any, training: bool) -> Mean:
        """Return zeros, one for each row."""
        output = tensors(model(batch[0], training=training))[0]
        return Mean(ops.zeros(ops.shape(output)[:1]))
