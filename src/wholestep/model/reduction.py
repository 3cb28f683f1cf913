"""One loss of a compiled model before its reduction: its values, with Keras' divisor as weights."""

from typing import NamedTuple

import keras
from keras import ops
from keras.src.backend import get_keras_mask

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.model.terms import Mean, Sum, Term, Whole
from wholestep.tree import Tensor


class LossCall(NamedTuple):
    """One loss with the arguments of Keras' call and its coefficient."""

    loss: keras.losses.Loss
    coefficient: float
    name: str
    y_true: Tensor
    y_pred: Tensor
    weight: Tensor


def unreduced(call: LossCall) -> Term:
    """Return one compiled loss before its reduction, with Keras' divisor as weights."""
    loss, dtype = call.loss, call.loss.dtype
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Whole(loss(call.y_true, call.y_pred, call.weight), call.coefficient)
    y_pred = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_pred)
    y_true = tree.map_leaves(lambda leaf: ops.convert_to_tensor(leaf, dtype=dtype), call.y_true)
    values = loss.call(y_true, y_pred)
    if len(getattr(values, "shape", ())) == 0:  # a Python number, of an output that does not count
        return Whole(ops.cast(loss(call.y_true, call.y_pred, call.weight), dtype), call.coefficient)
    mask = _both(get_keras_mask(call.y_pred), get_keras_mask(values))
    return _reduce(ops.cast(values, dtype), _checked(_fit(call.weight, values), values), _fit(mask, values), call)


def _reduce(values: Tensor, weight: Tensor, mask: Tensor, call: LossCall) -> Term:
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
    """Refuse weights of more axes than the values: weights of a single row would broadcast."""
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
    """Sum the values over the axes that the weights lack: Keras divides by the sum of the unbroadcast weights."""
    if weights is None:
        return values
    axes = [a for a in range(1, len(values.shape)) if a >= len(weights.shape) or weights.shape[a] == 1]
    values = ops.sum(values, axis=[a for a in axes if a < len(weights.shape)], keepdims=True) if axes else values
    return ops.sum(values, axis=[a for a in axes if a >= len(weights.shape)]) if axes else values
