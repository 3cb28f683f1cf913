"""What a gradient is made of: a factor for each row's own gradient. The right one, and those of the known mistakes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Window:
    """What a weighting may depend on.

    Attributes:
        weights: of each piece (terms, rows), 0 where a row is padding.
        row_weights: of each piece, the user's weight of each row, (rows,).
        coefficients: of each term.
        divided: whether each term is divided by its weights.
        pads: how many rows of each piece are padding.
        largest: the number of pieces of the largest window of the loop.
        full: of each term, the weight of the heaviest update of the loop.
        replicas: the replica of each piece.
        passes: the number of the pass over the data that each piece belongs to.
        places: how many places the outputs have, all but their last axis; 0 if each row has one.
    """

    weights: list[np.ndarray]
    row_weights: list[np.ndarray]
    coefficients: np.ndarray
    divided: np.ndarray
    pads: list[int]
    largest: int
    full: np.ndarray
    replicas: list[int]
    passes: list[int]
    places: int

    @property
    def num(self) -> int:
        """The number of its pieces."""
        return len(self.weights)

    @property
    def own(self) -> list[np.ndarray]:
        """The weight of each piece, by term."""
        return [w.sum(axis=1) for w in self.weights]

    @property
    def whole(self) -> np.ndarray:
        """The weight of the window, by term."""
        return np.sum(self.own, axis=0)


Divisors = list[np.ndarray]
Weighting = Callable[[Window], Divisors]


def factors(window: Window, divisors: Divisors) -> list[np.ndarray]:
    """Return the factor of each row's gradient, by piece (terms, rows); a divisor of infinity leaves a row out."""
    found = []
    for weights, divisor in zip(window.weights, divisors, strict=True):
        divisor = np.asarray(divisor, float)
        by_row = divisor if divisor.ndim == 2 else np.repeat(divisor[:, None], weights.shape[1], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = window.coefficients[:, None] / by_row
        found.append(np.where((weights == 0) | ~np.isfinite(factor), 0.0, factor))
    return found


def right(window: Window) -> Divisors:
    """Divide by the weight of the whole window, once; a sum by nothing."""
    return [np.where(window.divided, window.whole, 1.0)] * window.num


def summed(window: Window) -> Divisors:
    """Divide each piece by its own weight: the sum of the pieces' means."""
    return [np.where(window.divided, own, 1.0) for own in window.own]


def mean_of_means(window: Window) -> Divisors:
    """Divide each piece by its own weight and by the number of pieces."""
    return [window.num * each for each in summed(window)]


def never_divided(window: Window) -> Divisors:
    """Divide by nothing."""
    return [np.ones(len(window.divided))] * window.num


def divided_twice(window: Window) -> Divisors:
    """Divide by the window's weight, and by the number of pieces once more."""
    return [window.num * each for each in right(window)]


def full_window(window: Window) -> Divisors:
    """Divide each piece by its own weight and by the number of pieces of a full window."""
    return [window.largest * each for each in summed(window)]


def full_batch(window: Window) -> Divisors:
    """Divide by the weight of a full batch."""
    return [np.where(window.divided, window.full, 1.0)] * window.num


def only_last(window: Window) -> Divisors:
    """Leave out all pieces but the last."""
    return _only(summed(window), range(window.num - 1, window.num))


def only_last_of(window: Window) -> Divisors:
    """Leave out all pieces but the last, and divide by their number."""
    return _only(mean_of_means(window), range(window.num - 1, window.num))


def only_last_of_whole(window: Window) -> Divisors:
    """Leave out all pieces but the last; divide by the weight of the whole window."""
    return _only(right(window), range(window.num - 1, window.num))


def only_first(window: Window) -> Divisors:
    """Leave out all pieces but the first."""
    return _only(summed(window), range(1))


def only_first_of_whole(window: Window) -> Divisors:
    """Leave out all pieces but the first; divide by the weight of the whole window."""
    return _only(right(window), range(1))


def first_lost(window: Window) -> Divisors:
    """Leave out the first piece."""
    return _only(mean_of_means(window), range(1, window.num))


def first_lost_of_whole(window: Window) -> Divisors:
    """Leave out the first piece; divide by the weight of the whole window."""
    return _only(right(window), range(1, window.num))


def last_lost(window: Window) -> Divisors:
    """Leave out the last piece."""
    return _only(mean_of_means(window), range(window.num - 1))


def last_lost_of_whole(window: Window) -> Divisors:
    """Leave out the last piece; divide by the weight of the whole window."""
    return _only(right(window), range(window.num - 1))


def by_replica(window: Window) -> Divisors:
    """Divide each piece by the weight of its own replica: the sum of the replicas' means."""
    own = {
        each: sum(w for w, replica in zip(window.own, window.replicas, strict=True) if replica == each)
        for each in window.replicas
    }
    return [np.where(window.divided, own[replica], 1.0) for replica in window.replicas]


def replicas_twice(window: Window) -> Divisors:
    """Divide by the window's weight, and by the number of replicas once more."""
    return [len(set(window.replicas)) * each for each in right(window)]


def last_pass(window: Window) -> Divisors:
    """Leave out the pieces of the pass before, and divide by the weight of the others."""
    pieces = [i for i, number in enumerate(window.passes) if number == window.passes[-1]]
    weight = sum(window.own[i] for i in pieces)
    divisors = [np.where(window.divided, weight, 1.0)] * window.num
    return [each if i in pieces else np.full_like(each, np.inf, float) for i, each in enumerate(divisors)]


def last_pass_of_whole(window: Window) -> Divisors:
    """Leave out the pieces of the pass before; divide by the weight of a full window."""
    kept = last_pass(window)
    return [np.where(np.isinf(each), np.inf, other) for each, other in zip(kept, full_batch(window), strict=True)]


def pads_counted(window: Window) -> Divisors:
    """Divide by the number of rows with those that are padding."""
    return [np.where(window.divided, window.whole + sum(window.pads), 1.0)] * window.num


def places_counted(window: Window) -> Divisors:
    """Divide by the number of all places of the outputs, those without weight too."""
    return [np.where(window.divided, window.places, 1.0)] * window.num


def row_means(window: Window) -> Divisors:
    """Divide each row by its own weight, and by the number of rows."""
    num = sum(np.count_nonzero(w.sum(axis=0)) for w in window.weights)
    return [np.where(window.divided[:, None], num * w, 1.0) for w in window.weights]


def by_weights(window: Window) -> Divisors:
    """Divide by the sum of the rows' weights, where the number of rows was meant."""
    return [np.where(window.divided, sum(w.sum() for w in window.row_weights), 1.0)] * window.num


def by_rows(window: Window) -> Divisors:
    """Divide by the number of rows, where the sum of their weights was meant."""
    num = sum(len(w) for w in window.row_weights) - sum(window.pads)
    return [np.where(window.divided, num, 1.0)] * window.num


def of_last_pass(way: Weighting) -> Weighting:
    """Return a weighting for which the pieces of the pass before are not there."""

    def divisors(window: Window) -> Divisors:
        pieces = [i for i, number in enumerate(window.passes) if number == window.passes[-1]]
        names = "weights", "row_weights", "pads", "replicas", "passes"
        kept: dict[str, Any] = {name: [getattr(window, name)[i] for i in pieces] for name in names}
        found = iter(way(replace(window, **kept)))
        return [next(found) if i in pieces else np.full(len(window.divided), np.inf) for i in range(window.num)]

    return divisors


def _only(divisors: Divisors, pieces: range) -> Divisors:
    return [each if i in pieces else np.full_like(each, np.inf, float) for i, each in enumerate(divisors)]
