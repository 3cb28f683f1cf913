"""Numbers of two runs side by side: how far they are apart, and where."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.trace.log import Called
from stepcheck.trace.measure import all_same
from stepcheck.trace.updates import Pairs, Update

SMALL = 0.01  # of the length of all: a shorter array is compared with so much of it
_LEAST = 5e-324  # a distance of numbers that are equal and have other bits, as zeros of two signs


@dataclass(frozen=True)
class Sides:
    """Arrays of two runs in pairs, by name."""

    names: tuple[str, ...]
    ones: list[np.ndarray]
    twos: list[np.ndarray]

    @staticmethod
    def of(names: Sequence[str], ones: Sequence, twos: Sequence) -> "Sides":
        """Return arrays in pairs; None is zeros.

        Raises:
            SpecificationError: two arrays of a pair have different shapes.
        """
        pairs = [_alike(*each) for each in zip(names, ones, twos, strict=False)]
        return Sides((*names,), [a for a, _ in pairs], [b for _, b in pairs])

    @cached_property
    def distances(self) -> np.ndarray:
        """The relative distance of each pair; infinite where only one side is finite."""
        found = []
        scale = SMALL * max(_length(self.ones), _length(self.twos))
        for a, b in zip(self.ones, self.twos, strict=True):
            is_finite = np.isfinite(a)
            if not np.array_equal(is_finite, np.isfinite(b)):
                found.append(np.inf)
            else:
                one, two = a[is_finite], b[is_finite]
                size = max(_length([one]), _length([two]), scale)
                found.append(_length([one - two]) / size if size else 0.0)
        return np.array(found)

    def apart(self, *, bits: bool = False) -> float:
        """Return the largest distance; `bits`: equal numbers of different bits are
        apart.
        """
        largest = float(np.max(self.distances, initial=0))
        has_other_bits = bits and not all_same(self.ones, self.twos)
        return max(largest, _LEAST) if has_other_bits else largest

    def unlike(self, most: float) -> tuple[str, ...]:
        """Return the names of pairs that are farther apart, the farthest first."""
        order = np.argsort(-self.distances, kind="stable")
        return tuple(self.names[i] for i in order if self.distances[i] > most)

    def lengths(self) -> tuple[float, float]:
        """Return the length of all arrays of each run, as one vector."""
        return _length(self.ones), _length(self.twos)

    def largest(self) -> tuple[int, tuple[int, ...], float, float]:
        """Return (the farthest pair, the index of its largest difference, both numbers
        there).
        """
        i = int(np.argmax(self.distances))
        a, b = self.ones[i], self.twos[i]
        at = int(np.argmax(np.nan_to_num(np.abs(a - b), nan=np.inf)))
        index = tuple(map(int, np.unravel_index(at, a.shape)))
        return i, index, float(a.flat[at]), float(b.flat[at])

    def multiple(self, most: float) -> float | None:
        """Return the factor that makes the second side the first one, or None."""
        product = sum(
            float(np.vdot(a, b)) for a, b in zip(self.ones, self.twos, strict=True)
        )
        square = self.lengths()[1] ** 2
        if not np.isfinite(product) or not square:
            return None
        factor = product / square
        scaled = Sides(self.names, self.ones, [factor * b for b in self.twos])
        return factor if factor and scaled.apart() <= most else None


def _alike(name: str, one: np.ndarray | None, two: np.ndarray | None) -> tuple:
    given = [each for each in (one, two) if each is not None]
    shape = given[0].shape if given else (0,)
    a, b = (
        np.zeros(shape) if e is None else np.asarray(e, "float64") for e in (one, two)
    )
    if a.shape != b.shape:
        must = f"{name} must have the same shape in both traces."
        advice = "match=lambda name: (other_name, lambda value: value.T)."
        raise SpecificationError(message(must, f"{a.shape} and {b.shape}", advice))
    return a, b


def _length(arrays: list[np.ndarray]) -> float:
    known = [
        each if np.all(np.isfinite(each)) else each[np.isfinite(each)]
        for each in arrays
    ]
    return float(
        np.sqrt(sum(np.sum(each * each) for each in known))
    )  # a norm starts threads


class Facing(NamedTuple):
    """Some rows of an output, or of the derivative by it, in both runs.

    Attributes:
        at: the places of the rows among all pairs; empty for an output without rows.
        is_cut: whether one was wider, as with more padding.
    """

    leaf: int
    at: np.ndarray
    one: np.ndarray
    two: np.ndarray
    is_cut: bool


def facing(
    one: Update,
    two: Update,
    pairs: Pairs,
    of: Callable[[Called], dict[int, np.ndarray]],
) -> Iterator[Facing]:
    """Yield outputs, or what else there is of each pass, of the rows of two updates in
    pairs.
    """
    for p, q, rows, others, at in pairs.by_pass():
        first, second = of(one.passes[p]), of(two.passes[q])
        for leaf in (
            sorted(first.keys() & second.keys()) if len(first) == len(second) else ()
        ):
            a, b = first[leaf], second[leaf]
            have_rows = _has(a, one.passes[p]) and _has(b, two.passes[q])
            are_whole = _has(rows, one.passes[p]) and _has(rows, two.passes[q])
            if a.ndim == b.ndim > 0 and have_rows:
                yield _cropped(leaf, at, a[rows], b[others])
            elif a.shape == b.shape and are_whole and np.array_equal(rows, others):
                yield Facing(leaf, at[:0], a, b, is_cut=False)


def _has(array: np.ndarray, called: Called) -> bool:
    """Whether an array has an entry for each row of a pass."""
    return len(np.atleast_1d(array)) == len(called.inputs[0])


def _cropped(leaf: int, at: np.ndarray, one: np.ndarray, two: np.ndarray) -> Facing:
    shared = tuple(
        slice(min(sizes)) for sizes in zip(one.shape, two.shape, strict=True)
    )
    return Facing(leaf, at, one[shared], two[shared], is_cut=one.shape != two.shape)


def outputs_of(called: Called) -> dict[int, np.ndarray]:
    """Return a pass's outputs by their index."""
    return dict(enumerate(called.outputs))


def derivatives_of(called: Called) -> dict[int, np.ndarray]:
    """Return the derivative by each output of a pass: the sum of all that were taken."""
    return {
        i: np.sum(found, axis=0) for i, found in called.derivatives.items() if found
    }


class ByRow(NamedTuple):
    """The derivative by each row's outputs as a multiple of the other run's, with
    relative rests.

    A factor is NaN where both are zeros, or unknown. `is_proof`: whether a row has
    several numbers, which have one factor where the row counts otherwise, and not where
    the loss is another one.
    """

    factors: np.ndarray
    rests: np.ndarray
    is_proof: bool


def by_row(found: Sequence[Facing], num: int) -> ByRow:
    """Return how much each row counts in the first run, as a multiple of the second."""
    product, square, first = (np.zeros(num) for _ in range(3))
    for each in found:
        if len(each.at):
            a, b = (
                side.reshape(len(each.at), -1).astype("float64") for side in each[2:4]
            )
            product[each.at] += np.sum(a * b, axis=1)
            square[each.at] += np.sum(b * b, axis=1)
            first[each.at] += np.sum(a * a, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where((square == 0) & (first > 0), np.inf, product / square)
        rests = np.sqrt(np.maximum(first - product**2 / square, 0) / first)
    rests = np.where((first > 0) & (square > 0), rests, 0.0)
    is_proof = sum(each.one[:1].size for each in found if len(each.at)) > len(found)
    return ByRow(factors, rests, is_proof)
