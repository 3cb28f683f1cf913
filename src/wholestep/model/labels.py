"""Labels that are class numbers, and the range for which a compiled model has outputs."""

from typing import NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, message
from wholestep.model.compiled import unpack
from wholestep.model.reduction import LossCall
from wholestep.tree import Tree


class LabelRange(NamedTuple):
    """The class numbers that one leaf of the labels may hold."""

    leaf: int
    num_classes: int
    ignored: int | None


def label_ranges(call: LossCall, labels: list) -> list[LabelRange]:
    """Return the range of class numbers that a loss has outputs for, by leaf of the labels that it is called with."""
    loss = call.loss
    fn = getattr(loss, "fn", None)
    if fn is not keras.losses.sparse_categorical_crossentropy:
        return []
    axis = loss._fn_kwargs.get("axis", -1) if hasattr(loss, "_fn_kwargs") else -1
    found = [i for i, leaf in enumerate(labels) if leaf is call.y_true]
    return [LabelRange(i, int(call.y_pred.shape[axis]), loss._fn_kwargs.get("ignore_class")) for i in found]


def check_labels(ranges: list[LabelRange], batch: Tree, numbers: np.ndarray | None = None) -> None:
    """Refuse class numbers that the model has no output for: backends would count them as nothing, or as garbage.

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
                f"Class numbers in {label} must be whole and lie in 0..{num_classes - 1}: the model has {num_classes}"
            )
            received = f"{values[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            attempt = "renumber the classes, widen the last layer, or set ignore_class."
            raise BatchError(message(f"{must} outputs.", received, attempt))
