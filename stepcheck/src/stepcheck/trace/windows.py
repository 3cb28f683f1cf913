"""From a log to updates: which forward passes made which step, on which rows of the
data.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepcheck import tree
from stepcheck.trace.cuts import Step, steps
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.measure import (
    SOLVED,
    all_same,
    are_finite,
    distance,
    in_part,
)
from stepcheck.trace.rows import PAD, Rows, keys
from stepcheck.tree import Tree


class Rule(NamedTuple):
    """An optimizer that was solved for.

    Attributes:
        is_adaptive: whether a factor of the gradient moves nothing.
        decay: of the weights at a rate of 1, and the least that shows.
        momenta: the momentum of SGD, or both betas of Adam.
    """

    rates: list[float]
    is_adaptive: bool = False
    decay: tuple[float, float] = (0.0, float("inf"))
    momenta: tuple[float, ...] = ()


def packed(leaves: list, like: Tree) -> Any:
    """Return leaves in the structure of a nest."""
    left = iter(leaves)
    return tree.map_leaves(lambda _: next(left), like)


@dataclass(frozen=True)
class Piece:
    """A forward pass on rows of the data: a batch, or a microbatch.

    Attributes:
        rows: `PAD` for inputs not in the data.
        fills: whether all its rows fill up the batch that it is a part of.
        copied: of padding, the rows that it repeats.
    """

    called: Called
    rows: np.ndarray
    fills: bool = False
    copied: np.ndarray | None = None

    @property
    def is_known(self) -> bool:
        """Whether its inputs are rows of the data; a batch may be padded with copies of
        one row.
        """
        are_others = self.rows == PAD
        if are_others.all():
            return self.fills
        if self.copied is not None:
            return True
        others = [leaf[are_others] for leaf in self.called.inputs]
        num_known = np.count_nonzero(~are_others)
        is_at_end = are_others[num_known:].all() or not any(map(np.any, others))
        return bool(is_at_end) and len({*keys(others)}) <= 1


@dataclass(frozen=True)
class Update:
    """An optimizer step and the forward passes whose gradients it was made of.

    `trials` are passes before them, at other weights, as of sharpness-aware
    minimisation: no step has their gradients.
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
        return np.concatenate(
            [np.array([], int), *(piece.rows for piece in self.pieces)]
        )


_Part = TypeVar("_Part", Piece, Update)


@dataclass(frozen=True)
class Windows:
    """The updates of a log.

    Attributes:
        foreign: the number of passes of updates on inputs that are not rows of the
            data.
        seen: rows of forward passes without a gradient (an evaluation).
        in_training: the numbers of forward passes in training mode, before steps that
            were kept: (without a gradient, all of them).
        place: of each piece, by its order: (number of the pass over the data, rows
            before it in the pass).
        is_by_hand: whether no optimizer step was seen; then an update is any move of
            the weights.
        is_of_loss: whether their gradients are derivatives of the loop's loss, as the
            optimizer is not known.
        rule: the optimizer of such updates, if they are steps of one on the meant
            gradients.
        settled: updates with rows of equal inputs that were identified by the gradient.
        stale: updates whose gradients were taken at the weights of an update before.
        idle: by the number of an update, its optimizer steps: of zeros while it was
            summed up, and the last step.
    """

    pieces: list[Piece]
    updates: list[Update]
    foreign: int
    seen: set[int]
    place: dict[int, tuple[int, int]]
    is_by_hand: bool = False
    rule: Rule | None = None
    is_of_loss: bool = False
    settled: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    idle: dict[int, list[Update]] = field(default_factory=dict)
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
    """Return the updates of a log.

    Args:
        schedule: the rate that is meant: steps by hand at a rate of 0 are updates too.
    """
    *made, last = steps(log)
    found = [_found(step, rows) for step in [*made, last]]
    used = [_with_gradient(pieces) for pieces in found]
    seen = {
        row
        for pieces, own in zip(found, used, strict=True)
        for row in _without(pieces, own)
    }
    rest = [piece for piece in used.pop() if piece.called.differentiated]
    in_training = [_in_training(*each) for each in zip(made, used, strict=True)]
    of_steps, updates = _of_steps(made, used)
    is_by_hand = not updates
    if is_by_hand:
        updates, rest = _by_hand(rest, schedule)
    updates, stale = _one_by_one(updates)
    pieces = [
        *of_steps,
        *rest,
        *(p for u in updates if is_by_hand for p in u.pieces),
    ]
    pieces.sort(key=lambda piece: piece.called.order)
    return Windows(
        pieces=pieces,
        updates=updates,
        foreign=sum(not piece.is_known for piece in of_steps),
        seen=seen,
        place=placed(pieces),
        is_by_hand=is_by_hand and bool(updates),
        stale=stale,
        in_training=(
            sum(num for num, _ in in_training),
            sum(num for _, num in in_training),
        ),
    )


def _found(step: Step, rows: Rows) -> list[Piece]:
    called = [
        each
        for each in step.called
        if each.inputs and each.inputs[0].shape[:1] != (0,)
    ]
    return [Piece(each, rows.find(each.inputs)) for each in called]


def _with_gradient(window: list[Piece]) -> list[Piece]:
    """Return the passes whose gradients are in an update: the known, or else the
    possible ones.

    Beside passes with the derivative of a loss, those without one are cut off from it,
    as by `stop_gradient`.
    """
    known = [piece for piece in window if piece.called.differentiated]
    chosen = known or [
        piece for piece in window if piece.called.differentiated is None
    ]
    if not any(piece.called.derivatives for piece in chosen):
        return chosen
    return [
        each
        for each in chosen
        if each.called.derivatives or not each.called.is_whole
    ]


def _without(pieces: list[Piece], used: list[Piece]) -> set[int]:
    """Return the rows of the passes that are in no update."""
    orders = {piece.called.order for piece in used}
    others = [
        piece.rows for piece in pieces if piece.called.order not in orders
    ]
    return {int(row) for rows in others for row in rows} - {PAD}


def _in_training(step: Step, used: list[Piece]) -> tuple[int, int]:
    """Return how many passes in training mode have no gradient while others have one,
    and all.
    """
    orders = {each.order for each in step.called if each.is_training}
    own = {piece.called.order for piece in used}
    is_known = bool(own) and all(each.is_whole for each in step.called)
    return (len(orders - own), len(orders)) if is_known else (0, 0)


def _of_steps(
    made: list[Step], used: list[list[Piece]]
) -> tuple[list[Piece], list[Update]]:
    """Return (the passes whose gradients are in steps, the updates)."""
    ways = [
        _of_trials(pieces, step.applied)
        for pieces, step in zip(used, made, strict=True)
    ]
    # also where numbers are not kept
    usual = next((way for way in ways if any(way)), [])
    every, updates = list[Piece](), list[Update]()
    for step, pieces, own in zip(made, used, ways, strict=True):
        way = own or (
            usual if len(usual) == len(pieces) else [False] * len(pieces)
        )
        trials = [
            piece
            for piece, is_trial in zip(pieces, way, strict=True)
            if is_trial
        ]
        window = _filled(
            [p for p, is_trial in zip(pieces, way, strict=True) if not is_trial]
        )
        every += window
        if step.applied is not None:
            updates.append(
                Update(len(updates) + 1, window, step.applied, trials)
            )
    return every, updates


def _of_trials(window: list[Piece], applied: Applied | None) -> list[bool]:
    """Return of each pass whether it is at the weights at which the step begins, unlike
    the last.

    On TensorFlow weights that are moved and moved back are the first ones up to
    rounding.
    """
    if (
        applied is None
        or not applied.is_whole
        or not all(p.called.is_whole for p in window)
    ):
        return []
    states = [in_part(piece.called.params) for piece in window]
    begin = in_part(applied.params)
    first_of = {
        p.called.replica: s
        for p, s in zip(window[::-1], states[::-1], strict=True)
    }
    are_alike = all(
        distance(state, states[0]) <= SOLVED for state in first_of.values()
    )
    apart = [distance(state, begin) for state in states]
    are_trials = [each <= SOLVED * max(apart) for each in apart]
    is_so = are_alike and are_trials and are_trials[0] and not are_trials[-1]
    return are_trials if is_so else [False] * len(window) if are_alike else []


def _filled(window: list[Piece]) -> list[Piece]:
    """Return the passes of an update, and mark passes that only fill up its batch.

    They do if the batch has known rows, and one unknown row, which is zeros or comes
    last, several times.
    """
    batch = sorted(window, key=lambda piece: piece.called.replica)
    are_others = [bool(np.all(piece.rows == PAD)) for piece in batch]
    shapes = {
        tuple(leaf.shape[1:] for leaf in piece.called.inputs) for piece in batch
    }
    if all(are_others) or not any(are_others) or len(shapes) > 1:
        return window
    every = zip(*(piece.called.inputs for piece in batch), strict=True)
    inputs = [np.concatenate(leaves) for leaves in every]
    rows = np.concatenate([piece.rows for piece in batch])
    is_other = rows == PAD
    is_single = is_other.sum() == 1 and any(
        np.any(leaf[is_other]) for leaf in inputs
    )
    if (
        is_single
        or not Piece(replace(batch[0].called, inputs=inputs), rows).is_known
    ):
        return window
    return [
        replace(piece, fills=bool(np.all(piece.rows == PAD)))
        for piece in window
    ]


def _one_by_one(updates: list[Update]) -> tuple[list[Update], set[int]]:
    """Return (updates, the numbers of the stale ones).

    If n forward passes come before n steps with different gradients, each step has one
    pass.
    """
    found, stale, i = list(updates), set(), 0
    while i < len(updates):
        pieces = updates[i].pieces
        group = updates[i : i + len(pieces)]
        is_first_alone = not any(update.pieces for update in group[1:])
        if (
            1 < len(pieces) == len(group)
            and is_first_alone
            and _are_others(group)
        ):
            pairs = zip(group, pieces, strict=True)
            found[i : i + len(pieces)] = [
                replace(u, pieces=[piece]) for u, piece in pairs
            ]
            stale |= {update.number for update in group[1:]}
        i += max(len(pieces), 1)
    return found, stale


def _are_others(group: list[Update]) -> bool:
    """Whether these steps are one optimizer's, of the same parameters, each of another
    gradient.
    """
    made = [update.applied for update in group]
    parts = {
        (step.optimizer, *(g is None for g in step.grads)) for step in made
    }
    handed = [[g for g in step.grads if g is not None] for step in made]
    gradients = {
        b"".join(np.asarray(g).tobytes() for g in own) for own in handed
    }
    are_known = all(step.is_whole for step in made) and all(
        any(map(np.any, g)) for g in handed
    )
    return are_known and len(parts) == 1 and len(gradients) == len(made)


def placed(pieces: list[Piece]) -> dict[int, tuple[int, int]]:
    """Return of each piece, by its order, (number of the pass over the data, rows
    before it).
    """
    place: dict[int, tuple[int, int]] = {}
    for number, cut in enumerate(passes(pieces)):
        before = accumulate((len(piece.rows) for piece in cut), initial=0)
        place |= {
            p.called.order: (number, num)
            for p, num in zip(cut, before, strict=False)
        }
    return place


def _by_hand(
    pieces: list[Piece], schedule: Any
) -> tuple[list[Update], list[Piece]]:
    """Return (updates, the passes after the last one) of a loop without an optimizer."""
    updates, rest = by_hand(pieces)
    if any(
        len(update.pieces) > 1 for update in updates[1:]
    ):  # microbatches may wait for a move
        return updates, rest
    return by_hand(pieces, schedule)


def by_hand(
    pieces: list[Piece], schedule: Any = None
) -> tuple[list[Update], list[Piece]]:
    """Return (updates, the passes after the last one), where the weights of the passes
    move.

    A gradient is the change of the weights, still multiplied by the unknown rate.
    """
    updates: list[Update] = []
    window: list[Piece] = []
    for i, piece in enumerate(pieces):
        if not (piece.called.is_whole and are_finite(piece.called.params)):
            return updates, [*window, *pieces[i:]]
        is_still = schedule is not None and schedule(len(updates)) == 0
        if window and (
            is_still
            or not all_same(window[-1].called.params, piece.called.params)
        ):
            updates.append(_move(window, piece.called.params, len(updates) + 1))
            window = []
        window.append(piece)
    return updates, window


def _move(window: list[Piece], after: list[np.ndarray], number: int) -> Update:
    first, last = window[0].called, window[-1].called
    pairs = zip(first.params, after, strict=True)
    applied = Applied(
        order=last.order,
        optimizer=0,
        grads=[old.astype("float64") - new for old, new in pairs],
        params=first.params,
        slots=[],
        params_after=after,
        slots_after=[],
        learning_rate=float("nan"),
        iterations=number - 1,
        line=last.line,
    )
    return Update(number, window, applied)


def passes(pieces: list[_Part]) -> list[list[_Part]]:
    """Cut forward passes, or updates, into passes over the data.

    A new one begins where a row comes again.
    """
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
