"""Why does my GloVe model converge far slower in a loop of my own than in `fit`?

Because `fit` shuffles all rows anew every epoch, and the loop was fed through a small shuffle buffer, in the same order
each time. A co-occurrence table is sorted: a window of 1000 rows still shows one word's pairs, then the next word's.
`ws.Batches` permutes all rows every epoch, in constant memory, for `fit` and for a loop over `steps` alike.

The vectors (Pennington, Socher and Manning, "GloVe: Global Vectors for Word Representation", 2014) come from real text:
the language reference that Python carries (`pydoc_data.topics`), or any text file. It may be larger than memory: it is
read twice, its pairs are summed in buffers, spilled, merged and trained on from memory-mapped files.

1. `trainer.fit`;
2. a hand-written loop over `trainer.steps`: the same vectors, to the bit;
3. `fit` with a shuffle window of 1000 rows in one order, and 4. with no shuffle: the mistake, made on purpose.

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
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

import wholestep as ws

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH_SIZE, SHUFFLE_WINDOW, SEED = 1024, 1000, 7
FULL, WINDOW, NONE = "all rows, anew every epoch", f"a window of {SHUFFLE_WINDOW} rows, one order", "no shuffle"
WORD = re.compile(r"[^\W\d]\w+")
PAIR = np.dtype([("key", np.int64), ("count", np.float64)])  # key: focal * number of words + context
ASK = ("class", "function", "exception", "import", "string", "loop", "tuple", "module")


def main(argv=None):
    """Build the table, train in four ways, save vectors and a picture; return what was measured, by name."""
    arguments = parse(argv)
    keras.utils.set_random_seed(SEED)
    print(f"Engine: {keras.backend.backend()}.")
    words = vocabulary(lines(arguments.corpus), arguments.vocabulary, arguments.min_count)
    if len(words) < 2:
        raise SystemExit("Fewer than two words occur often enough: try a smaller --min-count or another --corpus.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        table = cooccurrences(lines(arguments.corpus), words, arguments.window, Path(folder))
        print(f"{len(table[0])} pairs of words within {arguments.window} words. Loss over all of them, by epoch:")
        result = train(rows(*table, Path(folder)), len(words), arguments.dim, arguments.epochs)
    vectors = result.pop("vectors")
    asked = [word for word in ASK if word in words] or content(words)[: len(ASK)]
    result |= {"num_words": len(words), "num_pairs": len(table[0])}
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
    add("--min-count", type=int, help="how often a word must occur (5; quick: 10)")
    add("--dim", type=int, help="length of a vector (100; quick: 32)")
    add("--epochs", type=int, help="(20; quick: 8)")
    add("--out", type=Path, default=Path("out"), help="folder of the vectors and the picture")
    add("--header", action="store_true", help="begin the vectors as word2vec does: number of words, length")
    arguments = parser.parse_args(argv)
    for name, usual, quick in (("min_count", 5, 10), ("dim", 100, 32), ("epochs", 20, 8)):
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


# ---- the model and its rows ----


def rows(focal, context, count, folder):
    """Return ((focal, context), log of the count, weight): what `fit` calls x, y and sample_weight; memory-mapped.

    The weight of a pair is min(count / 100, 1)^0.75: seldom met, it says little, and often met, not ever more.
    """
    log_count, weight = (np.memmap(folder / name, np.float32, "w+", shape=count.shape) for name in ("log", "weight"))
    np.log(count, out=log_count)
    np.minimum(count, 100, out=weight)
    weight /= 100
    weight **= 0.75
    return (focal, context), log_count, weight


def network(num_words, dim):
    """Return the model that predicts log count = target . context + a bias of each; compiled."""
    focal, context = keras.Input((), dtype="int32", name="focal"), keras.Input((), dtype="int32", name="context")
    target, other = embedding(num_words, dim, "target")(focal), embedding(num_words, dim, "other")(context)
    biases = [keras.layers.Embedding(num_words, 1, "zeros")(word) for word in (focal, context)]
    model = keras.Model((focal, context), keras.layers.add([keras.layers.Dot(1)([target, other]), *biases]))
    # Gradients of a mean over the batch are small, their squares more so: Adagrad must not begin at Keras' 0.1.
    optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-8, epsilon=1e-12)
    model.compile(optimizer, "mse")  # with sample weights: the mean over pairs of weight * error^2
    return model


def embedding(num_words, dim, name):
    return keras.layers.Embedding(num_words, dim, keras.initializers.RandomUniform(-0.5 / dim, 0.5 / dim), name=name)


def vectors_of(model):
    """Return (words, dim): the sum of a word's two vectors, as GloVe gives them."""
    return sum(model.get_layer(name).get_weights()[0] for name in ("target", "other"))


# ---- four ways to train it; each returns its curve: the loss over all pairs after every epoch ----


def train(data, num_words, dim, epochs):
    """Train from the same weights in four ways; return the curves, the vectors, and how far 1 and 2 are apart."""
    start = network(num_words, dim).get_weights()
    windowed = take(data, window_shuffled(len(data[1]), SHUFFLE_WINDOW, SEED))
    everything = ws.Batches(data, 8 * BATCH_SIZE)

    def run(name, way, data, **options):
        model = network(num_words, dim)
        model.set_weights(start)
        print(f"{name}:", end="", flush=True)
        began = time.perf_counter()
        losses = way(model, ws.Batches(data, BATCH_SIZE, seed=SEED, **options), everything, epochs)
        print(f" ({time.perf_counter() - began:.0f} s)", flush=True)
        return model, losses

    fitted, full = run(f"1. fit, {FULL}", fit, data)
    looped, by_loop = run(f"2. own loop, {FULL}", loop, data)
    return {
        "losses": {
            FULL: full,
            WINDOW: run(f"3. fit, {WINDOW}", fit, windowed, shuffle=False)[1],
            NONE: run(f"4. fit, {NONE}", fit, data, shuffle=False)[1],
        },
        "differing_bits": differing_bits(fitted.get_weights(), looped.get_weights()),
        "curve_differs": full != by_loop,
        "vectors": vectors_of(fitted),
    }


def fit(model, batches, everything, epochs):
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: show(logs["val_loss"]))
    trainer = ws.Trainer(model)
    history = trainer.fit(batches, epochs=epochs, validation_data=everything, callbacks=[note], verbose=0)
    return history.history["val_loss"]


def loop(model, batches, everything, epochs):
    losses, trainer = [], ws.Trainer(model)
    for step in trainer.steps(batches, epochs):
        if step.batch + 1 == len(batches):
            losses.append(trainer.evaluate(everything, verbose=0))
            show(losses[-1])
    return losses


def show(loss):
    print(f" {loss:.4f}", end="", flush=True)


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
    (focal, context), log_count, weight = data
    return (focal[order], context[order]), log_count[order], weight[order]


def differing_bits(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return sum(int(np.unpackbits(a.view(np.uint8) ^ b.view(np.uint8)).sum()) for a, b in pairs)


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
    full, windowed, unshuffled = (losses[-1] for losses in result["losses"].values())
    print(f"1 and 2: {result['differing_bits']} differing bits in the weights.")
    print(f"Loss of 1: {full:.4f}; of 3: {windowed:.4f}, {windowed / full:.1f} times as much; ", end="")
    print(f"of 4: {unshuffled:.4f}, {unshuffled / full:.1f} times.")
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
    for (name, curve), color in zip(losses.items(), ("#0072B2", "#D55E00", "#888888"), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=2.5, marker="o", markersize=4, label=name)
    axes.set(xlabel="epoch", ylabel="loss over all pairs", yscale="log", title="One model, one rate, three orders")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(title="The rows are shuffled:", alignment="left", frameon=False)
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
