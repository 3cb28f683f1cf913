"""The updates of a recorded run, and the rows that an update shares with one of another
run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Applied, Called, Values
from stepcheck.trace.measure import all_same
from stepcheck.trace.trace import Run
from stepcheck.trace.windows import Piece, by_hand

_NEAR = 1e-5  # relative distance of sketches of equal rows


@dataclass(frozen=True)
class Update:
    """An optimizer step, or a move of the weights without one, and the passes that made
    it.

    Attributes:
        buffers: statistics and seeds before it.
        after: all values where the next update begins, or after the training.
        is_by_hand: whether no optimizer was seen; its gradient is unknown then.
    """

    number: int
    passes: list[Called]
    applied: Applied
    buffers: list[np.ndarray]
    after: Values
    is_by_hand: bool = False

    @property
    def digests(self) -> np.ndarray:
        """The digests of its rows."""
        found = [called.inputs[0] for called in self.passes if called.inputs]
        return np.concatenate(found) if found else np.zeros(0, "uint64")

    @property
    def sketches(self) -> np.ndarray:
        """The sketches of its rows, of shape (rows, 2); (rows, 0) of integers."""
        found = [called.inputs[1] for called in self.passes if called.inputs]
        is_even = len({each.shape[1] for each in found}) == 1
        return np.concatenate(found) if is_even else np.zeros((len(self.digests), 0))


def updates(run: Run) -> list[Update]:
    """Return the updates of a run in order."""
    *made, last = steps(run.log)
    found = [
        (_with_gradient(each.called), each.applied) for each in made if each.applied
    ]
    is_by_hand = not found
    if is_by_hand:
        moved = [Piece(each, np.zeros(0, int)) for each in _with_gradient(last.called)]
        end = [
            Piece(replace(each.called, params=run.ended.params), each.rows)
            for each in moved
        ]
        ones, _ = by_hand([*moved, *end[-1:]])
        found = [
            ([piece.called for piece in each.pieces], each.applied) for each in ones
        ]
    num = len(run.parameters)
    found = [(passes, _known(applied, num)) for passes, applied in found]
    begins = [*(_begin(*each) for each in found), run.ended]
    return [
        Update(i + 1, passes, applied, begins[i].buffers, begins[i + 1], is_by_hand)
        for i, (passes, applied) in enumerate(found)
    ]


def _known(applied: Applied, num: int) -> Applied:
    """Return a step, without its numbers where other parameters were trained then."""
    outlines = applied.outlines[-1] if applied.outlines else ()
    is_alike = len(applied.params if applied.is_whole else outlines) == num
    return applied if is_alike else replace(applied.emptied(), outlines=[])


def _begin(passes: list[Called], applied: Applied) -> Values:
    """Return all values before an update, as far as they were kept."""
    first = next(iter(passes), None)
    return Values(applied.params, [] if first is None else first.buffers)


def _with_gradient(called: list[Called]) -> list[Called]:
    """Return the passes of which a gradient was taken, or else may have been taken."""
    by_knowledge = (
        [e for e in called if e.differentiated is known] for known in (True, None)
    )
    return _single(next(filter(None, by_knowledge), []))


def _single(called: list[Called]) -> list[Called]:
    """Return passes without those that repeat another one to the bit, as
    `jax.checkpoint` does.

    They add no row; the gradient shows whether one counts twice.
    """
    kept: list[Called] = []
    for each in called:
        again = next(
            (i for i, other in enumerate(kept) if _are_same(each, other)), None
        )
        if again is None:
            kept.append(each)
        elif each.derivatives:
            kept[again] = each
    return kept


def _are_same(one: Called, two: Called) -> bool:
    """Whether two passes have the same inputs, and begin with the same values of the
    model.
    """
    is_alike = (one.replica, one.mode, one.random) == (
        two.replica,
        two.mode,
        two.random,
    )
    pairs = (
        (one.inputs, two.inputs),
        (one.params, two.params),
        (one.buffers, two.buffers),
    )
    return is_alike and all(all_same(*pair) for pair in pairs)


class Pairs(NamedTuple):
    """The rows of two updates in pairs: of each [its pass, its place there], of shape
    (rows, 2).
    """

    one: np.ndarray
    two: np.ndarray

    def by_pass(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield for each two passes (pass, other pass, rows, other rows, places of the
        pairs).
        """
        both = np.stack([self.one[:, 0], self.two[:, 0]], axis=1)
        for first, second in np.unique(both, axis=0).tolist():
            at = np.flatnonzero((both[:, 0] == first) & (both[:, 1] == second))
            yield first, second, self.one[at, 1], self.two[at, 1], at


def in_order(one: Update, two: Update) -> Pairs:
    """Return the rows of two updates in pairs, each with the one at its place."""
    return Pairs(_places(one), _places(two))


def paired(one: Update, two: Update) -> Pairs | None:
    """Return the rows of two updates in pairs, in the first one's order; None for other
    rows.
    """
    places = [_places(each) for each in (one, two)]
    if len(places[0]) != len(places[1]):
        return None
    if np.array_equal(one.digests, two.digests) or _are_near(
        one.sketches, two.sketches
    ):
        return in_order(one, two)
    orders = [_sorted(each) for each in (one, two)]
    if not np.array_equal(one.digests[orders[0]], two.digests[orders[1]]):
        return None
    back = np.argsort(orders[0])
    return Pairs(places[0], places[1][orders[1]][back])


def _places(update: Update) -> np.ndarray:
    sizes = [len(called.inputs[0]) if called.inputs else 0 for called in update.passes]
    of_pass = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.concatenate([np.arange(size) for size in sizes]) if sizes else of_pass
    return np.stack([of_pass, rows], axis=1).astype(int)


def _sorted(update: Update) -> np.ndarray:
    """Return the order of rows by digest; equal rows by the derivative, as their labels
    differ.
    """
    firsts = [np.zeros(0), *(_first_derivatives(called) for called in update.passes)]
    return np.lexsort([np.concatenate(firsts), update.digests])


def _first_derivatives(called: Called) -> np.ndarray:
    num = len(called.inputs[0]) if called.inputs else 0
    known = [
        d
        for each in called.derivatives.values()
        for d in each
        if len(np.atleast_1d(d)) == num
    ]
    return known[0].reshape(num, -1)[:, 0] if known and num else np.zeros(num)


def _are_near(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether rows are equal up to rounding, or have equal norms, as in another layout."""
    if one.shape != two.shape or not one.size:
        return False
    length = np.maximum(one[:, :1], two[:, :1])
    are_near = np.abs(one - two) <= _NEAR * length
    is_by_norm = np.ptp(length) > 100 * _NEAR * np.max(length)
    return bool(np.all(are_near) or (is_by_norm and np.all(are_near[:, 0])))
