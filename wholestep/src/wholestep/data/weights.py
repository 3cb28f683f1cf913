"""Weights of rows: class weights, and checks of sample weights."""

from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

import keras
import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message, shown
from wholestep.tree import Tree


def check_weights(
    batch: Tree,
    *,
    all_zero: bool,
    divisors: Collection[int] | None = None,
    numbers: ndarray | None = None,
) -> None:
    """Refuse sample weights that are not finite, negative, or (`all_zero`) 0 for every row.

    Args:
        divisors: the leaves by which a mean is divided: only these must not be negative; None for
            all.
        numbers: the row numbers to show in errors; None to show indices.

    Raises:
        BatchError: such weights; names the first row.
    """
    if not isinstance(batch, tuple) or len(batch) < 3:
        return
    for position, (label, weight) in enumerate(tree.named_leaves(batch[2], "sample_weight")):
        must = f"{label} must be finite."
        attempt = "give rows that shall not count the weight 0."
        good = np.isfinite(weight)
        if divisors is None or position in divisors:
            good &= weight >= 0
            must = f"{label} must be finite and not negative: the loss is divided by it."
            attempt = (
                "give rows that shall not count the weight 0; "
                'reduction="sum_over_batch_size" divides by rows.'
            )
        good_rows = good.reshape(len(weight), -1).all(axis=1)
        for row in np.flatnonzero(~good_rows)[:1]:
            received = f"{weight[row]} in row {row if numbers is None else numbers[row]}"
            raise BatchError(message(must, received, attempt))
        if all_zero and not np.any(weight):
            must = f"{label} must weigh at least one row."
            raise BatchError(message(must, "weights that are all 0", "leave sample_weight out."))


def class_weighted(class_weight: dict[int, float]) -> Callable[[Tree], tuple[Any, ...]]:
    """Return the transform (x, y) -> (x, y, weight of the row's class); other classes weigh 1.

    Raises:
        SpecificationError: not a mapping of class numbers to finite weights.
        BatchError: the batch has weights already, or labels that are not one class a row.
    """
    _check_class_weight(class_weight)
    classes = np.asarray(sorted(class_weight), np.int64)
    values = [class_weight[number] for number in sorted(class_weight)]
    weights = np.asarray(values, keras.config.floatx())

    def transform(batch: Tree) -> tuple[Any, ...]:
        if not isinstance(batch, tuple) or len(batch) != 2:
            received = f"{len(batch) if isinstance(batch, tuple) else 1} parts"
            must = "class_weight needs batches (x, y): it makes the sample weights."
            attempt = "multiply class weights into sample_weight yourself."
            raise BatchError(message(must, received, attempt))
        labels = _classes(batch[1])
        nearest = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
        is_weighted = classes[nearest] == labels
        weight = np.where(is_weighted, weights[nearest], 1)
        return (*batch, weight.astype(weights.dtype))

    return transform


def _check_class_weight(class_weight: object) -> None:
    attempt = "{0: 1.0, 1: 5.0}, a weight for each class; leave it out for 1 each."
    if isinstance(class_weight, Mapping):
        if not all(_is_finite(number) and number % 1 == 0 for number in class_weight):
            attempt = "the classes' numbers: {0: 1.0, 1: 5.0}."
        elif class_weight and all(map(_is_finite, class_weight.values())):
            return
    elif isinstance(class_weight, list | tuple | ndarray):
        attempt = "class_weight=dict(enumerate(weights))."
    must = "class_weight must map class numbers to finite weights."
    raise SpecificationError(message(must, shown(class_weight), attempt))


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and bool(np.isfinite(float(value)))


def _classes(y: Any) -> ndarray:
    must = "class_weight needs one class a row."
    if not hasattr(y, "shape") or len(y.shape) > 2:
        shape = getattr(y, "shape", type(y).__name__)
        raise BatchError(message(must, f"labels of shape {shape}", "pass sample_weight instead."))
    if y.dtype.kind not in "biuf":
        must = "class_weight needs classes that are numbers."
        attempt = "encode the labels as integers first."
        raise BatchError(message(must, f"labels of dtype {y.dtype}", attempt))
    if len(y.shape) == 2 and y.shape[1] > 1:
        return np.argmax(y, axis=1)
    return np.round(y.reshape(-1)).astype(np.int64)
