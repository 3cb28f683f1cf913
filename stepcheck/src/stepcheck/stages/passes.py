"""The stages of the forward pass and of the state: its mode, and whether values that it
moved are kept.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from stepcheck.faults import Fault
from stepcheck.port import Port
from stepcheck.solve.modes import Modes
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.measure import all_same, distance
from stepcheck.trace.windows import Piece, Update
from stepcheck.values import Change, Finding, Shown, Where


def mode(modes: Modes) -> Iterator[Finding]:
    """Yield the finding on updates in inference mode."""
    if modes.inferring:
        first = modes.inferring[0]
        numbers = {each.update.number for each in modes.inferring}
        apart = max(each.training for each in modes.inferring)
        with_error = max(each.inference for each in modes.inferring)
        proof = proof_of(first.update.number, Shown.OUTPUT, str, modes.outputs)
        where = Where(tuple(sorted(numbers)), line=first.piece.called.line)
        yield Finding(
            Change(Fault.INFERENCE_MODE), apart, with_error, where, proof
        )


def state(
    replay: Port, modes: Modes, updates: list[Update]
) -> Iterator[Finding]:
    """Yield the findings on statistics and seeds that a forward pass moves, and the
    next pass does not begin with.
    """
    known = [u for u in updates if u.is_known and all(map(modes.of, u.pieces))]
    chosen = range(len(replay.are_seeds) - replay.num_recurrent)
    seeds = [i for i in chosen if replay.are_seeds[i]]
    statistics = [i for i in chosen if not replay.are_seeds[i]]
    steps = [
        _Pair(b, a.pieces, b.pieces[0])
        for a, b in pairwise(known)
        if b.follows(a)
    ]
    inside = [
        _Pair(u, [a], b)
        for u in known
        for a, b in pairwise(u.pieces)
        if a.called.replica == b.called.replica
    ]
    found = [
        *_thrown_away(Fault.STATISTICS_THROWN_AWAY, modes, steps, statistics),
        *_thrown_away(Fault.SEEDS_THROWN_AWAY, modes, steps, seeds),
    ]
    of_one = Fault.STATE_OF_ONE_MICROBATCH
    yield from found or _thrown_away(of_one, modes, inside, [*chosen])


class _Pair(NamedTuple):
    """Passes that begin with the same values, the last of which moves these, and the
    next pass, of an update.
    """

    update: Update
    pieces: list[Piece]
    after: Piece


def _thrown_away(
    fault: Fault, modes: Modes, pairs: list[_Pair], chosen: list[int]
) -> Iterator[Finding]:
    """Yield the finding on values, at the `chosen` indices, that every pass moves and
    no next pass begins with.
    """
    moving: list[tuple[bool, int, float]] = []
    for update, pieces, after in pairs:
        first = pieces[0].called.buffers
        made = modes.moved[pieces[-1].called.order]
        every = first, made, after.called.buffers
        old, should, new = ([values[i] for i in chosen] for values in every)
        if not all_same(old, should):
            moving.append(
                (all_same(old, new), update.number, distance(new, should))
            )
    lost = [each for each in moving if each[0]]
    if lost and all(
        is_lost for is_lost, *_ in moving[1:]
    ):  # the first may be assigned
        numbers = tuple(sorted({number for _, number, _ in lost}))
        where = Where(numbers, line=pairs[0].pieces[-1].called.line)
        yield Finding(
            Change(fault), max(apart for *_, apart in lost), where=where
        )
