"""Which layers are set to be trained, as it was while a loop ran."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

Flags = list[tuple[keras.layers.Layer, bool]]


def flags(model: keras.Model) -> Flags:
    """Return every layer with whether it is set to be trained, a model before its parts."""
    return [(layer, layer.trainable) for layer in model._flatten_layers()]


@contextmanager
def as_then(model: keras.Model, then: Flags) -> Iterator[None]:
    """Let the layers be set as then, for the time of a `with`; no flags leave them as they are."""
    now = flags(model) if then else []
    try:
        _set(then)
        yield
    finally:
        _set(now)


def _set(wanted: Flags) -> None:
    for layer, is_trained in wanted:
        if layer.trainable != is_trained:
            layer.trainable = is_trained
