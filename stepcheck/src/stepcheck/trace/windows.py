"""From a log to updates: which forward passes made which optimizer step, on which rows of the data."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepcheck import tree
from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.measure import SOLVED, all_same, are_finite, distance, in_part
from stepcheck.tree import Tree

PAD = -1


class Rule(NamedTuple):
    """An optimizer that was solved for or stated."""

    rates: list[float]
    is_stated: bool = False
    is_adaptive: bool = False  # a factor of the gradient moves nothing
    decay: tuple[float, float] = (
        0.0,
        float("inf"),
    )  # of the weights at a rate of 1, and the least that shows
    momenta: tuple[float, ...] = ()  # the momentum of SGD, or both betas of Adam


def keys(leaves: list[np.ndarray]) -> list[bytes]:
    """Return the bytes of each row of some arrays of as many rows."""
    return [
        b"".join(_bytes(leaf[row : row + 1]) for leaf in leaves) for row in range(len(leaves[0]))
    ]


def _bytes(part: np.ndarray) -> bytes:
    """Return the bytes of an array, or of its text."""
    if part.dtype.kind not in "OSU":
        return part.tobytes()
    return b"\0".join(
        each if isinstance(each, bytes) else str(each).encode() for each in part.ravel().tolist()
    )


class Rows:
    """Finds rows of the data by the bytes of the inputs, in their dtype; a batch may be narrower than the data."""

    def __init__(self, inputs: Tree):
        self.leaves = [np.asarray(leaf) for leaf in tree.leaves(inputs)]
        self.num = len(self.leaves[0])
        self._tables: dict[tuple, dict[bytes, list[int]]] = {}
        self._equal: dict[
            int, list[int]
        ] = {}  # by row its group, of groups of several that were found
        self._uses, self._passed = (
            Counter[int](),
            set[int](),
        )  # of equal rows, and other rows, in this pass

    def anew(self) -> "Rows":
        """Return the same rows, none of which was used."""
        found = copy(self)  # whose tables are shared
        found._equal, found._uses, found._passed = {}, Counter[int](), set[int]()
        return found

    def find(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the number of each row, `PAD` for inputs not in the data; of equal rows a pass uses each once."""
        if len(inputs) != len(self.leaves) or not inputs[0].ndim:
            return np.array([], int)
        found = np.full(len(inputs[0]), PAD)
        if any(
            leaf.shape[:1] != inputs[0].shape[:1] for leaf in inputs
        ):  # as one time step beside the rows
            return found
        table = self._table(tuple((leaf.dtype, leaf.shape[1:2]) for leaf in inputs))
        for row, key in enumerate(keys(inputs)):
            if len(equal := table.get(key, [])) == 1:
                found[row] = equal[0]
                if equal[0] in self._passed:  # a new pass
                    self._passed.clear()
                    self._uses.clear()
                self._passed.add(equal[0])
            elif equal:
                found[row] = min(equal, key=self._uses.__getitem__)
                self._uses[int(found[row])] += 1
                if int(found[row]) not in self._equal:
                    self._equal |= {each: equal for each in equal if each not in self._equal}
        return found

    def twins(self, rows: np.ndarray) -> float:
        """Return the share of these rows that have the inputs of other rows of the data."""
        return sum(row in self._equal for row in rows.tolist()) / max(1, len(rows))

    def equal(self, row: int) -> list[int]:
        """Return the rows of the data with the same inputs, this row among them."""
        return self._equal.get(row, [row])

    def agree(self, rows: np.ndarray, others: Tree) -> bool:
        """Whether all rows with equal inputs have the same labels and weights too."""
        equal = [self._equal[row] for row in set(rows.tolist()) & set(self._equal)]
        leaves = [np.asarray(leaf) for leaf in tree.leaves(others)]
        return all(
            len({leaf[row].tobytes() for row in group}) == 1 for group in equal for leaf in leaves
        )

    def _table(self, kinds: tuple) -> dict[bytes, list[int]]:
        if kinds not in self._tables:
            pairs = [*zip(self.leaves, kinds, strict=True)]
            narrow = [
                (leaf[:, : w[0]], leaf[:, w[0] :])
                if w and leaf.ndim > 1
                else (leaf, leaf[:0].reshape(0, 1))
                for leaf, (_, w) in pairs
            ]
            cast = [leaf.astype(dtype) for (leaf, _), (dtype, _) in zip(narrow, kinds, strict=True)]
            whole, cut = (dict[bytes, list[int]]() for _ in range(2))
            # A batch of inputs without their last token may cut the last token of its longest rows.
            are_cut = np.any(
                [[*map(np.any, rest[:, 1:])] for _, rest in narrow if rest[:, 1:].size], axis=0
            )
            are_cut = np.broadcast_to(are_cut, self.num)
            for row, key in enumerate(keys(cast)):
                (cut if are_cut[row] else whole).setdefault(key, []).append(row)
            self._tables[kinds] = cut | whole
        return self._tables[kinds]


def packed(leaves: list, like: Tree) -> Any:
    """Return leaves in the structure of a nest."""
    left = iter(leaves)
    return tree.map_leaves(lambda _: next(left), like)


@dataclass(frozen=True)
class Piece:
    """A forward pass on rows of the data: a batch, or a microbatch. `rows` is `PAD` for inputs not in the data.

    `fills`: all its rows fill up the batch that it is a part of. `copied`: of padding, the rows that it repeats.
    """

    called: Called
    rows: np.ndarray
    fills: bool = False
    copied: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        """Whether its inputs are rows of the data; a batch may be padded with copies of one other row."""
        if np.all(are_others := self.rows == PAD):
            return self.fills
        if self.copied is not None:
            return True
        others = [leaf[are_others] for leaf in self.called.inputs]
        is_at_end = np.all(are_others[np.count_nonzero(~are_others) :]) or not any(
            map(np.any, others)
        )
        return bool(is_at_end) and len({*keys(others)}) <= 1


@dataclass(frozen=True)
class Update:
    """An optimizer step and the forward passes whose gradients it was made of.

    `trials` are passes before them, at other weights, as of sharpness-aware minimisation: no step has their gradients.
    """

    number: int
    pieces: list[Piece]
    applied: Applied
    trials: list[Piece] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether its gradient can be computed again."""
        are_known = all(p.is_known and p.called.is_whole for p in self.pieces)
        return bool(self.pieces) and self.applied.is_whole and are_known

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows of its pieces."""
        return tuple(len(piece.rows) for piece in self.pieces)

    def follows(self, other: "Update") -> bool:
        """Whether it is the update after another one."""
        return self.number == other.number + 1

    @property
    def rows(self) -> np.ndarray:
        """The rows of all its pieces."""
        return (
            np.concatenate([piece.rows for piece in self.pieces])
            if self.pieces
            else np.array([], int)
        )


_Part = TypeVar("_Part", Piece, Update)


@dataclass(frozen=True)
class Windows:
    """The updates of a log.

    Attributes:
        rest: forward passes after the last optimizer step.
        foreign: the number of such passes on inputs that are not rows of the data.
        seen: rows of forward passes without a gradient (an evaluation).
        num_skipped, num_skipped_at_end: optimizer steps whose gradients were not finite, in all and at the end.
        num_waiting: gradients at the end that make no update, as the optimizer accumulates them.
        in_training: forward passes in training mode, before steps that were kept: (without a gradient, all of them).
        place: of each piece, by its order: (number of the pass over the data, rows before it in the pass).
        is_by_hand: whether no optimizer step was seen; then an update is any move of the weights.
        is_of_loss: whether their gradients are derivatives of the loop's loss, as the optimizer is not known.
        rule: the optimizer of such updates, if they are steps of one on the gradients that were meant.
        settled: updates with rows of equal inputs that were identified by the gradient.
        stale: updates whose gradients were taken at the weights of an update before.
        idle: by the number of an update, its optimizer steps: of zeros while it was summed up, and the last step.
    """

    pieces: list[Piece]
    updates: list[Update]
    rest: list[Piece]
    foreign: int
    seen: set[int]
    num_skipped: int
    place: dict[int, tuple[int, int]]
    is_by_hand: bool = False
    is_of_loss: bool = False
    rule: Rule | None = None
    settled: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    idle: dict[int, list[Update]] = field(default_factory=dict)
    num_skipped_at_end: int = 0
    num_waiting: int = 0
    in_training: tuple[int, int] = (0, 0)

    @property
    def is_rated(self) -> bool:
        """Whether the rates of updates by hand are known."""
        return self.rule is not None

    @property
    def numbers(self) -> list[int]:
        """The numbers of the updates."""
        return [update.number for update in self.updates]


def windows(log: Log, rows: Rows, schedule: Any = None) -> Windows:
    """Return the updates of a log; by the schedule that is meant, steps by hand at a rate of 0 are updates too."""
    pieces: list[Piece] = []
    updates: list[Update] = []
    seen: set[int] = set()
    foreign = num_skipped = in_turn = num_waiting = 0
    *made, last = steps(log)
    passes_of = [_with_gradient(_found(step.called, rows), seen) for step in made]
    in_training = [
        _in_training(step.called, own) for step, own in zip(made, passes_of, strict=True)
    ]
    ways = [_of_trials(window, step.applied) for window, step in zip(passes_of, made, strict=True)]
    usual = next(
        (way for way in ways if any(way)), []
    )  # also of updates whose numbers are not kept
    for step, window, way in zip(made, passes_of, ways, strict=True):
        way = way or (usual if len(usual) == len(window) else [False] * len(window))
        trials = [piece for piece, is_trial in zip(window, way, strict=True) if is_trial]
        window = _filled(
            [piece for piece, is_trial in zip(window, way, strict=True) if not is_trial]
        )
        is_skipped = step.applied is None and step.is_complete  # the gradients were not finite
        num_skipped, in_turn = num_skipped + is_skipped, in_turn + 1 if is_skipped else 0
        num_waiting += not step.is_complete
        if step.applied is not None:
            updates.append(Update(len(updates) + 1, window, step.applied, trials))
        pieces += window
        foreign += sum(not piece.is_known for piece in window)
    rest = [
        piece
        for piece in _with_gradient(_found(last.called, rows), seen)
        if piece.called.differentiated
    ]
    is_by_hand = not updates
    if is_by_hand:
        updates, left = by_hand(rest)
        are_alone = all(
            len(update.pieces) == 1 for update in updates[1:]
        )  # else microbatches may wait for a move
        updates, rest = by_hand(rest, schedule) if are_alone else (updates, left)
    pieces = [*pieces, *rest, *(p for u in updates if is_by_hand for p in u.pieces)]
    pieces.sort(key=lambda piece: piece.called.order)
    updates, stale = _one_by_one(updates)
    found = Windows(
        pieces,
        updates,
        rest,
        foreign,
        seen,
        num_skipped,
        placed(pieces),
        is_by_hand and bool(updates),
    )
    num_unused, num_all = (sum(nums) for nums in zip((0, 0), *in_training, strict=True))
    found = replace(found, stale=stale, in_training=(num_unused, num_all))
    return replace(found, num_skipped_at_end=in_turn, num_waiting=num_waiting)


def _of_trials(window: list[Piece], applied: Applied | None) -> list[bool]:
    """Return of each pass whether it is at the weights at which the step begins, while others are not, as the last one.

    On TensorFlow weights that are moved and moved back are the first ones up to rounding.
    """
    if (
        applied is None
        or not applied.is_whole
        or not all(piece.called.is_whole for piece in window)
    ):
        return []
    states, begin = [in_part(piece.called.params) for piece in window], in_part(applied.params)
    firsts = {
        piece.called.replica: state for piece, state in zip(window[::-1], states[::-1], strict=True)
    }
    if any(
        distance(state, states[0]) > SOLVED for state in firsts.values()
    ):  # replicas that are not kept the same
        return []
    apart = [distance(state, begin) for state in states]
    are_trials = [each <= SOLVED * max(apart) for each in apart]
    return (
        are_trials if are_trials and are_trials[0] and not are_trials[-1] else [False] * len(window)
    )


def _one_by_one(updates: list[Update]) -> tuple[list[Update], set[int]]:
    """Return (updates, the numbers of the stale ones).

    If n forward passes come before n steps with different gradients, each step belongs to one pass.
    """
    found, stale, i = list(updates), set(), 0
    while i < len(updates):
        group = updates[i : i + (num := len(updates[i].pieces))]
        if (
            num > 1
            and len(group) == num
            and not any(u.pieces for u in group[1:])
            and _are_others(group)
        ):
            found[i : i + num] = [
                replace(u, pieces=[p]) for u, p in zip(group, updates[i].pieces, strict=True)
            ]
            stale |= {u.number for u in group[1:]}
        i += max(num, 1)
    return found, stale


def _are_others(group: list[Update]) -> bool:
    """Whether all these steps are one optimizer's, of the same parameters, and no two of the same gradient."""
    steps = [update.applied for update in group]
    parts = {tuple(g is None for g in step.grads) for step in steps}
    keys = {
        b"".join(np.asarray(g).tobytes() for g in step.grads if g is not None) for step in steps
    }
    has_one = all(
        step.is_whole and any(np.any(g) for g in step.grads if g is not None) for step in steps
    )
    return (
        has_one
        and len({step.optimizer for step in steps}) == len(parts) == 1
        and len(keys) == len(steps)
    )


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
    return [
        Piece(e, rows.find(e.inputs)) for e in called if e.inputs and e.inputs[0].shape[:1] != (0,)
    ]


def _filled(window: list[Piece]) -> list[Piece]:
    """Return the passes of an update, and mark passes that only fill up its batch.

    They do if the batch has known rows, and one unknown row, which is zeros or comes last, several times.
    """
    batch = sorted(window, key=lambda piece: piece.called.replica)
    are_others = [bool(np.all(piece.rows == PAD)) for piece in batch]
    if (
        all(are_others)
        or not any(are_others)
        or len({tuple(x.shape[1:] for x in p.called.inputs) for p in batch}) > 1
    ):
        return window
    inputs = [
        np.concatenate(leaves)
        for leaves in zip(*(piece.called.inputs for piece in batch), strict=True)
    ]
    rows = np.concatenate([piece.rows for piece in batch])
    is_single = np.count_nonzero(rows == PAD) == 1 and any(
        np.any(leaf[rows == PAD]) for leaf in inputs
    )
    if is_single or not Piece(replace(batch[0].called, inputs=inputs), rows).is_known:
        return window
    return [replace(piece, fills=bool(np.all(piece.rows == PAD))) for piece in window]


def _with_gradient(window: list[Piece], seen: set[int]) -> list[Piece]:
    """Return the passes whose gradients are in an update: the known ones, or else the possible ones.

    Beside passes with the derivative of a loss, those without one are cut off from it, as by `stop_gradient`.
    """
    of = {
        wanted: [piece for piece in window if piece.called.differentiated is wanted]
        for wanted in (True, None)
    }
    chosen = of[True] or of[None]
    if any(piece.called.derivatives for piece in chosen):
        chosen = [
            piece for piece in chosen if piece.called.derivatives or not piece.called.is_whole
        ]
    for piece in window:
        if not any(piece is other for other in chosen):
            seen.update(piece.rows[piece.rows != PAD].tolist())
    return chosen


def _in_training(called: list[Called], used: list[Piece]) -> tuple[int, int]:
    """Return how many passes before a step, in training mode, have no gradient while others have one, and all."""
    orders = {each.order for each in called if each.is_training}
    own = {piece.called.order for piece in used}
    is_known = bool(own) and all(each.is_whole for each in called)
    return (len(orders - own), len(orders)) if is_known else (0, 0)


def by_hand(pieces: list[Piece], schedule: Any = None) -> tuple[list[Update], list[Piece]]:
    """Return (updates, the passes after the last one) where the weights of the passes move by no optimizer of Keras.

    A gradient is the change of the weights, still multiplied by the unknown rate.
    """
    updates: list[Update] = []
    window: list[Piece] = []
    for i, piece in enumerate(pieces):
        if not (piece.called.is_whole and are_finite(piece.called.params)):
            return updates, [*window, *pieces[i:]]
        is_still = schedule is not None and schedule(len(updates)) == 0
        if window and (is_still or not all_same(window[-1].called.params, piece.called.params)):
            first, last = window[0].called, window[-1].called
            after, moved = piece.called.params, list[np.ndarray | None]()
            moved += [a.astype("float64") - b for a, b in zip(first.params, after, strict=True)]
            applied = Applied(
                last.order,
                0,
                moved,
                first.params,
                [],
                after,
                [],
                float("nan"),
                len(updates),
                last.line,
            )
            updates.append(Update(len(updates) + 1, window, applied))
            window = []
        window.append(piece)
    return updates, window


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
