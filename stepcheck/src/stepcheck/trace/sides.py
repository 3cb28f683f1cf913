"""Numbers of two runs side by side: how far they are apart, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.trace.measure import all_same
from stepcheck.trace.updates import Pair, Update
from stepcheck.values import Number, Shown

# of the length of all: a shorter array is compared with so much of it
SMALL = 0.01
# a distance of equal numbers with other bits, as zeros of two signs
_LEAST = 5e-324


@dataclass(frozen=True)
class Sides:
    """Arrays of two runs in pairs, by name; one infinity or NaN in both is 0."""

    names: Sequence[str]
    ones: list[np.ndarray]
    twos: list[np.ndarray]

    @staticmethod
    def of(names: Sequence[str], ones: Sequence, twos: Sequence) -> "Sides":
        """Return arrays in pairs.

        Raises:
            SpecificationError: two arrays of a pair have different shapes.
        """
        pairs = [_alike(*each) for each in zip(names, ones, twos, strict=True)]
        return Sides(names, [a for a, _ in pairs], [b for _, b in pairs])

    @cached_property
    def distances(self) -> np.ndarray:
        """The relative distance of each pair; infinite where only one side is finite."""
        lengths = np.stack([_lengths(self.ones), _lengths(self.twos)])
        apart = _lengths(
            [a - b for a, b in zip(self.ones, self.twos, strict=True)]
        )
        of_all = np.sum(lengths**2, axis=1, where=np.isfinite(lengths)) ** 0.5
        sizes = np.maximum(np.max(lengths, axis=0), SMALL * np.max(of_all))
        sizes, infinite = np.maximum(sizes, _LEAST), np.full_like(apart, np.inf)
        return np.divide(apart, sizes, out=infinite, where=np.isfinite(apart))

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

    @property
    def lost(self) -> set[str]:
        """The names of pairs with zeros alone on one side."""
        ones, twos = (_lengths(side) == 0 for side in (self.ones, self.twos))
        return {*compress(self.names, ones != twos)}

    @property
    def vectors(self) -> list[np.ndarray]:
        """All numbers of each run."""
        sides = self.ones, self.twos
        return [np.concatenate([*map(np.ravel, side)]) for side in sides]

    def number(self, what: Shown) -> Number:
        """Return both numbers where the farthest pair differs most."""
        i = int(np.argmax(self.distances))
        one, two = self.ones[i], self.twos[i]
        at = int(np.argmax(np.nan_to_num(np.abs(one - two), nan=np.inf)))
        index = [*map(int, np.unravel_index(at, one.shape))]
        of = f"{self.names[i]}{index or ''}"
        of_row = str(index[0]) if what is Shown.DERIVATIVE else of
        return Number(
            what, of_row, float(one.flat[at]), float(two.flat[at]), np.nan
        )

    def multiple(self, most: float) -> float | None:
        """Return the factor that makes the second side the first one, or None."""
        one, two = self.vectors
        square = float(two @ two)
        factor = float(one @ two) / square if square else 0.0
        if not factor or not np.isfinite(factor):
            return None
        scaled = Sides(self.names, self.ones, [factor * b for b in self.twos])
        return factor if scaled.apart() <= most else None

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays of rows as two arrays of the shape (rows, numbers)."""
        one, two = (
            np.concatenate(
                [each.reshape(len(each), -1) for each in side], axis=1
            )
            for side in (self.ones, self.twos)
        )
        return one, two

    def unlike_rows(self, most: float) -> tuple[int, ...]:
        """Return the rows that differ by more than a part of the largest number."""
        one, two = self.rows()
        limit = most * np.max(np.abs([one, two]), initial=0)
        are_unlike = np.max(np.abs(one - two), axis=1, initial=0) > limit
        return tuple(np.flatnonzero(are_unlike).tolist())

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (how much each row counts in the first run, as a multiple of the
        second, relative rests).

        A factor is NaN where both are zeros.
        """
        one, two = self.rows()
        product, first, square = (
            np.sum(e, 1) for e in (one * two, one**2, two**2)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(
                (square == 0) & (first > 0), np.inf, product / square
            )
            rests = np.sqrt(np.maximum(1 - product**2 / square / first, 0))
        return factors, np.where((first > 0) & (square > 0), rests, 0.0)


def _alike(name: str, one: np.ndarray, two: np.ndarray) -> tuple:
    a, b = np.array(one, "float64"), np.array(two, "float64")
    if a.shape != b.shape:
        must = f"{name} must have the same shape in both traces."
        advice = "match=lambda name: (other_name, lambda value: value.T)."
        raise SpecificationError(
            message(must, f"{a.shape} and {b.shape}", advice)
        )
    are_one = (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))
    a[are_one] = b[are_one] = 0
    return a, b


def _lengths(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the length of each array; without `norm`, which starts threads."""
    return np.sqrt([np.sum(each * each) for each in arrays])


def facing(pair: Pair, *, are_outputs: bool) -> Sides | None:
    """Return the outputs of the same rows, or the derivatives by them; None if there
    are none.

    Derivatives of rows with less padding are filled up with zeros; such outputs are not
    compared.
    """
    one, two = (
        _by_row(each, are_outputs=are_outputs) for each in (pair.one, pair.two)
    )
    if pair.places is None or not one or one.keys() != two.keys():
        return None
    first, second = [], []
    for leaf, own in one.items():
        others = [two[leaf][i] for i in pair.places]
        is_cut = any(
            a.shape != b.shape for a, b in zip(own, others, strict=True)
        )
        if own[0].ndim != others[0].ndim or (is_cut and are_outputs):
            return None
        rows = _stacked([*own, *others])
        first.append(rows[: len(own)])
        second.append(rows[len(own) :])
    return Sides.of([*map(str, one)], first, second)


def _by_row(
    update: Update, *, are_outputs: bool
) -> dict[int, list[np.ndarray]]:
    """Return the rows of each output that has rows in all passes, or derivatives."""
    found: dict[int, list[np.ndarray]] = {}
    for called in update.passes:
        taken = {
            i: np.sum(d, axis=0) for i, d in called.derivatives.items() if d
        }
        arrays = dict(enumerate(called.outputs)) if are_outputs else taken
        for leaf, array in arrays.items():
            if (
                array.ndim
                and called.inputs
                and len(array) == len(called.inputs[0])
            ):
                found.setdefault(leaf, []).extend(array)
    num = len(update.digests)
    return {
        leaf: rows for leaf, rows in sorted(found.items()) if len(rows) == num
    }


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    """Return rows as an array, filled up with zeros."""
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        most = np.max([*shapes], axis=0)
        rows = [np.pad(row, [(0, n) for n in most - row.shape]) for row in rows]
    return np.stack(rows)
