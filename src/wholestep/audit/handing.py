"""The variables that a gradient reaches: some are moved by no step, and some should not move."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from wholestep import tree
from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import Finding, Likely, found, some
from wholestep.audit.log import Applied, Called
from wholestep.audit.measure import FINE, same
from wholestep.audit.replay import Replay
from wholestep.audit.windows import Piece, Update
from wholestep.model import Objective

_AGAINST = 0.5  # a cosine: an average of other weights moves otherwise
_ZEROS = "The gradient that is handed over for a trainable variable is zero in every update: something makes it so."
_FLAT = (
    "The gradient of a trainable variable is zero in every update, as the loss and the model have it: it learns "
    "nothing (one of two factors that both begin with zeros? units that never fire?)."
)
_BY_OTHERS = "Something else may train them on purpose, as each part of a GAN has an optimizer of its own."
NUM_MOVES, FEW = 5, 4  # moves that are compared with their gradient; numbers that move against it by chance
NUM_ROWS = 32  # on this many rows the gradient is computed if no forward pass was seen


def _so(told: str, names: list[str]) -> list[str]:
    return [f"{told} These are {', '.join(names)}.".strip()] if names else []


def left_out(
    replay: Replay,
    objective: Objective,
    updates: list[Update],
    steps: list[Applied],
    before: list[np.ndarray],
    *,
    is_thawed: bool = False,
    has_others: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on trainable variables that no optimizer step moves.

    Args:
        steps: all recorded steps.
        before: the weights when the loop began.
        is_thawed: whether the loop itself has set them to be trained.
        has_others: whether other optimizers made steps too.
    """
    whole = [step for step in steps if step.is_whole] or [u.applied for u in updates if u.applied.is_whole]
    names = replay.names
    if len(before) != len(names):  # the model was not built
        before = next((p.called.params for u in updates for p in u.pieces if p.called.is_whole), [])
    if not whole or len(before) != len(names) or any(len(step.grads) != len(names) for step in whole):
        return
    missing = [i for i in range(len(names)) if not any(s.grads[i] is not None and np.any(s.grads[i]) for s in whole)]
    # In half precision a small gradient is zero.
    zero = [i for i in missing if all(s.grads[i] is not None for s in whole) and not replay.is_half]
    if len(missing) == len(names):
        yield from map(Likely, _so(_FLAT, [names[i] for i in zero]))
        return
    shares = _shares(replay, objective, updates, before)
    still = [
        i for i in missing if not _moves(replay, updates, before, i, is_known=len(whole) == len(steps) or not steps)
    ]
    wrong = [i for i in still if shares is not None and shares[i] > FINE.differs]
    bare = [i for i in missing if all(step.grads[i] is None for step in whole)]
    handed = [i for i in wrong if i not in bare and not replay.is_half]
    yield from _so(_ZEROS, [names[i] for i in handed])
    yield from _so(_FLAT, [names[i] for i in zero if i not in handed])
    wrong = [i for i in wrong if i in bare and (is_thawed or _is_meant(replay, steps, missing, i))]
    if wrong and shares is not None:
        size = float(np.sqrt(sum(shares[i] ** 2 for i in wrong)))
        (detail,) = _so("", [names[i] for i in wrong])
        numbers = [u.number for u in updates if u.applied.is_whole]
        yield found("variable left out", size, whole[0].line, numbers, detail)
        return
    still = [i for i in still if i in bare]
    if bare and 2 * len(still) >= len(names) and not has_others:
        part = "Half" if 2 * len(still) == len(names) else "Most"
        got = f"{len(still)} of {len(names)} variables get no gradient, {some([names[i] for i in still])}"
        yield Likely(f"{part} of the model is never trained: {got}. If that is meant, set `layer.trainable = False`.")
    else:
        yield from _so(BY_NAME["variable left out"].explanation, [names[i] for i in bare])


def _is_meant(replay: Replay, steps: list[Applied], missing: list[int], i: int) -> bool:
    """Whether a variable was meant to be trained, and not left out by choice.

    It was, if it is handed over with None for a gradient, or if a larger one of its layer is trained.
    """
    beside = [j for j in replay.beside(i) if j not in missing]
    sizes = replay.sizes
    return any(i in step.lost for step in steps) or any(sizes[j] > sizes[i] for j in beside)


def frozen(replay: Replay, objective: Objective, updates: list[Update], has_others: bool) -> Iterator[Finding]:
    """Yield the finding on variables that are set to be frozen, and move against their gradient all the same.

    Args:
        has_others: whether other optimizers made steps too, which may train such variables on purpose.
    """
    pieces = [piece for u in updates for piece in u.pieces if piece.called.is_whole and piece.is_known]
    names: list[str] = []
    shares: list[float] = []
    numbers: set[int] = set()
    most = 0
    for i in replay.frozen():
        moved = [(a, b) for a, b in pairwise(pieces) if not same(a.called.buffers[i], b.called.buffers[i])]
        if len(moved) < 2 or _cosine(replay, objective, i, moved[0]) <= _AGAINST:
            continue
        if all(_cosine(replay, objective, i, pair) > 0 for pair in moved[1:NUM_MOVES]):
            old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved[0])
            size = float(np.linalg.norm(new - old))
            names.append(replay.names_of_others[i])
            shares.append(size / max(float(np.linalg.norm(old)), size))
            numbers |= {u.number for u in updates for a, _ in moved if any(a is piece for piece in u.pieces)}
            most = max(most, new.size)
    if names and (has_others or most <= FEW):
        yield from _so(f"{BY_NAME['frozen variable trained'].explanation} {_BY_OTHERS}", names)
    elif names:
        line = next(u.applied.line for u in updates if u.number in numbers)
        (detail,) = _so("", names)
        yield found("frozen variable trained", max(shares), line, sorted(numbers), detail)


def _cosine(replay: Replay, objective: Objective, i: int, moved: tuple[Piece, Piece]) -> float:
    """Return the cosine between a move of a frozen variable from one pass to the next and the fall of the loss."""
    old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved)
    grad = replay.of_frozen(moved[0], objective, i, training=True)
    size = float(np.linalg.norm(new - old)) * float(np.linalg.norm(grad))
    return float(np.vdot(old - new, grad)) / size if size else 0.0


def _shares(
    replay: Replay, objective: Objective, updates: list[Update], before: list[np.ndarray]
) -> list[float] | None:
    """Return the length of each variable's gradient as a share of the whole; None if it cannot be computed."""
    pieces = [piece for u in updates if u.is_known for piece in u.pieces] or [_first(replay, before)]
    try:
        grads = replay.parts(_gradient(replay, objective, pieces[0]))
    except Exception:  # a model that does not take the data as they are
        return None
    sizes = [float(np.linalg.norm(grad)) for grad in grads.values()]
    whole = float(np.linalg.norm(sizes))
    return [size / whole for size in sizes] if 0 < whole < np.inf else None


def _first(replay: Replay, before: list[np.ndarray]) -> Piece:
    """Return a forward pass on the first rows of the data, as none was seen."""
    inputs = [np.asarray(leaf)[:NUM_ROWS] for leaf in tree.leaves(replay.data[0])]
    now = replay.values()
    return Piece(Called(0, inputs, [], before, now.buffers if now else [], True, None), np.arange(len(inputs[0])))


def _gradient(replay: Replay, objective: Objective, piece: Piece) -> np.ndarray:
    """Return the gradient of the sum over rows, and of the model's own losses as often."""
    batch = replay.batch(piece)
    weights = replay.terms(piece, objective, batch, training=False).weights
    return replay.gradient(piece, objective, batch, np.ones_like(weights), training=False, penalty=len(piece.rows))


def _moves(replay: Replay, updates: list[Update], before: list[np.ndarray], i: int, *, is_known: bool) -> bool:
    """Whether a variable moves by something else.

    It may, if not all steps are known and no weight has moved in the end.
    """
    now = replay.values()
    values = before if now is None else now.params
    is_shown = is_known or any(not same(a, b) for a, b in zip(before, values, strict=True))
    later = [piece.called.params[i] for u in updates for piece in u.pieces if piece.called.is_whole]
    return not is_shown or any(not same(before[i], value) for value in (values[i], *later))
