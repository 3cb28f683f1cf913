"""Losses of Keras and functions as such, and their relatives, which a loss may be
mistaken for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import keras
from keras import ops
from keras.losses import Loss

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.tree import Tensor, Tree


class Function(Loss):
    """A plain function as a Keras loss; labels and outputs are given the same rank, as
    Keras does.

    It may return (values, weights); the sample weights are multiplied by these weights.
    """

    has_own_weights = False
    is_unrolled = (
        False  # whether it is called row by row, as it returns a single number
    )
    is_coupled = False  # whether a row's loss depends on the rows beside it

    def __init__(self, function: Callable):
        super().__init__(name=getattr(function, "__name__", None))
        self._function, self.is_class = function, isinstance(function, Loss)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the function's values; of a single number, that of each row alone."""
        values = self.whole(y_true, y_pred)
        if len(values.shape):
            return values
        num, self.is_unrolled = tree.leaves(y_pred)[0].shape[0], True

        def row(i: int, nest: Tree) -> Any:
            return tree.map_leaves(lambda leaf: leaf[i : i + 1], nest)

        return ops.stack(
            [self.whole(row(i, y_true), row(i, y_pred)) for i in range(num)]
        )

    def with_weights(self) -> "Function":
        """Return the same function with a mean that is divided by its own weights of
        the rows.
        """
        found = Function(self._function)
        found.reduction, found.has_own_weights = "mean_with_sample_weight", True
        return found

    def whole(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the values; weights are allowed if the mean is by those of the data."""
        values, weights = self.pair(y_true, y_pred)
        if weights is not None and self.reduction != "mean_with_sample_weight":
            must = (
                "A loss of (values, weights) needs a built model, one output, one "
                "array of labels."
            )
            raise SpecificationError(
                message(
                    must,
                    self.name,
                    "data=(x, y, weights), and a loss that returns values.",
                )
            )
        return values

    def pair(self, y_true: Tensor, y_pred: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (values, weights), None for no weights; nests are passed unchanged."""
        found = self._called(y_true, y_pred)
        if not isinstance(found, tuple | list):
            return found, None
        shapes = [tuple(getattr(part, "shape", ())) for part in found]
        if len(found) != 2 or not shapes[1] or not _fit(*shapes):
            must = "A loss must return values, or (values, weights) of one shape."
            raise SpecificationError(
                message(must, f"parts of the shapes {shapes}", "the values alone.")
            )
        return found[0], found[1]

    def _called(self, y_true: Tensor, y_pred: Tensor) -> Any:
        if not hasattr(y_true, "shape") or not hasattr(y_pred, "shape"):
            return self._function(y_true, y_pred)
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = ops.expand_dims(y_true, -1)
        elif len(y_true.shape) == len(y_pred.shape) + 1 and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, -1)
        return self._function(y_true, y_pred)


def _fit(values: tuple[int, ...], weights: tuple[int, ...]) -> bool:
    """Whether weights have the shape of values, or 1 in the place of some of its sizes."""
    return len(values) == len(weights) and all(
        w in (v, 1) for v, w in zip(values, weights, strict=True)
    )


def is_unreduced(loss: Any) -> bool:
    """Whether a loss returns a number for each row, which the script reduces."""
    return not isinstance(loss, Loss) or loss.reduction in (None, "none")


def averaging(loss: Any) -> Any:
    """Return a loss; if it is unreduced, its mean over the places."""
    return mean_of(loss) if isinstance(loss, Loss) and is_unreduced(loss) else loss


def mean_of(loss: Loss, *, by_weight: bool = False) -> Loss:
    """Return the mean of a loss over the places, or over their weights."""
    found = object.__new__(type(loss))  # its configuration may not be whole
    vars(found).update(vars(loss))
    found.reduction = "mean_with_sample_weight" if by_weight else "sum_over_batch_size"
    return found


def _changed(loss: Loss, **arguments: Any) -> Loss | None:
    """Return a loss with other arguments; None if its configuration is not whole."""
    made, _ = attempt(lambda: type(loss).from_config(loss.get_config() | arguments))
    return made


def name_of(loss: object) -> str:
    """Return the name of a loss: of a name, a Keras loss, a function, or several of
    them.

    >>> name_of(keras.losses.Huber()), name_of(keras.losses.huber), name_of(["mse", "huber"])
    ('Huber', 'huber', 'mse, huber')
    """
    if isinstance(loss, str):
        return loss
    if isinstance(loss, dict | list | tuple):
        return ", ".join(
            map(name_of, loss.values() if isinstance(loss, dict) else loss)
        )
    function = getattr(loss, "func", loss)
    return getattr(function, "__name__", None) or type(loss).__name__


def flipped(loss: Loss) -> Loss | None:
    """Return a loss with `from_logits` the other way; None if it has no such argument."""
    function, config = (
        getattr(loss, "_function", None),
        {} if isinstance(loss, Function) else loss.get_config(),
    )
    if function is not None and "from_logits" in signature(function).parameters:
        is_set = getattr(function, "keywords", {}).get("from_logits", False)
        return Function(partial(function, from_logits=not is_set))
    if "from_logits" not in config:
        return None
    return _changed(loss, from_logits=not config["from_logits"])


def changes(loss: Loss, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether it is the loss's activation) that outputs may go
    through.
    """
    functions = (
        {"softmax": _softmax, "log_softmax": ops.log_softmax} if width > 1 else {}
    )
    functions |= {
        "sigmoid": _sigmoid,
        "tanh": ops.tanh,
        "relu": ops.relu,
        "exp": ops.exp,
        "square": ops.square,
    }
    own = "sigmoid" if "Binary" in type(loss).__name__ else "softmax"
    yield from ((name, function, name == own) for name, function in functions.items())


def _softmax(outputs: Tensor) -> Tensor:
    return ops.exp(
        ops.log_softmax(outputs)
    )  # written out, as `_sigmoid` is: Keras would undo its own activations


def _sigmoid(outputs: Tensor) -> Tensor:
    return 1 / (1 + ops.exp(-outputs))


def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (the unsmoothed dense loss, the smoothing, whether labels are classes), or
    None.
    """
    if type(loss).__name__ == "SparseCategoricalCrossentropy":
        dense = keras.losses.CategoricalCrossentropy(
            loss.get_config()["from_logits"], reduction=loss.reduction
        )
        return dense, 0.0, True
    if not hasattr(loss, "label_smoothing"):
        return None
    plain = _changed(loss, label_smoothing=0.0)
    return None if plain is None else (plain, float(loss.label_smoothing), False)
