"""How can a contrastive loss have 4,096 rows in a batch, with the memory of 64?

Rows meet in such a loss: the other rows of the batch are the wrong answers. Microbatches by
themselves would compare 64 rows alone. An objective that returns `ws.Whole(loss, outputs)` says
that the loss is a function of the outputs of all rows: these are computed first, microbatch by
microbatch, then the loss and its derivative, and then the gradient.

Two towers learn from docstrings of installed packages: the query is the first line, the answer the
rest. They are trained with batches of 64, and of 4,096 in microbatches of 64; the picture shows how
often the right answer is among the best ten of all held-out ones, by updates. An update of 4,096
rows moves further. (By epochs, small batches are ahead on so few docstrings.) One update with all
rows at once shows that the cut changes rounding only.

    KERAS_BACKEND=jax python examples/retrieval.py [--quick]

A few minutes on 2 CPU cores.
"""

import argparse
import ast
import importlib.util
import os
import random
import re
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers, ops

import wholestep as ws

PACKAGES = ("keras", "jax", "numpy", "scipy", "sklearn", "matplotlib", "pandas")
WORD = re.compile(r"[a-z]+")
NUM_WORDS = 10_000
LENGTHS = 16, 64  # words of a query, and of an answer
TEMPERATURE = 0.1


def main(argv=None):
    """Train both ways; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer docstrings and epochs")
    quick = parser.parse_args(argv).quick
    train, held_out = docstrings(most=3_000 if quick else None)
    print(f"{len(train[0])} docstrings to learn from, {len(held_out[0])} held out.", flush=True)
    large = 512 if quick else 4_096
    plans = {64: (1e-3, 12), large: (4e-3, 32)}  # rates and epochs
    shown = {"difference": difference(train, large)}
    print(f"One update of {large} rows: cut and whole differ by {shown['difference']:.1e}.")
    shown["recall"] = {
        size: recalls(train, held_out, size, rate, 2 if quick else epochs)
        for size, (rate, epochs) in plans.items()
    }
    picture(shown["recall"], Path("out/retrieval.png"))
    print("\nYou have seen: ws.Whole keeps the rows of a loss together, however the batch is cut.")
    return shown


# ---- the data: docstrings of installed packages ----


def docstrings(most=None):
    """Return (queries, answers), int32 (rows, words), to train on and held out."""
    pairs = list(dict.fromkeys(pair for folder in folders() for pair in pairs_in(folder)))
    random.Random(0).shuffle(pairs)
    texts = [
        [WORD.findall(text.lower()) for text in side] for side in zip(*pairs[:most], strict=True)
    ]
    counts = Counter(word for side in texts for text in side for word in text)
    words = {word: i + 1 for i, (word, _) in enumerate(counts.most_common(NUM_WORDS - 1))}
    sides = [numbers(side, words, length) for side, length in zip(texts, LENGTHS, strict=True)]
    num_held_out = min(2_000, len(pairs[:most]) // 5)
    return [side[num_held_out:] for side in sides], [side[:num_held_out] for side in sides]


def folders():
    """Yield Python's library and the installed packages."""
    yield Path(sysconfig.get_path("stdlib"))
    for name in PACKAGES:
        if (spec := importlib.util.find_spec(name)) is not None:
            yield Path(spec.origin).parent


def pairs_in(folder):
    """Yield (first line, rest) of the docstrings in a folder, without those in site-packages."""
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests"} & {*path.relative_to(folder).parts}:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n")
                if len(WORD.findall(first.lower())) >= 4 and len(WORD.findall(rest.lower())) >= 8:
                    yield first, rest


def numbers(texts, words, length):
    """Return the numbers of the first words of texts, int32 (texts, length); 0 where none is."""
    table = np.zeros((len(texts), length), np.int32)
    for row, text in zip(table, texts, strict=True):
        known = [words[word] for word in text if word in words][:length]
        row[: len(known)] = known
    return table


# ---- the model and its loss ----


def towers():
    """Return a model (queries, answers) -> vectors of both, each (rows, 64)."""
    random.seed(1)  # from which Keras draws the seeds of weights
    inputs = [keras.Input((length,), dtype="int32") for length in LENGTHS]
    embedding = layers.Embedding(NUM_WORDS, 64, mask_zero=True)
    outputs = []
    for i, words in enumerate(inputs):
        mean = layers.GlobalAveragePooling1D()(embedding(words))
        hidden = layers.Dropout(0.2, seed=i)(layers.Dense(128, activation="relu")(mean))
        outputs.append(layers.UnitNormalization()(layers.Dense(64)(hidden)))
    return keras.Model(inputs, outputs)


class Matching(ws.Objective):
    """The contrastive loss of queries and answers, over all rows of the batch."""

    def __call__(self, model, batch, training):
        """Return the loss of all rows by the vectors of both towers."""
        return ws.Whole(contrastive, tuple(model(batch, training=training)))


def contrastive(queries, answers):
    scores = ops.matmul(queries, ops.transpose(answers)) / TEMPERATURE
    return ws.Mean(-ops.diagonal(ops.log_softmax(scores)))


def difference(train, size):
    """Return the largest difference of a weight after one update, in microbatches and at once."""
    batch = tuple(side[:size] for side in train)
    found = []
    for microbatch_size in (64, size):
        model = towers()
        trainer = ws.Trainer(
            model, Matching(), optimizer=keras.optimizers.SGD(1.0), microbatch_size=microbatch_size
        )
        trainer.update(batch)
        found.append(model.get_weights())
    return max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True))


def recalls(train, held_out, size, rate, epochs):
    """Train with batches of `size` rows; return (updates, recall) after each epoch."""
    optimizer = keras.optimizers.Adam(rate)
    trainer = ws.Trainer(towers(), Matching(), optimizer=optimizer, microbatch_size=64)
    found = []
    for epoch in range(epochs):
        trainer.fit(tuple(train), batch_size=size, verbose=0)
        found.append((trainer.run.number, recall(trainer, held_out)))
        updates, share = found[-1]
        text = f"Batches of {size}: recall {share:.3f} after epoch {epoch + 1}, {updates} updates."
        print(text, flush=True)
    return found


def recall(trainer, held_out, num=10):
    """Return how often the right answer is among the best `num` of all held-out ones."""
    queries, answers = trainer.predict(held_out, batch_size=500, verbose=0)
    scores = queries @ answers.T
    is_better = scores > np.diagonal(scores)[:, None]
    return float(np.mean(is_better.sum(axis=1) < num))


def picture(by_size, path):
    """Draw the recall by updates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for size, values in by_size.items():
        updates, shares = zip(*values, strict=True)
        axes.plot(updates, shares, marker="o", label=f"batches of {size:,} rows")
    axes.set_xscale("log")
    axes.set(xlabel="updates", ylabel="right answer among the best ten", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
