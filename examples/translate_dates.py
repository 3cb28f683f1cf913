"""I train a Transformer on padded batches, bucketed by length: every update has another number of rows and of tokens.
By what do I divide the loss, also where a batch is cut over replicas or into accumulated parts?

By the number of real tokens in the whole update, wherever they are. A mean of the parts' means lets a token count for
more where its part holds few. An objective that returns `Mean(loss, weights)` never divides: the update sums both over
all of its parts, and divides once.

The task: days, months and spans of days as people write them in 48 languages ("Dienstag, 3. März 2026", from Babel's
locale data) become ISO 8601 ("2026-03-03"), character by character. Nothing is downloaded.

1. Training in buckets, and on rows padded to the longest: over the real tokens seen they learn about as fast (batches
   of like length are somewhat noisier), since an update divides by those. Padding is worth nothing and costs time.
2. Greedy decoding of dates that never occur in training.
3. One batch in parts: its gradient divided once, and as the mean of the parts' means.

    KERAS_BACKEND=jax python examples/translate_dates.py [--quick] [--out FOLDER]

Allow 3 to 5 minutes on 2 CPU cores.
"""

import argparse
import os
import random
import time
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import devices
import keras
import matplotlib
import numpy as np
from babel import Locale
from babel.dates import format_date, format_interval, format_skeleton
from keras import layers, ops

import wholestep as ws

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LANGUAGES = [
    *("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "is", "et", "lv", "lt", "pl", "cs", "sk", "sl"),
    *("hr", "sr", "bg", "mk", "uk", "ru", "be", "ro", "hu", "sq", "el", "tr", "hy", "ka", "he", "ar", "fa", "ur", "hi"),
    *("bn", "ta", "te", "th", "ja", "ko", "zh", "vi", "id", "af"),
]
KINDS = ("full", "long", "medium", "month", "span")
SHAPES = [
    {"source": 16, "target": 12},
    {"source": 32, "target": 12},
    {"source": 24, "target": 23},
    {"source": 44, "target": 23},
]
LONGEST = SHAPES[-1]
PADDING, BEGIN, END, UNKNOWN = range(4)
WIDTH, NUM_HEADS, SMOOTHING, NUM_PARTS, SEED = 64, 4, 0.1, 4, 7


@dataclass(frozen=True)
class Size:
    """How large a run is. An update has so many `tokens`, padding included, in one of the `shapes`."""

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
    """Train twice, translate, compare gradients, draw the curves; return what was measured, by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two languages, a smaller model, fewer updates")
    parser.add_argument("--replicas", type=int, default=1, help="devices that share the rows of every batch")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    arguments = parser.parse_args(argv)
    devices.split_cpu(arguments.replicas)
    size, rng = QUICK if arguments.quick else FULL, random.Random(SEED)
    days, days_held_out = split_days(rng)
    pairs = write_dates(size.num_rows, days, size.languages, rng)
    held_out = write_dates(size.num_held_out, days_held_out, size.languages, rng)
    characters = Characters(text for pair in pairs for text in pair)
    rows, rows_held_out = ([characters.row(*pair) for pair in some] for some in (pairs, held_out))
    print(f"{len(rows)} dates in {len(size.languages)} languages. Engine: {keras.backend.backend()}.", flush=True)

    model, in_buckets = train("in buckets", rows, size, len(characters), arguments.replicas)
    num_places = len(rows) * size.epochs // len(in_buckets.losses) * sum(LONGEST.values())  # as many rows in an update
    longest = replace(size, shapes=[LONGEST], tokens=num_places, epochs=1)
    _, padded = train("padded to the longest", rows, longest, len(characters))
    curves = {"in buckets": in_buckets, "padded to the longest": padded}
    batches = ws.Batches(rows_held_out, tokens=size.tokens, length=lengths, boundaries=[LONGEST])
    result = {
        "losses": in_buckets.losses,
        "held_out": ws.Trainer(model, Translation()).evaluate(batches, verbose=0, return_dict=True),
        "exact": report(held_out, translate(model, characters, rows_held_out)),
        "errors": normalisation(model, rows[: 8 * NUM_PARTS]),
        "picture": picture(curves, arguments.out),
    }
    print(f"Curves: {result['picture']}")
    return result


# ---- the data: texts, and rows of tokens made from them ----


def split_days(rng):
    """Return the days from 1950 to 2049: nine tenths to train on, and one tenth held out."""
    days = [date(1950, 1, 1) + timedelta(i) for i in range(36_525)]
    rng.shuffle(days)
    return days[3652:], days[:3652]


def write_dates(num, days, languages, rng):
    """Return `num` pairs (as people write it, ISO 8601): a day, the month that begins with it, or a span of two."""
    locales, known, pairs = [Locale.parse(language) for language in languages], set(days), []
    while len(pairs) < num:
        locale, kind, day = rng.choice(locales), rng.choice(KINDS), rng.choice(days)
        first, last = day.replace(day=1), day + timedelta(rng.randint(1, 60))
        if kind == "month" and first in known:
            pairs.append((format_skeleton("yMMMM", first, locale=locale), f"{first:%Y-%m}"))
        elif kind == "span" and last in known:
            pairs.append((format_interval(day, last, "yMMMd", locale=locale), f"{day}/{last}"))
        elif kind in ("full", "long", "medium"):
            pairs.append((format_date(day, kind, locale), f"{day}"))
    return pairs


class Characters:
    """The tokens: every character of some texts."""

    def __init__(self, texts):
        self.known = sorted(set("".join(texts)))
        self.tokens = {character: token for token, character in enumerate(self.known, start=UNKNOWN + 1)}

    def __len__(self):
        return UNKNOWN + 1 + len(self.known)

    def encode(self, text):
        """Return the text's tokens, a list."""
        return [self.tokens.get(character, UNKNOWN) for character in text]

    def decode(self, tokens):
        """Return the text that stands before the first END."""
        text = takewhile(lambda token: token != END, tokens)
        return "".join(self.known[token - UNKNOWN - 1] if token > UNKNOWN else "?" for token in text)

    def row(self, text, iso):
        """Return {"source": (length,), "target": (length,)}, the target between BEGIN and END."""
        tokens = {"source": self.encode(text), "target": [BEGIN, *self.encode(iso), END]}
        return {name: np.asarray(values, np.int32) for name, values in tokens.items()}


def lengths(row):
    return {name: len(tokens) for name, tokens in row.items()}


# ---- the model: an encoder and a decoder that share one table of characters ----


def transformer(num_tokens, width, num_layers):
    """Return the model [source: (rows, S), target: (rows, T)] -> logits (rows, T, tokens), for any S and T.

    The logits at place t follow from the whole source, and from the target up to t.
    """
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    table = Embedding(num_tokens, width)
    is_text = ops.expand_dims(source != PADDING, 1)  # (rows, 1, S): no place looks at padding

    x = table(source)
    for _ in range(num_layers):
        x = think(look(x, attention_mask=is_text))
    memory = layers.LayerNormalization()(x)

    x = table(target)
    for _ in range(num_layers):
        x = look(x, use_causal_mask=True)  # padding comes last: no character looks at it
        x = think(look(x, memory, attention_mask=is_text))
    return keras.Model([source, target], table(layers.LayerNormalization()(x), reverse=True))


def look(x, memory=None, **masks):
    """Let every place look at those of `memory`, or at its own sequence."""
    query = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(NUM_HEADS, x.shape[-1] // NUM_HEADS)
    return x + attention(query, query if memory is None else memory, **masks)


def think(x):
    """Let every place make something of what it has seen."""
    hidden = layers.Dense(4 * x.shape[-1], activation="relu")(layers.LayerNormalization()(x))
    return x + layers.Dense(x.shape[-1])(hidden)


class Embedding(layers.ReversibleEmbedding):
    """One table for the characters read, those written and, in reverse, the logits; with sines that tell the place.

    As in https://arxiv.org/abs/1706.03762 (3.4 and 3.5), but for short texts, where the order of digits is what counts:
    wavelengths up to 100 * 2 pi, not 10 000 * 2 pi, and characters that weigh less than their places.
    """

    def __init__(self, num_tokens, width):
        super().__init__(num_tokens, width, embeddings_initializer=keras.initializers.RandomNormal(stddev=width**-0.5))

    def call(self, inputs, reverse=False):
        """Return (rows, length, width) of tokens (rows, length); in reverse, logits (rows, length, tokens)."""
        if reverse:
            return super().call(inputs, reverse=True)
        place = ops.cast(ops.arange(ops.shape(inputs)[1]), self.compute_dtype)[:, None]
        angle = place / 100 ** (np.arange(0, self.output_dim, 2, dtype="float32") / self.output_dim)
        character = 0.4 * self.output_dim**0.5 * super().call(inputs)
        return character + ops.concatenate([ops.sin(angle), ops.cos(angle)], axis=-1)


# ---- the loss, unreduced, and the learning rate ----


class Translation(ws.Objective):
    """Predict every next character. Weights: 1 for a character, 0 for padding."""

    def __call__(self, model, batch, training):
        """Return the loss of every character, and two metrics: over characters, and over whole sequences."""
        given, wanted = batch["target"][:, :-1], batch["target"][:, 1:]
        logits = model([batch["source"], given], training=training)
        is_padding = wanted == PADDING
        is_right = ops.cast(ops.argmax(logits, axis=-1), wanted.dtype) == wanted
        weights = 1 - ops.cast(is_padding, "float32")
        return ws.Mean(smoothed_cross_entropy(wanted, logits), weights), {
            "token_accuracy": ws.Mean(ops.cast(is_right, "float32"), weights),
            "sequence_accuracy": ws.Mean(ops.cast(ops.all(is_right | is_padding, axis=1), "float32")),
        }


def smoothed_cross_entropy(wanted, logits):
    """Return the cross-entropy with 0.9 on the wanted token and 0.1 spread over the others, less its lowest value.

    The lowest value is the entropy of what is aimed at. So 0 is perfect, and a curve shows what is left to learn.

    Args:
        wanted: tokens (rows, length).
        logits: (rows, length, tokens).
    """
    num_others = logits.shape[-1] - 1
    right, other = 1 - SMOOTHING, SMOOTHING / num_others
    lowest = -right * np.log(right) - num_others * other * np.log(other)
    log_probabilities = ops.log_softmax(logits)
    of_wanted = ops.take_along_axis(log_probabilities, wanted[..., None], axis=-1)[..., 0]
    return -(right - other) * of_wanted - other * ops.sum(log_probabilities, axis=-1) - lowest


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises for `num_warmup` updates in a straight line, then falls with the inverse square root of their number.

    Counted in updates, into however many parts they are cut (https://arxiv.org/abs/1706.03762, 5.3).
    """

    def __init__(self, width, num_warmup):
        self.width = width
        self.num_warmup = num_warmup

    def __call__(self, step):
        """Return the rate of the update that comes after `step` others."""
        number = ops.cast(step, "float32") + 1
        return self.width**-0.5 * ops.minimum(number**-0.5, number * self.num_warmup**-1.5)


# ---- training and translating ----


class Curve(NamedTuple):
    """The loss of every update and its weight; and all tokens up to then, the real ones and those computed."""

    losses: np.ndarray
    weights: np.ndarray
    num_real: np.ndarray
    num_computed: np.ndarray


def train(name, rows, size, num_tokens, replicas=1):
    """Return a model that was trained on these rows, and its Curve."""
    random.seed(SEED)  # from which Keras draws the seeds of weights
    with devices.scope(replicas):
        model = transformer(num_tokens, WIDTH, size.num_layers)
        optimizer = keras.optimizers.Adam(WarmUp(WIDTH, size.num_warmup), 0.9, 0.98, 1e-9)
    trainer = ws.Trainer(model, Translation(), optimizer=optimizer, replicas=replicas)
    batches = ws.Batches(rows, tokens=size.tokens, length=lengths, boundaries=size.shapes, seed=SEED)
    counts = np.array([count(batch) for _ in range(size.epochs) for batch in batches])
    weights, (num_real, num_computed) = counts[:, 0], np.cumsum(counts[:, 1:], axis=0).T

    batches.seek(0)  # the same batches again: their order follows from the seed and the epoch
    began, losses = time.perf_counter(), []
    for step in trainer.steps(batches, size.epochs):
        losses.append(step.loss)
        if step.number % 200 == 0 or step.number == len(counts):
            print(f"  update {step.number:4}, loss {step.loss:.4f}, over the epoch so far", end=" ")
            print(f"{step.logs['token_accuracy']:.2%} of the characters right", flush=True)
    print(f"Trained {name}: {len(losses)} updates in {time.perf_counter() - began:.0f} s, of", end=" ")
    print(f"shapes {batches.shapes}; {1 - num_real[-1] / num_computed[-1]:.0%} padding.", flush=True)
    return model, Curve(np.asarray(losses), weights, num_real, num_computed)


def count(batch):
    """Return the characters to predict, the real tokens of both sequences, and all that is computed."""
    sizes = [(np.count_nonzero(tokens), tokens.size) for tokens in batch.values()]
    return (np.count_nonzero(batch["target"][:, 1:]), *np.sum(sizes, axis=0))


def translate(model, characters, rows):
    """Return the texts that the model writes for these rows, the likeliest character at every place."""
    (batch,) = ws.Batches(rows, tokens=10**6, length=lengths, boundaries=[LONGEST], shuffle=False)
    written = np.zeros_like(batch["target"])
    written[:, 0] = BEGIN
    for place in range(1, LONGEST["target"]):
        logits = model.predict([batch["source"], written[:, :-1]], batch_size=100, verbose=0)
        written[:, place] = logits[:, place - 1].argmax(axis=-1)
    return [characters.decode(tokens) for tokens in written[:, 1:]]


def report(pairs, translations):
    """Print some translations; return the share that is right to the last character."""
    for (text, iso), ours in list(zip(pairs, translations, strict=True))[:10]:
        print(f"  {text:>36}  {ours:22} {'' if ours == iso else f'wrong: {iso}'}")
    exact = float(np.mean([ours == iso for ours, (_, iso) in zip(translations, pairs, strict=True)]))
    print(f"Of {len(pairs)} held-out dates, {exact:.1%} are right to the last character.")
    return exact


# ---- what the normalisation is worth ----


def normalisation(model, rows):
    """Return how far the gradient of a batch in parts is from that of the whole, normalised in two ways."""
    (batch,) = ws.Batches(rows, tokens=10**6, length=lengths, boundaries=[LONGEST])
    num = len(rows) // NUM_PARTS
    parts = [{name: tokens[i : i + num] for name, tokens in batch.items()} for i in range(0, len(rows), num)]
    (whole,) = gradients(model, [batch], microbatch_size=len(rows))
    (divided_once,) = gradients(model, [batch], microbatch_size=num)
    mean_of_means = np.mean(gradients(model, parts, microbatch_size=num), axis=0)
    errors = {
        "divided once": relative_error(divided_once, whole),
        "mean of means": relative_error(mean_of_means, whole),
    }
    counts = [int(np.count_nonzero(part["target"][:, 1:])) for part in parts]
    print(f"A batch of {len(rows)} rows in {NUM_PARTS} parts of {counts} characters. Relative error of its gradient:")
    print(f"  divided once, by the {sum(counts)} characters of the whole: {errors['divided once']:.0e}")
    print(f"  the mean of the parts' means:                    {errors['mean of means']:.0e}")
    return errors


def gradients(model, batches, microbatch_size):
    """Return the gradient of each batch as one vector: what an update of plain SGD takes off the parameters."""
    rate = 1024.0  # large, for the parameters' own digits not to drown the last ones of what is taken off
    trainer = ws.Trainer(model, Translation(), optimizer=keras.optimizers.SGD(rate), microbatch_size=microbatch_size)
    start, found = model.get_weights(), []
    for batch in batches:
        trainer.update(batch)
        moves = [before - after for before, after in zip(start, model.get_weights(), strict=True)]
        found.append(np.concatenate([move.ravel() for move in moves]) / rate)
        model.set_weights(start)
    return found


def relative_error(found, right):
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def picture(curves, out):
    num = min(50, *(len(curve.losses) for curve in curves.values()))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        sums = [np.convolve(values, np.ones(num), "valid") for values in (curve.losses * curve.weights, curve.weights)]
        for panel, tokens in zip(axes, (curve.num_real, curve.num_computed), strict=True):
            panel.plot(tokens[num - 1 :] / 1e6, sums[0] / sums[1], label=name, color=colour)
    axes[0].set(xlabel="real tokens seen, millions", ylabel=f"loss of {num} updates", yscale="log")
    axes[0].set_title("What is learned follows from the real tokens")
    axes[1].set(xlabel="tokens computed, millions, padding included")
    axes[1].set_title("What it costs, from all that is computed")
    axes[0].legend()
    for panel in axes:
        panel.grid(alpha=0.3)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"translate-dates-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
