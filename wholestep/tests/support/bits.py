"""`python tests/support/bits.py`: which laws hold to the bit on this process's device, under its XLA_FLAGS.

Prints, for each model and law, the number of weights' bits that differ from one `fit`, or the
largest difference relative to the largest weight. On a CPU the suite proves the laws; this script
is for other devices.
"""

import tempfile
from collections.abc import Callable
from contextlib import suppress

import keras
import numpy as np
from keras import layers

import wholestep as ws

_SIZE = 12
_ROWS = 96


def _dense() -> tuple[keras.Model, np.ndarray]:
    return keras.Sequential([layers.Dense(64, "relu"), layers.Dense(10)]), _numbers(_ROWS, 32)


def _convolutions() -> tuple[keras.Model, np.ndarray]:
    first = layers.Conv2D(16, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()
    parts = [*first, layers.Conv2D(8, 3), layers.Flatten(), layers.Dense(10)]
    return keras.Sequential(parts), _numbers(_ROWS, 16, 16, 3)


def _recurrent() -> tuple[keras.Model, np.ndarray]:
    return keras.Sequential([layers.LSTM(32), layers.Dense(10)]), _numbers(_ROWS, 20, 8)


def _attention() -> tuple[keras.Model, np.ndarray]:
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(50, 32)(tokens)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, 16)(x, x)))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, outputs), np.random.default_rng(1).integers(
        0, 50, (_ROWS, 16)
    ).astype("int32")


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype("float32")


MODELS = {
    "dense": _dense,
    "convolutions": _convolutions,
    "recurrent": _recurrent,
    "attention": _attention,
}


class Case:
    """One model, built and compiled anew for each run, and its data."""

    def __init__(self, make: Callable[[], tuple[keras.Model, np.ndarray]]):
        self.make = make
        self.y = np.random.default_rng(2).integers(0, 10, _ROWS).astype("int32")

    def trainer(self, **how: object) -> tuple[ws.Trainer, dict]:
        """Return a trainer of a new model, and the arguments of its `fit`."""
        model, x = self.model()
        return ws.Trainer(model, **how), {"x": x, "y": self.y, "batch_size": _SIZE, "verbose": 0}

    def model(self) -> tuple[keras.Model, np.ndarray]:
        """Return a new compiled model, and its inputs."""
        keras.utils.set_random_seed(0)
        model, x = self.make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
        return model, x

    def fit(self, **how: object) -> list[np.ndarray]:
        """Return the weights after three epochs."""
        trainer, data = self.trainer(**how)
        trainer.fit(**data, epochs=3)
        return trainer.model.get_weights()

    def keras(self) -> list[np.ndarray]:
        """Return the weights after three epochs of Keras, whose order of rows is another: rows are
        not shuffled.
        """
        model, x = self.model()
        model.fit(x, self.y, batch_size=_SIZE, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()

    def unshuffled(self) -> list[np.ndarray]:
        """Return the weights after three epochs over rows that are not shuffled."""
        trainer, data = self.trainer()
        trainer.fit(**data, epochs=3, shuffle=False)
        return trainer.model.get_weights()

    def one_by_one(self) -> list[np.ndarray]:
        """Return the weights after three epochs over rows that are not shuffled, by single
        updates.
        """
        trainer, data = self.trainer()
        for start in [*range(0, _ROWS, _SIZE)] * 3:
            part = slice(start, start + _SIZE)
            trainer.update((data["x"][part], data["y"][part]))
        return trainer.model.get_weights()

    def loop(self) -> list[np.ndarray]:
        """Return the weights after three epochs over rows that are not shuffled, by a loop that
        reads each loss.
        """
        trainer, data = self.trainer()
        batches = ws.Batches((data["x"], data["y"]), batch_size=_SIZE, shuffle=False)
        for _ in range(3):
            for step in trainer.steps(batches):
                float(step.loss)
        return trainer.model.get_weights()

    def resumed(self) -> list[np.ndarray]:
        """Return the weights after three epochs, the run killed after update 12 and resumed after
        update 10.
        """
        with tempfile.TemporaryDirectory() as folder:
            trainer, data = self.trainer()
            saved = ws.Checkpoints(folder, every_steps=5)
            trainer, data = self.trainer()
            with suppress(_StopError):
                trainer.fit(**data, epochs=3, callbacks=[_StopsAt(12)], checkpoints=saved)
            trainer, data = self.trainer()
            trainer.fit(**data, epochs=3, checkpoints=saved)
            assert trainer.model.optimizer.iterations == 3 * _ROWS // _SIZE
            return trainer.model.get_weights()


class _StopError(Exception):
    pass


class _StopsAt(keras.callbacks.Callback):
    def __init__(self, num_updates: int):
        super().__init__()
        self.left = num_updates

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise _StopError


def _integers() -> tuple[keras.Model, np.ndarray]:
    model = keras.Sequential(
        [layers.Dense(8, kernel_initializer="ones"), layers.Dense(4, kernel_initializer="ones")]
    )
    return model, np.random.default_rng(3).integers(-2, 3, (24, 8)).astype("float32")


def of_integers(microbatch_size: int) -> list[np.ndarray]:
    """Return the weights after one update of which every product and sum is exact, in TF32 too."""
    model, x = _integers()
    model.compile(keras.optimizers.SGD(2.0**-6), keras.losses.MeanSquaredError())
    trainer = ws.Trainer(model, microbatch_size=microbatch_size)
    y = np.random.default_rng(4).integers(-2, 3, (24, 4)).astype("float32")
    trainer.update((x[:16], y[:16]))
    return model.get_weights()


def differing_bits(one: list[np.ndarray], other: list[np.ndarray]) -> int:
    """Return how many bits differ."""
    pairs = zip(one, other, strict=True)
    return sum(int(np.bitwise_count(a.view(np.uint32) ^ b.view(np.uint32)).sum()) for a, b in pairs)


def largest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest weight."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return difference / max(float(np.abs(b).max()) for b in other)


def laws(case: Case, whole: list[np.ndarray]) -> dict[str, int]:
    """Return by law the number of bits that differ; `whole` are the weights after one `fit`."""
    rows = case.unshuffled()
    return {
        "the same run again": differing_bits(case.fit(), whole),
        "stopped and resumed": differing_bits(case.resumed(), whole),
        "fit and update()": differing_bits(case.one_by_one(), rows),
        "fit and steps()": differing_bits(case.loop(), rows),
    }


def main() -> None:
    """Print the table."""
    print(
        f"integers: 16 rows and 4 x 4 rows: {differing_bits(of_integers(16), of_integers(4))} bits"
    )
    for name, make in MODELS.items():
        case = Case(make)
        whole = case.fit()
        bits = laws(case, whole)
        distances = {}
        if name != "convolutions":  # BatchNormalization sees all rows of a microbatch
            distances["microbatches of 5"] = largest(case.fit(microbatch_size=5), whole)
        if name != "attention":  # dropout draws other numbers
            distances["Keras"] = largest(case.keras(), case.unshuffled())
        print(name, *(f"{law}: {found} bits" for law, found in bits.items()), sep="; ", end="; ")
        print(*(f"{law}: {found:.1e}" for law, found in distances.items()), sep="; ", flush=True)


if __name__ == "__main__":
    main()
