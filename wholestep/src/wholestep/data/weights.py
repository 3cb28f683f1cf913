"""Weights of rows: class weights, and checks of sample weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
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


ClassWeight = Mapping[int, float]


def class_weighted(
    class_weight: Mapping[Any, Any], outputs: Sequence[str] = ()
) -> Callable[[Tree], tuple[Any, ...]]:
    """Return the transform (x, y[, sample_weight]) -> (x, y, weights): the weight of the row's
    class, times its sample weight.

    Args:
        class_weight: {class: weight}, other classes weigh 1; of several outputs
            {output: {class: weight}}.
        outputs: the names of the model's outputs in their order, as far as known.

    Raises:
        SpecificationError: not a mapping of class numbers to finite weights, or of outputs to such.
        BatchError: labels that are not one class a row, or of other outputs.
    """
    is_nested = isinstance(class_weight, Mapping) and bool(class_weight)
    is_nested = is_nested and all(isinstance(name, str) for name in class_weight)
    is_nested = is_nested and all(isinstance(w, Mapping) for w in class_weight.values())
    if not is_nested:
        weigh = _weigher(class_weight)
    else:
        _check_outputs(class_weight, outputs)
        weighers = {name: _weigher(weights) for name, weights in class_weight.items()}
        weigh = partial(_by_output, weighers, outputs)

    def transform(batch: Tree) -> tuple[Any, ...]:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            received = f"{len(batch) if isinstance(batch, tuple) else 1} parts"
            must = "class_weight needs batches (x, y) or (x, y, sample_weight)."
            attempt = "multiply class weights into sample_weight yourself."
            raise BatchError(message(must, received, attempt))
        x, y, *given = batch
        return x, y, weigh(y, *given)

    return transform


def _weigher(class_weight: ClassWeight) -> Callable[..., ndarray]:
    """Return the function (labels, sample_weight) -> weights of one output."""
    _check_class_weight(class_weight)
    classes = np.asarray(sorted(class_weight), np.int64)
    values = [class_weight[number] for number in sorted(class_weight)]
    weights = np.asarray(values, keras.config.floatx())

    def weigh(y: Any, given: ndarray | None = None) -> ndarray:
        labels = _classes(y)
        nearest = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
        is_weighted = classes[nearest] == labels
        weight = np.where(is_weighted, weights[nearest], 1).astype(weights.dtype)
        if given is None:
            return weight
        weight = weight.reshape(len(weight), *[1] * (np.ndim(given) - 1))
        return weight * np.asarray(given, weights.dtype)

    return weigh


def _by_output(
    weighers: Mapping[str, Callable[..., ndarray]],
    outputs: Sequence[str],
    y: Any,
    given: Any = None,
) -> Any:
    """Return the weights of every output, nested as the labels."""
    if isinstance(y, ndarray) and len(weighers) == 1:
        return next(iter(weighers.values()))(y, given)
    names = list(y) if isinstance(y, dict) else list(outputs)
    is_nested = isinstance(y, dict | list | tuple) and len(names) == len(y)
    if not is_nested or not weighers.keys() <= {*names}:
        received = f"labels {names if is_nested else shown(y)}"
        must = f"class_weight by output needs labels of the outputs {sorted(weighers)}."
        raise BatchError(message(must, received, "name the labels as the outputs: y={name: ...}."))
    weights = {}
    for i, name in enumerate(names):
        labels = y[name] if isinstance(y, dict) else y[i]
        own = given if given is None or isinstance(given, ndarray) else _item(given, name, i)
        if name in weighers:
            own = weighers[name](labels, own)
        weights[name] = np.ones(len(labels), keras.config.floatx()) if own is None else own
    return weights if isinstance(y, dict) else list(weights.values())


def _item(given: Any, name: str, i: int) -> Any:
    return given.get(name) if isinstance(given, dict) else given[i]


def _check_outputs(class_weight: Mapping[str, ClassWeight], outputs: Sequence[str]) -> None:
    unknown = sorted(class_weight.keys() - {*outputs}) if outputs else []
    if unknown:
        must = f"class_weight must name outputs of the model: {list(outputs)}."
        raise SpecificationError(message(must, unknown, "the weights of a class by such a name."))


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
        attempt = "pass {output: {class: weight}} for several outputs, or sample_weight."
        raise BatchError(message(must, f"labels of shape {shape}", attempt))
    if y.dtype.kind not in "biuf":
        must = "class_weight needs classes that are numbers."
        attempt = "encode the labels as integers first."
        raise BatchError(message(must, f"labels of dtype {y.dtype}", attempt))
    if len(y.shape) == 2 and y.shape[1] > 1:
        return np.argmax(y, axis=1)
    return np.round(y.reshape(-1)).astype(np.int64)
