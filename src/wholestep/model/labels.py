"""Labels that are class numbers, and the range for which a compiled model has outputs."""

from typing import NamedTuple

import keras
import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, message, warn
from wholestep.model.compiled import unpack
from wholestep.model.reduction import LossCall
from wholestep.tree import Tree

# Keras' losses that compare element by element; its others check shapes themselves, or take other shapes by design.
_ELEMENTWISE = (
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.cosine_similarity,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.categorical_hinge,
    keras.losses.kl_divergence,
    keras.losses.poisson,
)


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


def warn_of_broadcast(call: LossCall) -> bool:
    """Warn if one of Keras' losses broadcasts labels against an output; return whether it does."""
    is_elementwise = any(getattr(call.loss, "fn", None) is fn for fn in _ELEMENTWISE)
    given, made = (tuple(getattr(each, "shape", ())) for each in (call.y_true, call.y_pred))
    if not is_elementwise or _are_alike(given, made):
        return False
    shapes = [f"({', '.join(['rows', *map(str, shape[1:])])})" for shape in (given, made)]
    must = f"The labels of the loss {call.name!r} must have the shape of the output."
    received = f"labels of shape {shapes[0]}, outputs of shape {shapes[1]}: the loss broadcasts them, as in Keras"
    warn(message(must, received, "pass labels of the output's shape, or give the last layer as many units as labels."))
    return True


def _are_alike(given: tuple, made: tuple) -> bool:
    """Whether shapes are equal as far as they are known; Keras adds or drops a last axis of length 1."""
    if abs(len(given) - len(made)) == 1:
        longer = max(given, made, key=len)
        given, made = (shape[:-1] if shape is longer and shape[-1] == 1 else shape for shape in (given, made))
    pairs = list(zip(given[1:], made[1:], strict=False))
    return len(given) == len(made) and all(a == b or a is None or b is None for a, b in pairs)


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
