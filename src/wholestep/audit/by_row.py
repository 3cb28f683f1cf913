"""Solutions by row: each row's factor in a gradient, its derivative by the outputs, and the row of its label."""

import numpy as np

from wholestep.audit.evidence import AtOutputs, Evidence, narrowed
from wholestep.audit.found import numbers_of
from wholestep.audit.port import OneLoss
from wholestep.audit.ratios import least
from wholestep.audit.windows import PAD

NUM_FREE = 64  # rows whose factors are solved for
NUM_SOLVED = 8_000  # numbers of a gradient from which they are solved
NUM_PAIRS = 2_000_000  # numbers of the outputs' derivatives for all labels
_NEAR = 1e-2


def solve(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (the factors of the rows that make the handed gradient, the right ones), if some do."""
    used = np.flatnonzero(np.concatenate([w.reshape(-1) for w in e.weights]))
    if not 0 < len(used) <= min(NUM_FREE, len(e.handed) // 2):
        return None
    rows = np.concatenate(e.rows)[used]
    some = np.random.default_rng(0).permutation(rows.shape[1])[:NUM_SOLVED]
    solved = least(list(rows[:, some].astype("float64")), (e.handed - e.penalty)[some])[0]
    if e.apart(solved.astype("float32") @ rows + e.penalty) > e.meant.replay.tolerance.fits:
        return None
    return solved, np.concatenate([factors.reshape(-1) for factors in e.factors])[used]


def derivative(e: Evidence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the derivatives by the outputs of the loop's loss and of the meant loss; None if another part counts.

    Then the model, the tape and the variables are right, and the fault is in the loss.
    """
    found = [e] if isinstance(e, AtOutputs) else narrowed([e])
    return None if found is None else (found[0].handed, found[0].reference)


def on_a_row(e: Evidence, solved: np.ndarray, should: np.ndarray) -> str:
    """Return in words one row for a comparison by hand: its label and output, and the derivatives of both losses."""
    pieces = e.update.pieces
    if any(len(piece.called.outputs) != 1 for piece in pieces) or not hasattr(e.meant.replay.data[1], "shape"):
        return ""
    starts = np.cumsum([0, *(piece.called.outputs[0].size for piece in pieces)])
    place = int(np.argmax(np.abs(solved - should)))
    which = int(np.searchsorted(starts, place, "right")) - 1
    piece, terms, out = pieces[which], e.terms[which], pieces[which].called.outputs[0]
    width = out.size // len(out)
    at = (place - int(starts[which])) // width
    part = slice(int(starts[which]) + at * width, int(starts[which]) + (at + 1) * width)
    label = e.meant.replay.batch(piece)[1][at]
    values, weights = terms.values[:, at].sum(), terms.weights[:, at].sum()
    loss = f"the loss that was meant is {values / weights:.4g}, " if weights else ""
    return (
        f"On row {piece.rows[at]} of the data, label {numbers_of(label)}, output {numbers_of(out[at])}: {loss}with "
        f"derivative {numbers_of(should[part])} by the output in this batch; the loop's has {numbers_of(solved[part])}."
    )


def labels_of_others(e: Evidence) -> list[np.ndarray] | None:
    """Return, by piece, rows whose labels make the gradient if each row may have any; None if none do."""
    replay, objective = e.meant.replay, e.meant.objective
    labels = replay.data[1]
    outputs = [piece.called.outputs for piece in e.update.pieces]
    if not isinstance(objective, OneLoss) or replay.data[2] is not None or not hasattr(labels, "shape"):
        return None
    labels = np.asarray(labels)
    _, first = np.unique(labels.reshape(len(labels), -1), axis=0, return_index=True)
    if any(len(leaves) != 1 or leaves[0].size * len(first) > NUM_PAIRS for leaves in outputs):
        return None
    if (solved := derivative(e)) is None:
        return None
    found, start = [], 0
    for piece, (leaf,), factors in zip(e.update.pieces, outputs, e.factors, strict=True):
        had = solved[0][start : start + leaf.size].reshape(len(leaf), 1, -1)
        start += leaf.size
        given = np.repeat(leaf, len(first), axis=0), np.concatenate([labels[first]] * len(leaf))
        could = replay.derivative(objective, *given).reshape(len(leaf), len(first), -1) * factors[0][:, None, None]
        apart = np.linalg.norm(had - could, axis=2)
        if np.any(apart.min(axis=1) > _NEAR * np.linalg.norm(had, axis=2).max()):
            return None
        found.append(np.where(piece.rows == PAD, 0, first[np.argmin(apart, axis=1)]))
    return None if _is_rule(e.update.rows, np.concatenate(found), labels) else found


def _is_rule(rows: np.ndarray, others: np.ndarray, labels: np.ndarray) -> bool:
    """Whether one class always has the label of one other: then classes are renamed, and no rows mixed."""
    told: dict[bytes, set[bytes]] = {}
    for row, other in zip(rows, others, strict=True):
        told.setdefault(labels[row].tobytes(), set()).add(labels[other].tobytes())
    return len(told) <= len(rows) // 2 and all(len(each) == 1 for each in told.values())
