"""From a log to updates: which forward passes made which optimizer step, on which rows of the data."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from wholestep import tree
from wholestep.audit.keeping import all_same
from wholestep.audit.lanes import steps
from wholestep.audit.log import Applied, Called, Log
from wholestep.tree import Tree

PAD = -1


class Rows:
    """Finds rows of the data by the bytes of the model's inputs, whatever their dtype has become.

    A batch may be narrower than the data, as one that is padded to its own longest row: zeros are left out then.
    """

    def __init__(self, inputs: Tree):
        self.leaves = [np.asarray(leaf) for leaf in tree.leaves(inputs)]
        self.num = len(self.leaves[0])
        self._tables: dict[tuple, dict[bytes, list[int]]] = {}
        self._uses = np.zeros(self.num, int)

    def find(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the number of each row, `PAD` for what is no row of the data; of equal rows the least used one."""
        if len(inputs) != len(self.leaves) or not inputs[0].ndim:
            return np.array([], int)
        found = []
        table = self._table(tuple((leaf.dtype, leaf.shape[1:2]) for leaf in inputs))
        for row in range(len(inputs[0])):
            equal = table.get(b"".join(leaf[row].tobytes() for leaf in inputs), [])
            found.append(min(equal, key=self._uses.__getitem__) if equal else PAD)
            if equal:
                self._uses[found[-1]] += 1
        return np.array(found, int)

    def twins(self, rows: np.ndarray) -> bool:
        """Whether one of these rows has the inputs of another row of the data."""
        own = set(rows[rows != PAD].tolist())
        return any(len(equal) > 1 and own & set(equal) for table in self._tables.values() for equal in table.values())

    def equal(self, row: int) -> list[int]:
        """Return the rows of the data with the inputs of this one, itself among them."""
        return next((g for table in self._tables.values() for g in table.values() if row in g), [row])

    def agree(self, rows: np.ndarray, others: Tree) -> bool:
        """Whether all rows with the inputs of one of these have the same labels and weights too."""
        own = set(rows[rows != PAD].tolist())
        equal = [group for table in self._tables.values() for group in table.values() if len(group) > 1]
        groups = [group for group in equal if own & set(group)]
        return all(
            np.asarray(leaf)[row].tobytes() == np.asarray(leaf)[group[0]].tobytes()
            for group in groups
            for row in group
            for leaf in tree.leaves(others)
        )

    def _table(self, kinds: tuple) -> dict[bytes, list[int]]:
        if kinds not in self._tables:
            pairs = [*zip(self.leaves, kinds, strict=True)]
            narrow = [(leaf[:, : w[0]], leaf[:, w[0] :]) if w else (leaf, leaf[:0]) for leaf, (_, w) in pairs]
            cast = [leaf.astype(dtype) for (leaf, _), (dtype, _) in zip(narrow, kinds, strict=True)]
            table: dict[bytes, list[int]] = {}
            for row in range(self.num):
                if not any(np.any(rest[row : row + 1]) for _, rest in narrow):
                    table.setdefault(b"".join(leaf[row].tobytes() for leaf in cast), []).append(row)
            self._tables[kinds] = table
        return self._tables[kinds]


@dataclass(frozen=True)
class Piece:
    """A forward pass on rows of the data: a batch, or a microbatch. `rows` are `PAD` where it is no row."""

    called: Called
    rows: np.ndarray

    @property
    def is_known(self) -> bool:
        """Whether it is rows of the data; a batch may be filled up, with one row again and again."""
        others = {
            b"".join(leaf[row].tobytes() for leaf in self.called.inputs) for row in np.flatnonzero(self.rows == PAD)
        }
        return bool(np.any(self.rows != PAD)) and len(others) <= 1


@dataclass(frozen=True)
class Update:
    """An optimizer step and the forward passes whose gradients it was made of."""

    number: int
    pieces: list[Piece]
    applied: Applied

    @property
    def is_known(self) -> bool:
        """Whether all that it is made of can be computed again."""
        return (
            bool(self.pieces) and self.applied.is_whole and all(p.is_known and p.called.is_whole for p in self.pieces)
        )

    @property
    def rows(self) -> np.ndarray:
        """The rows of all its pieces."""
        return np.concatenate([piece.rows for piece in self.pieces]) if self.pieces else np.array([], int)


_Part = TypeVar("_Part", Piece, Update)


@dataclass(frozen=True)
class Windows:
    """What a log says.

    Attributes:
        pieces: every forward pass of which a gradient may have been taken, in order.
        updates: the optimizer steps.
        rest: forward passes after the last optimizer step.
        foreign: how many such passes were on something else than rows of the data.
        seen: rows that other forward passes (an evaluation) have looked at.
        num_skipped: optimizer steps that were skipped, as gradients were not finite.
        place: of each piece, by its order: (number of the pass over the data, rows before it in the pass).
        is_by_hand: whether no optimizer step was seen, and the updates are what moved the weights.
        is_rated: whether it is known by which rates the gradients of such updates were multiplied.
        settled: updates of whose rows it was found out which of several with equal inputs they are.
        stale: updates whose gradients were taken before the steps of others, with as many forward passes at once.
        idle: by the number of an update, its optimizer step after those of zeros that were made while it was summed up.
    """

    pieces: list[Piece]
    updates: list[Update]
    rest: list[Piece]
    foreign: int
    seen: set[int]
    num_skipped: int
    place: dict[int, tuple[int, int]]
    is_by_hand: bool = False
    is_rated: bool = False
    settled: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    idle: dict[int, list[Update]] = field(default_factory=dict)


def windows(log: Log, rows: Rows) -> Windows:
    """Return the updates of a log."""
    pieces: list[Piece] = []
    updates: list[Update] = []
    seen: set[int] = set()
    foreign = num_skipped = 0
    *made, last = steps(log)
    for step in made:
        window = _with_gradient(_found(step.called, rows), seen)
        num_skipped += step.is_skipped
        if step.applied is not None:
            updates.append(Update(len(updates) + 1, window, step.applied))
        pieces += window
        foreign += sum(not piece.is_known for piece in window)
    rest = [piece for piece in _with_gradient(_found(last.called, rows), seen) if piece.called.differentiated]
    is_by_hand = not updates
    if is_by_hand:
        updates, rest = by_hand(rest)
    pieces = sorted([*pieces, *rest, *(p for u in updates if is_by_hand for p in u.pieces)], key=_order)
    updates, stale = _one_by_one(updates)
    place, is_own = placed(pieces), is_by_hand and bool(updates)
    return Windows(pieces, updates, rest, foreign, seen, num_skipped, place, is_own, stale=stale)


def _one_by_one(updates: list[Update]) -> tuple[list[Update], set[int]]:
    """Return (updates, the numbers of those that are stale).

    As many steps as forward passes before them have a gradient each, if no two are the same: then the first step has
    not all of these passes, and the others are not without one.
    """
    found, stale, i = list(updates), set(), 0
    while i < len(updates):
        num = len(updates[i].pieces)
        group = updates[i : i + num]
        if num > 1 and len(group) == num and not any(u.pieces for u in group[1:]) and _are_others(group):
            found[i : i + num] = [replace(u, pieces=[p]) for u, p in zip(group, updates[i].pieces, strict=True)]
            stale |= {u.number for u in group[1:]}
        i += max(num, 1)
    return found, stale


def _are_others(group: list[Update]) -> bool:
    """Whether all these steps are of the same parameters, and no two of the same gradient."""
    steps = [update.applied for update in group]
    parts = {tuple(g is None for g in step.grads) for step in steps}
    keys = {b"".join(np.asarray(g).tobytes() for g in step.grads if g is not None) for step in steps}
    has_one = all(step.is_whole and any(np.any(g) for g in step.grads if g is not None) for step in steps)
    return has_one and len(parts) == 1 and len(keys) == len(steps)


def _order(piece: Piece) -> int:
    return piece.called.order


def placed(pieces: list[Piece]) -> dict[int, tuple[int, int]]:
    """Return of each piece, by its order, (number of the pass over the data, rows before it in the pass)."""
    place: dict[int, tuple[int, int]] = {}
    for number, cut in enumerate(passes(pieces)):
        before = 0
        for piece in cut:
            place[piece.called.order] = number, before
            before += len(piece.rows)
    return place


def _found(called: list[Called], rows: Rows) -> list[Piece]:
    """Return the forward passes on rows; a replica may have none."""
    found = [Piece(event, rows.find(event.inputs)) for event in called]
    return [piece for piece in found if piece.called.inputs and piece.called.inputs[0].shape[:1] != (0,)]


def _with_gradient(window: list[Piece], seen: set[int]) -> list[Piece]:
    """Return the passes whose gradients are in an update: those that are known to be, or else those that may be."""
    for wanted in (True, None):
        chosen = [piece for piece in window if piece.called.differentiated is wanted]
        if chosen:
            break
    else:
        chosen = []
    for piece in window:
        if not any(piece is other for other in chosen):
            seen.update(piece.rows[piece.rows != PAD].tolist())
    return chosen


def by_hand(pieces: list[Piece]) -> tuple[list[Update], list[Piece]]:
    """Return (updates, the passes after the last one) where the weights of the passes move by no optimizer of Keras.

    Gradients are what was taken off the weights, to be divided by a rate that nobody told.
    """
    updates: list[Update] = []
    window: list[Piece] = []
    for i, piece in enumerate(pieces):
        if not piece.called.is_whole:
            return updates, [*window, *pieces[i:]]
        if window and not all_same(window[-1].called.params, piece.called.params):
            first, last = window[0].called, window[-1].called
            moved: list[np.ndarray | None] = [
                a.astype("float64") - b for a, b in zip(first.params, piece.called.params, strict=True)
            ]
            after = piece.called.params
            applied = Applied(last.order, 0, moved, first.params, [], after, [], float("nan"), len(updates), last.line)
            updates.append(Update(len(updates) + 1, window, applied))
            window = []
        window.append(piece)
    return updates, window


def doubled(updates: list[Update], num_rows: int) -> dict[int, np.ndarray]:
    """Return, by their numbers, the last updates of passes, if all passes end so, and which of their rows came before.

    Such a pass has all rows of the data once its last update is there, which is filled up with some of them again.
    """
    found: dict[int, np.ndarray] = {}
    used = np.zeros(num_rows, bool)
    for update in updates:
        again = (update.rows != PAD) & used[update.rows]
        used[update.rows[update.rows != PAD]] = True
        is_whole = bool(used.all())
        if bool(again.any()) != is_whole:
            return {}
        if is_whole:
            found[update.number] = again
            used[:] = False
    return found


def passes(pieces: list[_Part]) -> list[list[_Part]]:
    """Cut forward passes, or updates, into passes over the data: a new one begins where a row comes again."""
    cut: list[list[_Part]] = []
    used: set[int] = set()
    for piece in pieces:
        rows = set(piece.rows[piece.rows != PAD].tolist())
        if not cut or rows & used:
            cut.append([])
            used = set()
        cut[-1].append(piece)
        used |= rows
    return cut
