"""A small model and small data."""

import keras
import numpy as np

ROWS = 20
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, ROWS)


def model(*layers, optimizer=None, seed=3, **compile_with):
    """Return a compiled classifier of 6 features and 4 classes, with these layers in the middle."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(8, activation="tanh"), *layers]
    made = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(
        optimizer or keras.optimizers.Adam(0.01),
        **{"loss": loss, "metrics": ["accuracy"]} | compile_with,
    )
    return made


def values(made):
    """Return every variable of a model and its optimizer as numpy."""
    return [keras.ops.convert_to_numpy(v) for v in [*made.variables, *made.optimizer.variables]]


def same(one, two):
    """Whether two models hold the same bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(values(one), values(two), strict=True))


def count_calls(monkeypatch, kind, name):
    """Return a list that has one entry for each call of a method of a class."""
    calls = []
    method = getattr(kind, name)

    def counting(*given, **named):
        calls.append(given)
        return method(*given, **named)

    monkeypatch.setattr(kind, name, counting)
    return calls
