"""The stages of the forward pass and of the state: its mode, and whether values that it
moved are kept.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault
from stepcheck.port import Port
from stepcheck.solve.modes import Modes
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.measure import all_same, distance
from stepcheck.trace.windows import Piece, Update
from stepcheck.values import Change, Finding, Line, Shown, Where


def mode(modes: Modes) -> Iterator[Finding]:
    """Yield the finding on updates in inference mode."""
    if modes.inferring:
        first = modes.inferring[0]
        numbers = {each.update.number for each in modes.inferring}
        apart = max(each.training for each in modes.inferring)
        with_error = max(each.inference for each in modes.inferring)
        proof = proof_of(first.update.number, Shown.OUTPUT, str, modes.outputs)
        where = Where(tuple(sorted(numbers)), line=first.piece.called.line)
        yield Finding(Change(Fault.INFERENCE_MODE), apart, with_error, where, proof)


class _Moved(NamedTuple):
    """Values that a pass moves: before it, after it, and where the next pass begins."""

    update: int
    old: list[np.ndarray]
    made: list[np.ndarray]
    new: list[np.ndarray]


def state(replay: Port, modes: Modes, updates: list[Update]) -> Iterator[Finding]:
    """Yield the findings on statistics and seeds that a forward pass moves, and the
    next pass does not begin with.
    """

    def moved(number: int, first: Piece, mover: Piece, after: Piece) -> _Moved:
        made = modes.moved[mover.called.order]
        return _Moved(number, first.called.buffers, made, after.called.buffers)

    updates = [u for u in updates if u.is_known and all(map(modes.of, u.pieces))]
    steps = [
        moved(b.number, a.pieces[0], a.pieces[-1], b.pieces[0])
        for a, b in pairwise(updates)
        if b.follows(a)
    ]
    inside = [
        moved(u.number, a, a, b)
        for u in updates
        for replica in {piece.called.replica for piece in u.pieces}
        for a, b in pairwise([p for p in u.pieces if p.called.replica == replica])
    ]
    chosen = range(len(replay.are_seeds) - replay.num_recurrent)
    seeds = [i for i in chosen if replay.are_seeds[i]]
    statistics = [i for i in chosen if not replay.are_seeds[i]]
    lines = [piece.called.line for u in updates[:1] for piece in u.pieces]
    thrown_away = [
        *_thrown_away(Fault.STATISTICS_THROWN_AWAY, steps, lines[:1], statistics),
        *_thrown_away(Fault.SEEDS_THROWN_AWAY, steps, lines[:1], seeds),
    ]
    of_one = Fault.STATE_OF_ONE_MICROBATCH
    yield from thrown_away or _thrown_away(of_one, inside, lines[-1:], [*chosen])


def _thrown_away(
    fault: Fault, steps: list[_Moved], lines: list[Line | None], chosen: list[int]
) -> Iterator[Finding]:
    """Yield the finding on values, at the `chosen` indices, that every pass moves and
    no next pass begins with.
    """
    every = [
        _Moved(number, *([values[i] for i in chosen] for values in each))
        for number, *each in steps
    ]
    moving = [each for each in every if not all_same(each.old, each.made)]
    lost = [each for each in moving if all_same(each.old, each.new)]
    kept = [each for each in moving if not all_same(each.old, each.new)]
    if lost and kept in ([], moving[:1]):  # the first ones may be assigned
        apart = max(distance(each.new, each.made) for each in lost)
        numbers = tuple(sorted({each.update for each in lost}))
        yield Finding(Change(fault), apart, where=Where(numbers, line=lines[0]))
