"""The relatives of Keras' losses, which a loss may be mistaken for."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import keras
from keras import ops
from keras.losses import Loss

from stepcheck.errors import attempt
from stepcheck.tree import Tensor


def _changed(loss: Loss, name: str, value: Any) -> Loss | None:
    """Return a loss with another argument; None if it has none of this name, or its
    configuration is not whole.
    """
    config, _ = attempt(loss.get_config)
    if not config or name not in config:
        return None
    return attempt(lambda: type(loss).from_config(config | {name: value}))[0]


@lru_cache  # so that a program of it is found again
def flipped(loss: Loss) -> Loss | None:
    """Return a loss with `from_logits` the other way; None if it has no such argument."""
    is_set = attempt(loss.get_config)[0] or {}
    return _changed(loss, "from_logits", not is_set.get("from_logits"))


def changes(loss: Loss, width: int) -> Iterator[tuple[str, Callable, bool]]:
    """Yield (name, function, whether it is the loss's activation) that outputs may go
    through.
    """
    wide: dict[str, Callable] = {
        "softmax": _softmax,
        "log_softmax": ops.log_softmax,
    }
    functions = (wide if width > 1 else {}) | {
        "sigmoid": _sigmoid,
        "tanh": ops.tanh,
        "relu": ops.relu,
        "exp": ops.exp,
        "square": ops.square,
    }
    own = "sigmoid" if "Binary" in type(loss).__name__ else "softmax"
    yield from (
        (name, function, name == own) for name, function in functions.items()
    )


# Written out: Keras would undo its own activations.
def _softmax(outputs: Tensor) -> Tensor:
    return ops.exp(ops.log_softmax(outputs))


def _sigmoid(outputs: Tensor) -> Tensor:
    return 1 / (1 + ops.exp(-outputs))


@lru_cache
def unsmoothed(loss: Any) -> tuple[Loss, float, bool] | None:
    """Return (the unsmoothed dense loss, the smoothing, whether labels are classes), or
    None.
    """
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        is_of_logits = loss.get_config()["from_logits"]
        dense = keras.losses.CategoricalCrossentropy(
            is_of_logits, reduction=loss.reduction
        )
        return dense, 0.0, True
    plain = _changed(loss, "label_smoothing", 0.0)
    return (
        None if plain is None else (plain, float(loss.label_smoothing), False)
    )
