"""Inputs that are no rows of the data: in another order, labels among them, or times a number."""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import Found, found, numbers_of
from wholestep.audit.windows import PAD, Piece, Rows

NUM_LOOKED, MOST_LEAVES = 6, 5  # forward passes that are looked at, and inputs of a model whose order is
_MOSTLY, _SOME, _NEAR = 0.9, 0.1, 1e-5


def altered(rows: Rows, labels: list[np.ndarray], pieces: list[Piece]) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of what the model got in the place of the data's rows.

    Args:
        labels: the leaves of the data's labels.
        pieces: forward passes of which none is on rows of the data.
    """
    shapes = [leaf.shape[1:] for leaf in pieces[0].called.inputs] if pieces else []
    looked = [piece for piece in pieces if [leaf.shape[1:] for leaf in piece.called.inputs] == shapes][:NUM_LOOKED]
    if not looked or len(shapes) != len(rows.leaves):
        return [], []
    numbers, line = list(range(1, len(pieces) + 1)), looked[0].called.line
    for name, detail, leaves in _ways(rows.leaves, labels, looked[0]):
        if _share(Rows(leaves), looked) >= _MOSTLY:
            return [found(BY_NAME[name], 1.0, 0.0, line, numbers, detail)], []
    if (share := _share(rows, looked)) > _SOME:
        told = f"Of the rows that the model gets {share:.0%} are rows of `data`, and the others are none: "
        if _are_moved(rows, looked):
            return [], [f"{told}they are rows whose numbers stand elsewhere (flipped, rolled, turned?)."]
        return [], [f"{told}are they augmented, or is it trained on more than `data`, as on rows that are held out?"]
    if (line_of := _scaled(rows, looked)) is not None:
        scale, offset = line_of
        more = f", plus {offset:.5g}" if abs(offset) > _NEAR else ""
        return [], [f"The model's inputs are the rows of `data` times {scale:.5g}{more}. Is that meant?"]
    return [], []


def _ways(
    leaves: list[np.ndarray], labels: list[np.ndarray], piece: Piece
) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Yield (the cause, what is told of it, the data as the model would have got them)."""
    num = range(len(leaves))
    for order in permutations(num) if 1 < len(leaves) <= MOST_LEAVES else ():
        if list(order) != list(num) and all(leaves[i].shape == leaves[j].shape for i, j in enumerate(order)):
            told = ", ".join(
                f"input {i + 1} gets what is meant for input {j + 1}" for i, j in enumerate(order) if i != j
            )
            yield "inputs swapped", f"{told[0].upper()}{told[1:]}.", [leaves[j] for j in order]
    for i in num:
        for label in labels:
            if label.shape[1:] == piece.called.inputs[i].shape[1:] and label.ndim > 1:
                detail = f"Input {i + 1} of {len(leaves)} gets the labels of its rows."
                yield "labels among the inputs", detail, [label if j == i else leaf for j, leaf in enumerate(leaves)]


def _share(rows: Rows, pieces: list[Piece]) -> float:
    """Return how many of the rows that the model got are rows of these data."""
    if any(leaf.shape[1:] != given.shape[1:] for leaf, given in zip(rows.leaves, pieces[0].called.inputs, strict=True)):
        return 0.0
    found = np.concatenate([rows.find(piece.called.inputs) for piece in pieces])
    return float(np.mean(found != PAD)) if len(found) else 0.0


def beside(rows: Rows, pieces: list[Piece]) -> str:
    """Return in words a row that the model got, and the row of the data that is nearest to it."""
    given = next((piece.called.inputs for piece in pieces if piece.called.inputs), [])
    if len(given) != len(rows.leaves) or any(
        a.shape[1:] != b.shape[1:] for a, b in zip(given, rows.leaves, strict=True)
    ):
        return ""
    data, got = (leaf.reshape(len(leaf), -1).astype("float64") for leaf in (rows.leaves[0], given[0]))
    near = int(np.argmin(np.linalg.norm(data - got[0], axis=1)))
    return f": the model got {numbers_of(got[0])}, and row {near} of `data`, the nearest, is {numbers_of(data[near])}"


def _are_moved(rows: Rows, pieces: list[Piece]) -> bool:
    """Whether the rows that are none of the data have the numbers of one, in another order."""

    def sorted_rows(leaf: np.ndarray) -> list[bytes]:
        return [row.tobytes() for row in np.sort(leaf.reshape(len(leaf), -1), axis=1)]

    known = set(sorted_rows(rows.leaves[0].astype(pieces[0].called.inputs[0].dtype)))
    others = [key for p in pieces for key in sorted_rows(p.called.inputs[0][rows.find(p.called.inputs) == PAD])]
    return bool(others) and sum(key in known for key in others) >= _MOSTLY * len(others)


def _scaled(rows: Rows, pieces: list[Piece]) -> tuple[float, float] | None:
    """Return (number, number) if what the model got are rows of the data times the first, plus the second."""
    (data, *more), given = rows.leaves, np.concatenate([piece.called.inputs[0] for piece in pieces])
    if more or data.shape[1:] != given.shape[1:] or data.dtype.kind not in "fiu" or given.dtype.kind != "f":
        return None
    one, two = (leaf.reshape(len(leaf), -1).astype("float64") for leaf in (data, given))
    if one.shape[1] < 3:
        return None
    likeness = _directions(two) @ _directions(one).T
    mates = one[np.argmax(np.abs(likeness), axis=1)]
    x, y = mates.ravel(), two.ravel()
    scale, offset = (float(number) for number in np.polyfit(x, y, 1))
    rest = float(np.linalg.norm(y - scale * x - offset))
    return (scale, offset) if rest <= _NEAR * float(np.linalg.norm(y)) else None


def _directions(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.mean(axis=1, keepdims=True)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
