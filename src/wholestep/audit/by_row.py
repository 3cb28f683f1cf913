"""What each row adds to a gradient: its factor, its derivative by the outputs, and whose label or weight it has."""

from collections.abc import Iterator

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.candidates import Hypothesis
from wholestep.audit.causes import BY_NAME
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import least_squares
from wholestep.audit.meaning import LossObjective
from wholestep.audit.windows import PAD, Piece
from wholestep.tree import Tree

NUM_FREE = 64  # rows whose factors are solved for, or outputs by which a loss is derived
NUM_SOLVED = 8_000  # numbers of a gradient from which they are solved
NUM_SPARE = 8  # so many more numbers of the gradient than that: no chance fits them
NUM_PAIRS = 2_000_000  # numbers of the outputs' derivatives for all labels
_NEAR = 1e-2


def solve(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the factors of the rows that make the gradient that was handed over, the right ones), if some do."""
    used = np.flatnonzero(np.concatenate([w.reshape(-1) for w in e.weights]))
    if not 0 < len(used) <= min(NUM_FREE, len(e.handed) // 2):
        return None
    rows = np.concatenate(e.rows())[used]
    some = np.random.default_rng(0).permutation(rows.shape[1])[:NUM_SOLVED]
    solved = least_squares(rows[:, some].T.astype("float64"), (e.handed - e.penalty)[some], 1e-6)
    if e.apart(solved.astype("float32") @ rows + e.penalty) > e.meant.replay.tolerance.fits:
        return None
    should = np.concatenate([f.reshape(-1) for f in weightings.factors(e.window, weightings.right(e.window))])[used]
    return solved, should


def derivative(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the derivative by the outputs that the loop's loss has, that of the loss meant), if there is one.

    The gradient of any loss of the outputs is a sum of the outputs' own gradients: if it is one here, the model, the
    tape and the variables are right, whatever the loss.
    """
    replay, training = e.meant.replay, [e.meant.modes.of(piece) for piece in e.update.pieces]
    num = sum(leaf.size for piece in e.update.pieces for leaf in piece.called.outputs)
    if not 0 < num <= min(NUM_FREE, len(e.handed) - NUM_SPARE):
        return None
    pairs = zip(e.update.pieces, training, strict=True)
    basis = np.concatenate([replay.of_outputs(piece, training=mode)[:, e.mask] for piece, mode in pairs])
    solved, should = (least_squares(basis.T, g - e.penalty, 1e-6) for g in (e.handed, e.reference))
    return (solved, should) if e.apart(solved @ basis + e.penalty) <= e.meant.replay.tolerance.fits else None


def of_others(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """Each row has the label of another row, or its weight, of whichever one."""
    first = chosen[0]
    objective, data = first.meant.objective, first.meant.replay.data
    if not isinstance(objective, LossObjective) or not all(hasattr(part, "shape") for part in data[1:2]):
        return
    if data[2] is None:
        yield Hypothesis((BY_NAME["labels of other rows"],), _with_labels, is_wide=True)
    elif hasattr(data[2], "shape") and np.size(data[2]) == len(data[2]):
        yield Hypothesis((BY_NAME["weights of other rows"],), _with_weights, is_wide=True)


def _with_weights(e: Evidence) -> list[np.ndarray]:
    if (found := _weights(e)) is None:
        return []

    def batch(piece: Piece) -> Tree:
        x, y, _ = e.meant.replay.batch(piece)
        return x, y, found[next(i for i, each in enumerate(e.update.pieces) if each is piece)]

    return [e.data(weightings.right(e.window), batch) + e.penalty]


def _weights(e: Evidence) -> list[np.ndarray] | None:
    """Return, by piece, weights of the data that make the gradient if each row may have any; None if none do."""
    known = np.unique(np.asarray(e.meant.replay.data[2]).reshape(-1).astype("float64"))
    solved = solve(e)
    if solved is None or any(len(w) != 1 or np.any(w == 0) for w in e.weights) or not known.any():
        return None
    own = np.concatenate([np.asarray(e.meant.replay.data[2]).reshape(-1)[p.rows] for p in e.update.pieces])
    counted = own * solved[0] / solved[1]
    nearest = known[np.argmin(np.abs(counted[:, None] - known), axis=1)]
    if np.any(np.abs(nearest - counted) > _NEAR * np.abs(known).max()):
        return None
    return np.split(nearest.astype("float32"), np.cumsum([len(p.rows) for p in e.update.pieces])[:-1])


def _with_labels(e: Evidence) -> list[np.ndarray]:
    found = _labels(e)
    if found is None or _is_rule(e.update.rows, np.concatenate(found), np.asarray(e.meant.replay.data[1])):
        return []

    def batch(piece: Piece) -> Tree:
        labels = found[next(i for i, each in enumerate(e.update.pieces) if each is piece)]
        return e.meant.replay.batch(piece, labels=labels)

    return [e.data(weightings.right(e.window), batch) + e.penalty]


def _labels(e: Evidence) -> list[np.ndarray] | None:
    """Return, by piece, rows whose labels make the gradient if each row may have any; None if none do."""
    solved = derivative(e)
    labels = np.asarray(e.meant.replay.data[1])
    _, first = np.unique(labels.reshape(len(labels), -1), axis=0, return_index=True)
    outputs = [piece.called.outputs for piece in e.update.pieces]
    if solved is None or any(len(leaves) != 1 or leaves[0].size * len(first) > NUM_PAIRS for leaves in outputs):
        return None
    found, start = [], 0
    (factors, *more) = weightings.factors(e.window, weightings.right(e.window))
    for piece, (leaf,), factor in zip(e.update.pieces, outputs, (factors, *more), strict=True):
        had = solved[0][start : start + leaf.size].reshape(len(leaf), 1, -1)
        start += leaf.size
        could = e.meant.replay.of_labels(piece, e.meant.objective, first) * factor[0][:, None, None]
        apart = np.linalg.norm(had - could, axis=2)
        if np.any(apart.min(axis=1) > _NEAR * np.linalg.norm(had, axis=2).max()):
            return None
        found.append(np.where(piece.rows == PAD, 0, first[np.argmin(apart, axis=1)]))
    return found


def _is_rule(rows: np.ndarray, others: np.ndarray, labels: np.ndarray) -> bool:
    """Whether one class always has the label of one other: then classes are renamed, and no rows mixed."""
    told: dict[bytes, set[bytes]] = {}
    for row, other in zip(rows, others, strict=True):
        told.setdefault(labels[row].tobytes(), set()).add(labels[other].tobytes())
    return len(told) <= len(rows) // 2 and all(len(each) == 1 for each in told.values())
