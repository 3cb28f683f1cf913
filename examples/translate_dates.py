"""I train a Transformer on padded batches, bucketed by length: the numbers of rows and of tokens
vary between updates. Which divisor does the loss need, also if a batch is split over replicas or
into microbatches?

The number of real tokens in the full update. In a mean of the microbatches' means, a token of a
microbatch with few tokens counts too much. An objective that returns `Mean(loss, weights)` never
divides: the update sums both over all microbatches, and divides once.

The task: days, months and spans of days, written in 48 languages ("Dienstag, 3. März 2026", from
Babel's locale data) become ISO 8601 ("2026-03-03"), character by character. Nothing is downloaded.

1. Training in buckets, and on rows padded to the longest: per real token they learn about as fast
   (batches of similar length are somewhat noisier), since an update divides by real tokens. Padding
   only costs time.
2. Greedy decoding of dates that never occur in training.
3. One batch in microbatches: its gradient divided once, and as the mean of the microbatches' means.

    KERAS_BACKEND=jax python examples/translate_dates.py [--quick] [--replicas N] [--out FOLDER]

Allow 3 to 5 minutes on 2 CPU cores; with --quick, expect about 60 % of the held-out dates to be
right.
"""

import argparse
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import devices
import keras
import numpy as np
from keras import ops
from translate_dates_data import (
    LANGUAGES,
    LONGEST,
    PADDING,
    SHAPES,
    Characters,
    lengths,
    split_days,
    write_dates,
)
from translate_dates_model import WarmUp, smoothed_cross_entropy, transformer, translate
from translate_dates_picture import Curve, picture

import wholestep as ws

WIDTH = 64
NUM_PARTS = 4
SEED = 7


@dataclass(frozen=True)
class Size:
    """The size of a run. Each batch has one of the `shapes`, and at most `tokens` tokens, padding
    included.
    """

    languages: list[str]
    num_rows: int
    num_held_out: int
    num_layers: int
    shapes: list[dict]
    tokens: int
    num_warmup: int
    epochs: int


FULL = Size(LANGUAGES, 40_000, 500, 2, SHAPES, tokens=2048, num_warmup=400, epochs=4)
QUICK = Size(LANGUAGES[:2], 2500, 50, 1, SHAPES[1::2], tokens=1024, num_warmup=200, epochs=4)


def main(argv=None):
    """Train twice, translate, compare gradients, draw the curves; return the measurements by
    name.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two languages, a smaller model, fewer updates"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="devices that share the rows of every batch"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    arguments = parser.parse_args(argv)
    devices.split_cpu(arguments.replicas)
    size = QUICK if arguments.quick else FULL
    rng = random.Random(SEED)
    days, days_held_out = split_days(rng)
    pairs = write_dates(size.num_rows, days, size.languages, rng)
    held_out = write_dates(size.num_held_out, days_held_out, size.languages, rng)
    characters = Characters(text for pair in pairs for text in pair)
    rows, rows_held_out = ([characters.row(*pair) for pair in some] for some in (pairs, held_out))
    print(
        f"{len(rows)} dates in {len(size.languages)} languages. Engine: {keras.backend.backend()}.",
        flush=True,
    )

    model, in_buckets = train("in buckets", rows, size, len(characters), arguments.replicas)
    # as many rows in an update
    num_places = len(rows) * size.epochs // len(in_buckets.losses) * sum(LONGEST.values())
    longest = replace(size, shapes=[LONGEST], tokens=num_places, epochs=1)
    _, padded = train("padded to the longest", rows, longest, len(characters))
    curves = {"in buckets": in_buckets, "padded to the longest": padded}
    batches = ws.Batches(rows_held_out, tokens=size.tokens, length=lengths, boundaries=[LONGEST])
    result = {
        "losses": in_buckets.losses,
        "held_out": ws.Trainer(model, Translation()).evaluate(batches, verbose=0, return_dict=True),
        "exact": report(held_out, translate(model, characters, rows_held_out)),
        "errors": normalisation(model, rows[: 8 * NUM_PARTS]),
    }
    result["picture"] = picture(curves, result["errors"], arguments.out)
    print(f"Curves: {result['picture']}")
    print(
        "You have seen: what divides a loss is the real tokens of the whole update, not the parts "
        "it is computed in."
    )
    return result


# ---- the loss, unreduced ----


class Translation(ws.Objective):
    """Predict every next character. Weights: 1 for a character, 0 for padding."""

    def __call__(self, model, batch, training):
        """Return the loss of every character, and two metrics: over characters, and over
        sequences.
        """
        given = batch["target"][:, :-1]
        wanted = batch["target"][:, 1:]
        logits = model([batch["source"], given], training=training)
        is_padding = wanted == PADDING
        is_right = ops.cast(ops.argmax(logits, axis=-1), wanted.dtype) == wanted
        weights = 1 - ops.cast(is_padding, "float32")
        return ws.Mean(smoothed_cross_entropy(wanted, logits), weights), {
            "token_accuracy": ws.Mean(ops.cast(is_right, "float32"), weights),
            "sequence_accuracy": ws.Mean(
                ops.cast(ops.all(is_right | is_padding, axis=1), "float32")
            ),
        }


# ---- training and translating ----


def train(name, rows, size, num_tokens, replicas=1):
    """Train a model on these rows; return the model and its Curve."""
    random.seed(SEED)  # from which Keras draws the seeds of weights
    with devices.scope(replicas):
        model = transformer(num_tokens, WIDTH, size.num_layers)
        optimizer = keras.optimizers.Adam(WarmUp(WIDTH, size.num_warmup), 0.9, 0.98, 1e-9)
    trainer = ws.Trainer(model, Translation(), optimizer=optimizer, replicas=replicas)
    batches = ws.Batches(
        rows, tokens=size.tokens, length=lengths, boundaries=size.shapes, seed=SEED
    )
    counts = np.array([count(batch) for _ in range(size.epochs) for batch in batches])
    weights, (num_real, num_computed) = counts[:, 0], np.cumsum(counts[:, 1:], axis=0).T

    batches.seek(0)  # the same batches again: their order follows from the seed and the epoch
    began = time.perf_counter()
    losses = []
    for step in trainer.steps(batches, size.epochs):
        losses.append(step.loss)
        if step.number % 200 == 0 or step.number == len(counts):
            print(f"  update {step.number:4}, loss {step.loss:.4f}, over the epoch so far", end=" ")
            print(f"{step.logs['token_accuracy']:.2%} of the characters right", flush=True)
    print(
        f"Trained {name}: {len(losses)} updates in {time.perf_counter() - began:.0f} s, of", end=" "
    )
    print(
        f"shapes {batches.shapes}; {1 - num_real[-1] / num_computed[-1]:.0%} padding.", flush=True
    )
    return model, Curve(np.asarray(losses), weights, num_real, num_computed)


def count(batch):
    """Return the numbers of characters to predict, of real tokens in both sequences, and of all
    computed tokens.
    """
    sizes = [(np.count_nonzero(tokens), tokens.size) for tokens in batch.values()]
    return (np.count_nonzero(batch["target"][:, 1:]), *np.sum(sizes, axis=0))


def report(pairs, translations):
    """Print some translations; return the share of completely right translations."""
    for (text, iso), ours in list(zip(pairs, translations, strict=True))[:10]:
        print(f"  {text:>36}  {ours:22} {'' if ours == iso else f'wrong: {iso}'}")
    exact = float(
        np.mean([ours == iso for ours, (_, iso) in zip(translations, pairs, strict=True)])
    )
    print(f"Of {len(pairs)} held-out dates, {exact:.1%} are right to the last character.")
    return exact


# ---- the effect of the normalisation ----


def normalisation(model, rows):
    """Return the errors of the gradient of a batch in microbatches, normalised in two ways."""
    (batch,) = ws.Batches(rows, tokens=10**6, length=lengths, boundaries=[LONGEST])
    num = len(rows) // NUM_PARTS
    parts = [
        {name: tokens[i : i + num] for name, tokens in batch.items()}
        for i in range(0, len(rows), num)
    ]
    (whole,) = gradients(model, [batch], microbatch_size=len(rows))
    (divided_once,) = gradients(model, [batch], microbatch_size=num)
    mean_of_means = np.mean(gradients(model, parts, microbatch_size=num), axis=0)
    errors = {
        "divided once": relative_error(divided_once, whole),
        "mean of means": relative_error(mean_of_means, whole),
    }
    counts = [int(np.count_nonzero(part["target"][:, 1:])) for part in parts]
    print(
        f"A batch of {len(rows)} rows in {NUM_PARTS} parts of {counts} characters. Relative error "
        "of its gradient:"
    )
    print(
        f"  divided once, by the {sum(counts)} characters of the whole: "
        f"{errors['divided once']:.0e}"
    )
    print(f"  the mean of the parts' means:                    {errors['mean of means']:.0e}")
    return errors


def gradients(model, batches, microbatch_size):
    """Return the gradient of each batch as one vector: the change of the parameters by an update of
    plain SGD.
    """
    # large, so that little of a parameter's change is lost by rounding
    rate = 1024.0
    trainer = ws.Trainer(
        model, Translation(), optimizer=keras.optimizers.SGD(rate), microbatch_size=microbatch_size
    )
    start = model.get_weights()
    found = []
    for batch in batches:
        trainer.update(batch)
        moves = [before - after for before, after in zip(start, model.get_weights(), strict=True)]
        found.append(np.concatenate([move.ravel() for move in moves]) / rate)
        model.set_weights(start)
    return found


def relative_error(found, right):
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


if __name__ == "__main__":
    main()
