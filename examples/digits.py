"""Is an update the same, however I cut its batch, loop over it, or kill the process?

One model is trained in seven ways, two of them by Keras, and the parameters are compared. The
microbatches, the custom loop and the run that is killed end with the weights of the full batches;
accumulation in Keras' optimizer does not.

    KERAS_BACKEND=jax python examples/digits.py [--epochs N] [--quick] [--out FOLDER]

The data are scikit-learn's handwritten digits: 1797 scans of 8 x 8 pixels, shipped with the
library. Every row has a sample weight; these are drawn at random (no annotator gave them), so that
no two microbatches weigh the same.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from digits_report import NOTES, picture, table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import wholestep as ws

_BATCH = 60
_SEED = 7


@dataclass(frozen=True)
class Row:
    """One run of the table.

    Args:
        name: the way of training.
        losses: the loss of each epoch, as the run reports it.
        accuracy: the fraction of test rows that are classified correctly, after the last epoch.
        differences: the largest relative difference of the parameters from the first row's, after
            each epoch.
        seconds: the median time of an epoch, without the first unless it is the only one.
    """

    name: str
    losses: tuple[float, ...]
    accuracy: float
    differences: tuple[float, ...]
    seconds: float


class Diary(keras.callbacks.Callback):
    """Records the loss, the weights and the time of every epoch, in Keras' `fit` and in ours."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.weights: list[list[np.ndarray]] = []
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Record the start time of the epoch."""
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Record the epoch, the time first: reading the weights is not part of the epoch."""
        self.seconds.append(time.perf_counter() - self.began)
        self.losses.append(float((logs or {})["loss"]))
        self.weights.append(self.model.get_weights())

    def get_state(self) -> dict[str, Any]:
        """Return the records, to resume from."""
        return {"losses": self.losses, "weights": self.weights, "seconds": self.seconds}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the records."""
        vars(self).update(state)

    def row(self, name: str, test: tuple, reference: list[list[np.ndarray]]) -> Row:
        """Return the results of the run, compared with the weights of another."""
        right = self.model.predict(test[0], verbose=0).argmax(axis=-1) == test[1]
        differences = tuple(difference(*pair) for pair in zip(self.weights, reference, strict=True))
        seconds = float(np.median(self.seconds[1:] or self.seconds))
        return Row(name, tuple(self.losses), float(np.mean(right)), differences, seconds)


def main(argv: list[str] | None = None) -> list[Row]:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30, help="of every run (default: 30)")
    parser.add_argument("--quick", action="store_true", help="2 epochs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    arguments = parser.parse_args(argv)
    return run(2 if arguments.quick else arguments.epochs, arguments.out)


def run(epochs: int, out: Path | str) -> list[Row]:
    """Train in seven ways, print the table, and write the picture `digits-<backend>.png` into the
    folder `out`.

    Returns:
        One Row per run; the first run, with uncut batches, is the reference of the others.
    """
    # Not keras.utils.set_random_seed: on TensorFlow, Keras' fit would shuffle alike in every epoch.
    random.seed(_SEED)
    train_rows, test_rows = digits()
    start = network().get_weights()
    print(
        f"{len(train_rows[0])} digits to train on, {len(test_rows[0])} to test on. Engine: "
        f"{keras.backend.backend()}."
    )
    print(
        f"Each run: {epochs} epochs from the same weights, in batches of {_BATCH} with a shorter "
        "last one."
    )
    rows: list[Row] = []
    reference: list[list[np.ndarray]] = []
    for name, train in _RUNS.items():
        model = network()
        diary = Diary()
        model.set_weights(start)
        train(model, train_rows, epochs, diary)
        reference = reference or diary.weights
        rows.append(diary.row(name, test_rows, reference))
        print(f"  {name}: loss {rows[-1].losses[-1]:.5f}, {sum(diary.seconds):.1f} s", flush=True)
    print(f"\n{table(rows)}\n\n{NOTES}\n\nPicture: {picture(rows, Path(out))}")
    print(
        "You have seen: however a batch is cut, stopped or looped over, the update is the same but "
        "for rounding."
    )
    return rows


def digits() -> tuple[tuple, tuple]:
    """Return ((x, y, sample_weight), (x, y)) to train and to test on: a fifth of each class, always
    the same rows.
    """
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, random_state=_SEED, stratify=y)
    weight = np.random.default_rng(_SEED).uniform(0.25, 1.75, len(x)).astype("float32")
    return (x, y, weight), (test_x, test_y)


def network(accumulation: int | None = None) -> keras.Model:
    """Return a compiled classifier: a weighted mean as loss, L2 regularisation; `accumulation` as
    in Keras.
    """
    l2 = keras.regularizers.L2(1e-4)
    # Smooth: a relu that rounding pushes over its kink pulls two runs apart, however exact each of
    # them is.
    hidden = keras.layers.Dense(128, activation="tanh", kernel_regularizer=l2)
    model = keras.Sequential(
        [keras.Input((64,)), hidden, keras.layers.Dense(10, kernel_regularizer=l2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, loss)
    return model


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest relative difference: over all variables, max|a - b| / max|b|."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True)
    )


# ---- the seven ways ----


def _fit(microbatch_size: int) -> Callable:
    def train(model: keras.Model, rows: tuple, epochs: int, diary: Diary) -> None:
        x, y, weight = rows
        trainer = ws.Trainer(model, microbatch_size=microbatch_size, seed=_SEED)
        trainer.fit(x, y, _BATCH, epochs, sample_weight=weight, callbacks=[diary], verbose=0)

    return train


def _own_loop(model: keras.Model, rows: tuple, epochs: int, diary: Diary) -> None:
    diary.set_model(model)
    diary.on_epoch_begin(0)
    batches = ws.Batches(rows, _BATCH, seed=_SEED)
    for step in ws.Trainer(model, microbatch_size=6).steps(batches, epochs):
        if step.batch == len(batches) - 1:
            diary.on_epoch_end(step.epoch, step.logs)
            diary.on_epoch_begin(step.epoch + 1)


class _Kills(keras.callbacks.Callback):
    """Kills its process after a number of updates."""

    def __init__(self, update: int):
        super().__init__()
        self.update = update

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if int(self.model.optimizer.iterations) == self.update:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(model: keras.Model, rows: tuple, epochs: int, diary: Diary) -> None:
    """Train in another process that is killed in the middle of an epoch; resume here from its
    checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = get_context("spawn").Process(
            target=_until_killed, args=(model.get_weights(), rows, epochs, folder)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"the process ended with {process.exitcode}"
        _saved(model, rows, epochs, [diary], folder)


def _until_killed(start: list[np.ndarray], rows: tuple, epochs: int, folder: str) -> None:
    model = network()
    num = -(-len(rows[0]) // _BATCH)
    model.set_weights(start)
    _saved(model, rows, epochs, [Diary(), _Kills(epochs // 2 * num + num // 2)], folder)


def _saved(model: keras.Model, rows: tuple, epochs: int, callbacks: list, folder: str) -> None:
    x, y, weight = rows
    checkpoints = ws.Checkpoints(folder, every_steps=5)
    how = {
        "sample_weight": weight,
        "callbacks": callbacks,
        "verbose": 0,
        "checkpoints": checkpoints,
    }
    ws.Trainer(model, seed=_SEED).fit(x, y, _BATCH, epochs, **how)


def _keras(batch_size: int, accumulation: int | None = None) -> Callable:
    """`keras.Model.fit` on the same rows in the same order: the rows of each epoch are put in order
    beforehand.
    """

    def train(model: keras.Model, rows: tuple, epochs: int, diary: Diary) -> None:
        model.compile(network(accumulation).optimizer, model.loss)
        batches = ws.Batches(rows, _BATCH, seed=_SEED)
        for epoch in range(epochs):
            order = np.concatenate([batches.rows(epoch, step) for step in range(len(batches))])
            x, y, weight = (leaf[order] for leaf in rows)
            model.fit(
                x, y, batch_size, sample_weight=weight, shuffle=False, callbacks=[diary], verbose=0
            )

    return train


_RUNS: dict[str, Callable] = {
    "wholestep fit, whole batch": _fit(_BATCH),
    "wholestep fit, 10 microbatches of 6": _fit(6),
    "wholestep fit, ragged microbatches (7)": _fit(7),
    "own loop over steps(), microbatches of 6": _own_loop,
    "wholestep fit, killed (SIGKILL), resumed": _killed,
    "keras fit, whole batch": _keras(_BATCH),
    "keras fit, batch 6, accumulation 10": _keras(6, accumulation=10),
}


if __name__ == "__main__":
    main()
