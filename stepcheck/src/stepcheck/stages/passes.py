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
from stepcheck.trace.log import Called, Log
from stepcheck.trace.measure import all_same
from stepcheck.trace.windows import Piece, Update, Windows
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


def state(replay: Port, modes: Modes, updates: list[Update]) -> Iterator[Finding]:
    """Yield the findings on statistics and seeds that a forward pass moves, and the
    next pass does not begin with.
    """
    updates = [u for u in updates if u.is_known and all(modes.of(p) for p in u.pieces)]
    if not updates:
        return
    steps = [
        _Moved(b.number, a.pieces[-1], a.pieces[0], b.pieces[0])
        for a, b in pairwise(updates)
        if b.follows(a)
    ]
    first, last = (updates[0].pieces[i].called.line for i in (0, -1))
    num = len(replay.are_seeds) - replay.num_recurrent
    statistics, seeds = (
        [i for i in range(num) if replay.are_seeds[i] == is_seed]
        for is_seed in (False, True)
    )
    thrown_away = [
        *_thrown_away(Fault.STATISTICS_THROWN_AWAY, modes, steps, first, statistics),
        *_thrown_away(Fault.SEEDS_THROWN_AWAY, modes, steps, first, seeds),
    ]
    by_replica = [
        (u.number, [p for p in u.pieces if p.called.replica == replica])
        for u in updates
        for replica in {p.called.replica for p in u.pieces}
    ]
    inside = [
        _Moved(number, a, a, b)
        for number, pieces in by_replica
        for a, b in pairwise(pieces)
    ]
    yield from thrown_away or _thrown_away(
        Fault.STATE_OF_ONE_MICROBATCH, modes, inside, last, [*range(num)]
    )


class _Moved(NamedTuple):
    """An update, the pass that moves values last, the pass that began with the old
    ones, and the next pass.
    """

    update: int
    mover: Piece
    before: Piece
    after: Piece


def _thrown_away(
    fault: Fault,
    modes: Modes,
    steps: list[_Moved],
    line: Line | None,
    chosen: list[int],
) -> Iterator[Finding]:
    """Yield the finding on values, at the `chosen` indices, that every pass moves and
    no next pass begins with.
    """
    lost, shares, num_kept = [], [], 0
    for i, step in reversed([*enumerate(steps, 1)]):
        every = (
            step.before.called.buffers,
            step.after.called.buffers,
            modes.moved[step.mover.called.order],
        )
        old, new, should = ([values[i] for i in chosen] for values in every)
        if all_same(old, should):
            continue
        if not all_same(old, new):
            num_kept = i
            break
        lost.append(step.update)
        differing = [np.ravel(a != b) for a, b in zip(new, should, strict=True)]
        shares.append(float(np.mean(np.concatenate(differing))))
    if (
        lost and num_kept <= 1
    ):  # those of the first pass may be the ones that are assigned
        where = Where(updates=tuple(sorted(set(lost))), line=line)
        yield Finding(Change(fault), max(shares), where=where)


def second_passes(log: Log, seen: Windows) -> Iterator[Finding]:
    """Yield the finding on passes without gradient, on the rows of the update before,
    that move statistics or seeds.
    """
    last = {
        u.pieces[-1].called.order: u for u in seen.updates if u.pieces and u.is_known
    }
    moving: list[tuple[Update, Called, float]] = []
    update = None
    for one, two in pairwise([called for called in log.called if called.is_whole]):
        update = last.get(one.order, update)
        if update is None or one.order in last or one.differentiated is not False:
            continue
        moves = [
            not np.array_equal(a, b)
            for a, b in zip(one.buffers, two.buffers, strict=True)
        ]
        if any(moves) and all_same(one.inputs, update.pieces[-1].called.inputs):
            moving.append((update, one, float(np.mean(moves))))
    if len(moving) > 1:
        line = next((one.line for _, one, _ in moving if one.line), None)
        share = max(share for *_, share in moving)
        where = Where(updates=tuple(u.number for u, *_ in moving), line=line)
        yield Finding(Change(Fault.SECOND_PASS_IN_TRAINING_MODE), share, where=where)
