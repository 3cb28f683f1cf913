"""Losses of Keras and functions as such, their relatives, which a loss may be mistaken for, and sums of soft labels."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.audit.found import Likely
from wholestep.audit.measure import SOLVED, are_shares
from wholestep.audit.ratios import least
from wholestep.tree import Tensor, Tree

Loss = keras.losses.Loss
_LOSSES = (
    *("MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "MeanSquaredLogarithmicError"),
    *("MeanAbsolutePercentageError", "Poisson", "KLDivergence", "Hinge", "SquaredHinge", "CosineSimilarity"),
    *("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    "SparseCategoricalCrossentropy",
)


class Function(keras.losses.Loss):
    """A plain function as a Keras loss; labels and outputs are given the same rank, as Keras does."""

    has_own_weights = False
    is_coupled = False  # whether a row's loss depends on the rows beside it

    def __init__(self, function: Callable):
        super().__init__(name=getattr(function, "__name__", None))
        self._function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's values; if it returns a single number, its number for each row alone."""
        values = self.whole(y_true, y_pred)
        if len(values.shape):
            return values
        num = tree.leaves(y_pred)[0].shape[0]

        def row(i: int, nest: Tree) -> Any:
            return tree.map_leaves(lambda leaf: leaf[i : i + 1], nest)

        return ops.stack([self.whole(row(i, y_true), row(i, y_pred)) for i in range(num)])

    def with_weights(self) -> "Function":
        """Return the same function with a mean that is divided by its own weights of the rows."""
        found = Function(self._function)
        found.reduction, found.has_own_weights = "mean_with_sample_weight", True
        return found

    def whole(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's result; nests of labels and outputs are passed unchanged."""
        if not hasattr(y_true, "shape") or not hasattr(y_pred, "shape"):
            return self._function(y_true, y_pred)
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = ops.expand_dims(y_true, -1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, -1)
        return self._function(y_true, y_pred)


class Soft(keras.losses.Loss):
    """A sum of two cross entropies: of logits, and of logits divided by a number."""

    def __init__(self, one: float, two: float, divisor: float, **others: object):
        super().__init__(**others)
        self._factors, self._divisor = (one, two), divisor

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return a number for each place; labels: (..., twice the classes), both side by side."""
        parts = zip(self._factors, ops.split(y_true, 2, axis=-1), (y_pred, y_pred / self._divisor), strict=True)
        return sum(f * -ops.sum(y * ops.log_softmax(ops.cast(out, "float32")), axis=-1) for f, y, out in parts)

    def get_config(self) -> dict:
        """Return the arguments."""
        return super().get_config() | {"one": self._factors[0], "two": self._factors[1], "divisor": self._divisor}


class Through(keras.losses.Loss):
    """A loss of other labels and outputs, which a function returns."""

    def __init__(self, loss: keras.losses.Loss, view: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]):
        super().__init__(name=loss.name, reduction=loss.reduction)
        self._loss, self._view = loss, view

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the loss's values."""
        return self._loss.call(*self._view(y_true, y_pred))


def picked(y_true: Tensor, y_pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (label, one output) of each row; y_true: (rows, 2), the output's index and the label."""
    hot = ops.one_hot(ops.cast(y_true[:, 0], "int32"), y_pred.shape[-1])
    return y_true[:, 1:], ops.sum(y_pred * hot, axis=-1, keepdims=True)


def by_place(y_true: Tensor, y_pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return both so that each output is a place; y_true: (..., outputs, 1)."""
    return y_true, y_pred[..., None]


def losses(outputs: list[np.ndarray], y: Tree) -> Iterator[keras.losses.Loss]:
    """Yield the losses that fit labels and outputs, the most usual first.

    >>> [loss.name for loss in losses([np.array([[0.9, 0.1]])], np.array([0]))]
    ['sparse_categorical_crossentropy']
    >>> [loss.name for loss in losses([np.array([[7.0]])], np.array([2.5]))]
    ['mean_squared_error', 'mean_absolute_error', 'huber_loss']
    """
    if len(outputs) != 1 or not isinstance(y, np.ndarray) or not y.size or not outputs[0].ndim:
        return
    labels, out = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y, outputs[0]
    single = out[..., 0] if out.ndim > 1 and out.shape[-1] == 1 else out
    is_whole = labels.dtype.kind in "biuf" and bool(np.all(labels == np.round(labels)))
    if labels.ndim == out.ndim - 1 and out.shape[-1] > 1:
        if is_whole and labels.min() >= 0 and labels.max() < out.shape[-1]:
            yield keras.losses.SparseCategoricalCrossentropy(from_logits=not are_shares(out))
        return
    if labels.ndim != single.ndim or labels.shape[1:] != single.shape[1:]:
        return
    if set(np.unique(labels)) <= {0, 1}:
        if out.shape[-1] > 1 and np.all(y.sum(-1) == 1):
            yield keras.losses.CategoricalCrossentropy(from_logits=not are_shares(out))
        yield keras.losses.BinaryCrossentropy(from_logits=bool(out.min() < 0 or out.max() > 1))
    yield keras.losses.MeanSquaredError()
    yield keras.losses.MeanAbsoluteError()
    yield keras.losses.Huber()
    if not is_whole and labels.min() >= 0 and labels.max() <= 1:  # as of pixels
        yield keras.losses.BinaryCrossentropy(from_logits=bool(out.min() < 0 or out.max() > 1))


def is_unreduced(loss: Any) -> bool:
    """Whether a loss returns a number for each row, which the script reduces."""
    return not isinstance(loss, keras.losses.Loss) or loss.reduction in (None, "none")


def averaging(loss: Any) -> Any:
    """Return a loss; if it is unreduced, its mean over the places."""
    return mean_of(loss) if isinstance(loss, keras.losses.Loss) and is_unreduced(loss) else loss


def mean_of(loss: keras.losses.Loss, *, by_weight: bool = False) -> keras.losses.Loss:
    """Return the mean of a loss over the places, or over their weights."""
    how = "mean_with_sample_weight" if by_weight else "sum_over_batch_size"
    return type(loss).from_config(loss.get_config() | {"reduction": how})


def name_of(loss: object) -> str:
    """Return the name of a loss: a name, a Keras loss, a function, or a partial function.

    >>> name_of(keras.losses.Huber()), name_of(keras.losses.huber), name_of("huber")
    ('Huber', 'huber', 'huber')
    """
    if isinstance(loss, str):
        return loss
    function = getattr(loss, "func", loss)
    return getattr(function, "__name__", None) or type(loss).__name__


def shares_of(logits: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the softmax of logits."""
    powers = np.exp(logits - logits.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def is_squared(loss: Any) -> bool:
    """Whether it is the mean squared error."""
    name = getattr(getattr(loss, "_function", None), "__name__", "")
    return type(loss).__name__ == "MeanSquaredError" or name in ("mse", "mean_squared_error")


def flipped(loss: keras.losses.Loss) -> keras.losses.Loss | None:
    """Return a loss with `from_logits` the other way; None if it has no such argument."""
    function, config = getattr(loss, "_function", None), {} if isinstance(loss, Function) else loss.get_config()
    if function is not None and "from_logits" in signature(function).parameters:
        is_set = getattr(function, "keywords", {}).get("from_logits", False)
        return Function(partial(function, from_logits=not is_set))
    if "from_logits" not in config:
        return None
    return type(loss).from_config(config | {"from_logits": not config["from_logits"]})


def swapped(loss: keras.losses.Loss) -> keras.losses.Loss:
    """Return a loss that gets outputs and labels in the other order."""
    other = Function(lambda y, y_pred: loss.call(ops.cast(y_pred, "float32"), ops.cast(y, "float32")))
    other.reduction = loss.reduction
    return other


def others(loss: keras.losses.Loss, labels: Any) -> Iterator[tuple[str, keras.losses.Loss]]:
    """Yield (in words, loss) for the other losses of Keras that take such labels."""
    reduction = loss.reduction if isinstance(loss.reduction, str) else "sum_over_batch_size"
    is_whole = np.issubdtype(np.asarray(labels).dtype, np.integer)
    for name in _LOSSES:
        kind = getattr(keras.losses, name)
        if kind is type(loss) or ("Sparse" in name and not is_whole):
            continue
        has_logits = "from_logits" in signature(kind).parameters
        for given in [{"from_logits": True}, {"from_logits": False}] if has_logits else [{}]:
            arguments = ", ".join(f"{key}={value}" for key, value in given.items())
            yield f"{name}({arguments})", kind(**given, reduction=reduction)


def changes(loss: keras.losses.Loss, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether it is the loss's own activation) of functions that outputs may go through."""
    functions = {"softmax": _softmax, "log_softmax": ops.log_softmax} if width > 1 else {}
    functions |= {"sigmoid": _sigmoid, "tanh": ops.tanh, "relu": ops.relu, "exp": ops.exp, "square": ops.square}
    own = "sigmoid" if "Binary" in type(loss).__name__ else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def _softmax(outputs: Tensor) -> Tensor:
    return ops.exp(ops.log_softmax(outputs))  # written out, as `_sigmoid` is: Keras would undo its own activations


def _sigmoid(outputs: Tensor) -> Tensor:
    return 1 / (1 + ops.exp(-outputs))


def unsmoothed(loss: Any) -> tuple[keras.losses.Loss, float, bool] | None:
    """Return (a loss of dense labels without smoothing; the smoothing; whether labels are classes), or None."""
    if type(loss).__name__ == "SparseCategoricalCrossentropy":
        dense = keras.losses.CategoricalCrossentropy(loss.get_config()["from_logits"], reduction=loss.reduction)
        return dense, 0.0, True
    if not hasattr(loss, "label_smoothing"):
        return None
    config = loss.get_config()
    return type(loss).from_config(config | {"label_smoothing": 0.0}), float(config.get("label_smoothing", 0.0)), False


_TEMPERATURES = 1.0, 2.0, 3.0, 4.0, 5.0, 1.5, 2.5, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 0.5
_MOST_NUMBERS = 2**24  # of one-hot labels
_FEWEST = 3  # of two classes, any loss of the difference has such a derivative
_NUM_ROWS = 16  # from which two numbers are solved: those with the largest derivatives


class Softened(NamedTuple):
    """A loss, its labels for all rows of the data, and a note on it; "" for none."""

    loss: Soft
    labels: np.ndarray
    note: str = ""


def softened(
    rows: np.ndarray, outputs: np.ndarray, derivative: np.ndarray, labels: dict[str, np.ndarray]
) -> Iterator[Softened]:
    """Yield the sums of cross entropies of classes and of soft labels that have this derivative by these logits."""
    shape, width = outputs.shape[1:], outputs.shape[-1]
    if width < _FEWEST or max(map(len, labels.values()), default=0) * outputs[0].size > _MOST_NUMBERS:
        return
    at = np.argsort(-np.abs(derivative).reshape(-1, width).sum(-1))[:_NUM_ROWS]
    out, moved = (each.reshape(-1, width)[at] for each in (outputs, derivative))
    classes = [(name, y.astype(int).reshape(-1, *shape[:-1])) for name, y in labels.items() if _are_classes(y, shape)]
    for (name, y), (teacher, soft, own) in product(classes, _soft(shape, labels)):
        both = np.eye(width)[y], np.broadcast_to(soft, (*y.shape, width))
        hot, targets = (each[rows].reshape(-1, width)[at] for each in both)
        for divisor in dict.fromkeys((own, 1.0)) if own > 1.0 or not teacher else _TEMPERATURES:
            if (found := _solved(out, moved, hot, targets, divisor)) is None:
                continue
            one, two = (found * len(outputs) if teacher else found / found.sum()).tolist()
            told, note = f"categorical_crossentropy of {name or 'the data'} as labels, smoothed by {two:.3g}", ""
            if teacher:
                told = f"{one:.3g} times the cross entropy of {name or 'the data'}, and {two * divisor:.3g} times that"
                told += f" of {teacher} by the outputs / {divisor:g}"
            if own >= 1.0 != own / divisor:  # below 1 labels are sharpened, which is meant
                note = f"The soft labels are {teacher}, and the loss takes the outputs / {divisor:g}: one temperature "
                note = Likely(f"{note}is meant for both.")
            loss = Soft(one, two * divisor, divisor, name=told)
            yield Softened(loss, np.concatenate(both, -1).astype("float32"), note)


def _soft(shape: tuple[int, ...], labels: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yield (name, soft labels, their temperature or 0): the same for all classes, softmaxes of logits, and shares."""
    yield "", np.full(shape[-1:], 1 / shape[-1]), 1.0
    teachers = {name: y for name, y in labels.items() if y.shape[1:] == shape and y.dtype.kind == "f"}
    for name, logits in teachers.items():
        for own in () if are_shares(logits) else _TEMPERATURES:
            yield f"the softmax of {name} / {own:g}", shares_of(logits / own), own
    yield from ((name, shares, 0.0) for name, shares in teachers.items() if are_shares(shares))


def _are_classes(y: np.ndarray, shape: tuple[int, ...]) -> bool:
    is_one = y.size == len(y) * int(np.prod(shape[:-1])) > 0 and y.dtype.kind in "iuf"
    return is_one and bool(np.all(y == np.round(y)) and y.min() >= 0 and y.max() < shape[-1])


def _solved(out: np.ndarray, moved: np.ndarray, one: np.ndarray, two: np.ndarray, divisor: float) -> np.ndarray | None:
    """Return the factors above 0 of both cross entropies, by which they have these derivatives in each row."""
    parts = [shares_of(out) - one, shares_of(out / divisor) - two]
    by_row = [least([part[i] for part in parts], row)[0] for i, row in enumerate(moved)]
    rest = moved - sum(f[:, None] * part for f, part in zip(np.transpose(by_row), parts, strict=True))
    found = np.median(by_row, axis=0)
    return found if np.linalg.norm(rest) <= SOLVED * np.linalg.norm(moved) and np.all(found > 0) else None
