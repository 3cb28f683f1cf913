"""Which rows' labels make the derivatives of a loss, where each row may have those of
others.
"""

import numpy as np

from stepcheck.solve.outputs import AtOutput
from stepcheck.trace.windows import PAD

_MOST = 2_000_000  # numbers of the outputs' derivatives for all labels
_NEAR, _FEW_FIT = 1e-2, 0.1


def labels_of(e: AtOutput) -> list[np.ndarray] | None:
    """Return, by piece, rows whose labels make the derivatives; None if none do.

    More than a tenth of all labels must not do for most rows: a sign has those of half
    the rows.
    """
    labels = e.meant.replay.data[1]
    is_of_row = (
        e.meant.replay.by_pass is None and e.meant.replay.data[2] is None
    )
    if not hasattr(labels, "shape") or not is_of_row:
        return None
    flat = np.asarray(labels).reshape(len(labels), -1)
    _, first = np.unique(flat, axis=0, return_index=True)
    if any(part.size * len(first) > _MOST for part in e.by_piece(e.handed)):
        return None
    found = []
    for i in range(len(e.update.pieces)):
        apart = _distances(e, i, first)
        fits = apart <= _NEAR
        is_of_few = np.median(fits.sum(axis=1)) <= max(1, _FEW_FIT * len(first))
        if not np.all(fits.any(axis=1)) or not is_of_few:
            return None
        found.append(first[np.argmin(apart, axis=1)])
    return found


def _distances(e: AtOutput, i: int, rows: np.ndarray) -> np.ndarray:
    """Return how far the derivatives of a piece are from those with the labels of some
    rows.

    By row of the piece and of `rows`, relative to the longest one.
    """
    piece, replay = e.update.pieces[i], e.meant.replay
    leaf, num = piece.called.outputs[0], len(rows)
    labels = replay.as_wide(
        np.asarray(replay.data[1])[np.tile(rows, len(leaf))], piece
    )
    made = replay.derivative(
        e.meant.objective, np.repeat(leaf, num, axis=0), labels
    )
    could = made.reshape(len(leaf), num, -1) * e.factors[i][0][:, None, None]
    had = e.by_piece(e.handed)[i].reshape(len(leaf), 1, -1)
    apart = np.linalg.norm(had - could, axis=2)
    apart[piece.rows == PAD] = 0
    return apart / (np.linalg.norm(had, axis=2).max() or 1.0)
