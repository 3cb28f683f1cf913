"""Why does my model learn in `fit`, and stay on a plateau in my own loop? Check the loop.

The model predicts how often two words co-occur (GloVe). The loop is the one in the question: labels
of shape (B,) against outputs of shape (B, 1). stepcheck runs it for two passes over a few hundred
pairs, and names the fault: the shape of the labels, not the shuffling, which is the usual first
guess. The pairs are random, as the fault does not depend on the text; `examples/glove.py` shows its
cost on a real text.

1. the loop as written: one cause, in the gradient, and the line to change;
2. the same loop with the fix that the report proposes: no cause.

The first report is also written as a page with pictures, `audit-<backend>.html`.

    KERAS_BACKEND=tensorflow python examples/audit.py [--out FOLDER]        (or jax)
"""

import argparse
import os
import random
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from glove_loops import jax_step, tape_step
from keras import layers, ops

import stepcheck

NUM_WORDS = 60
NUM_PAIRS = 240
BATCH_SIZE = 64


def main(argv=None):
    """Watch the loop as written and mended; return both reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the page")
    out = parser.parse_args(argv).out
    pairs = draw_pairs(np.random.default_rng(0))
    reports = [watched("as written", as_written, pairs), watched("with that fix", mended, pairs)]
    page = out / f"audit-{keras.backend.backend()}.html"
    out.mkdir(parents=True, exist_ok=True)
    reports[0].html(page)
    print(f"The first report with pictures: {page}")
    print("You have seen: stepcheck ran the loop as it stands, and named the line to change.")
    return reports


def watched(title, loss, pairs):
    """Run a loop that minimises `loss`, watch it, and print the report."""
    random.seed(1)  # from which Keras draws the seeds of weights
    model = network()
    with stepcheck.watch(model, data=pairs, loss=glove_loss) as report:
        train(model, loss, pairs)
    print(f"---- the loop {title} ----\n{report}\n")
    return report


# ---- the question: the loss, and a hand-written loop ----


def glove_loss(count, prediction):
    """Return min(count / 100, 1)^0.75 * (prediction - log(count))^2, unreduced."""
    return ops.minimum(count / 100, 1) ** 0.75 * (prediction - ops.log(count)) ** 2


def as_written(model, pair, count):
    return ops.mean(glove_loss(count, model(pair, training=True)))


def mended(model, pair, count):
    return ops.mean(glove_loss(count[:, None], model(pair, training=True)))


def train(model, loss, pairs):
    """Train for two epochs, in a new order each."""
    (focal, context), count = pairs
    step = {"jax": jax_step, "tensorflow": tape_step}[keras.backend.backend()](model, loss)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(count))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            step((focal[rows], context[rows]), count[rows])


# ---- the model and the pairs ----


def network(dim=8):
    """Return the model that predicts log count = target . context + a bias of each, as (rows,
    1).
    """
    focal = keras.Input((), dtype="int32")
    context = keras.Input((), dtype="int32")
    vectors = [layers.Embedding(NUM_WORDS, dim)(word) for word in (focal, context)]
    biases = [layers.Embedding(NUM_WORDS, 1, "zeros")(word) for word in (focal, context)]
    model = keras.Model((focal, context), layers.add([layers.Dot(1)(vectors), *biases]))
    model.compile(keras.optimizers.Adam(0.005), glove_loss)
    return model


def draw_pairs(draw):
    """Return ((focal, context), count): different pairs of words, and their counts."""
    chosen = draw.permutation(NUM_WORDS**2)[:NUM_PAIRS]
    focal, context = (part.astype("int32") for part in np.divmod(chosen, NUM_WORDS))
    return (focal, context), draw.lognormal(1, 1.5, NUM_PAIRS).astype("float32")


if __name__ == "__main__":
    main()
