"""Small runs and their results, for tests of snapshots and checkpoints."""

import json
import shutil

import keras
import numpy as np

from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.snapshot import Snapshot

JAX = keras.backend.backend() == "jax"


NO_XLA = {} if JAX else {"jit_compile": False}  # the suite does without


ROWS = 22


SIZE = 4


RNG = np.random.default_rng(3)


X = RNG.normal(size=(ROWS, 5)).astype("float32")


Y = (RNG.random((ROWS, 1)) < 0.5).astype("float32")


BATCHES = -(-ROWS // SIZE)


def carried(snapshot):
    """Return the snapshot as a file would give it back."""
    return Snapshot(
        {k: np.array(v) for k, v in snapshot.arrays.items()}, json.loads(json.dumps(snapshot.facts))
    )


def small(seed=0):
    """Return a model with no more state than a momentum and the sums of an epoch."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", metrics=["accuracy"]
    )
    return model


def made(seed=0):
    """Return a model with every kind of state: seeds, moving statistics, slots, averages of
    weights, counts.
    """
    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(6, activation="tanh"),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
    ]
    model = keras.Sequential(
        [keras.Input((5,)), *layers, keras.layers.Dense(1, activation="sigmoid")]
    )
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7),
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=4,
    )
    model.compile(
        optimizer,
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(num_thresholds=5, name="auc")],
    )
    return model


class Takes(keras.callbacks.Callback):
    """Takes snapshots after `batches` of the call and at the end of epochs; records all logs.

    `taken` holds pairs: the number of batches before the snapshot, and the snapshot.
    """

    def __init__(self, run, *batches, epochs=()):
        super().__init__()
        self.run = run
        self.batches = batches
        self.epochs = epochs
        self.told = []
        self.taken = []

    def on_train_batch_end(self, batch, logs=None):
        self.told.append((batch, {k: np.asarray(v).tobytes() for k, v in logs.items()}))
        if len(self.told) in self.batches:
            self.taken.append((len(self.told), carried(self.run.snapshot())))

    def on_epoch_end(self, epoch, logs=None):
        if epoch in self.epochs:
            self.taken.append((len(self.told), carried(self.run.snapshot())))

    def only(self):
        """Return the one snapshot that was taken."""
        ((_, snapshot),) = self.taken
        return snapshot


def leaves(model):
    values = [
        *model.variables,
        *model.optimizer.variables,
        *(v for m in model.metrics for v in m.variables),
    ]
    return [np.asarray(v) for v in values]


def check_same_bits(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


HOW = {"batch_size": SIZE, "epochs": 3, "verbose": 0}


LAST = 3 * BATCHES


GROWING = [(0, 2), (5, 4), (12, 8)]  # of which three epochs have 8, 5 and 3 batches


GROWING_LAST = 16


def steps_in(folder):
    return sorted(Folder(folder).steps())


def taken_from(folder, step, to):
    """Return a separate folder with a single checkpoint."""
    shutil.copytree(Folder(folder).path(step), Folder(to).path(step))
    return to


class Tells(keras.callbacks.Callback):
    """Gives the logs of each epoch a number."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = numbers

    def on_epoch_end(self, epoch, logs=None):
        logs["good"] = self.numbers[epoch]
