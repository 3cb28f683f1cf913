"""Weights of rows: class weights, and checks of sample weights."""

from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, message, shown
from wholestep.tree import Tree


def check_weights(
    batch: Tree,
    *,
    all_zero: bool,
    divisors: Collection[int] | None = None,
    numbers: np.ndarray | None = None,
) -> None:
    """Refuse sample weights that are not finite, that are negative, or (`all_zero`) that weigh no
    row at all.

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
        divides = divisors is None or position in divisors
        good = np.isfinite(weight) & (weight >= 0) if divides else np.isfinite(weight)
        bad = np.flatnonzero(~good.reshape(len(weight), -1).all(axis=1))
        if bad.size:
            must = f"{label} must be finite and not negative: the loss is divided by it."
            attempt = (
                "give rows that shall not count the weight 0; "
                'reduction="sum_over_batch_size" divides by rows.'
            )
            received = f"{weight[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            if not divides:
                must = f"{label} must be finite."
                attempt = "give rows that shall not count the weight 0."
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
    classes = np.asarray(sorted(class_weight), dtype=np.int64)
    weights = np.asarray(
        [class_weight[c] for c in sorted(class_weight)], dtype=keras.config.floatx()
    )

    def transform(batch: Tree) -> tuple[Any, ...]:
        if not isinstance(batch, tuple) or len(batch) != 2:
            received = f"{len(batch) if isinstance(batch, tuple) else 1} parts"
            must = "class_weight needs batches (x, y): it makes the sample weights."
            raise BatchError(
                message(must, received, "multiply class weights into sample_weight yourself.")
            )
        labels = _classes(batch[1])
        place = np.clip(np.searchsorted(classes, labels), 0, len(classes) - 1)
        found = classes[place] == labels
        return (*batch, np.where(found, weights[place], 1).astype(weights.dtype))

    return transform


def _check_class_weight(given: object) -> None:
    attempt = "{0: 1.0, 1: 5.0}, a weight for each class; leave it out for 1 each."
    if isinstance(given, Mapping):
        names = [c for c in given if not isinstance(c, Real) or not float(c).is_integer()]
        others = [w for w in given.values() if not isinstance(w, Real) or not np.isfinite(float(w))]
        if given and not names and not others:
            return
        attempt = "the classes' numbers: {0: 1.0, 1: 5.0}." if names else attempt
    elif isinstance(given, list | tuple | np.ndarray):
        attempt = "class_weight=dict(enumerate(weights))."
    raise SpecificationError(
        message("class_weight must map class numbers to finite weights.", shown(given), attempt)
    )


def _classes(y: Any) -> np.ndarray:
    if not hasattr(y, "shape") or len(y.shape) > 2:
        shape = getattr(y, "shape", type(y).__name__)
        must = "class_weight needs one class a row."
        raise BatchError(message(must, f"labels of shape {shape}", "pass sample_weight instead."))
    if y.dtype.kind not in "biuf":
        must = "class_weight needs classes that are numbers."
        attempt = "encode the labels as integers first."
        raise BatchError(message(must, f"labels of dtype {y.dtype}", attempt))
    if len(y.shape) == 2 and y.shape[1] > 1:
        return np.argmax(y, axis=1)
    return np.round(np.reshape(y, (-1,))).astype(np.int64)
