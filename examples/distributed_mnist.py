"""My own training loop on several devices: what must be divided by the global batch, and where do
metrics go?

You do neither: the loss is unreduced, and the update divides once, by the weight of all rows on all
devices. The small network of the tutorials (two convolutions, two dense layers; Adam) learns
pictures of 28 x 28 on 1, 2 and 3 devices:

1. `trainer.fit` and a loop over `trainer.steps`, which agree to the bit on the same devices, with
   the loss and accuracy on test pictures after each epoch;
2. the same on more devices: a table of the losses and accuracies, which equal one device's up to
rounding;
3. an epoch that is interrupted and continued;
4. a checkpoint every second epoch, restored without several devices, and evaluated.

The pictures are Fashion-MNIST if Keras can download it, else scikit-learn's digits, enlarged. The
global batch has 192 rows, 64 for each of three devices, on one device too: an update does not
depend on the number of devices. Here the devices are parts of one CPU, and so cannot be faster than
one.

    KERAS_BACKEND=jax python examples/distributed_mnist.py [--quick] [--out FOLDER]
"""

import argparse
import os
import random
import shutil
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import devices
import keras
import matplotlib
import numpy as np

import wholestep as ws

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NUM_REPLICAS = (1, 2, 3)
BATCH_SIZE = 64 * max(NUM_REPLICAS)
SEED = 7


def main(argv=None):
    """Train on one, two and three devices; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two epochs of digits instead of four")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the picture and the checkpoints"
    )
    arguments = parser.parse_args(argv)
    devices.split_cpu(max(NUM_REPLICAS))
    epochs = 2 if arguments.quick else 4
    name, train, test = digits() if arguments.quick else pictures()
    print(
        f"{name}: {len(train[0])} rows, {len(test[0])} to test. Engine: {keras.backend.backend()}.",
        flush=True,
    )
    checkpoints = arguments.out / f"checkpoints-{keras.backend.backend()}"
    shutil.rmtree(checkpoints, ignore_errors=True)  # checkpoints of an earlier run

    curves = {}
    weights = {}
    for num in NUM_REPLICAS:
        print(f"\nOwn loop, {num} {'replica' if num == 1 else 'replicas'}")
        curves[num], weights[num] = loop(num, train, test, epochs, checkpoints / str(num))
    fitted, fit_weights = fit(NUM_REPLICAS[-1], train, test, epochs)
    print("\n" + table(curves))
    result = {
        "curves": curves,
        "fit_differs": sum(
            np.count_nonzero(a != b) for a, b in zip(fit_weights, weights[3][-1], strict=True)
        ),
        "fit_curve": fitted,
        "between_replicas": max(
            np.abs(np.subtract(curves[n], curves[1])).max() for n in NUM_REPLICAS[1:]
        ),
        "parts": parts_of_an_epoch(train),
        "restored": restore(checkpoints / str(NUM_REPLICAS[-1]), test),
        "tested": curves[NUM_REPLICAS[-1]][-1][1:],
        "picture": picture(curves, weights, name, arguments.out),
    }
    print(
        f"fit against the own loop, {NUM_REPLICAS[-1]} replicas: {result['fit_differs']} weights "
        "differ."
    )
    print(
        "Between numbers of replicas, losses and accuracies differ by "
        f"{result['between_replicas']:.1g} at most."
    )
    print(f"Half an epoch and the other half: updates {result['parts']}.")
    print("Restored on one device, test loss {:.4f}, accuracy {:.2%}.".format(*result["restored"]))
    print(f"Curves: {result['picture']}")
    print(
        "You have seen: the global batch is divided once, so the number of devices changes nothing "
        "but rounding."
    )
    return result


# ---- the pictures ----


def pictures():
    """Return (name, (x, y), (x, y) to test): Fashion-MNIST if it can be downloaded, else digits."""
    try:
        train, test = keras.datasets.fashion_mnist.load_data()
    except Exception as error:
        print(f"Fashion-MNIST cannot be downloaded ({type(error).__name__}); digits instead.")
        return digits()
    return "Fashion-MNIST", *(
        (x[..., None] / np.float32(255), y.astype("int32")) for x, y in (train, test)
    )


def digits():
    """Return the same tuple for scikit-learn's scanned digits, enlarged from 8 x 8 to 28 x 28."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8), np.ones((3, 3)))[..., None].astype("float32") / 16
    x = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    return (
        "Scanned digits",
        (x[:1500], y[:1500].astype("int32")),
        (x[1500:], y[1500:].astype("int32")),
    )


# ---- the network ----


def trainer_on(num):
    """Return a trainer of a new network on `num` devices."""
    keras.utils.clear_session()
    random.seed(SEED)  # from which Keras draws the seeds of weights
    layers = keras.layers
    with devices.scope(num):
        seen = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()]
        seen += [layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
        model = keras.Sequential(
            [keras.Input((28, 28, 1)), *seen, layers.Dense(64, "relu"), layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return ws.Trainer(model, replicas=num, seed=SEED)


# ---- the runs ----


def loop(num, train, test, epochs, folder):
    """Train by a loop over `steps`; return [loss, test loss, test accuracy] of each epoch, and the
    weights.
    """
    trainer = trainer_on(num)
    batches = ws.Batches(train, BATCH_SIZE, seed=SEED)
    curve = []
    weights = []
    for epoch in range(epochs):
        *_, last = trainer.steps(batches)
        curve.append(
            [last.logs["loss"], *trainer.evaluate(*test, batch_size=BATCH_SIZE, verbose=0)]
        )
        weights.append(trainer.model.get_weights())
        print(
            "  epoch {}: loss {:.4f}, test loss {:.4f}, test accuracy {:.2%}".format(
                epoch + 1, *curve[-1]
            )
        )
        if epoch % 2 == 1:
            trainer.save(folder)
    return curve, weights


def fit(num, train, test, epochs):
    """Train by `fit`; return the losses of the epochs, and the weights."""
    trainer = trainer_on(num)
    history = trainer.fit(
        *train, batch_size=BATCH_SIZE, epochs=epochs, validation_data=test, verbose=0
    )
    return history.history["loss"], trainer.model.get_weights()


def parts_of_an_epoch(train):
    """Interrupt an epoch and continue it; return the numbers of the batches before and after."""
    trainer = trainer_on(2)
    batches = ws.Batches(train, BATCH_SIZE, seed=SEED)
    before = []
    for step in trainer.steps(batches):
        before.append(step.batch)
        if 2 * len(before) >= len(batches):
            break
    after = [step.batch for step in trainer.steps(batches)]
    return f"{before[0]} to {before[-1]}, then {after[0]} to {after[-1]}"


def restore(folder, test):
    """Restore the newest checkpoint of a folder on one device; return the test loss and
    accuracy.
    """
    trainer = trainer_on(1)
    trainer.restore(folder, only="weights")
    return trainer.evaluate(*test, batch_size=BATCH_SIZE, verbose=0)


def table(curves):
    """Return the losses and accuracies of every number of replicas, side by side."""
    lines = ["epoch  " + "  ".join(f"{n} x: loss, test loss, accuracy" for n in curves)]
    for epoch, rows in enumerate(zip(*curves.values(), strict=True)):
        lines.append(
            f"{epoch + 1:5}  "
            + "  ".join("   {:10.6f} {:10.6f} {:7.2%}".format(*row) for row in rows)
        )
    return "\n".join(lines)


def relative_difference(ours, theirs):
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True)
    )


def picture(curves, weights, name, out):
    """Draw the losses, and the differences of the weights between several devices and one."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    epochs = range(1, len(curves[1]) + 1)
    for i, (num, rows) in enumerate(curves.items()):
        label = f"{num} {'device' if num == 1 else 'devices'}"
        left.plot(epochs, np.array(rows)[:, 1], label=label, linewidth=(8, 5, 2)[i], marker="o")
        if num != 1:
            apart = [
                relative_difference(*pair) for pair in zip(weights[num], weights[1], strict=True)
            ]
            right.plot(epochs, apart, label=label, color=f"C{i}", marker="o")
    right.axhline(
        np.finfo("float32").eps, color="grey", linestyle="--", label="one rounding of float32"
    )
    left.set(
        xlabel="epoch", ylabel="test loss", title=f"{name}: one curve ({keras.backend.backend()})"
    )
    right.set(xlabel="epoch", ylabel="max|a - b| / max|b|", yscale="log", ylim=(1e-8, 1))
    right.set_title("Weights on several devices, beside one device")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
        axes.grid(alpha=0.3)
    path = out / f"devices-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
