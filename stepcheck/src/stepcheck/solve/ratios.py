"""Numbers that were solved for: the ones that were meant, or fractions of known counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from stepcheck.values import MEANT, NOTHING, Count, Known

Counts = dict[Known, np.ndarray]
_MULTIPLES = 1.0, -1.0, 2.0, 0.5
_ROUNDING, _LEAST_SLACK = 1e-9, 1e-12
_LEAST_SHARE = 1e-6  # of the largest singular value


@dataclass(frozen=True)
class Reading:
    """What numbers may be: a count, the numbers that it gives, and how much it
    supposes.
    """

    cost: float
    count: Count
    values: np.ndarray

    @property
    def is_right(self) -> bool:
        """Whether these are the numbers that were meant."""
        return self.count == MEANT


def read(
    values: np.ndarray, slack: np.ndarray, counts: Counts, right: np.ndarray
) -> Reading | None:
    """Return the simplest fraction of known counts that numbers are; None if they are
    none.

    Args:
        slack: by how much each may be off.
        counts: known counts, one for each number.
        right: the numbers that were meant.

    >>> rows = {Known.ROWS_OF_UPDATE: np.array([4.0, 3.0])}
    >>> read(np.array([0.25, 1 / 3]), np.zeros(2), rows, np.ones(2)).count.below
    (<Known.ROWS_OF_UPDATE: 2>,)
    """
    slack = np.maximum(slack, _LEAST_SLACK)
    if np.all(np.abs(values - right) <= slack):
        return Reading(0, MEANT, right)
    if np.all(np.abs(values) <= slack):
        return Reading(1, NOTHING, np.zeros_like(values))
    found = _fractions(values, slack, counts, right)
    return min(found, key=lambda reading: reading.cost, default=None)


_Product = tuple[tuple[Known, ...], np.ndarray]


def _products(
    counts: Counts, right: np.ndarray
) -> tuple[list[_Product], list[_Product]]:
    """Return the numerators and the denominators that fractions may have."""
    kept: Counts = {}
    for known, column in counts.items():
        is_same = any(
            np.allclose(column, own, rtol=_ROUNDING) for own in kept.values()
        )
        if not is_same and np.all(column > 0) and np.any(column != 1):
            kept[known] = column
    one: _Product = (), np.ones_like(right)
    single: list[_Product] = [
        ((known,), column) for known, column in kept.items()
    ]
    pairs = [(x + y, a * b) for (x, a), (y, b) in combinations(single, 2)]
    meant = [(MEANT.above, right)] if np.all(right != 0) else []
    return [one, *single, *meant], [one, *single, *pairs]


def _fractions(
    values: np.ndarray, slack: np.ndarray, counts: Counts, right: np.ndarray
) -> Iterator[Reading]:
    """Yield the fractions of counts that these numbers are, times 1, -1, 2 or 1/2.

    Times any number they are the meant numbers alone.
    """
    tops, lows = _products(counts, right)
    for (top, above), (low, below) in product(tops, lows):
        shape = above / below
        ratios, loose = values / shape, slack / np.abs(shape)
        middle = float(np.median(ratios))
        loose = loose + _ROUNDING * abs(middle)
        if {*top} & {*low} or np.any(np.abs(ratios - middle) > loose):
            continue
        near = [
            own for own in _MULTIPLES if np.all(np.abs(ratios - own) <= loose)
        ]
        is_meant = top == MEANT.above
        if near or (is_meant and not low):
            number = near[0] if near else middle
            cost = len(top) - 0.5 * is_meant + len(low) + 1.5 * (number != 1)
            yield Reading(cost, Count(number, top, low), number * shape)


def least(
    columns: list[np.ndarray], wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (the coefficients of columns whose sum is nearest, by how much each may be
    off).

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
    inverses = np.where(s > _LEAST_SHARE * s[0], 1 / np.where(s == 0, 1, s), 0)
    inverse = vt.T * inverses
    numbers = inverse @ (u.T @ (q.T @ wanted)) / sizes
    return numbers, np.linalg.norm(inverse, axis=1) / sizes
