"""The stage of the rows: whether each pass over the data takes them as the user states
it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from itertools import pairwise
from math import lgamma, log
from typing import NamedTuple

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Fault, Stage
from stepcheck.trace.windows import PAD, Piece, Rows, Windows
from stepcheck.values import Change, Finding, Reason, Unjudged, Where

# random orders, of which one may be that of the pass before
_BY_CHANCE = log(1e6)


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
    raise SpecificationError(
        message(must, rows, "rows='shuffled', or leave it out.")
    )


class Batch(NamedTuple):
    """The rows of an update, of equal rows always the first; update 0: of forward
    passes that no update is made of.
    """

    update: int
    rows: list[int]


@dataclass
class Pass:
    """A pass over the data, until a row comes again.

    Attributes:
        parts: by the number of a batch, its rows that are in the pass.
        again: the update whose row ends it; 0 if the loop does.
        is_inside: whether it ends inside of an update.
    """

    parts: dict[int, list[int]] = field(default_factory=dict)
    again: int = 0
    is_inside: bool = False

    @property
    def rows(self) -> list[int]:
        """Its rows, in their order."""
        return [row for part in self.parts.values() for row in part]

    @property
    def batches(self) -> list[list[int]]:
        """The rows of its batches in the order of the data, sorted."""
        return sorted(map(sorted, self.parts.values()))

    def repeats(self, other: "Pass") -> bool:
        """Whether all its rows come in the order of another pass."""
        rows = self.rows
        return rows == other.rows[: len(rows)]


def batches(seen: Windows, rows: Rows) -> list[Batch]:
    """Return the rows of each update, and of passes without an update; those of a batch
    that is passed twice once.
    """
    of = {
        piece.called.order: u.number for u in seen.updates for piece in u.pieces
    }
    parts: dict[int, dict[tuple[int, bytes], Piece]] = {}
    for piece in seen.pieces:
        number = of.get(piece.called.order, -piece.called.order)
        parts.setdefault(number, {})[
            piece.called.replica, piece.rows.tobytes()
        ] = piece
    found = []
    for number, pieces in parts.items():
        own = np.concatenate([piece.rows for piece in pieces.values()]).tolist()
        firsts = [rows.equal(row)[0] for row in own if row != PAD]
        found.append(Batch(max(number, 0), firsts))
    return found


def passes(batches: list[Batch], rows: Rows) -> list[Pass]:
    """Cut batches into passes over the data: a new one begins where a row comes again."""
    found: list[Pass] = []
    used = Counter[int]()
    for number, batch in enumerate(batches):
        for i, row in enumerate(batch.rows):
            is_again = used[row] >= len(rows.equal(row))
            if found and is_again:
                found[-1].again, found[-1].is_inside = batch.update, i > 0
                used.clear()
            if is_again or not found:
                found.append(Pass())
            used[row] += 1
            found[-1].parts.setdefault(number, []).append(row)
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
    used = {
        each for batch in own for row in batch.rows for each in rows.equal(row)
    }
    unused = tuple(sorted({*range(rows.num)} - used))
    if short and unused:
        updates = tuple(batch.update for batch in own if batch.update)
        change = Change(Fault.ROWS_NEVER_USED, numbers=(len(unused), rows.num))
        yield Finding(
            change, len(unused) / rows.num, where=Where(updates, unused)
        )
    elif short:
        updates = tuple(
            dict.fromkeys(each.again for each in short if each.again)
        )
        least = min(len(each.rows) for each in short)
        change = Change(Fault.ROWS_TWICE_IN_A_PASS, numbers=(least, rows.num))
        yield Finding(change, 1 - least / rows.num, where=Where(updates))
    elif not whole or (use is Use.SHUFFLED and len(whole) < 2):
        yield Unjudged(Reason.FEW_PASSES, Stage.ROWS)
    elif use is Use.SHUFFLED:
        yield from _in_an_order_of_before(whole, seen)


def _in_an_order_of_before(
    whole: list[Pass], seen: Windows
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on passes whose rows, or whose batches, come as in the pass
    before.
    """
    pairs = [*pairwise(whole)]
    same = [each for each in pairs if each[1].repeats(each[0])]
    found = same or [(a, b) for a, b in pairs if a.batches == b.batches]
    sizes = [len(part) for part in whole[0].parts.values()]
    if not found or len(sizes) == 1:  # updates of all rows have no order
        return
    # the logarithm of the number of orders, or of sets
    num = lgamma(sum(sizes) + 1)
    if not same:
        num -= sum(lgamma(size + 1) for size in sizes) + lgamma(len(sizes) + 1)
    if num < _BY_CHANCE:
        yield Unjudged(Reason.BY_CHANCE, Stage.ROWS)
        return
    fault = (
        Fault.SAME_ORDER_EVERY_PASS if same else Fault.SAME_BATCHES_EVERY_PASS
    )
    numbers = float(len(found)), float(len(pairs))
    where = Where(tuple(seen.numbers), rows=tuple(found[0][0].rows))
    yield Finding(Change(fault, numbers=numbers), 1.0, where=where)


def across(
    seen: Windows, rows: Rows, known: set[int]
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on updates with rows of two passes, if their gradients have all
    these rows.

    Args:
        known: the updates whose gradients have the rows of all their forward passes.
    """
    own = batches(seen, rows)
    inside = [
        each for each in passes(own, rows) if each.is_inside and each.again
    ]
    shared = {each.again: each for each in inside if len(each.rows) == rows.num}
    numbers = tuple(number for number in shared if number in known)
    if len(numbers) < len(shared):
        num_left = len(shared) - len(numbers)
        yield Unjudged(Reason.NO_GRADIENT, Stage.ROWS, num_left)
    if numbers:
        *_, last = shared[numbers[0]].parts.values()
        whole = next(batch.rows for batch in own if batch.update == numbers[0])
        counts = float(len(last)), float(len(whole))
        change = Change(Fault.WINDOW_CARRIED_OVER, numbers=counts)
        line = next(
            u.applied.line for u in seen.updates if u.number == numbers[0]
        )
        where = Where(numbers, line=line)
        yield Finding(change, len(last) / len(whole), where=where)
