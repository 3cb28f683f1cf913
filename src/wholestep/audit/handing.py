"""What of a gradient reaches the variables: those that no step moves, and those that should not move."""

from itertools import pairwise

import keras
import numpy as np

from wholestep import tree
from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import DIFFERS, Found, Likely, found
from wholestep.audit.keeping import same
from wholestep.audit.log import Applied, Called
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
MOST_NAMES = 8  # in a sentence
NUM_MOVES, FEW = 5, 4  # moves that are compared with their gradient; numbers that move against it by chance
NUM_ROWS = 32  # on so many the gradient of what is left out is computed, where no forward pass was seen


def left_out(
    replay: Replay,
    objective: Objective,
    updates: list[Update],
    steps: list[Applied],
    before: list[np.ndarray],
    *,
    is_thawed: bool = False,
    has_others: bool = False,
) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of trainable variables that no step of an optimizer moves.

    Args:
        steps: all that were told.
        before: the weights when the loop began.
        is_thawed: whether the loop itself has set them to be trained.
        has_others: whether other optimizers made steps too.
    """
    whole = [step for step in steps if step.is_whole] or [u.applied for u in updates if u.applied.is_whole]
    names = replay.names
    if len(before) != len(names):  # the model was not built
        before = next((p.called.params for u in updates for p in u.pieces if p.called.is_whole), [])
    if not whole or len(before) != len(names) or any(len(step.grads) != len(names) for step in whole):
        return [], []
    missing = [i for i in range(len(names)) if not any(s.grads[i] is not None and np.any(s.grads[i]) for s in whole)]
    flat = [names[i] for i in missing if all(s.grads[i] is not None for s in whole) and not replay.is_half]
    if len(missing) == len(names):
        return [], [Likely(f"{_FLAT} It is so with {', '.join(flat)}.")] if flat else []
    shares = _shares(replay, objective, updates, before)
    wrong = [i for i in missing if shares is not None and shares[i] > DIFFERS]
    is_known = len(whole) == len(steps) or not steps
    wrong = [i for i in wrong if not _moves(replay.model, updates, before, i, is_known=is_known)]
    bare = [i for i in missing if all(step.grads[i] is None for step in whole)]
    zeros = [names[i] for i in wrong if i not in bare and not replay.is_half]  # where what is small becomes zero
    notes = [f"{_ZEROS} It is so with {', '.join(zeros)}."] if zeros else []
    flat = [name for name in flat if name not in zeros]
    notes += [f"{_FLAT} It is so with {', '.join(flat)}."] if flat else []
    wrong = [i for i in wrong if i in bare and (is_thawed or _is_meant(replay.model, steps, missing, i))]
    if wrong and shares is not None:
        numbers = [u.number for u in updates if u.applied.is_whole]
        size = float(np.sqrt(sum(shares[i] ** 2 for i in wrong)))
        detail = f"It is so with {', '.join(names[i] for i in wrong)}."
        return [found(BY_NAME["variable left out"], size, 0.0, whole[0].line, numbers, detail)], notes
    told = f"{BY_NAME['variable left out'].explanation} It is so with {', '.join(names[i] for i in bare)}."
    still = [i for i in bare if not _moves(replay.model, updates, before, i, is_known=is_known)]
    if 2 * len(still) >= len(names) and not has_others:
        part = "Half" if 2 * len(still) == len(names) else "Most"
        got = (
            f"{len(still)} of {len(names)} variables get no gradient, {', '.join(names[i] for i in still[:MOST_NAMES])}"
        )
        told = Likely(f"{part} of the model is never trained: {got}. If that is meant, set `layer.trainable = False`.")
    return [], [*notes, told] if bare else notes


def _is_meant(model: keras.Model, steps: list[Applied], missing: list[int], i: int) -> bool:
    """Whether a variable was meant to be trained.

    So it is if it is handed over with None for a gradient, or if a larger one of its layer is trained. Else the loop
    may have chosen what it trains.
    """
    if any(i in step.lost for step in steps):
        return True
    variables = model.trainable_variables
    home = [
        v
        for layer in model._flatten_layers()
        for v in [layer._trainable_variables]
        if any(variables[i] is w for w in v)
    ]
    others = [j for j, v in enumerate(variables) if j not in missing and any(v is w for own in home for w in own)]
    return any(np.prod(variables[j].shape) > np.prod(variables[i].shape) for j in others)


def frozen(
    replay: Replay, objective: Objective, updates: list[Update], has_others: bool
) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of variables that are set to be frozen, and move against their gradient all the same.

    Args:
        has_others: whether other optimizers made steps too, which may train such variables on purpose.
    """
    model = replay.model
    own = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    pieces = [piece for u in updates for piece in u.pieces if piece.called.is_whole and piece.is_known]
    names: list[str] = []
    shares: list[float] = []
    numbers: set[int] = set()
    most = 0
    for i, variable in enumerate(model.non_trainable_variables):
        moved = [(a, b) for a, b in pairwise(pieces) if not same(a.called.buffers[i], b.called.buffers[i])]
        if id(variable) not in own or len(moved) < 2:
            continue
        if _cosine(replay, objective, i, moved[0]) > _AGAINST and all(
            _cosine(replay, objective, i, pair) > 0 for pair in moved[1:NUM_MOVES]
        ):
            old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved[0])
            size = float(np.linalg.norm(new - old))
            names.append(variable.path)
            shares.append(size / max(float(np.linalg.norm(old)), size))
            numbers |= {u.number for u in updates for a, _ in moved if any(a is piece for piece in u.pieces)}
            most = max(most, new.size)
    if not names:
        return [], []
    detail = f"It is so with {', '.join(names)}."
    if has_others or most <= FEW:
        return [], [f"{BY_NAME['frozen variable trained'].explanation} {_BY_OTHERS} {detail}"]
    line = next(u.applied.line for u in updates if u.number in numbers)
    return [found(BY_NAME["frozen variable trained"], max(shares), 0.0, line, sorted(numbers), detail)], []


def _cosine(replay: Replay, objective: Objective, i: int, moved: tuple[Piece, Piece]) -> float:
    """Return the cosine between a move of a frozen variable from one pass to the next and the fall of the loss."""
    old, new = (np.asarray(piece.called.buffers[i], "float64") for piece in moved)
    grad = replay.of_frozen(moved[0], objective, i, training=True)
    size = float(np.linalg.norm(new - old)) * float(np.linalg.norm(grad))
    return float(np.vdot(old - new, grad)) / size if size else 0.0


def _shares(
    replay: Replay, objective: Objective, updates: list[Update], before: list[np.ndarray]
) -> list[float] | None:
    """Return how long each variable's gradient is, as a share of the whole; None if it cannot be computed."""
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
    buffers = [np.array(keras.ops.convert_to_numpy(v)) for v in replay.model.non_trainable_variables]
    return Piece(Called(0, inputs, [], before, buffers, True, None), np.arange(len(inputs[0])))


def _gradient(replay: Replay, objective: Objective, piece: Piece) -> np.ndarray:
    """Return the gradient of the sum over rows, and of the model's own losses as often."""
    batch = replay.batch(piece)
    weights = replay.terms(piece, objective, batch, training=False).weights
    return replay.gradient(piece, objective, batch, np.ones_like(weights), training=False, penalty=len(piece.rows))


def _moves(model: keras.Model, updates: list[Update], before: list[np.ndarray], i: int, *, is_known: bool) -> bool:
    """Whether a variable moves by something else; as it may if steps are not known and no weight tells at the end."""
    now = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    is_told = is_known or any(not same(a, b) for a, b in zip(before, now, strict=True))
    later = [piece.called.params[i] for u in updates for piece in u.pieces if piece.called.is_whole]
    return not is_told or any(not same(before[i], value) for value in (now[i], *later))
