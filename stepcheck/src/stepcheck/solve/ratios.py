"""What numbers that were solved for are: the ones that were meant, or fractions of known counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stepcheck.values import MEANT, NOTHING, Count, Counted

Counts = dict[Counted, np.ndarray]
_MULTIPLES = 1.0, -1.0, 2.0, 0.5
_USUAL = 1, 2, 3, 4, 5, 10, -1, 0.5
_MOST_COUNTS = 3  # in one fraction
_MOST_FOUND = 5
_ROUNDING = 1e-9
_LEAST_SLACK, _SAME_NUMBER = 1e-12, 1e-4


@dataclass(frozen=True)
class Reading:
    """What numbers may be.

    Attributes:
        cost: how much is supposed: 0 for the numbers that were meant, 1 for each count.
        values: the numbers that the count gives.
        is_solved: whether a number of the count is solved for, and is none that is usual.
    """

    cost: float
    count: Count
    values: np.ndarray
    is_solved: bool = False

    @property
    def is_right(self) -> bool:
        """Whether these are the numbers that were meant."""
        return self.count == MEANT

    def is_other(self, reading: "Reading") -> bool:
        """Whether it tells another count, and not just another number."""
        return self.count != reading.count and not (self.is_solved and reading.is_solved)


def readings(
    values: np.ndarray, slack: np.ndarray, counts: Counts, right: np.ndarray, *, is_plain: bool
) -> list[Reading]:
    """Return what these numbers may be, the simplest first.

    Args:
        slack: by how much each may be off.
        counts: known counts, one for each number.
        right: the numbers that were meant.
        is_plain: whether a multiple of the meant numbers comes before any fraction.
    """
    slack = np.maximum(slack, _LEAST_SLACK)
    if np.all(np.abs(values - right) <= slack):
        return [Reading(0, MEANT, right)]
    if np.all(np.abs(values) <= slack):
        return [Reading(1, NOTHING, np.zeros_like(values))]
    found = sorted(_fractions(values, slack, counts, right), key=_cost)[:_MOST_FOUND]
    has_base = bool(np.all(right != 0))
    base = right if has_base else np.ones_like(values)
    ratio, loose = values / base, np.max(slack / np.abs(base))
    if not is_plain or np.ptp(ratio) > loose:
        return found
    middle = float(np.median(ratio))
    near = float(min(_USUAL, key=lambda number: abs(middle - number)))
    is_near = abs(middle - near) <= max(loose, _SAME_NUMBER * abs(near))
    number = near if is_near else middle
    count = Count(number, MEANT.above if has_base else ())
    multiple = Reading(1, count, middle * base, is_solved=not is_near)
    return sorted([multiple, *found[:2]], key=_cost)


def _cost(reading: Reading) -> float:
    return reading.cost


_Product = tuple[tuple[Counted, ...], np.ndarray]


def _products(
    values: np.ndarray, counts: Counts, right: np.ndarray
) -> tuple[list[_Product], list[_Product]]:
    """Return the numerators and the denominators that fractions may have."""
    kept: Counts = {}
    for known, column in counts.items():
        is_same = any(np.allclose(column, own, rtol=_ROUNDING) for own in kept.values())
        if not is_same and np.all(column > 0) and np.any(column != 1):
            kept[known] = column
    one: _Product = (), np.ones_like(values)
    single: list[_Product] = [((known,), column) for known, column in kept.items()]
    squares = [(known * 2, column**2) for known, column in single]
    pairs = [(x + y, a * b) for (x, a), (y, b) in combinations(single, 2)]
    meant = [(MEANT.above, right)] if np.all(right != 0) else []
    return [one, *single, *squares, *meant], [one, *single, *pairs]


def _fractions(
    values: np.ndarray, slack: np.ndarray, counts: Counts, right: np.ndarray
) -> Iterator[Reading]:
    """Yield the fractions of counts that these numbers are, times 1, -1, 2, 1/2 or one number."""
    tops, lows = _products(values, counts, right)
    ways = [
        (top, low, above / below)
        for top, above in tops
        for low, below in lows
        if not set(top) & set(low) and len(top) + len(low) <= _MOST_COUNTS
    ]
    shapes = np.stack([shape for *_, shape in ways])
    ratios, loose = values / shapes, slack / np.abs(shapes)
    middles = np.median(ratios, axis=1)
    rounding = _ROUNDING * np.abs(middles[:, None])
    fits = np.all(np.abs(ratios - middles[:, None]) <= loose + rounding, axis=1)
    for i in np.flatnonzero(fits):
        top, low, shape = ways[i]
        off, most = ratios[i], loose[i] + _ROUNDING
        near = next((m for m in _MULTIPLES if np.all(np.abs(off - m) <= most)), None)
        number = float(middles[i]) if near is None else near
        is_meant = top == MEANT.above
        cost = len(top) - is_meant + len(low) - 0.5 * (is_meant and bool(low))
        cost += 2.5 if near is None else float(near != 1)
        count = Count(number, top, low)
        yield Reading(max(cost, 0.5), count, number * shape, is_solved=near is None)


def farthest_first(ratios: np.ndarray) -> np.ndarray:
    """Return each number once, the farthest from 1 first; nothing if all are 1.

    >>> farthest_first(np.array([1.0, 1.0, 0.5, 3.0, 0.5])).tolist()
    [3.0, 0.5, 1.0]
    """
    single = np.array([*dict.fromkeys(float(f"{ratio:.4g}") for ratio in ratios)])
    order = np.argsort(-np.abs(single - 1), kind="stable")
    return single[order] if np.any(single != 1) else single[:0]


def least(columns: list[np.ndarray], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the coefficients of columns whose sum is nearest, by how much each may be off).

    The latter is for a unit of error.

    >>> least([np.array([2.0, 0.0]), np.array([0.0, 4.0])], np.array([2.0, 2.0]))
    (array([1. , 0.5]), array([0.5 , 0.25]))
    """
    basis = np.stack(columns, axis=1)
    if not (np.all(np.isfinite(basis)) and np.all(np.isfinite(wanted))):
        return np.full(len(columns), np.nan), np.zeros(len(columns))
    sizes = np.linalg.norm(basis, axis=0)
    sizes = np.where(sizes == 0, 1, sizes)
    q, r = np.linalg.qr(basis / sizes)
    u, s, vt = np.linalg.svd(r, full_matrices=False)
    inverses = np.where(s > 1e-6 * s[0], 1 / np.where(s == 0, 1, s), 0)
    inverse = vt.T * inverses
    return inverse @ (u.T @ (q.T @ wanted)) / sizes, np.linalg.norm(inverse, axis=1) / sizes
