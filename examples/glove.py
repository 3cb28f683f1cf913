"""Why does my GloVe model stay on a plateau in a loop of my own, where `fit` trains it well from the same pipeline?

Because of a shape. The pipeline's labels are (B,), the model's outputs (B, 1). `prediction - log(count)` in a loop of
one's own is then (B, B): every pair is drawn to the count of every other pair of its batch. `fit` trains the same model
with the same function, for Keras gives labels the rank of the outputs before it calls a loss. One line mends the loop.

1. the loop as written, with a bare operation on (B,) and (B, 1): the plateau;
2. the same loop and one more line: `count = ops.reshape(count, (-1, 1))`;
3. `keras.Model.fit`;
4. a hand-written loop over `trainer.steps`. 2, 3 and 4 are on one curve. (On TensorFlow 4 is a few per cent apart:
   Keras squares the gradients of equal embedding rows there before it sums them.) The loss as written, as an
   `Objective`, is refused before anything runs, in a sentence that names both shapes;
5. the loop of 4, its rows shuffled in a window of 1000, in one order for all epochs. That is the second effect, and the
   smaller one: a table of pairs is sorted, and a window still shows one word's pairs, then the next word's.
   `ws.Batches` permutes all rows anew every epoch, in constant memory; runs 1 to 4 read them so.

The vectors (Pennington, Socher and Manning, "GloVe: Global Vectors for Word Representation", 2014) come from real text:
the language reference that Python carries (`pydoc_data.topics`), or any text file. It may be larger than memory: it is
read twice, its pairs are summed in buffers, spilled, merged and trained on from memory-mapped files.

    KERAS_BACKEND=jax python examples/glove.py [--quick] [--corpus FILE] [--out FOLDER]
"""

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib
import numpy as np
from keras import ops
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

import wholestep as ws

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH_SIZE, SHUFFLE_WINDOW, SEED = 512, 1000, 7
AS_WRITTEN, MENDED, KERAS = "own loop, as written", "own loop, labels reshaped", "keras fit"
OURS, WINDOW = "own loop over trainer.steps", f"the same, a window of {SHUFFLE_WINDOW} rows"
RATE = 0.005
PARTS = ("target", "other", "target_bias", "other_bias")
WORD = re.compile(r"[^\W\d]\w+")
PAIR = np.dtype([("key", np.int64), ("count", np.float64)])  # key: focal * number of words + context
ASK = ("class", "function", "exception", "import", "string", "loop", "tuple", "module")


def main(argv=None):
    """Build the table, train in five ways, save vectors and a picture; return what was measured, by name."""
    arguments = parse(argv)
    print(f"Engine: {keras.backend.backend()}.")
    words = vocabulary(lines(arguments.corpus), arguments.vocabulary, arguments.min_count)
    if len(words) < 2:
        raise SystemExit("Fewer than two words occur often enough: try a smaller --min-count or another --corpus.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        focal, context, count = cooccurrences(lines(arguments.corpus), words, arguments.window, Path(folder))
        print(f"{len(count)} pairs of words within {arguments.window} words. Loss over all of them, by epoch:")
        result = train(((focal, context), count), len(words), arguments.dim, arguments.epochs)
    vectors = result.pop("vectors")
    asked = [word for word in ASK if word in words] or content(words)[: len(ASK)]
    result |= {"num_words": len(words), "num_pairs": len(count)}
    result["neighbours"] = {word: nearest(word, list(words), vectors) for word in asked}
    result["vectors"] = save(arguments.out / "glove.txt", words, vectors, header=arguments.header)
    result["picture"] = picture(result["losses"], list(words), vectors, arguments.out)
    report(result)
    return result


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, help="a text file (UTF-8); without it, Python's language reference")
    add("--quick", action="store_true", help="frequent words only, shorter vectors, few epochs")
    add("--window", type=int, default=10, help="words to either side that count as context")
    add("--vocabulary", type=int, default=20_000, help="the most frequent words, at most")
    add("--min-count", type=int, help="how often a word must occur (5; quick: 15)")
    add("--dim", type=int, help="length of a vector (100; quick: 32)")
    add("--epochs", type=int, help="(12; quick: 6)")
    add("--out", type=Path, default=Path("out"), help="folder of the vectors and the picture")
    add("--header", action="store_true", help="begin the vectors as word2vec does: number of words, length")
    arguments = parser.parse_args(argv)
    for name, usual, quick in (("min_count", 5, 15), ("dim", 100, 32), ("epochs", 12, 6)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    return arguments


# ---- from text to a table of pairs, never holding either ----


def lines(corpus: Path | None) -> Iterator[str]:
    """Yield the lines of a text file, or of Python's language reference."""
    if corpus is None:
        yield from (line for text in topics.values() for line in text.splitlines())
        return
    with corpus.open(encoding="utf-8", errors="replace") as text:
        yield from text


def split(text: Iterable[str]) -> Iterator[str]:
    return (match[0] for line in text for match in WORD.finditer(line.lower()))


def vocabulary(text: Iterable[str], num_words: int, min_count: int) -> dict[str, int]:
    """Return the most frequent words and their numbers, the most frequent first."""
    counts = Counter(split(text))
    frequent = [word for word, count in counts.most_common(num_words) if count >= min_count]
    print(f"{counts.total()} words of text, {len(counts)} different; {len(frequent)} are kept.", flush=True)
    return {word: number for number, word in enumerate(frequent)}


def cooccurrences(text, words, window, folder, *, num_buffered=1 << 22):
    """Return how often words meet: (focal, context, count), memory-mapped, sorted by focal and context word.

    A pair counts 1 / distance, summed over the text, in both directions. Words that are not kept take no place.

    Args:
        text: lines.
        words: their numbers, 0 to V - 1.
        window: the largest distance.
        folder: for files of sorted runs, and of the table.
        num_buffered: pairs that are sorted at once, 16 bytes each and a few times as much while sorting.
    """
    numbers = (words[word] for word in split(text) if word in words)
    runs = []
    for run in sorted_runs(numbers, len(words), window, max(1, num_buffered // (2 * window))):
        np.save(folder / f"run{len(runs)}.npy", run)
        runs.append(np.load(folder / f"run{len(runs)}.npy", mmap_mode="r"))
    columns = {"focal": np.int32, "context": np.int32, "count": np.float32}
    for pairs in merge(runs, max(1, num_buffered // max(1, len(runs)))):
        parts = *np.divmod(pairs["key"], len(words)), pairs["count"]
        for (name, dtype), part in zip(columns.items(), parts, strict=True):
            with (folder / name).open("ab") as file:
                part.astype(dtype).tofile(file)
    return tuple(np.memmap(folder / name, dtype, "r") for name, dtype in columns.items())


def sorted_runs(numbers: Iterator[int], num_words: int, window: int, size: int) -> Iterator[np.ndarray]:
    """Yield the pairs of every `size` words, with those `window` words before them: one sorted run each."""
    before = np.empty(0, np.int64)
    while len(new := np.fromiter(islice(numbers, size), np.int64)):
        text = np.concatenate([before, new])
        yield add_up(pairs_within(text, len(before), num_words, window))
        before = text[-window:]


def pairs_within(text: np.ndarray, begin: int, num_words: int, window: int) -> np.ndarray:
    """Return the pairs of which the later word stands at `begin` or after it, in both directions."""
    found = []
    for distance in range(1, window + 1):
        later = text[max(begin, distance) :]
        earlier = text[max(begin, distance) - distance :][: len(later)]
        pairs = np.empty(2 * len(later), PAIR)
        pairs["key"] = np.concatenate([earlier * num_words + later, later * num_words + earlier])
        pairs["count"] = 1 / distance
        found.append(pairs)
    return np.concatenate(found)


def add_up(pairs: np.ndarray) -> np.ndarray:
    """Return the pairs sorted by key, equal keys as one with the sum of their counts."""
    pairs = pairs[np.argsort(pairs["key"], kind="stable")]
    first = np.flatnonzero(np.diff(pairs["key"], prepend=-1))
    merged = pairs[first]
    merged["count"] = np.add.reduceat(pairs["count"], first) if len(first) else 0
    return merged


def merge(runs: list[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield sorted runs as a single one, in pieces, looking at `size` pairs of each run at a time."""
    runs = [run for run in runs if len(run)]
    while runs:
        heads = [run[:size] for run in runs]
        last = min(head["key"][-1] for head in heads)  # beyond it, a run may hold more than its head shows
        counts = [np.searchsorted(head["key"], last, side="right") for head in heads]
        yield add_up(np.concatenate([head[:num] for head, num in zip(heads, counts, strict=True)]))
        runs = [run[num:] for run, num in zip(runs, counts, strict=True) if num < len(run)]


# ---- the model and its loss ----


def glove_loss(count, prediction):
    """Return min(count / 100, 1)^0.75 * (prediction - log(count))^2, unreduced.

    Seldom met, a pair says little; often met, not ever more.
    """
    weight = ops.minimum(count / 100, 1) ** 0.75
    return weight * (prediction - ops.log(count)) ** 2


def network(num_words, dim):
    """Return the model that predicts log count = target . context + a bias of each, as (rows, 1); compiled."""
    focal, context = keras.Input((), dtype="int32", name="focal"), keras.Input((), dtype="int32", name="context")
    target, other = embedding(num_words, dim, "target", 1)(focal), embedding(num_words, dim, "other", 2)(context)
    biases = [
        keras.layers.Embedding(num_words, 1, "zeros", name=f"{name}_bias")(word)
        for name, word in (("target", focal), ("other", context))
    ]
    model = keras.Model((focal, context), keras.layers.add([keras.layers.Dot(1)([target, other]), *biases]))
    model.compile(keras.optimizers.Adam(RATE), glove_loss)
    return model


def embedding(num_words, dim, name, seed):
    start = keras.initializers.RandomUniform(-0.5 / dim, 0.5 / dim, seed=SEED + seed)  # the same in every run
    return keras.layers.Embedding(num_words, dim, start, name=name)


def vectors_of(model):
    """Return (words, dim): the sum of a word's two vectors, as GloVe gives them."""
    return sum(model.get_layer(name).get_weights()[0] for name in ("target", "other"))


def loss_of(model, data, size=1 << 16):
    """Return the mean loss over all pairs, some at a time, with numpy alone: one measure for all runs."""
    (focal, context), count = data
    weights = {name: model.get_layer(name).get_weights()[0] for name in PARTS}
    total = 0.0
    for begin in range(0, len(count), size):
        i, j, met = (column[begin : begin + size] for column in (focal, context, count))
        products = np.einsum("ij,ij->i", weights["target"][i], weights["other"][j])
        error = products + weights["target_bias"][i, 0] + weights["other_bias"][j, 0] - np.log(met)
        total += float(np.sum(np.minimum(met / 100, 1) ** 0.75 * error**2))
    return total / len(count)


# ---- the hand-written loop, as one writes it in Keras 3 on either engine ----


def as_written(model, pair, count):
    return ops.mean(glove_loss(count, model(pair, training=True)))  # (B,) and (B, 1) make (B, B)


def mended(model, pair, count):
    count = ops.reshape(count, (-1, 1))
    return ops.mean(glove_loss(count, model(pair, training=True)))


def by_hand(loss):
    """Return a way to train: a loop of one's own that minimises `loss(model, pair, count)`."""

    def train(model, batches, epochs, note):
        step = {"jax": jax_step, "tensorflow": tape_step}[keras.backend.backend()](model, loss)
        for _ in range(epochs):
            for pair, count in batches:
                step(pair, count)
            note(model)

    return train


def tape_step(model, loss):
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def step(pair, count):
        with tf.GradientTape() as tape:
            value = loss(model, pair, count)
        gradients = tape.gradient(value, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def jax_step(model, loss):
    import jax

    variables, optimizer = model.trainable_variables, model.optimizer
    optimizer.build(variables)

    def value_at(values, pair, count):
        with keras.StatelessScope(zip(variables, values, strict=True)):
            return loss(model, pair, count)

    @jax.jit
    def update(values, slots, pair, count):
        return optimizer.stateless_apply(slots, jax.grad(value_at)(values, pair, count), values)

    def step(pair, count):
        held = variables + optimizer.variables
        values, slots = update([v.value for v in variables], [v.value for v in optimizer.variables], pair, count)
        for variable, value in zip(held, [*values, *slots], strict=True):
            variable.assign(value)

    return step


# ---- Keras' fit, and ours ----


def fit(model, batches, epochs, note):
    """Train with `keras.Model.fit` on these very batches, which it takes in their order."""
    stream = (batch for _ in range(epochs) for batch in batches)
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note(model))
    model.fit(stream, steps_per_epoch=len(batches), epochs=epochs, callbacks=[noting], verbose=0, shuffle=False)


def loop(model, batches, epochs, note):
    for step in ws.Trainer(model).steps(batches, epochs):
        if step.batch + 1 == len(batches):
            note(model)


class AsWritten(ws.Objective):
    """The loss as written: the mistake, made on purpose."""

    def __call__(self, model, batch, training):
        """Return (B, B) values, which no update can divide among B rows."""
        pair, count = batch
        return ws.Mean(glove_loss(count, model(pair, training=training)))


def refusal(data, num_words, dim):
    """Return what the library says of the loss as written."""
    try:
        ws.Trainer(network(num_words, dim), AsWritten()).update(next(ws.Batches(data, BATCH_SIZE)))
    except ws.SpecificationError as error:
        return str(error)
    raise AssertionError("a loss of (B, B) was taken")


# ---- five runs from the same weights; each has a curve: the loss over all pairs after every epoch ----


def train(data, num_words, dim, epochs):
    """Train in five ways; return the curves, the vectors, and what the library says of the first way."""
    models, losses = {}, {}
    windowed = take(data, window_shuffled(len(data[1]), SHUFFLE_WINDOW, SEED))
    for name, way, rows, shuffle in (
        (AS_WRITTEN, by_hand(as_written), data, True),
        (MENDED, by_hand(mended), data, True),
        (KERAS, fit, data, True),
        (OURS, loop, data, True),
        (WINDOW, loop, windowed, False),
    ):
        print(f"{len(losses) + 1}. {name}:", end="", flush=True)
        models[name], losses[name], began = network(num_words, dim), [], time.perf_counter()

        def note(model, curve=losses[name]):
            curve.append(loss_of(model, data))
            print(f" {curve[-1]:.4f}", end="", flush=True)

        way(models[name], ws.Batches(rows, BATCH_SIZE, seed=SEED, shuffle=shuffle), epochs, note)
        print(f" ({time.perf_counter() - began:.0f} s)", flush=True)
    return {"losses": losses, "refusal": refusal(data, num_words, dim), "vectors": vectors_of(models[OURS])}


def window_shuffled(num: int, window: int, seed: int) -> np.ndarray:
    """Return the order that a shuffle buffer of so many rows gives, as `tf.data.Dataset.shuffle` does."""
    rng = np.random.default_rng(seed)
    window = min(window, num)
    held, order = list(range(window)), []
    for row, slot in enumerate(rng.integers(0, window, num - window), start=window):
        order.append(held[slot])
        held[slot] = row
    rng.shuffle(held)
    return np.array(order + held)


def take(data, order):
    (focal, context), count = data
    return (focal[order], context[order]), count[order]


# ---- what came out ----


def content(words):
    """Return the words that are no stop words, the most frequent first."""
    return [word for word in words if word not in ENGLISH_STOP_WORDS]


def nearest(word, names, vectors, num=6):
    """Return the words whose vectors point the same way, by cosine."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-(vectors @ vectors[names.index(word)]))
    return [names[i] for i in order if names[i] != word][:num]


def save(path, words, vectors, *, header=False):
    """Write one line a word, `word 0.1 0.2 ...`, in digits that give the same float32 back; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        if header:
            file.write(f"{len(words)} {vectors.shape[1]}\n")
        for word, vector in zip(words, vectors, strict=True):
            file.write(" ".join([word, *(f"{value:.9g}" for value in vector)]) + "\n")
    return path


def load(path):
    """Return (words, vectors) of a file in the format of GloVe or, with a header, of word2vec."""
    with path.open(encoding="utf-8") as file:
        found = [line.split() for line in file]
    found = found[1:] if len(found[0]) == 2 else found
    return [line[0] for line in found], np.array([line[1:] for line in found], np.float32)


def report(result):
    last = {name: losses[-1] for name, losses in result["losses"].items()}
    together = [last[name] for name in (MENDED, KERAS, OURS)]
    print(f"1 ends at {last[AS_WRITTEN]:.4f}; 2, 3 and 4 at {min(together):.4f} to {max(together):.4f}; ", end="")
    print(f"5 at {last[WINDOW]:.4f}.")
    print(f"The loss of 1, as an Objective: {result['refusal']}")
    for word, others in result["neighbours"].items():
        print(f"{word:>12}: {', '.join(others)}")
    print(f"Vectors: {result['vectors']}, picture: {result['picture']}")


def picture(losses, names, vectors, out):
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6.5), layout="constrained", width_ratios=(2, 3))
    draw_curves(left, losses)
    draw_words(right, names, vectors)
    path = out / f"glove-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_curves(axes, losses):
    styles = (
        ("#D55E00", 2.5, "-"),
        ("#56B4E9", 9, "-"),
        ("#F0E442", 5, "-"),
        ("#000000", 1.5, "-"),
        ("#888888", 2, "--"),
    )
    for (name, curve), (color, width, line) in zip(losses.items(), styles, strict=True):
        axes.plot(range(1, len(curve) + 1), curve, line, color=color, linewidth=width, label=name)
    axes.set(xlabel="epoch", ylabel="loss over all pairs", yscale="log", title="One model, one rate, one pipeline")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)


def draw_words(axes, names, vectors, num=100):
    """Draw frequent words (no stop words) in the two directions in which they differ most, where there is room."""
    chosen = [names.index(word) for word in content(names)[:num]]
    points = vectors[chosen] / np.linalg.norm(vectors[chosen], axis=1, keepdims=True)
    points = points - points.mean(axis=0)
    places = points @ np.linalg.svd(points, full_matrices=False)[2][:2].T
    places = (places - places.min(axis=0)) / np.ptp(places, axis=0)
    drawn = []
    for i, (x, y) in zip(chosen, places, strict=True):
        width = 0.007 * len(names[i])
        if all(abs(x - u) > width + other or abs(y - v) > 0.035 for u, v, other in drawn):
            drawn.append((x, y, width))
            size = 13 - len(drawn) / 15
            axes.text(x, y, names[i], ha="center", va="center", fontsize=size, color="#0072B2")
    axes.set(xlim=(-0.06, 1.06), ylim=(-0.04, 1.04), xticks=[], yticks=[])
    axes.set_title(f"{len(drawn)} frequent words, by what they stand beside")
    axes.spines[:].set_color("#cccccc")


if __name__ == "__main__":
    main()
