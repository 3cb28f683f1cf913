"""Which of many arrays hold what a model and a loss were given."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.audit.surroundings import Named, is_stream
from wholestep.audit.windows import PAD, Rows

_SECONDS, _ROWS = 30.0, 200_000  # for reading a dataset once more


def holding(arrays: list[Named], inputs: list[list[np.ndarray]]) -> list[Named] | None:
    """Return the smallest arrays that hold all rows of all these inputs, a leaf each."""
    widths = [int(np.prod(leaf.shape[1:])) for leaf in inputs[0]]
    fitting = [
        [a for a in arrays if int(np.prod(a.value.shape[1:])) == width and _has_row(a.value, leaf[0])]
        for leaf, width in zip(inputs[0], widths, strict=True)
    ]
    found = []
    for choice in itertools.islice(itertools.product(*fitting), 200):
        if len({len(named.value) for named in choice}) > 1:
            continue
        rows = Rows([named.value for named in choice])
        held = [rows.find(leaves) for leaves in inputs if len(leaves) == len(choice)]
        share = np.mean([np.mean(each != PAD) for each in held if len(each)])
        found.append((share, -len(choice[0].value), list(choice)))
    if not found:
        return None
    share, _, best = max(found, key=lambda each: each[:2])
    return best if share > 0.5 else None


def _has_row(array: np.ndarray, row: np.ndarray) -> bool:
    flat = array.reshape(len(array), -1)
    with np.errstate(all="ignore"):
        wanted = row.reshape(-1)
        few = np.flatnonzero(flat[:, 0].astype(wanted.dtype) == wanted[0]) if wanted.size else np.arange(len(flat))
    return any(flat[i].astype(wanted.dtype).tobytes() == wanted.tobytes() for i in few[:10_000])


def agrees(array: np.ndarray, pairs: list[tuple[np.ndarray, Any]]) -> bool:
    """Whether the rows of an array are what was seen at these rows."""
    for rows, values in pairs:
        known = rows != PAD
        if array[rows[known]].size != values[known].size:
            return False
        with np.errstate(all="ignore"):
            if not np.array_equal(array[rows[known]].reshape(-1).astype(values.dtype), values[known].reshape(-1)):
                return False
    return True


def assembled(num: int, pairs: list[tuple[np.ndarray, Any]], fill: float = 0.0) -> np.ndarray | None:
    """Put together what was seen at these rows; None if a row had several values."""
    whole = np.full((num, *pairs[0][1].shape[1:]), fill, pairs[0][1].dtype)
    for rows, values in pairs:
        known = rows != PAD
        if values.shape[1:] != whole.shape[1:]:
            return None
        whole[rows[known]] = values[known]
    return whole if agrees(whole, pairs) else None


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other; of batches as wide as their own longest row, filled up with zeros.

    >>> joined([np.array([[1, 2]]), np.array([[3]])]).tolist()
    [[1, 2], [3, 0]]
    """
    parts = list(parts)
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)

    def filled(part: np.ndarray) -> np.ndarray:
        more = width - part.shape[1] if part.ndim > 1 else 0
        return np.pad(part, [(0, 0), (0, more), *[(0, 0)] * (part.ndim - 2)]) if more else part

    return np.concatenate(list(map(filled, parts)))


def different(arrays: Iterable[Named]) -> list[Named]:
    """Return those whose values differ."""
    return list({(n.value.shape, n.value.dtype.str, n.value.tobytes()): n for n in arrays}.values())


def read(dataset: Any, inputs: list[list[np.ndarray]]) -> tuple | None:
    """Return (x, y[, sample_weight]) of the batches of a dataset that hold most of these inputs; None if none do.

    A dataset that is shuffled and drops its last, shorter batch leaves out other rows in each pass: it is read until
    all inputs are among its rows, or until a pass has no new ones.
    """
    until, known = time.monotonic() + _SECONDS, None
    while True:
        num = 0 if known is None else len(tree.leaves(known)[0])
        if (found := _pass(dataset, until)) is None:
            return None
        known = found if known is None else _united(known, found)
        rows = Rows(known[0])
        share = np.mean([np.mean(rows.find(leaves) != PAD) for leaves in inputs])
        if share == 1 or share <= 0.5 or len(tree.leaves(known)[0]) == num or time.monotonic() > until:
            return known if share > 0.5 else None


def _united(known: tuple, more: tuple) -> tuple:
    """Return the rows of two passes over one dataset; equal rows as often as in the pass that has most of them."""
    num = len(tree.leaves(known)[0])
    both = [joined(pair) for pair in zip(tree.leaves(known), tree.leaves(more), strict=True)]
    keys = [b"".join(leaf[row].tobytes() for leaf in both) for row in range(len(both[0]))]
    counts = Counter(keys[:num])
    chosen = list(range(num))
    for row, key in enumerate(keys[num:], start=num):
        counts[key] -= 1
        if counts[key] < 0:
            chosen.append(row)
    whole = iter([leaf[chosen] for leaf in both])
    return tree.map_leaves(lambda _: next(whole), known)


def _pass(dataset: Any, until: float) -> tuple | None:
    """Return the same of one pass."""
    num, parts = 0, []
    seen: set[int] = set()
    for batch in (dataset[i] for i in range(len(dataset))) if not is_stream(dataset) else dataset:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            return None
        batch = tree.map_leaves(np.asarray, batch)
        leaves = tree.leaves(batch)
        if not all(leaf.ndim for leaf in leaves):
            return None
        key = hash(b"".join(leaf.tobytes() for leaf in leaves))
        num += len(leaves[0])
        if key in seen or num > _ROWS or time.monotonic() > until:  # it repeats, or is too long
            break
        seen.add(key)
        parts.append(batch)
    if not parts:
        return None
    flat = [tree.leaves(part) for part in parts]
    whole = iter([joined(each) for each in zip(*flat, strict=True)])
    return tree.map_leaves(lambda _: next(whole), parts[0])
