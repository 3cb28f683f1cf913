"""How far observed numbers are from expected ones: bits, a relative distance, its
tolerance.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from stepcheck.tree import Tree

# entries of a larger parameter, gradient or slot that are compared
NUM_PLACES = 20_000
SOLVED = 1e-3  # a relative distance of numbers that are solved for
ROUNDED = 1e-5  # and of values up to rounding
Arrays = Sequence[np.ndarray]


class Tolerance(NamedTuple):
    """Relative distances: up to `fits` numbers are reproduced, above `differs` they
    differ.
    """

    fits: float
    differs: float

    def shows(self, without: float, with_change: float) -> bool:
        """Whether a change explains observed numbers, which are `without` apart from
        the expected.
        """
        return with_change <= self.fits and 3 * with_change <= without


FINE = Tolerance(1e-4, 1e-3)
# of float16, bfloat16: two orders of a sum differ by a percent
COARSE = Tolerance(4e-2, 4e-2)


def tolerance(dtypes: Iterable[str]) -> Tolerance:
    """Return the tolerance of numbers that are computed in these dtypes."""
    return COARSE if any("float16" in dtype for dtype in dtypes) else FINE


def distance(
    one: np.ndarray | Arrays, two: np.ndarray | Arrays, scale: float = 0.0
) -> float:
    """Return how far two arrays, or two lists of arrays as one vector, are apart.

    The distance is relative to the longer one, or to a scale that is larger still.

    >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.0]))
    0.0
    """
    ones, twos = (
        [each] if isinstance(each, np.ndarray) else each for each in (one, two)
    )
    size = max(_length(ones), _length(twos), scale)
    apart = _length(
        [np.asarray(a, "float64") - b for a, b in zip(ones, twos, strict=True)]
    )
    return apart / size if size else 0.0


def are_finite(arrays: Arrays) -> bool:
    """Whether all numbers are finite."""
    return all(bool(np.all(np.isfinite(each))) for each in arrays)


def is_even(numbers: np.ndarray, *others: float) -> bool:
    """Whether all numbers are equal, up to rounding."""
    if not len(numbers):
        return True
    spread = float(np.ptp([*numbers, *others]))
    most = float(np.max(np.abs(numbers)))
    return spread <= FINE.differs * most


def _length(leaves: Arrays) -> float:
    lengths = [
        float(np.linalg.norm(np.asarray(leaf, "float64"))) for leaf in leaves
    ]
    return float(np.linalg.norm(lengths))


def farthest(
    one: np.ndarray | Sequence[float], two: np.ndarray | Sequence[float]
) -> float:
    """Return the largest relative distance of two numbers at the same place."""
    ones, twos = np.asarray(one, "float64"), np.asarray(two, "float64")
    sizes = np.maximum(np.abs(ones), np.abs(twos))
    return float(np.max(np.abs(ones - twos) / np.maximum(sizes, 1e-12)))


@cache
def places(size: int, most: int = NUM_PLACES) -> np.ndarray | None:
    """Return the entries at which arrays of a size are compared, always the same; None
    for all.

    >>> places(3) is None, len(places(50_000))
    (True, 20000)
    """
    if size <= most:
        return None
    draw = np.random.default_rng(size)
    return np.sort(draw.choice(size, most, replace=False, shuffle=False))


def in_part(leaves: Arrays) -> list[np.ndarray]:
    """Return parameters, of each large one the entries at its places."""
    chosen = [places(leaf.size) for leaf in leaves]
    pairs = zip(leaves, chosen, strict=True)
    return [
        leaf if own is None else np.asarray(leaf).reshape(-1)[own]
        for leaf, own in pairs
    ]


_SMALL = 4096  # bytes that are compared at once


def outline(leaf: np.ndarray) -> np.ndarray:
    """Return the length of an array and a few of its numbers, always of the same
    places.

    >>> outline(np.array([3.0, 4.0])).tolist()
    [5.0, 3.0, 3.0, 4.0]
    """
    flat = np.asarray(leaf).reshape(-1).astype("float64")
    last = flat.size - 1
    some = [float(flat[i]) for i in (0, last // 2, last)] if flat.size else []
    # a norm starts threads
    return np.array([np.sqrt(np.sum(flat * flat)), *some], "float32")


def same(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two arrays hold the same bits."""
    if one is two:
        return True
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    is_small = one.nbytes <= _SMALL or not one.shape
    if is_small or one.dtype.itemsize not in (1, 2, 4, 8):
        return one.tobytes() == two.tobytes()
    bits = f"u{one.dtype.itemsize}"
    ones, twos = (np.ascontiguousarray(each).view(bits) for each in (one, two))
    return np.array_equal(ones, twos)


def all_same(one: Arrays, two: Arrays) -> bool:
    """Whether two lists of arrays hold the same bits."""
    return len(one) == len(two) and all(
        same(a, b) for a, b in zip(one, two, strict=True)
    )


def once(new: Arrays, old: Arrays) -> list[np.ndarray]:
    """Return copies of new arrays; an array that holds the bits of an old one is the
    old one.
    """
    if len(new) != len(old):
        return [np.array(leaf) for leaf in new]
    return [
        b if same(a, b) else np.array(a) for a, b in zip(new, old, strict=True)
    ]


NUM_PROBES, NUM_WEIGHED = 3, 512


def shares(
    value: Callable[[list[int], np.ndarray], float],
    num: int,
    shape: tuple[int, ...],
) -> np.ndarray | None:
    """Return the weight of each row in a function's number for a batch.

    None if they are equal, or are not known. A masked mean gives a row with more places
    more weight: the number of two rows lies between the numbers of each alone. Weights
    are measured with random outputs, and are assumed to depend on the labels alone.

    Args:
        value: the number of some rows of the data, with outputs for them.
        num: the number of rows of the data.
        shape: of an output of one row.
    """
    draw = np.random.default_rng(0)
    probes = draw.uniform(0.05, 0.95, (NUM_PROBES, 2, *shape)).astype("float32")

    def weigh(row: int, anchor: int) -> float:
        ratios = []
        for one, two in probes:
            first, other = value([anchor], one[None]), value([row], two[None])
            both = value([anchor, row], np.stack([one, two]))
            ratios.append((first - both, both - other))
        above, below = np.transpose(ratios)
        return (
            float(above @ below / (below @ below))
            if np.all(np.isfinite(ratios)) and below.any()
            else 0.0
        )

    some = (
        range(num)
        if num <= NUM_WEIGHED
        else draw.permutation(num)[:NUM_WEIGHED].tolist()
    )
    anchor = next(
        (row for row in some if np.isfinite(value([row], probes[0, :1]))), None
    )
    if anchor is None:
        return None
    found = np.array([weigh(row, anchor) for row in some])
    if (
        num > NUM_WEIGHED
        or np.all(np.abs(found - 1) < SOLVED)
        or not np.all(np.isfinite(found))
        or found.min() < -SOLVED
    ):
        return None
    return np.where(np.abs(found) < SOLVED, 0.0, found).astype("float32")


def shortened(vector: np.ndarray, bound: float) -> np.ndarray:
    """Return a vector, clipped to a norm."""
    size = float(np.linalg.norm(vector))
    return vector * (bound / size) if size > bound else vector


def classes(y: Tree) -> np.ndarray | None:
    """Return the number of each row's class; None if the labels are not classes.

    >>> classes(np.array([[0, 1], [1, 0]])).tolist()
    [1, 0]
    """
    if not hasattr(y, "shape"):
        return None
    values = np.asarray(y)
    is_one_hot = (
        values.ndim == 2
        and values.shape[1] > 1
        and set(np.unique(values)) == {0, 1}
    )
    if is_one_hot and np.all(values.sum(axis=1) == 1):
        return np.argmax(values, axis=1)
    is_column = values.size == len(values)
    return (
        values.reshape(-1)
        if is_column and np.array_equal(values, np.round(values))
        else None
    )
