"""The stage of the rows: whether each pass over the data takes them as the user states
it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from itertools import pairwise, permutations
from math import lgamma, log

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Fault, Stage
from stepcheck.trace.windows import PAD, Piece, Rows, Windows
from stepcheck.values import Change, Finding, Reason, Unjudged, Where

_BY_CHANCE = log(1e6)  # of so many random orders one may be that of the pass before
_NUM_LOOKED, _MOST_LEAVES = (
    6,
    5,
)  # forward passes, and inputs of a model whose order is permuted
_ALMOST_ALL = 0.9  # of the rows


class Use(StrEnum):
    """How a pass over the data uses the rows, as a user states it.

    `ONCE`: each row once, and an update ends where the pass ends. `SHUFFLED`: in a new
    order in each pass, too.
    """

    ONCE = auto()
    SHUFFLED = auto()


def stated_use(rows: str | None) -> Use | None:
    """Return how the rows are used, as `stepcheck.watch` gets it.

    Raises:
        SpecificationError: it is no such word.

    >>> stated_use("once"), stated_use(None)
    (<Use.ONCE: 'once'>, None)
    """
    if rows is None or rows in {*Use}:
        return None if rows is None else Use(rows)
    must = "rows must be 'once' (in each pass) or 'shuffled' (in a new order, too)."
    raise SpecificationError(message(must, rows, "rows='shuffled', or leave it out."))


@dataclass(frozen=True)
class Batch:
    """The rows of an update, of equal rows always the first; update 0: of forward
    passes that no update is made of.
    """

    update: int
    rows: list[int]


@dataclass
class Pass:
    """A pass over the data, until a row comes again: its rows, and the part of each
    batch that is in it.

    Attributes:
        again: the update whose row ends it; 0 if the loop does.
        is_inside: whether it ends inside of an update.
    """

    rows: list[int] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    again: int = 0
    is_inside: bool = False

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """The rows of its batches, each in the order of the data."""
        return [tuple(sorted(part)) for part in self.parts]

    def repeats(self, other: "Pass") -> bool:
        """Whether all its rows come in the order of another pass."""
        return self.rows == other.rows[: len(self.rows)]


def batches(seen: Windows, rows: Rows) -> list[Batch]:
    """Return the rows of each update, and of passes without an update; those of a batch
    that is passed twice once.
    """
    of = {piece.called.order: u.number for u in seen.updates for piece in u.pieces}
    parts: dict[int, dict[tuple[int, bytes], Piece]] = {}
    for piece in seen.pieces:
        number = of.get(piece.called.order, -piece.called.order)
        parts.setdefault(number, {})[piece.called.replica, piece.rows.tobytes()] = piece
    found = []
    for number, pieces in parts.items():
        own = np.concatenate([piece.rows for piece in pieces.values()]).tolist()
        found.append(
            Batch(max(number, 0), [rows.equal(row)[0] for row in own if row != PAD])
        )
    return found


def passes(batches: list[Batch], rows: Rows) -> list[Pass]:
    """Cut batches into passes over the data: a new one begins where a row comes again."""
    found: list[Pass] = []
    used = Counter[int]()
    for batch in batches:
        part: list[int] | None = None
        for row in batch.rows:
            if not found or used[row] >= len(rows.equal(row)):
                if found:
                    found[-1].again, found[-1].is_inside = (
                        batch.update,
                        part is not None,
                    )
                found.append(Pass())
                used.clear()
                part = None
            if part is None:
                part = []
                found[-1].parts.append(part)
            used[row] += 1
            part.append(row)
            found[-1].rows.append(row)
    return found


def order(use: Use, seen: Windows, rows: Rows) -> Iterator[Finding | Unjudged]:
    """Yield the finding on passes that do not use each row once, or that have an order
    of before.
    """
    if seen.foreign:
        yield Unjudged(Reason.OTHER_INPUTS, Stage.ROWS)
        return
    own = batches(seen, rows)
    cut = passes(own, rows)
    short = [each for each in cut[:-1] if len(each.rows) < rows.num]
    whole = [each for each in cut if len(each.rows) == rows.num]
    if short:
        yield _not_once(short, own, rows)
    elif not whole or (use is Use.SHUFFLED and len(whole) < 2):
        yield Unjudged(Reason.FEW_PASSES, Stage.ROWS)
    elif use is Use.SHUFFLED:
        yield from _in_an_order_of_before(whole, seen)


def _not_once(short: list[Pass], own: list[Batch], rows: Rows) -> Finding:
    used = {each for batch in own for row in batch.rows for each in rows.equal(row)}
    unused = sorted({*range(rows.num)} - used)
    if unused:
        updates = tuple(batch.update for batch in own if batch.update)
        change = Change(Fault.ROWS_NEVER_USED, numbers=(len(unused), rows.num))
        where = Where(updates, rows=tuple(unused))
        return Finding(change, len(unused) / rows.num, where=where)
    updates = tuple(dict.fromkeys(each.again for each in short if each.again))
    least = min(len(each.rows) for each in short)
    change = Change(Fault.ROWS_TWICE_IN_A_PASS, numbers=(least, rows.num))
    return Finding(change, 1 - least / rows.num, where=Where(updates))


def _in_an_order_of_before(
    whole: list[Pass], seen: Windows
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on passes whose rows, or whose batches, come as in the pass
    before.
    """
    sizes = [len(part) for part in whole[0].parts]
    orders = lgamma(sum(sizes) + 1)  # the logarithm of their number
    sets = orders - sum(lgamma(size + 1) for size in sizes) - lgamma(len(sizes) + 1)
    same = [(a, b) for a, b in pairwise(whole) if b.repeats(a)]
    alike = [
        (a, b) for a, b in pairwise(whole) if sorted(a.batches) == sorted(b.batches)
    ]
    if not alike or len(sizes) == 1:  # updates of all rows have no order
        return
    if (orders if same else sets) < _BY_CHANCE:
        yield Unjudged(Reason.BY_CHANCE, Stage.ROWS)
        return
    fault = Fault.SAME_ORDER_EVERY_PASS if same else Fault.SAME_BATCHES_EVERY_PASS
    found = same or alike
    numbers = float(len(found)), float(len(whole) - 1)
    where = Where(tuple(seen.numbers), rows=tuple(found[0][0].rows))
    yield Finding(Change(fault, numbers=numbers), 1.0, where=where)


def across(seen: Windows, rows: Rows, known: set[int]) -> Iterator[Finding | Unjudged]:
    """Yield the finding on updates with rows of two passes, if their gradients have all
    these rows.

    Args:
        known: the updates whose gradients have the rows of all their forward passes.
    """
    own = batches(seen, rows)
    inside = [each for each in passes(own, rows) if each.is_inside and each.again]
    shared = {each.again: each for each in inside if len(each.rows) == rows.num}
    unknown = [number for number in shared if number not in known]
    numbers = tuple(number for number in shared if number in known)
    if unknown:
        yield Unjudged(Reason.NO_GRADIENT, Stage.ROWS, len(unknown))
    if numbers:
        num = len(shared[numbers[0]].parts[-1])
        whole = next(len(batch.rows) for batch in own if batch.update == numbers[0])
        change = Change(Fault.WINDOW_CARRIED_OVER, numbers=(float(num), float(whole)))
        line = next(u.applied.line for u in seen.updates if u.number == numbers[0])
        yield Finding(change, num / whole, where=Where(numbers, line=line))


def altered(
    rows: Rows, labels: list[np.ndarray], pieces: list[Piece]
) -> Iterator[Finding]:
    """Yield the finding on inputs that are no rows of the data: in another order, or
    with labels among them.
    """
    shapes = [leaf.shape[1:] for leaf in pieces[0].called.inputs] if pieces else []
    alike = [
        p for p in pieces if [leaf.shape[1:] for leaf in p.called.inputs] == shapes
    ]
    looked = alike[:_NUM_LOOKED]
    if not looked or len(shapes) != len(rows.leaves):
        return
    ways = [*_reordered(rows.leaves), *_with_labels(rows.leaves, labels, shapes)]
    for change, leaves in ways:
        if _share(Rows(leaves), looked) >= _ALMOST_ALL:
            where = Where(tuple(range(1, len(pieces) + 1)), line=looked[0].called.line)
            yield Finding(change, 1.0, where=where)
            return


Way = tuple[Change, list[np.ndarray]]  # the data as the model would have received them


def _reordered(leaves: list[np.ndarray]) -> Iterator[Way]:
    num = range(len(leaves))
    for new in permutations(num) if 1 < len(leaves) <= _MOST_LEAVES else ():
        moved = [(i, j) for i, j in enumerate(new) if i != j]
        if moved and all(leaves[i].shape == leaves[j].shape for i, j in moved):
            numbers = tuple(1.0 + i for pair in moved for i in pair)
            yield (
                Change(Fault.INPUTS_SWAPPED, numbers=numbers),
                [leaves[j] for j in new],
            )


def _with_labels(
    leaves: list[np.ndarray], labels: list[np.ndarray], shapes: list[tuple[int, ...]]
) -> Iterator[Way]:
    for i, shape in enumerate(shapes):
        numbers = 1.0 + i, float(len(leaves))
        for label in labels:
            if label.shape[1:] == shape and label.ndim > 1:
                change = Change(Fault.LABELS_AMONG_THE_INPUTS, numbers=numbers)
                yield change, [*leaves[:i], label, *leaves[i + 1 :]]


def _share(rows: Rows, pieces: list[Piece]) -> float:
    """Return the share of input rows that are rows of the data."""
    given = pieces[0].called.inputs
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(rows.leaves, given, strict=True)):
        return 0.0
    held = np.concatenate([rows.find(piece.called.inputs) for piece in pieces])
    return float(np.mean(held != PAD)) if len(held) else 0.0
