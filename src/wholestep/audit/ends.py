"""What the model holds once the loop is over: values that never came back to it, and averages of its weights."""

from typing import NamedTuple

import keras
import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import DIFFERS, Found, far, found
from wholestep.audit.keeping import all_same, same
from wholestep.audit.windows import Update, Windows
from wholestep.audit.written import some, written

_DECAYS = 1 - np.geomspace(1e-4, 0.9, 400)
_FINER = 3  # times that the neighbourhood of the best decay is looked at again
NUM_KEPT = 300  # updates and microbatches whose weights may be averaged


class Ended(NamedTuple):
    """All values of a model after the loop."""

    params: list[np.ndarray]
    buffers: list[np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> "Ended | None":
        """Return copies of them; None if the loop has given them away, as it may on JAX (`donate_argnums`)."""
        groups = model.trainable_variables, model.non_trainable_variables
        try:
            return cls(*([np.array(keras.ops.convert_to_numpy(v)) for v in group] for group in groups))
        except RuntimeError:  # "Array has been deleted"
            return None


def ends(model: keras.Model, before: list[np.ndarray], now: Ended, seen: Windows) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of what the loop has left in the model.

    Args:
        before: the trainable weights when the loop began.
    """
    whole = [u for u in seen.updates if u.applied.is_whole and u.pieces and u.is_known]
    is_alike = whole and len(now.params) == len(before) == len(whole[0].pieces[0].called.params)
    if not is_alike or seen.is_by_hand or len(whole) < len(seen.updates):  # the last update is not known
        return [], []
    first, last = whole[0].applied.params, whole[-1].applied.params_after
    if any(a.shape != b.shape for a, b in zip(now.params, last, strict=True)) or all_same(now.params, last):
        return lost_statistics(model, now, whole), []
    if all_same(now.params, first):
        return [], ["The trained weights never come back to the model: after the loop it has those that it began with."]
    causes, notes = _averaged(now.params, whole)
    return [*causes, *lost_statistics(model, now, whole)], notes


def lost_statistics(model: keras.Model, now: Ended, updates: list[Update]) -> list[Found]:
    """Find statistics that the loop moved, and that the model does not have after it."""
    first, last = (updates[i].pieces[i].called.buffers for i in (0, -1))
    variables = model.non_trainable_variables
    if not len(first) == len(last) == len(now.buffers):
        return []
    lost = [
        i
        for i, variable in enumerate(variables)
        if "seed" not in variable.path.split("/")[-1]
        and same(now.buffers[i], first[i])
        and not same(now.buffers[i], last[i])
    ]
    if not lost:
        return []
    without = far([now.buffers[i] for i in lost], [last[i] for i in lost])
    detail = f"It is so with {', '.join(variables[i].path for i in lost)}."
    line = updates[-1].pieces[-1].called.line
    return [found(BY_NAME["statistics never written back"], without, 0.0, line, [updates[-1].number], detail)]


def _averaged(now: list[np.ndarray], updates: list[Update]) -> tuple[list[Found], list[str]]:
    """Return what the weights are that the model ends with, if they are not those of the last update."""
    *states, last = (*(some(u.applied.params) for u in updates), some(updates[-1].applied.params_after))
    by_update = _decayed(some(now), states, last)
    if by_update.apart <= DIFFERS:
        return [], []
    pieces = [state for u, state in zip(updates, states, strict=True) for state in [state] * len(u.pieces)]
    if len(states) < len(pieces) < NUM_KEPT:
        by_piece = _decayed(some(now), pieces, last)
        if by_piece.apart <= DIFFERS / 2:
            detail = f"It is decayed by {by_piece.decay:.4g}."
            name, line, numbers = "average by microbatch", updates[-1].applied.line, [u.number for u in updates]
            return [found(BY_NAME[name], by_update.apart, by_piece.apart, line, numbers, detail)], []
    how = written(updates, updates[-1], now)
    how = f": {how}" if how else ""
    return [], [f"After the loop the model's weights are not those of its last update{how}. Is that meant?"]


class _Decayed(NamedTuple):
    decay: float
    apart: float


def _decayed(wanted: np.ndarray, states: list[np.ndarray], last: np.ndarray) -> _Decayed:
    """Return the decay with which a moving average of the states comes nearest, and its distance.

    The average begins with the first state or the second, and goes up to the last one or to the one before. The
    distance is relative to that of the states.
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
    """Return how much of each of so many states is in a moving average of them: (decays, states)."""
    shares: np.ndarray = (1 - decays[:, None]) * decays[:, None] ** np.arange(num)[::-1]
    shares[:, 0] = shares[:, 0] / (1 - decays)
    return shares
