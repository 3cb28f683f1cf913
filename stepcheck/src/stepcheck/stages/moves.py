"""The weights between optimizer steps: what moved them where no step did."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault
from stepcheck.trace.measure import FINE, all_same, distance, in_part, same
from stepcheck.trace.windows import Update
from stepcheck.values import Change, Finding, Where

MOVED_INSIDE = {
    Fault.DECAY_BY_MICROBATCH,
    Fault.WEIGHTS_MOVED_INSIDE_A_WINDOW,
    Fault.REPLICAS_DRIFT_APART,
}
_SHRUNK = 1e-6  # relative distance of weights that have one factor


class _Move(NamedTuple):
    """Weights that were seen after an update, or in it, and again before the next step:
    they are others.
    """

    update: Update
    old: list[np.ndarray]
    new: list[np.ndarray]

    @property
    def factor(self) -> float:
        """The factor below 1 by which all weights that moved have become smaller, or 0."""
        pairs = zip(self.old, self.new, strict=True)
        moved = [(a, b) for a, b in pairs if not np.array_equal(a, b)]
        old, new = (
            np.concatenate(
                [np.zeros(0), *(np.ravel(pair[i]) for pair in moved)]
            )
            for i in (0, 1)
        )
        factor = float(old @ new / (old @ old)) if old.any() else 0.0
        is_one = distance(new, factor * old) <= _SHRUNK
        return factor if 0 < factor < 1 and is_one else 0.0


def between(
    updates: list[Update], decay: float | None, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield the findings on weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own.
        names: of the weights.
    """
    updates = [u for u in updates if u.applied.is_whole]
    if drifts := [*_replicas_apart(updates, names)]:
        yield from drifts
        return
    pairs = [(a, b) for a, b in pairwise(updates) if _is_one_optimizer(a, b)]
    after = [
        _Move(a, in_part(a.applied.params_after), in_part(begin(b)))
        for a, b in pairs
    ]
    after = [move for move in after if not all_same(move.old, move.new)]
    lost = [
        m for m in after if all_same(m.new, in_part(m.update.applied.params))
    ]
    if lost and 2 * len(lost) > len(updates) - 1:
        yield _finding(Fault.UPDATE_THROWN_AWAY, lost)
        return
    outer = {
        b.number
        for a, b in pairwise(updates)
        if a.applied.optimizer != b.applied.optimizer
        and all_same(in_part(a.applied.params), in_part(b.applied.params))
    }
    inside = [
        move for u in updates if u.number not in outer for move in _inside(u)
    ]
    is_decay = all(move.factor for move in inside)
    if any(len(move.update.pieces) > 1 for move in inside):
        moved = Fault.WEIGHTS_MOVED_INSIDE_A_WINDOW
        yield _finding(Fault.DECAY_BY_MICROBATCH if is_decay else moved, inside)
    elif decay and inside and is_decay:
        yield _finding(Fault.DECAYED_TWICE, inside, decay)
    if decay and len(after) > 1 and all(move.factor for move in after):
        yield _finding(Fault.DECAYED_TWICE, after, decay)


def _finding(
    fault: Fault, moves: list[_Move], decay: float | None = None
) -> Finding:
    first = moves[0]
    numbers = () if decay is None else (first.factor, decay)
    line = first.update.applied.line
    if fault in MOVED_INSIDE:
        line = first.update.pieces[-1].called.line
    apart = max(distance(move.old, move.new) for move in moves)
    where = Where(
        tuple(sorted({move.update.number for move in moves})), line=line
    )
    return Finding(Change(fault, numbers=numbers), apart, where=where)


def _is_one_optimizer(one: Update, two: Update) -> bool:
    """Whether it steps twice; another one may begin at other weights, as in
    meta-learning.
    """
    return two.follows(one) and one.applied.optimizer == two.applied.optimizer


def begin(update: Update) -> list[np.ndarray]:
    """Return the weights of an update's first forward pass, or those before its step."""
    called = [piece.called for piece in [*update.trials, *update.pieces]][:1]
    return next((c.params for c in called if c.is_whole), update.applied.params)


def written(updates: list[Update]) -> list[Update]:
    """Return the updates before whose step something else wrote weights, or slots of
    the optimizer.
    """
    whole = [u for u in updates if u.applied.is_whole]
    pairs = [(a, b) for a, b in pairwise(whole) if b.follows(a)]
    found = [b for a, b in pairs if not (_goes_on(a, b) and _keeps_slots(a, b))]
    found += [u for u in whole if [*_inside(u)]]
    return sorted(found, key=lambda update: update.number)


def _goes_on(one: Update, two: Update) -> bool:
    """Whether an update begins with the weights that the one before it moved.

    Others are another's: a step of another process, or none.
    """
    step = one.applied
    states = map(in_part, (step.params, step.params_after, begin(two)))
    return all(
        same(made, new)
        for old, made, new in zip(*states, strict=False)
        if not same(old, made)
    )


def _keeps_slots(before: Update, update: Update) -> bool:
    """Whether a step begins with the slots that the one before it left.

    The learning rate of Keras, a float without a parameter, may be set.
    """
    one, two = before.applied, update.applied
    if one.optimizer != two.optimizer:
        return True
    if one.slots_of[1] != two.slots_of[0]:  # some are made later; none is lost
        return len(one.slots_after) <= len(two.slots)
    pairs = zip(two.slots_of[0], one.slots_after, two.slots, strict=True)
    return all(
        same(old, new)
        for (_, name), old, new in pairs
        if name or np.ndim(old) or old.dtype.kind != "f"
    )


def _inside(update: Update) -> Iterator[_Move]:
    """Yield weights that move between the microbatches of an update, or between the
    last one and the step.
    """
    called = [piece.called for piece in update.pieces if piece.called.is_whole]
    states = [in_part(each.params) for each in called]
    states.append(in_part(update.applied.params))
    for old, new in pairwise(states if not update.trials else ()):
        if not all_same(old, new):
            yield _Move(update, old, new)


def _replicas_apart(
    updates: list[Update], names: Sequence[str]
) -> Iterator[Finding]:
    """Yield the finding on replicas whose weights differ at the beginning of an update."""
    for i, update in enumerate(updates):
        firsts = {p.called.replica: p.called for p in update.pieces[::-1]}
        states = [
            in_part(called.params)
            for called in firsts.values()
            if called.is_whole
        ]
        apart = max(
            (distance(state, states[0]) for state in states), default=0.0
        )
        if apart > FINE.differs:
            every = zip(names, *states, strict=True)
            differing = [
                name
                for name, one, *others in every
                if not all(same(one, o) for o in others)
            ]
            numbers = tuple(u.number for u in updates[i:])
            change = Change(Fault.REPLICAS_DRIFT_APART, names=tuple(differing))
            where = Where(numbers, line=update.applied.line)
            yield Finding(change, apart, where=where)
            return
