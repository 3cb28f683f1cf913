"""The variables that steps reach or leave out, and the values and averages that a loop leaves in the model."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.errors import attempt
from stepcheck.faults import Fault
from stepcheck.port import Port
from stepcheck.trace.log import Applied, Called, Values
from stepcheck.trace.measure import FINE, all_same, distance, in_part, places, same
from stepcheck.trace.windows import Piece, Update, Windows
from stepcheck.values import Change, Finding, Where

_AGAINST = 0.5  # a cosine: an average of other weights moves otherwise
NUM_MOVES, FEW = (
    5,
    4,
)  # moves that are compared with their gradient; numbers that move against it by chance
NUM_ROWS = 32  # on this many rows the gradient is computed if no forward pass was seen


def left_out(
    replay: Port,
    objective: Any,
    updates: list[Update],
    steps: list[Applied],
    before: list[np.ndarray],
    *,
    is_thawed: bool = False,
) -> Iterator[Finding]:
    """Yield the finding on trainable variables that no step moves, and that the loss has a gradient of.

    Args:
        before: the weights when the loop began.
        is_thawed: whether the loop itself has set them to be trained.
    """
    whole = [step for step in steps if step.is_whole] or [
        u.applied for u in updates if u.applied.is_whole
    ]
    num = len(replay.names)
    if len(before) != num:  # the model was not built
        before = next((p.called.params for u in updates for p in u.pieces if p.called.is_whole), [])
    if not whole or len(before) != num or any(len(step.grads) != num for step in whole):
        return
    grads = [[step.grads[i] for step in whole] for i in range(num)]
    missing = [i for i in range(num) if not any(g is not None and np.any(g) for g in grads[i])]
    if len(missing) == num:
        return
    shares = _shares(replay, objective, updates, before)
    bare = [i for i in missing if all(g is None for g in grads[i])]
    if not steps:  # by hand: the gradient is the move
        bare = [i for i in missing if shares[i] > FINE.differs]
    moving = _moving(replay, updates, before, is_known=len(whole) == len(steps) or not steps)
    wrong = [i for i in bare if i not in moving and shares[i] > FINE.differs]
    wrong = [i for i in wrong if is_thawed or _is_meant(replay, steps, missing, i)]
    if wrong:
        numbers = tuple(u.number for u in updates if u.applied.is_whole)
        where = Where(numbers, parameters=tuple(replay.names[i] for i in wrong), line=whole[0].line)
        yield Finding(
            Change(Fault.VARIABLE_LEFT_OUT), float(np.linalg.norm(shares[wrong])), where=where
        )


def _is_meant(replay: Port, steps: list[Applied], missing: list[int], i: int) -> bool:
    """Whether a variable was meant to be trained, and not left out by choice.

    It was, if it is handed over with None for a gradient, or if a larger one of its layer is trained.
    """
    beside = [j for j in replay.beside(i) if j not in missing]
    sizes = replay.sizes
    return any(i in step.lost for step in steps) or any(sizes[j] > sizes[i] for j in beside)


def frozen(
    replay: Port, objective: Any, updates: list[Update], *, has_others: bool
) -> Iterator[Finding]:
    """Yield the finding on variables that are set to be frozen, and move against their gradient all the same.

    Args:
        has_others: whether other optimizers make steps: they may train them on purpose.
    """
    pieces = [
        piece for u in updates for piece in u.pieces if piece.called.is_whole and piece.is_known
    ]
    names: list[str] = []
    shares: list[float] = []
    numbers: set[int] = set()
    most = 0
    for i in replay.frozen():
        moved = [
            (a, b)
            for a, b in pairwise(pieces)
            if not same(a.called.buffers[i], b.called.buffers[i])
        ]
        cosines = (_cosine(replay, objective, i, pair) for pair in moved[:NUM_MOVES])
        if len(moved) > 1 and next(cosines) > _AGAINST and all(cosine > 0 for cosine in cosines):
            old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved[0])
            size = float(np.linalg.norm(new - old))
            names.append(replay.names_of_others[i])
            shares.append(size / max(float(np.linalg.norm(old)), size))
            numbers |= {
                u.number for u in updates for a, _ in moved if any(a is piece for piece in u.pieces)
            }
            most = max(most, new.size)
    if names and most > FEW and not has_others:
        line = next(u.applied.line for u in updates if u.number in numbers)
        where = Where(tuple(sorted(numbers)), parameters=tuple(names), line=line)
        yield Finding(Change(Fault.FROZEN_VARIABLE_TRAINED), max(shares), where=where)


def _cosine(replay: Port, objective: Any, i: int, moved: tuple[Piece, Piece]) -> float:
    """Return the cosine between a move of a frozen variable from one pass to the next and the fall of the loss."""
    old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved)
    grad = replay.of_frozen(moved[0], objective, i, training=True)
    size = float(np.linalg.norm(new - old)) * float(np.linalg.norm(grad))
    return float(np.vdot(old - new, grad)) / size if size else 0.0


def _shares(
    replay: Port, objective: Any, updates: list[Update], before: list[np.ndarray]
) -> np.ndarray:
    """Return the length of each variable's gradient of a sum over rows as a share of the whole; NaN if not known."""
    piece = next((piece for u in updates if u.is_known for piece in u.pieces), None) or _first(
        replay, before
    )

    def gradient() -> np.ndarray:
        batch = replay.batch(piece)
        ones = np.ones_like(replay.terms(piece, objective, batch, training=False).weights)
        return replay.gradient(
            piece, objective, batch, ones, training=False, penalty=len(piece.rows)
        )

    whole, _ = attempt(gradient)  # an error: of a model that does not take the data as they are
    whole = np.zeros_like(replay.flat([*before])) if whole is None else whole
    sizes, size = (
        [np.linalg.norm(part) for part in replay.parts(whole).values()],
        float(np.linalg.norm(whole)),
    )
    return np.array(sizes) / size if 0 < size < np.inf else np.full(len(sizes), np.nan)


def _first(replay: Port, before: list[np.ndarray]) -> Piece:
    inputs = [np.asarray(leaf)[:NUM_ROWS] for leaf in tree.leaves(replay.data[0])]
    now = replay.values()
    return Piece(
        Called(0, inputs, [], before, now.buffers if now else [], True, None),
        np.arange(len(inputs[0])),
    )


def _moving(
    replay: Port, updates: list[Update], before: list[np.ndarray], *, is_known: bool
) -> set[int]:
    """Return the variables that move, perhaps by something else.

    All may, if not all steps are known and no weight has moved in the end.
    """
    states = [piece.called.params for u in updates for piece in u.pieces if piece.called.is_whole]
    moved = {
        i for i, value in enumerate(before) if not all(same(value, state[i]) for state in states)
    }
    if len(moved) == len(before):  # no copy of a large model is made
        return moved
    now = replay.values()
    last = before if now is None else now.params
    if not is_known and all(same(a, b) for a, b in zip(before, last, strict=True)):
        return set(range(len(before)))
    return moved | {i for i, value in enumerate(before) if not same(value, last[i])}


_DECAYS = 1 - np.geomspace(1e-4, 0.9, 400)
_FINER = 3  # times that the neighbourhood of the best decay is searched again
NUM_KEPT = 300  # updates and microbatches whose weights may be averaged


def ends(
    replay: Port,
    before: list[np.ndarray],
    now: Values,
    seen: Windows,
    *,
    averages: bool,
    is_stateless: bool,
) -> Iterator[Finding]:
    """Yield the findings on the values that the loop left in the model.

    Args:
        before: the weights when it began.
        averages: whether the optimizer keeps an average of the weights.
        is_stateless: whether the loop has the values in its own hands, and may forget to write them back.
    """
    whole = [u for u in seen.updates if u.applied.is_whole and u.pieces and u.is_known]
    if not whole or not len(now.params) == len(before) == len(whole[0].pieces[0].called.params):
        return
    first, last = whole[0].applied.params, whole[-1].applied.params_after
    if any(a.shape != b.shape for a, b in zip(now.params, last, strict=True)):
        return
    if all_same(now.params, first) and not all_same(first, last):
        return  # trained on the side
    is_last_known = len(whole) == len(seen.updates) and not seen.is_by_hand
    if is_last_known and not averages and not all_same(now.params, last):
        yield from _averaged(now.params, whole)
    if is_stateless:
        yield from _lost_statistics(replay, now, whole)


def _lost_statistics(replay: Port, now: Values, updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on statistics that the loop moved, and that the model does not have after it."""
    first, last = (updates[i].pieces[i].called.buffers for i in (0, -1))
    if not len(first) == len(last) == len(now.buffers):
        return
    values = zip(replay.are_seeds, now.buffers, first, last, strict=True)
    lost = [
        i
        for i, (is_seed, v, a, b) in enumerate(values)
        if not is_seed and same(v, a) and not same(v, b)
    ]
    if lost:
        apart = distance([now.buffers[i] for i in lost], [last[i] for i in lost])
        names = tuple(replay.names_of_others[i] for i in lost)
        where = Where(
            (updates[-1].number,), parameters=names, line=updates[-1].pieces[-1].called.line
        )
        yield Finding(Change(Fault.STATISTICS_NEVER_WRITTEN_BACK), apart, where=where)


def _averaged(now: list[np.ndarray], updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on a moving average of the weights that moves with every microbatch."""
    *states, last = (
        *(_as_vector(u.applied.params) for u in updates),
        _as_vector(updates[-1].applied.params_after),
    )
    _, by_update = _decayed(_as_vector(now), states, last)
    pieces = [
        state for u, state in zip(updates, states, strict=True) for state in [state] * len(u.pieces)
    ]
    if by_update <= FINE.differs or not len(states) < len(pieces) < NUM_KEPT:
        return
    decay, by_piece = _decayed(_as_vector(now), pieces, last)
    if by_piece <= FINE.differs / 2:
        where = Where(tuple(u.number for u in updates), line=updates[-1].applied.line)
        change = Change(Fault.AVERAGE_BY_MICROBATCH, numbers=(decay,))
        yield Finding(change, by_update, by_piece, where)


def _as_vector(state: list[np.ndarray]) -> np.ndarray:
    """Return weights as one vector, of many weights those at some places."""
    whole = np.concatenate([np.ravel(leaf) for leaf in in_part(state)]).astype("float64")
    return whole if (chosen := places(len(whole))) is None else whole[chosen]


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
    return min(
        (_searched((wanted - origin) / scale, way) for way in ways), key=lambda each: each.apart
    )


def _searched(wanted: np.ndarray, states: np.ndarray) -> _Decayed:
    gram, along, size = states @ states.T, states @ wanted, float(wanted @ wanted)
    decays: np.ndarray = _DECAYS
    for _ in range(_FINER):
        shares = _parts(decays, len(states))
        squares = np.einsum("di,ij,dj->d", shares, gram, shares) - 2 * shares @ along + size
        best = int(np.argmin(squares))
        decay, low, high = (
            float(decays[i]) for i in (best, max(best - 1, 0), min(best + 1, len(decays) - 1))
        )
        decays = np.linspace(low, high, len(_DECAYS))
    return _Decayed(
        decay, float(np.linalg.norm(wanted - _parts(np.array([decay]), len(states))[0] @ states))
    )


def _parts(decays: np.ndarray, num: int) -> np.ndarray:
    """Return the share of each of `num` states in a moving average of them: (decays, states)."""
    shares: np.ndarray = (1 - decays[:, None]) * decays[:, None] ** np.arange(num)[::-1]
    shares[:, 0] = shares[:, 0] / (1 - decays)
    return shares
