"""The model after the loop: values that never came back to it, and averages of its weights."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from wholestep.audit.found import Finding, found
from wholestep.audit.log import Values
from wholestep.audit.measure import FINE, all_same, distance, same
from wholestep.audit.port import Port
from wholestep.audit.steps import as_vector, written
from wholestep.audit.windows import Update, Windows

_DECAYS = 1 - np.geomspace(1e-4, 0.9, 400)
_FINER = 3  # times that the neighbourhood of the best decay is searched again
NUM_KEPT = 300  # updates and microbatches whose weights may be averaged


def ends(replay: Port, before: list[np.ndarray], now: Values, seen: Windows) -> Iterator[Finding]:
    """Yield the findings on the values that the loop left in the model.

    Args:
        before: the trainable weights when the loop began.
        now: all values after it.
    """
    whole = [u for u in seen.updates if u.applied.is_whole and u.pieces and u.is_known]
    is_alike = whole and len(now.params) == len(before) == len(whole[0].pieces[0].called.params)
    if not is_alike or seen.is_by_hand or len(whole) < len(seen.updates):  # the last update is not known
        return
    first, last = whole[0].applied.params, whole[-1].applied.params_after
    is_moved = all(a.shape == b.shape for a, b in zip(now.params, last, strict=True)) and not all_same(now.params, last)
    if is_moved and all_same(now.params, first):
        yield "The trained weights never come back to the model: after the loop it has those that it began with."
        return
    if is_moved:
        yield from _averaged(now.params, whole)
    yield from lost_statistics(replay, now, whole)


def lost_statistics(replay: Port, now: Values, updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on statistics that the loop moved, and that the model does not have after it."""
    first, last = (updates[i].pieces[i].called.buffers for i in (0, -1))
    if not len(first) == len(last) == len(now.buffers):
        return
    lost = [
        i
        for i, is_seed in enumerate(replay.are_seeds)
        if not is_seed and same(now.buffers[i], first[i]) and not same(now.buffers[i], last[i])
    ]
    if lost:
        without = distance([now.buffers[i] for i in lost], [last[i] for i in lost])
        detail = f"These are {', '.join(replay.names_of_others[i] for i in lost)}."
        line = updates[-1].pieces[-1].called.line
        yield found("statistics never written back", without, line, [updates[-1].number], detail)


def _averaged(now: list[np.ndarray], updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on final weights that differ from the last update."""
    *states, last = (*(as_vector(u.applied.params) for u in updates), as_vector(updates[-1].applied.params_after))
    decay, by_update = _decayed(as_vector(now), states, last)
    if by_update <= FINE.differs:
        return
    pieces = [state for u, state in zip(updates, states, strict=True) for state in [state] * len(u.pieces)]
    if len(states) < len(pieces) < NUM_KEPT:
        decay, by_piece = _decayed(as_vector(now), pieces, last)
        if by_piece <= FINE.differs / 2:
            detail, line = f"It is decayed by {decay:.4g}.", updates[-1].applied.line
            numbers = [u.number for u in updates]
            yield found("average by microbatch", by_update, line, numbers, detail, with_change=by_piece)
            return
    how = written(updates, updates[-1], now)
    how = f": {how}" if how else ""
    yield f"After the loop the model's weights are not those of its last update{how}. Is that meant?"


class _Decayed(NamedTuple):
    decay: float
    apart: float


def _decayed(wanted: np.ndarray, states: list[np.ndarray], last: np.ndarray) -> _Decayed:
    """Return the decay with which a moving average of the states comes nearest, and its distance.

    The average begins with the first state or the second, and ends with the last or the one before. The distance is
    relative to the length of the path.
    """
    origin = states[0]
    scale = max(float(np.linalg.norm(state - origin)) for state in (*states, last)) or 1.0
    moved = np.stack([state - origin for state in (*states, last)]) / scale
    ways = (moved, moved[1:], moved[:-1], moved[1:-1]) if len(moved) > 2 else (moved,)
    return min((_searched((wanted - origin) / scale, way) for way in ways), key=lambda each: each.apart)


def _searched(wanted: np.ndarray, states: np.ndarray) -> _Decayed:
    gram, along, size = states @ states.T, states @ wanted, float(wanted @ wanted)
    decays: np.ndarray = _DECAYS
    for _ in range(_FINER):
        shares = _shares(decays, len(states))
        squares = np.einsum("di,ij,dj->d", shares, gram, shares) - 2 * shares @ along + size
        best = int(np.argmin(squares))
        decay, low, high = (float(decays[i]) for i in (best, max(best - 1, 0), min(best + 1, len(decays) - 1)))
        decays = np.linspace(low, high, len(_DECAYS))
    return _Decayed(decay, float(np.linalg.norm(wanted - _shares(np.array([decay]), len(states))[0] @ states)))


def _shares(decays: np.ndarray, num: int) -> np.ndarray:
    """Return the share of each of `num` states in a moving average of them: (decays, states)."""
    shares: np.ndarray = (1 - decays[:, None]) * decays[:, None] ** np.arange(num)[::-1]
    shares[:, 0] = shares[:, 0] / (1 - decays)
    return shares
