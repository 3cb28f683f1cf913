"""Build a table of co-occurring words from a text; neither needs to fit in memory: for glove.py."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

WORD = re.compile(r"[^\W\d]\w+")
# key: focal * number of words + context
PAIR = np.dtype([("key", np.int64), ("count", np.float64)])


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
    """Return the most frequent words and their numbers, in order of frequency."""
    counts = Counter(split(text))
    frequent = [word for word, count in counts.most_common(num_words) if count >= min_count]
    print(
        f"{counts.total()} words of text, {len(counts)} different; {len(frequent)} are kept.",
        flush=True,
    )
    return {word: number for number, word in enumerate(frequent)}


def cooccurrences(text, words, window, folder, *, num_buffered=1 << 22):
    """Return the co-occurrences of words: (focal, context, count), memory-mapped, sorted by focal
    and context word.

    A pair counts 1 / distance, summed over the text, in both directions. Distances count words of
    the vocabulary only.

    Args:
        text: lines.
        words: the vocabulary's numbers, 0 to V - 1.
        window: the largest distance.
        folder: for files of sorted runs, and of the table.
        num_buffered: number of pairs to sort at once, 16 bytes each and a few times as much while
            sorting.
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


def sorted_runs(
    numbers: Iterator[int], num_words: int, window: int, size: int
) -> Iterator[np.ndarray]:
    """Yield the pairs of every `size` words, with those `window` words before them: one sorted run
    each.
    """
    before = np.empty(0, np.int64)
    while len(new := np.fromiter(islice(numbers, size), np.int64)):
        text = np.concatenate([before, new])
        yield add_up(pairs_within(text, len(before), num_words, window))
        before = text[-window:]


def pairs_within(text: np.ndarray, begin: int, num_words: int, window: int) -> np.ndarray:
    """Return the pairs whose later word is at or after `begin`, in both directions."""
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
    """Return the pairs sorted by key; pairs with equal keys are merged, and their counts summed."""
    pairs = pairs[np.argsort(pairs["key"], kind="stable")]
    first = np.flatnonzero(np.diff(pairs["key"], prepend=-1))
    merged = pairs[first]
    merged["count"] = np.add.reduceat(pairs["count"], first) if len(first) else 0
    return merged


def merge(runs: list[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the merged sorted runs in pieces, reading `size` pairs of each run at a time."""
    runs = [run for run in runs if len(run)]
    while runs:
        heads = [run[:size] for run in runs]
        # beyond it, a run may hold more than its head shows
        last = min(head["key"][-1] for head in heads)
        counts = [np.searchsorted(head["key"], last, side="right") for head in heads]
        yield add_up(np.concatenate([head[:num] for head, num in zip(heads, counts, strict=True)]))
        runs = [run[num:] for run, num in zip(runs, counts, strict=True) if num < len(run)]


def window_shuffled(num: int, window: int, seed: int) -> np.ndarray:
    """Return the order of rows from a shuffle buffer of `window` rows, as in
    `tf.data.Dataset.shuffle`.
    """
    rng = np.random.default_rng(seed)
    window = min(window, num)
    held = list(range(window))
    order = []
    for row, slot in enumerate(rng.integers(0, window, num - window), start=window):
        order.append(held[slot])
        held[slot] = row
    rng.shuffle(held)
    return np.array(order + held)
