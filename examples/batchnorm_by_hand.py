"""Why does my own training loop explode with BatchNormalization, where `fit` trains the same
network well?

Because a hand-written loop must pass `training=True`. With False, every BatchNormalization uses its
moving statistics (mean 0 and variance 1 at first), normalises nothing, and never updates them.
`Trainer.steps` runs the same compiled update as `Trainer.fit`, in the right mode, so your loop need
not set the mode.

Three runs from the same weights, on the same batches of 128 made-up images:

1. `trainer.fit`;
2. a hand-written loop over `trainer.steps`: the same weights and the same curve, to the bit;
3. the same loop, but the loss calls the network with `training=False`: the mistake, made on
purpose.

    KERAS_BACKEND=jax python examples/batchnorm_by_hand.py [--quick] [--out FOLDER]
"""

import argparse
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib
import numpy as np

import wholestep as ws

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH_SIZE = 128
NUM_BLOCKS = 8
SEED = 7


class InInferenceMode(ws.Objective):
    """The mistake: the network is called in inference mode during training."""

    def __call__(self, model, batch, training):
        """Return the loss of every row."""
        x, y = batch
        logits = model(x, training=False)
        return ws.Mean(keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True))


def main(argv=None):
    """Run the three loops and draw their curves; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1000 images instead of 10 000")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    arguments = parser.parse_args(argv)
    random.seed(SEED)  # from which Keras draws the seeds of weights
    x, y = images(1000 if arguments.quick else 10_000)
    start = network().get_weights()
    print(
        f"{len(x)} made images, batches of {BATCH_SIZE}, 2 epochs. Engine: "
        f"{keras.backend.backend()}.",
        flush=True,
    )

    fitted, fit_curve = run("1. trainer.fit", fit, start, x, y)
    looped, loop_curve = run("2. own loop", loop, start, x, y)
    wrong, wrong_curve = run(
        "3. own loop, inference mode", partial(loop, objective=InInferenceMode()), start, x, y
    )
    curves = {
        "trainer.fit": fit_curve,
        "own loop": loop_curve,
        "own loop, training=False": wrong_curve,
    }
    result = {
        "weight_difference": largest_difference(fitted.get_weights(), looped.get_weights()),
        "curve_difference": largest_difference(fit_curve.told, loop_curve.told),
        "moved": moved(looped, start),
        "moved_wrong": moved(wrong, start),
        "curves": curves,
        "picture": picture(curves, arguments.out),
    }
    report(result)
    return result


class Curve(NamedTuple):
    """The loss of every update, and the running loss of the epoch that `fit` passes to
    callbacks.
    """

    own: list[float]
    told: list[float]
    stopped: str = ""


def images(num_rows):
    """Return made images x: (rows, 32, 32, 3) in 0..255 and their classes y: (rows,).

    Each of 10 classes has a coarse pattern of 8 x 8 random colours; an image is its class' pattern
    with noise.
    """
    rng = np.random.default_rng(SEED)
    patterns = np.kron(rng.normal(size=(10, 8, 8, 3)), np.ones((1, 4, 4, 1)))
    y = rng.integers(0, 10, num_rows).astype("int32")
    x = 128 + 30 * patterns[y] + 50 * rng.normal(size=(num_rows, 32, 32, 3))
    return x.clip(0, 255).astype("float32"), y


def network():
    """Return a residual network of eight blocks, each convolution with BatchNormalization before
    it; compiled.
    """
    layers = keras.layers
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 4, 4)(layers.Rescaling(1 / 64, offset=-2)(inputs))
    for _ in range(NUM_BLOCKS):
        x = layers.add([x, block(block(x))])
    x = layers.Flatten()(layers.AveragePooling2D(4)(layers.BatchNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(10)(x))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def block(x):
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.layers.Conv2D(
        16, 3, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)


# ---- the three runs; each returns its Curve ----


def run(name, train, start, x, y):
    model = network()
    model.set_weights(start)
    began = time.perf_counter()
    curve = train(model, x, y)
    print(f"{name}: {len(curve.own)} updates, loss of the last {curve.own[-1]:.4g},", end=" ")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return model, curve


def fit(model, x, y):
    told = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: told.append(logs["loss"])
    )
    ws.Trainer(model, seed=SEED).fit(
        x, y, batch_size=BATCH_SIZE, epochs=2, callbacks=[note], verbose=0
    )
    return Curve(alone(told, len(x)), told)


def alone(told, num_rows):
    """Return the loss of each update, computed from the running losses of the epoch."""
    # rows before each batch, and after
    seen = np.minimum(np.arange(0, num_rows + BATCH_SIZE, BATCH_SIZE), num_rows)
    epochs = np.reshape(told, (2, -1)) * seen[1:]
    return (np.diff(epochs, axis=1, prepend=0) / np.diff(seen)).ravel().tolist()


def loop(model, x, y, objective=None):
    trainer = ws.Trainer(model, objective)
    batches = ws.Batches((x, y), batch_size=BATCH_SIZE, seed=SEED)
    own = []
    told = []
    try:
        for step in trainer.steps(batches, epochs=2):
            own.append(step.loss)
            told.append(step.logs["loss"])
    except ws.NonFiniteError as stop:
        print(f"   stopped: {stop}")
        num = stop.update - 1  # the loop may be two updates ahead of the one that failed
        return Curve(
            own[:num], told[:num], f"stopped before update {stop.update}: not finite any more"
        )
    return Curve(own, told)


# ---- results ----


def largest_difference(ours, theirs):
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(ours, theirs, strict=True))


def moved(model, start):
    """Return the largest change of the moving statistics since the start."""
    before = network()
    before.set_weights(start)
    pairs = [
        [keras.ops.convert_to_numpy(v) for v in m.non_trainable_variables] for m in (model, before)
    ]
    return largest_difference(*pairs)


def report(result):
    print(f"1 and 2: largest difference of the weights {result['weight_difference']},", end=" ")
    print(f"of the losses that are told {result['curve_difference']}.")
    print(
        f"Moving statistics moved by up to {result['moved']:.3g} in 2, by "
        f"{result['moved_wrong']:.3g} in 3."
    )
    print(f"Curves: {result['picture']}")
    print(
        "You have seen: a loop over steps() is fit to the bit, and training=False is what makes a "
        "loop explode."
    )


def picture(curves, out):
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(
            range(1, len(curve.own) + 1), curve.own, label=name, linewidth=(6, 2, 2)[i], marker="."
        )
        if curve.stopped:
            why = "every BatchNormalization divides by 1,\nso eight blocks let the numbers grow"
            place = (len(curve.own), curve.own[-1])
            axes.plot(*place, "x", color=f"C{i}", markersize=12, markeredgewidth=3)
            style = {"xytext": (14, 6), "textcoords": "offset points", "va": "top"}
            axes.annotate(f"{curve.stopped}:\n{why}", place, **style)
    axes.set(xlabel="update", ylabel="loss of each update", yscale="log")
    axes.set_title(f"One network, one order of the rows ({keras.backend.backend()})")
    axes.legend()
    axes.grid(alpha=0.3)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"batchnorm-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
