"""What is kept of numbers that a log is told: equal arrays once, and of large ones no more than is looked at."""

from functools import cache

import numpy as np

NUM_PLACES = 20_000  # of a larger parameter, gradient or slot so many numbers are compared, drawn once


@cache
def places(size: int) -> np.ndarray | None:
    """Return at which places parameters of a size are compared, always the same; None for all.

    >>> places(3) is None, len(places(50_000))
    (True, 20000)
    """
    if size <= NUM_PLACES:
        return None
    return np.sort(np.random.default_rng(size).choice(size, NUM_PLACES, replace=False, shuffle=False))


def in_part(leaves: list[np.ndarray]) -> list[np.ndarray]:
    """Return parameters, of each large one the numbers at its places."""
    return [leaf if (chosen := places(leaf.size)) is None else np.asarray(leaf).reshape(-1)[chosen] for leaf in leaves]


def same(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two arrays hold the same bits."""
    if one is two:
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.dtype.itemsize not in (1, 2, 4, 8) or not one.shape:
        return one.tobytes() == two.tobytes()
    bits = f"u{one.dtype.itemsize}"
    return np.array_equal(np.ascontiguousarray(one).view(bits), np.ascontiguousarray(two).view(bits))


def all_same(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    """Whether two lists of arrays hold the same bits."""
    return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))


def once(new: list[np.ndarray], old: list[np.ndarray]) -> list[np.ndarray]:
    """Return copies of new arrays; for one that holds the bits of an old one, the old one itself."""
    if len(new) != len(old):
        return [np.array(leaf) for leaf in new]
    return [b if same(a, b) else np.array(a) for a, b in zip(new, old, strict=True)]
