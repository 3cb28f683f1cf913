"""The weights between optimizer steps: what moved them where no step did."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault
from stepcheck.trace.measure import FINE, all_same, distance, in_part, same
from stepcheck.trace.windows import Update
from stepcheck.values import Change, Finding, Line, Where


class _Move(NamedTuple):
    """Weights that were seen after an update, or in it, and again before the next step:
    they are others.
    """

    update: Update
    old: list[np.ndarray]
    new: list[np.ndarray]


def between(
    updates: list[Update],
    decay: float | None,
    names: Sequence[str] = (),
    *,
    moves_weights: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own.
        names: of the weights.
        moves_weights: whether a pass of the model moves them, as SpectralNormalization
            does.
    """
    updates = [u for u in updates if u.applied.is_whole]
    if drifts := [*_replicas_apart(updates, names)]:
        yield from drifts
        return
    outer = _outer(updates)
    after = [*_after(updates, outer)]
    lost = [
        move
        for move in after
        if all_same(move.new, in_part(move.update.applied.params))
    ]
    if lost and 2 * len(lost) > len(updates) - 1:
        yield _finding(Fault.UPDATE_THROWN_AWAY, lost, lost[0].update.applied.line)
        return
    inside = [*_inside([u for u in updates if u.number not in outer])]
    are_alone = (
        all(len(move.update.pieces) == 1 for move in inside) and not moves_weights
    )
    if inside and not are_alone:
        first = inside[0].update
        line = first.pieces[-1].called.line if first.pieces else first.applied.line
        is_decay = all(map(_shrunk, inside))
        fault = (
            Fault.DECAY_BY_MICROBATCH
            if is_decay
            else Fault.WEIGHTS_MOVED_INSIDE_A_WINDOW
        )
        yield _finding(fault, inside, line)
        inside = []
    for moves, least in ((inside, 0), (after, 1)):
        if decay and len(moves) > least and all(map(_shrunk, moves)):
            line = moves[0].update.applied.line
            yield _finding(Fault.DECAYED_TWICE, moves, line, (_shrunk(moves[0]), decay))


def _finding(
    fault: Fault, moves: list[_Move], line: Line | None, numbers: tuple[float, ...] = ()
) -> Finding:
    apart = max(distance(move.old, move.new) for move in moves)
    where = Where(tuple(sorted({move.update.number for move in moves})), line=line)
    return Finding(Change(fault, numbers=numbers), apart, where=where)


def _after(updates: list[Update], outer: set[int]) -> Iterator[_Move]:
    """Yield the weights after a step that are others where the next update begins."""
    for a, b in pairwise(updates):
        first = next(iter([*b.trials, *b.pieces]), None)
        is_seen = first is not None and first.called.is_whole
        new = in_part(
            first.called.params if first is not None and is_seen else b.applied.params
        )
        made = in_part(a.applied.params_after)
        if b.follows(a) and b.number not in outer and not all_same(new, made):
            yield _Move(a, made, new)


def _replicas_apart(updates: list[Update], names: Sequence[str]) -> Iterator[Finding]:
    """Yield the finding on replicas whose weights differ at the beginning of an update."""
    firsts = [
        {p.called.replica: p for p in u.pieces[::-1] if p.called.is_whole}
        for u in updates
    ]
    states = [
        [in_part(piece.called.params) for piece in each.values()] for each in firsts
    ]
    apart = [
        max((distance(state, own[0]) for state in own), default=0.0) for own in states
    ]
    if max(apart, default=0.0) > FINE.differs:
        i = int(np.argmax(apart))
        every = enumerate(zip(*states[i], strict=True))
        differing = [
            names[k]
            for k, own in every
            if names and any(not same(own[0], v) for v in own)
        ]
        numbers, line = tuple(u.number for u in updates), updates[i].applied.line
        change = Change(Fault.REPLICAS_DRIFT_APART, names=tuple(differing))
        yield Finding(change, apart[i], where=Where(numbers, line=line))


def _outer(updates: list[Update]) -> set[int]:
    """Return the updates that begin where the steps of another optimizer before them
    began, as in meta-learning.
    """
    runs = [
        next(run)
        for _, run in groupby(updates, key=lambda update: update.applied.optimizer)
    ]
    same = [
        (b.number, all_same(in_part(a.applied.params), in_part(b.applied.params)))
        for a, b in pairwise(runs)
    ]
    return {number for number, is_same in same if is_same}


def _inside(updates: list[Update]) -> Iterator[_Move]:
    """Yield weights that move between the microbatches of an update, or between the
    last one and the step.

    Without microbatches a decay by hand before the step is one per update, and other
    weights may be earlier ones.
    """
    for update in updates:
        pairs = [] if update.trials else pairwise(_states(update))
        yield from (
            _Move(update, one, two) for one, two in pairs if not all_same(one, two)
        )


def _states(update: Update) -> list[list[np.ndarray]]:
    called = [
        in_part(piece.called.params) for piece in update.pieces if piece.called.is_whole
    ]
    return [*called, in_part(update.applied.params)]


def _shrunk(move: _Move) -> float:
    """Return the factor below 1 by which all weights that moved have become smaller, or
    0.
    """
    every = zip(move.old, move.new, strict=True)
    pairs = [(a, b) for a, b in every if not np.array_equal(a, b)]
    if not pairs:
        return 0.0
    old, new = (
        np.concatenate([np.ravel(p[i]) for p in pairs]).astype("float64")
        for i in (0, 1)
    )
    factor = float(old @ new / (old @ old)) if old.any() else 0.0
    return factor if 0 < factor < 1 and distance(new, factor * old) <= 1e-6 else 0.0
