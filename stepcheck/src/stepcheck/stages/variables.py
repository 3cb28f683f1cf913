"""The variables that steps reach or leave out, and the values and averages that a loop leaves in the model."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from stepcheck import tree
from stepcheck.port import Port
from stepcheck.report.causes import BY_NAME
from stepcheck.report.found import Finding, Likely, found, some
from stepcheck.solve.evidence import Evidence
from stepcheck.stages.printed import Losses
from stepcheck.stages.steps import as_vector, written
from stepcheck.trace.log import Applied, Called, Values
from stepcheck.trace.measure import FINE, all_same, distance, same
from stepcheck.trace.windows import Piece, Update, Windows

_AGAINST = 0.5  # a cosine: an average of other weights moves otherwise
_ZEROS = "The gradient that is handed over for a trainable variable is zero in every update: something makes it so."
_FLAT = (
    "The gradient of a trainable variable is zero in every update, as the loss and the model have it: it learns "
    "nothing (one of two factors that both begin with zeros? units that never fire?)."
)
_BY_OTHERS = "Something else may train them on purpose, as each part of a GAN has an optimizer of its own."
NUM_MOVES, FEW = 5, 4  # moves that are compared with their gradient; numbers that move against it by chance
NUM_ROWS = 32  # on this many rows the gradient is computed if no forward pass was seen


def _these(names: list[str]) -> str:
    return f"These are {', '.join(names)}."


def left_out(
    replay: Port,
    objective: Any,
    updates: list[Update],
    steps: list[Applied],
    before: list[np.ndarray],
    *,
    is_thawed: bool = False,
    has_others: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on trainable variables that no step moves; `is_thawed`: the loop itself has set them so."""
    whole = [step for step in steps if step.is_whole] or [u.applied for u in updates if u.applied.is_whole]
    names, num = replay.names, len(replay.names)
    if len(before) != num:  # the model was not built
        before = next((p.called.params for u in updates for p in u.pieces if p.called.is_whole), [])
    if not whole or len(before) != num or any(len(step.grads) != num for step in whole):
        return

    def so(told: str, chosen: list[int]) -> list[str]:
        return [f"{told} {_these([names[i] for i in chosen])}"] if chosen else []

    missing = [i for i in range(num) if not any(s.grads[i] is not None and np.any(s.grads[i]) for s in whole)]
    shares = _shares(replay, objective, updates, before)
    bare = [i for i in missing if all(step.grads[i] is None for step in whole)]
    if not steps:  # by hand: the gradient is the move
        bare = [i for i in missing if shares[i] > FINE.differs]
    # In half precision a small gradient is zero.
    zero = [i for i in missing if all(s.grads[i] is not None for s in whole) and i not in bare and not replay.is_half]
    if len(missing) == num:
        yield from map(Likely, so(_FLAT, zero))
        return
    moving = _moving(replay, updates, before, is_known=len(whole) == len(steps) or not steps)
    wrong = [i for i in missing if i not in moving and shares[i] > FINE.differs]
    handed = [i for i in wrong if i not in bare and not replay.is_half]
    yield from so(_ZEROS, handed)
    yield from so(_FLAT, [i for i in zero if i not in handed])
    wrong = [i for i in wrong if i in bare and (is_thawed or _is_meant(replay, steps, missing, i))]
    if wrong:
        numbers = [u.number for u in updates if u.applied.is_whole]
        size, detail = float(np.linalg.norm(shares[wrong])), _these([names[i] for i in wrong])
        yield found("variable left out", size, whole[0].line, numbers, detail)
        return
    still = [names[i] for i in bare if i not in moving]
    is_unheld = bool(replay.incomplete) and not {i for step in steps for i in step.built} & {*bare}
    if bare and 2 * len(still) >= num and not has_others:
        part = "Half" if 2 * len(still) == num else "Most"
        got = f"{len(still)} of {num} variables {'get no gradient' if steps else 'never move'}, {some(still)}"
        if is_unheld:
            got = (
                f"the optimizer does not hold {len(still)} of {num} variables, {some(still)}. {replay.incomplete[:-1]}"
            )
        yield Likely(f"{part} of the model is never trained: {got}. If that is meant, set `{replay.freezing}`.")
    else:
        unheld = f"The optimizer does not hold some of the parameters. {replay.incomplete}"
        told = so(unheld if is_unheld else BY_NAME["variable left out"].explanation, bare)
        yield from map(Likely, told) if replay.are_forgotten(bare) else told


def _is_meant(replay: Port, steps: list[Applied], missing: list[int], i: int) -> bool:
    """Whether a variable was meant to be trained, and not left out by choice.

    It was, if it is handed over with None for a gradient, or if a larger one of its layer is trained.
    """
    beside = [j for j in replay.beside(i) if j not in missing]
    sizes = replay.sizes
    return any(i in step.lost for step in steps) or any(sizes[j] > sizes[i] for j in beside)


def frozen(replay: Port, objective: Any, updates: list[Update], has_others: bool) -> Iterator[Finding]:
    """Yield the finding on variables that are set to be frozen, and move against their gradient all the same."""
    pieces = [piece for u in updates for piece in u.pieces if piece.called.is_whole and piece.is_known]
    names: list[str] = []
    shares: list[float] = []
    numbers: set[int] = set()
    most = 0
    for i in replay.frozen():
        moved = [(a, b) for a, b in pairwise(pieces) if not same(a.called.buffers[i], b.called.buffers[i])]
        cosines = (_cosine(replay, objective, i, pair) for pair in moved[:NUM_MOVES])
        if len(moved) > 1 and next(cosines) > _AGAINST and all(cosine > 0 for cosine in cosines):
            old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved[0])
            size = float(np.linalg.norm(new - old))
            names.append(replay.names_of_others[i])
            shares.append(size / max(float(np.linalg.norm(old)), size))
            numbers |= {u.number for u in updates for a, _ in moved if any(a is piece for piece in u.pieces)}
            most = max(most, new.size)
    if names and (has_others or most <= FEW):
        yield f"{BY_NAME['frozen variable trained'].explanation} {_BY_OTHERS} {_these(names)}"
    elif names:
        line = next(u.applied.line for u in updates if u.number in numbers)
        yield found("frozen variable trained", max(shares), line, sorted(numbers), _these(names))


def _cosine(replay: Port, objective: Any, i: int, moved: tuple[Piece, Piece]) -> float:
    """Return the cosine between a move of a frozen variable from one pass to the next and the fall of the loss."""
    old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved)
    grad = replay.of_frozen(moved[0], objective, i, training=True)
    size = float(np.linalg.norm(new - old)) * float(np.linalg.norm(grad))
    return float(np.vdot(old - new, grad)) / size if size else 0.0


def _shares(replay: Port, objective: Any, updates: list[Update], before: list[np.ndarray]) -> np.ndarray:
    """Return the length of each variable's gradient of a sum over rows as a share of the whole; NaN if not known."""
    piece = next((piece for u in updates if u.is_known for piece in u.pieces), None) or _first(replay, before)
    try:
        batch = replay.batch(piece)
        ones = np.ones_like(replay.terms(piece, objective, batch, training=False).weights)
        whole = replay.gradient(piece, objective, batch, ones, training=False, penalty=len(piece.rows))
    except Exception:  # a model that does not take the data as they are
        whole = np.zeros_like(replay.flat([*before]))
    sizes, size = [np.linalg.norm(part) for part in replay.parts(whole).values()], float(np.linalg.norm(whole))
    return np.array(sizes) / size if 0 < size < np.inf else np.full(len(sizes), np.nan)


def _first(replay: Port, before: list[np.ndarray]) -> Piece:
    inputs = [np.asarray(leaf)[:NUM_ROWS] for leaf in tree.leaves(replay.data[0])]
    now = replay.values()
    return Piece(Called(0, inputs, [], before, now.buffers if now else [], True, None), np.arange(len(inputs[0])))


def _moving(replay: Port, updates: list[Update], before: list[np.ndarray], *, is_known: bool) -> set[int]:
    """Return the variables that move, perhaps by something else.

    All may, if not all steps are known and no weight has moved in the end.
    """
    states = [piece.called.params for u in updates for piece in u.pieces if piece.called.is_whole]
    moved = {i for i, value in enumerate(before) if not all(same(value, state[i]) for state in states)}
    if len(moved) == len(before):  # no copy of a large model is made
        return moved
    now = replay.values()
    last = before if now is None else now.params
    if not is_known and all(same(a, b) for a, b in zip(before, last, strict=True)):
        return set(range(len(before)))
    return moved | {i for i, value in enumerate(before) if not same(value, last[i])}


def unconstrained(replay: Port, updates: list[Update]) -> Iterator[Likely]:
    """Yield a note on weights that no step brings back to the constraint of their variable."""
    states = [u.pieces[0].called.params for u in updates[1:] if u.pieces and u.pieces[0].called.is_whole]
    names = []
    for i, name in enumerate(replay.names):
        for value in (state[i] for state in states[-NUM_MOVES:]):
            if (once := replay.constrained(i, value)) is None:
                break
            twice = replay.constrained(i, once)
            if twice is not None and distance([once], [value]) > FINE.differs > distance([twice], [once]):
                names.append(name)
                break
    if names:
        told = f"No step applies the constraint of {some(names)}: the weights leave it. Keras' optimizers apply it "
        yield Likely(f"{told}after each step, as `v.assign(v.constraint(v))` does.")


_PENALTIES = {
    "squares": lambda weights: float(np.sum(np.square(weights, dtype="float64"))),
    "sizes": lambda weights: float(np.sum(np.abs(weights), dtype="float64")),
    "lengths": lambda weights: float(np.linalg.norm(weights)),
}
_MOVED = 1e-2  # relative: sums of the weights that move less are like a constant


def unmoved(evidence: list[Evidence]) -> Iterator[Likely]:
    """Yield a note if a penalty of the weights is in the number that gradients are taken of, and not in these."""
    own = [e for e in evidence if len(e.update.pieces) == 1 and e.without <= e.meant.replay.tolerance.fits]
    called, meant = [e.update.pieces[0].called for e in own], Losses(own, penalty=True).alone if own else []
    numbers = np.array([e.meant.replay.number_of(each) for e, each in zip(own, called, strict=True)])
    of_outputs = np.array([loss for cut in meant for loss in cut])
    # A penalty's gradient is at least as long as the penalty over the length of the weights.
    sizes = [e.norm * float(np.linalg.norm(as_vector(each.params))) for e, each in zip(own, called, strict=True)]
    if len(own) < FEW or not np.all(np.abs(numbers - of_outputs) > FINE.differs * np.maximum(np.abs(numbers), sizes)):
        return
    for (name, size), least in product(_PENALTIES.items(), (1, 2)):
        sums = np.array([sum(size(p) for p in each.params if p.ndim >= least) for each in called])
        factors = (numbers - of_outputs) / np.maximum(sums, 1e-30)
        if np.ptp(sums) > _MOVED * sums.max() and np.ptp(factors) <= FINE.differs * np.abs(factors).max():
            told = f"The number that `backward()` is called on is {numbers[0]:.4g} in update {own[0].update.number}, "
            told += f"and the loss of outputs and labels is {of_outputs[0]:.4g}: the rest, {factors[0]:.3g} times the "
            yield Likely(f"{told}sum of the {name} of the weights, has no gradient (`.data`, `detach()`, `.item()`?).")
            return


_NO_AVERAGE = (
    "The optimizer keeps an average of the weights (`use_ema`), and the model does not have it after the loop, as it "
    "has after `fit`. `optimizer.finalize_variable_values(model.trainable_variables)` puts it there; on JAX, once the "
    "optimizer's variables have their last values."
)
_DECAYS = 1 - np.geomspace(1e-4, 0.9, 400)
_FINER = 3  # times that the neighbourhood of the best decay is searched again
NUM_KEPT = 300  # updates and microbatches whose weights may be averaged


def ends(
    replay: Port, before: list[np.ndarray], now: Values, seen: Windows, *, averages: bool = False
) -> Iterator[Finding]:
    """Yield the findings on the values that the loop left in the model.

    Args:
        before: the weights when it began.
        averages: whether the optimizer keeps an average of the weights.
    """
    whole = [u for u in seen.updates if u.applied.is_whole and u.pieces and u.is_known]
    if not whole or not len(now.params) == len(before) == len(whole[0].pieces[0].called.params):
        return
    first, last = whole[0].applied.params, whole[-1].applied.params_after
    if any(a.shape != b.shape for a, b in zip(now.params, last, strict=True)):
        return
    is_last_known = len(whole) == len(seen.updates) and not seen.is_by_hand
    if all_same(now.params, first) and not all_same(first, last):
        if is_last_known:
            yield "The trained weights never come back to the model: after the loop it has those that it began with."
        return
    if is_last_known and averages == all_same(now.params, last):
        yield from [_NO_AVERAGE] if averages else _averaged(now.params, whole)
    yield from lost_statistics(replay, now, whole)


def lost_statistics(replay: Port, now: Values, updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on statistics that the loop moved, and that the model does not have after it."""
    first, last = (updates[i].pieces[i].called.buffers for i in (0, -1))
    if not len(first) == len(last) == len(now.buffers):
        return
    values = zip(replay.are_seeds, now.buffers, first, last, strict=True)
    lost = [i for i, (is_seed, v, a, b) in enumerate(values) if not is_seed and same(v, a) and not same(v, b)]
    if lost:
        without = distance([now.buffers[i] for i in lost], [last[i] for i in lost])
        detail = f"These are {', '.join(replay.names_of_others[i] for i in lost)}."
        line = updates[-1].pieces[-1].called.line
        yield found("statistics never written back", without, line, [updates[-1].number], detail)


def _averaged(now: list[np.ndarray], updates: list[Update]) -> Iterator[Finding]:
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
        shares = _parts(decays, len(states))
        squares = np.einsum("di,ij,dj->d", shares, gram, shares) - 2 * shares @ along + size
        best = int(np.argmin(squares))
        decay, low, high = (float(decays[i]) for i in (best, max(best - 1, 0), min(best + 1, len(decays) - 1)))
        decays = np.linspace(low, high, len(_DECAYS))
    return _Decayed(decay, float(np.linalg.norm(wanted - _parts(np.array([decay]), len(states))[0] @ states)))


def _parts(decays: np.ndarray, num: int) -> np.ndarray:
    """Return the share of each of `num` states in a moving average of them: (decays, states)."""
    shares: np.ndarray = (1 - decays[:, None]) * decays[:, None] ** np.arange(num)[::-1]
    shares[:, 0] = shares[:, 0] / (1 - decays)
    return shares
