"""The works: models to train, and random data of the right shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.language import Language, same_start

NUM_CLASSES = 10


@dataclass(frozen=True)
class Work:
    """
    A model, and an epoch of it.

    Args:
        layers: from the input tensor to the logits.
        shape: of one row.
        optimizer: makes the optimizer, with the keyword arguments given.
        num_rows: rows in an epoch, a multiple of `batch_size`.
        quick_rows: the same for a smoke run.
    """

    layers: Callable[[Any], Any]
    shape: tuple[int, ...]
    optimizer: Callable[..., keras.optimizers.Optimizer]
    batch_size: int
    num_rows: int
    quick_rows: int

    def model(self, *, at_once: int = 1, **optimizer: Any) -> keras.Model:
        """Return a compiled model with the same weights every time; Keras sends `at_once` updates
        in one execution.
        """
        same_start()
        inputs = keras.Input(self.shape)
        model = keras.Model(inputs, self.layers(inputs))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            self.optimizer(**optimizer), loss, metrics=["accuracy"], steps_per_execution=at_once
        )
        return model

    def data(self, *, quick: bool) -> dict[str, np.ndarray]:
        """Return what `fit` takes, x: (rows, *shape) float32 and y: (rows,) int32."""
        random = np.random.default_rng(1)
        num = self.quick_rows if quick else self.num_rows
        x = random.random((num, *self.shape), np.float32)
        return {"x": x, "y": random.integers(0, NUM_CLASSES, (num,), np.int32)}


@dataclass(frozen=True)
class Pairs:
    """
    GloVe: two tables of vectors and two of biases, and pairs of words to fit them to, with sample
    weights.

    Args:
        num_words: the size of the vocabulary.
        num_rows: pairs in an epoch, a multiple of `batch_size`.
        quick_rows: the same for a smoke run.
    """

    num_words: int
    batch_size: int
    num_rows: int
    quick_rows: int
    dim: int = 100

    def model(self) -> keras.Model:
        """Return a compiled model with the same weights every time."""
        same_start()
        words = [keras.Input((), dtype="int32") for _ in range(2)]
        vectors = [layers.Embedding(self.num_words, self.dim)(word) for word in words]
        biases = [layers.Embedding(self.num_words, 1)(word) for word in words]
        model = keras.Model(words, layers.add([layers.Dot(1)(vectors), *biases]))
        model.compile(
            keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-8, epsilon=1e-12), "mse"
        )
        return model

    def data(self, *, quick: bool) -> dict[str, Any]:
        """Return what `fit` takes. Words are numbered by frequency and drawn by Zipf's law, as a
        text would: k about 1/(k+1) times as often as the first; exactly, number k has the share
        log(1 + 1/(k+1)) / log(num_words + 1).
        """
        random = np.random.default_rng(1)
        num = self.quick_rows if quick else self.num_rows
        places = np.exp(random.random((2, num)) * np.log(self.num_words + 1))
        words = np.minimum(places - 1, self.num_words - 1).astype(np.int32)
        y = random.normal(size=num).astype(np.float32)
        weight = random.random(num, np.float32)
        return {"x": [*words], "y": y, "sample_weight": weight}


def _mlp(x: Any) -> Any:
    x = layers.Flatten()(x)
    x = layers.Dense(128, activation="relu")(x)
    return layers.Dense(NUM_CLASSES)(x)


def _perceptron(x: Any) -> Any:
    return layers.Dense(NUM_CLASSES)(layers.Dense(128, activation="relu")(x))


def _cnn(x: Any) -> Any:
    for num_filters in (32, 64):
        x = layers.Conv2D(num_filters, 3, activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation="relu")(x)
    return layers.Dense(NUM_CLASSES)(x)


def _residual(x: Any) -> Any:
    x = _normed(x, 16, 1)
    for num_filters, stride in ((16, 1), (32, 2), (64, 2)):
        x = _block(x, num_filters, stride)
    x = layers.GlobalAveragePooling2D()(x)
    return layers.Dense(NUM_CLASSES)(x)


def _block(x: Any, num_filters: int, stride: int) -> Any:
    inner = _normed(x, num_filters, stride)
    inner = layers.Conv2D(num_filters, 3, padding="same", use_bias=False)(inner)
    inner = layers.BatchNormalization()(inner)
    if stride > 1:
        x = layers.Conv2D(num_filters, 1, strides=stride, use_bias=False)(x)
    return layers.ReLU()(layers.Add()([x, inner]))


def _normed(x: Any, num_filters: int, stride: int) -> Any:
    x = layers.Conv2D(num_filters, 3, strides=stride, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(x)


def _wide(x: Any) -> Any:
    for _ in range(6):
        x = layers.Dense(512, activation="gelu")(x)
    return layers.Dense(NUM_CLASSES)(x)


def _momentum(**arguments: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


_ADAM = keras.optimizers.Adam

WORKS = {
    "A": Work(_mlp, (28, 28), _ADAM, batch_size=60, num_rows=60_000, quick_rows=3_000),
    "B": Work(_cnn, (28, 28, 1), _ADAM, batch_size=64, num_rows=64 * 40, quick_rows=64 * 5),
    "C": Pairs(num_words=20_000, batch_size=1024, num_rows=1024 * 1024, quick_rows=1024 * 20),
    "D": Language(
        4000, width=128, num_layers=2, length=64, batch_size=32, num_rows=32 * 12, quick_rows=32 * 2
    ),
    "E": Work(
        _residual, (32, 32, 3), _momentum, batch_size=128, num_rows=128 * 20, quick_rows=128 * 3
    ),
    "P": Work(_perceptron, (64,), _ADAM, batch_size=60, num_rows=12_000, quick_rows=600),
    "wide": Work(_wide, (256,), _ADAM, batch_size=16_000, num_rows=32_000, quick_rows=16_000),
}
