"""Class weights: one sample weight for all rows of a class."""

from collections.abc import Callable, Mapping
from numbers import Real

import keras
import numpy as np

from wholestep.errors import BatchError, SpecificationError, message, shown
from wholestep.tree import Tree


def class_weighted(class_weight: dict[int, float]) -> Callable[[Tree], Tree]:
    """Return the transform (x, y) -> (x, y, weight of the row's class); other classes weigh 1.

    Raises:
        SpecificationError: not a mapping of class numbers to finite weights.
        BatchError: the batch has weights already, or labels that are not one class a row.
    """
    _check_class_weight(class_weight)
    classes = np.asarray(sorted(class_weight), dtype=np.int64)
    weights = np.asarray([class_weight[c] for c in sorted(class_weight)], dtype=keras.config.floatx())

    def transform(batch: Tree) -> Tree:
        if not isinstance(batch, tuple) or len(batch) != 2:
            received = f"{len(batch) if isinstance(batch, tuple) else 1} parts"
            raise BatchError(
                message(
                    "class_weight needs batches (x, y): it makes the sample weights.",
                    received,
                    "multiply class weights into sample_weight yourself.",
                )
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
    raise SpecificationError(message("class_weight must map class numbers to finite weights.", shown(given), attempt))


def _classes(y: Tree) -> np.ndarray:
    if not hasattr(y, "shape") or len(y.shape) > 2:
        shape = getattr(y, "shape", type(y).__name__)
        raise BatchError(
            message("class_weight needs one class a row.", f"labels of shape {shape}", "pass sample_weight instead.")
        )
    if y.dtype.kind not in "biuf":
        must, attempt = "class_weight needs classes that are numbers.", "encode the labels as integers first."
        raise BatchError(message(must, f"labels of dtype {y.dtype}", attempt))
    if len(y.shape) == 2 and y.shape[1] > 1:
        return np.argmax(y, axis=1)
    return np.round(np.reshape(y, (-1,))).astype(np.int64)
