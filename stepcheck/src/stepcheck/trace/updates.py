"""The updates of a recorded run, and the rows that an update shares with one of another
run.
"""

from dataclasses import dataclass, replace

import numpy as np

from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Applied, Called, Values
from stepcheck.trace.measure import all_same
from stepcheck.trace.trace import Run
from stepcheck.trace.windows import Piece, by_hand

NEAR = 1e-5  # relative distance of equal rows


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
    is_by_hand: bool

    @property
    def digests(self) -> np.ndarray:
        """The digests of its rows."""
        found = [called.inputs[0] for called in self.passes if called.inputs]
        return np.concatenate([np.zeros(0, "uint64"), *found])

    @property
    def sketches(self) -> np.ndarray:
        """The sketches of its rows, of shape (rows, 2); (rows, 0) of integers."""
        found = [called.inputs[1] for called in self.passes if called.inputs]
        is_even = len({each.shape[1] for each in found}) == 1
        return np.concatenate(found) if is_even else np.zeros((0, 0))


def updates(run: Run) -> list[Update]:
    """Return the updates of a run in order."""
    *made, last = steps(run.log)
    found = [
        (_with_gradient(each.called), each.applied)
        for each in made
        if each.applied
    ]
    is_by_hand = not found
    if is_by_hand:
        found = _by_hand(_with_gradient(last.called), run.ended.params)
    num, after, backwards = len(run.parameters), run.ended, list[Update]()
    for number, (passes, step) in reversed([*enumerate(found, start=1)]):
        applied = _known(step, num)
        buffers = passes[0].buffers if passes else []
        made_of = passes, applied, buffers, after, is_by_hand
        backwards.append(Update(number, *made_of))
        after = Values(applied.params, buffers)
    return backwards[::-1]


def _by_hand(
    called: list[Called], ended: list[np.ndarray]
) -> list[tuple[list[Called], Applied]]:
    """Return (passes, step) of each move of the weights."""
    end = [replace(each, params=ended) for each in called[-1:]]
    moved, _ = by_hand(
        [Piece(each, np.zeros(0, int)) for each in (*called, *end)]
    )
    return [([p.called for p in each.pieces], each.applied) for each in moved]


def _known(applied: Applied, num: int) -> Applied:
    """Return a step, without its numbers where other parameters were trained then."""
    outlines = applied.outlines[-1] if applied.outlines else ()
    is_alike = len(applied.params if applied.is_whole else outlines) == num
    return applied if is_alike else replace(applied.emptied(), outlines=[])


def _with_gradient(called: list[Called]) -> list[Called]:
    """Return the passes of which a gradient was taken, or else may have been taken.

    One that repeats another to the bit, as by `jax.checkpoint`, adds no row; the
    gradient shows whether it counts twice.
    """
    known = [each for each in called if each.differentiated]
    kept: list[Called] = []
    for each in known or [
        each for each in called if each.differentiated is None
    ]:
        again = [i for i, other in enumerate(kept) if _are_same(each, other)]
        if not again:
            kept.append(each)
        elif each.derivatives:
            kept[again[0]] = each
    return kept


def _are_same(one: Called, two: Called) -> bool:
    """Whether two passes have the same inputs, and begin with the same values."""
    first, second = ((c.replica, c.mode, c.random) for c in (one, two))
    ones, twos = ([*c.inputs, *c.params, *c.buffers] for c in (one, two))
    return first == second and all_same(ones, twos)


@dataclass
class Pair:
    """An update in two runs.

    Attributes:
        places: of each row of the first one, its place in the other; None for other
            rows.
        rows_apart: how far the rows are apart at most.
    """

    one: Update
    two: Update
    places: np.ndarray | None
    rows_apart: float

    def __post_init__(self) -> None:
        sides = self.one, self.two
        self.steps = self.one.applied, self.two.applied
        self.are_whole = all(step.is_whole for step in self.steps)
        self.are_by_hand = any(each.is_by_hand for each in sides)
        modes = [{called.mode for called in each.passes} for each in sides]
        self.has_other_mode = modes[0] != modes[1]


def paired(one: Update, two: Update, near: float) -> Pair:
    """Return an update of two runs, whose rows are equal up to a relative distance."""
    digests, apart = (one.digests, two.digests), np.inf
    are_as_many = len(digests[0]) == len(digests[1])
    if np.array_equal(*digests):
        apart = 0.0
    elif are_as_many:
        apart = _apart(one.sketches, two.sketches)
    if apart <= near:
        return Pair(one, two, np.arange(len(digests[0])), apart)
    first, second = (np.argsort(each, kind="stable") for each in digests)
    if are_as_many and np.array_equal(digests[0][first], digests[1][second]):
        return Pair(one, two, second[np.argsort(first)], 0.0)
    return Pair(one, two, None, np.inf)


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    """Return the relative distance of rows by their sketches; of rows in another layout
    that of their norms, if these differ from row to row.
    """
    if one.shape != two.shape or not one.size:
        return np.inf
    norms = np.maximum(one[:, 0], two[:, 0])
    apart = np.abs(one - two).T / np.maximum(norms, np.finfo("float64").tiny)
    is_by_norm = np.ptp(norms) > 100 * NEAR * np.max(norms)
    by_norm = float(np.max(apart[0]))
    return by_norm if is_by_norm and by_norm <= NEAR else float(np.max(apart))
