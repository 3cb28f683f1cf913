"""How do I get gradient accumulation inside `fit`, keeping my callbacks, without a mess?

Set the rows of an update (`batch_size`) and the rows that fit in memory at once
(`microbatch_size`). The rest of `fit` stays the same.

(a) A small dense network, 60 rows to an update in 10 microbatches of 6: the same weights as with
full batches.
(b) DenseNet121, 64 rows in ten parts: BatchNormalization couples the rows, so a cut changes the
update.
(c) The network of (a) in `mixed_float16`, where `compile` adds a LossScaleOptimizer: the rounding
    differences of the cut after one update, and after three epochs.

    KERAS_BACKEND=jax python examples/accumulation.py [--quick]

DenseNet121 compiles slowly: allow 5 to 9 minutes with jax and 3 with tensorflow on 2 CPU cores, or
use --quick.
"""

import argparse
import os
import random
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import wholestep as ws


def main(argv=None):
    """Run the three parts; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few rows; a small network instead of DenseNet121 in (b)",
    )
    quick = parser.parse_args(argv).quick
    random.seed(1)  # from which Keras draws the seeds of weights
    source, x, y = images()
    x, y = (x[:600], y[:600]) if quick else (x, y)
    print(f"Data: {len(x)} {source}. Engine: {keras.backend.backend()}.")
    shown = {
        "source": source,
        "accumulation": accumulation(x, y),
        "coupled": coupled(colour(x[:128]), y[:128], small_network if quick else densenet),
        "mixed_float16": in_float16(x, y),
    }
    print(
        "\nYou have seen: microbatch_size says how much is computed at once, and batch_size what "
        "an update means."
    )
    return shown


def images():
    """Return MNIST (name, x: (rows, 28, 28), y) if it can be downloaded, else scikit-learn's digits
    enlarged.
    """
    try:
        (x, y), _ = keras.datasets.mnist.load_data()
        return "MNIST images", x.astype("float32") / 255, y.astype("int32")
    except Exception as reason:
        print(f"MNIST cannot be loaded ({reason}).")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    return (
        "scikit-learn digits, enlarged to 28 x 28",
        np.pad(x, [(0, 0), (2, 2), (2, 2)]).astype("float32"),
        y,
    )


# ---- (a) ----


def accumulation(x, y):
    """Train with 10 microbatches of 6, with callbacks, and with full batches; return the difference
    of the weights.
    """
    print("\n(a) Dense network, 60 rows to an update in 10 microbatches of 6, 3 epochs")
    model, whole = twins(dense_network)
    epochs = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=2),
            keras.callbacks.CSVLogger(log),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch)),
        ]
        trainer = ws.Trainer(model, microbatch_size=6)
        trainer.fit(
            x, y, batch_size=60, epochs=3, validation_split=0.1, callbacks=callbacks, verbose=2
        )
        print(f"CSVLogger wrote:\n{log.read_text()}LambdaCallback saw the epochs {epochs}.")
    print(trainer.explain())

    ws.Trainer(whole, microbatch_size=60).fit(
        x, y, batch_size=60, epochs=len(epochs), validation_split=0.1, verbose=0
    )
    difference = relative_difference(model, whole)
    print(
        "10 microbatches of 6 against whole batches: largest relative difference of the weights "
        f"{difference:.1e}."
    )
    return {"difference": difference, "epochs": epochs}


def twins(network):
    """Return two networks with the same weights."""
    one = network()
    other = network()
    other.set_weights(one.get_weights())
    return one, other


def dense_network():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def relative_difference(one, other):
    """Return the largest over all variables of max|a - b| / max|b|."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


# ---- (b) ----


def coupled(x, y, network):
    """Train a network with BatchNormalization, first uncut, then cut; return the warnings and
    explanations.
    """
    model, cut = twins(network)
    print(f"\n(b) {model.name}, 64 rows to an update, {len(x) // 64} updates", flush=True)
    trainer = timed_fit(ws.Trainer(model), x, y)
    print("Left alone, the batch stays whole:", trainer.explain(), sep="\n", flush=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = timed_fit(ws.Trainer(cut, microbatch_size=7), x, y)
    warned = [str(warning.message) for warning in caught if warning.category is UserWarning]
    print("With microbatch_size=7 it warns:", *warned, "and explains:", trainer.explain(), sep="\n")
    difference = relative_difference(cut, model)
    print(
        f"Ten parts are another update: the weights differ by up to {difference:.1e} from those of "
        "whole batches."
    )
    return {"warned": warned, "difference": difference}


def timed_fit(trainer, x, y):
    began = time.perf_counter()
    trainer.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    print(f"{time.perf_counter() - began:.0f} s, compilation included.")
    return trainer


def densenet():
    model = keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3), classes=10)
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def small_network():
    """Return a few layers with BatchNormalization instead of DenseNet121; they compile in
    seconds.
    """
    layers = keras.layers
    stack = [keras.Input((32, 32, 3))]
    for channels in (8, 16):
        stack += [layers.Conv2D(channels, 3, strides=4), layers.BatchNormalization(), layers.ReLU()]
    stack += [layers.Flatten(), layers.Dense(10, activation="softmax")]
    model = keras.Sequential(stack, name="small_network_with_batch_normalization")
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def colour(x):
    """Return grey images (rows, 28, 28) as (rows, 32, 32, 3)."""
    return np.repeat(np.pad(x, [(0, 0), (2, 2), (2, 2)])[..., None], 3, axis=-1)


# ---- (c) ----


def in_float16(x, y):
    """Cut as in (a), in half precision; return the weights' differences after one update and after
    three epochs.
    """
    print("\n(c) The network of (a) in mixed_float16, cut in the same way")
    policy = keras.config.dtype_policy()
    full = dense_network()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        networks = {"10 microbatches of 6": dense_network(), "whole batches": dense_network()}
    finally:
        keras.config.set_dtype_policy(policy)
    print(f"compile made a {type(networks['whole batches'].optimizer).__name__}.")
    networks["whole batches in float32"] = full
    for model in networks.values():
        model.set_weights(full.get_weights())
    cut, whole, full = networks.values()
    found = {}
    for when, rows, epochs in (("one update", 60, 1), ("three epochs more", len(x), 3)):
        for model in networks.values():
            trainer = ws.Trainer(model, microbatch_size=6 if model is cut else 60)
            trainer.fit(x[:rows], y[:rows], batch_size=60, epochs=epochs, verbose=0)
        found[when] = {
            "cut": relative_difference(cut, whole),
            "rounding": relative_difference(whole, full),
        }
        print(
            f"After {when}, the weights of 10 microbatches and of whole batches differ by up to",
            end=" ",
        )
        print(
            f"{found[when]['cut']:.1e}; whole batches in float16 and in float32 by "
            f"{found[when]['rounding']:.1e}."
        )
    print(
        "float16 keeps three digits. A cut adds them up in another order, and update after update "
        "magnifies that."
    )
    return found


if __name__ == "__main__":
    main()
