"""The stage of the rows: which rows of the data the updates were made of, and in which order."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from stepcheck.faults import Fault, Stage
from stepcheck.solve.readings import FEW_TWINS, doubled, in_order
from stepcheck.trace.log import Log
from stepcheck.trace.windows import PAD, Piece, Rows, Update, Windows, passes
from stepcheck.values import Change, Finding, Line, Reason, Unjudged, Where

NUM_DRAWS, CHANCE = (
    20,
    0.1,
)  # a batch of few labels must be rarer than that in this many random orders
MOSTLY = 0.7  # of the neighbouring batches; the others are at the ends of passes
FEW, LEAST = 3, 4  # a batch of fewer labels is strange, if it has twice the latter of rows
NUM_LOOKED, MOST_LEAVES = (
    6,
    5,
)  # forward passes that are compared; inputs of a model whose order is permuted
_NEARLY_ALL, _ALMOST_ALL = 0.98, 0.9
_BY_CHANCE = 1e-6  # of the beginning of a pass whose rows are all shuffled


def order(
    windows: Windows, rows: Rows, log: Log, labels: np.ndarray | None = None
) -> Iterator[Finding | Unjudged]:
    """Yield the findings on the order of the rows.

    Args:
        labels: by row the number of its class, if the data have classes.
    """
    known = {piece.called.order: piece.rows for piece in windows.pieces if piece.is_known}
    if not known or _are_alike(windows):
        return
    if rows.twins(np.concatenate([*known.values()])) > FEW_TWINS:
        yield Unjudged(Reason.EQUAL_ROWS, Stage.ROWS)
        return
    windows = in_order(windows, rows, are_given=False)
    pieces = [piece for piece in windows.pieces if piece.called.order in known]
    stream = _whole_stream(pieces)
    own = [piece.rows[piece.rows != PAD].tolist() for piece in pieces]
    if not stream and any(len({*each}) < len(each) for each in own):  # drawn with replacement
        return
    for found in (
        () if stream else (_again(windows), _overlap(windows, pieces), _doubled(windows, rows.num))
    ):
        if found is not None:
            yield found
            return
    lists = stream or [_rows_of(cut) for cut in passes(pieces)]
    if _is_drawn(lists[:-1], rows.num):
        return
    seen = _Passes(windows, pieces, lists, rows.num)
    few = _few_labels(windows, pieces, labels)
    if few is not None and (seen.are_unshuffled or seen.are_batches_alike):
        yield few
    if seen.are_few:
        yield Unjudged(Reason.FEW_PASSES, Stage.ROWS)
    else:
        yield from _left_out(seen, log)
        yield from _one_order(seen, log)


def _finding(
    fault: Fault,
    share: float,
    updates: list[int],
    *,
    numbers: tuple[int, ...] = (),
    rows: tuple[int, ...] = (),
    line: Line | None = None,
) -> Finding:
    change = Change(fault, numbers=tuple(map(float, numbers)))
    return Finding(change, share, where=Where(tuple(updates), rows, line=line))


def _rows_of(pieces: list[Piece]) -> list[int]:
    return [row for piece in pieces for row in piece.rows.tolist() if row != PAD]


@dataclass(frozen=True)
class _Passes:
    """The rows of passes over the data, in their order."""

    windows: Windows
    pieces: list[Piece]
    lists: list[list[int]]
    num_rows: int

    @property
    def whole(self) -> list[list[int]]:
        """The passes without a last one that was not seen to its end."""
        return self.lists if len(self.lists[-1]) == len(self.lists[0]) else self.lists[:-1]

    @property
    def are_few(self) -> bool:
        """Whether less than two whole passes of one length were seen."""
        return len(self.whole) < 2 or len({len(each) for each in self.whole}) > 1

    @property
    def are_whole_batches(self) -> bool:
        """Whether each update has all rows: they have no order."""
        rows = [update.rows[update.rows != PAD] for update in self.windows.updates if update.pieces]
        return all(len(np.unique(own)) == self.num_rows for own in rows)

    @property
    def is_one_order(self) -> bool:
        """Whether all passes have the same order."""
        return all(each == self.whole[0] for each in self.whole)

    @property
    def are_unshuffled(self) -> bool:
        """Whether the rows come in the order of the data."""
        first = self.lists[0]
        if not self.are_few:
            return self.is_one_order and first == sorted(first)
        left = 1 + max(first) - np.arange(len(first))  # rows that may come next
        chance = float(np.prod(np.minimum(1.0, 1 / left)))
        return first == [*range(len(first))] and chance <= _BY_CHANCE

    @property
    def are_batches_alike(self) -> bool:
        """Whether batches are shuffled, and not rows: the same rows meet in every pass."""
        cut = [sorted(tuple(sorted(p.rows.tolist())) for p in each) for each in passes(self.pieces)]
        cut = cut[: len(self.whole)]
        return not self.are_few and len(cut[0]) > 1 and all(each == cut[0] for each in cut)


def _left_out(seen: _Passes, log: Log) -> Iterator[Finding]:
    """Yield the finding on rows that every pass leaves out, if they are no more than a remainder."""
    first, windows = seen.whole[0], seen.windows
    unused = sorted({*range(seen.num_rows)} - {*first} - windows.seen)
    are_same = all({*each} == {*first} for each in seen.whole)
    if not unused or not are_same or seen.are_whole_batches or windows.foreign or log.has_evaluated:
        return
    are_last = unused[0] == seen.num_rows - len(unused)
    if are_last and len(unused) > max(len(piece.rows) for piece in seen.pieces):
        return  # held out
    share = len(unused) / seen.num_rows
    numbers = len(unused), seen.num_rows
    yield _finding(
        Fault.ROWS_NEVER_USED, share, windows.numbers, numbers=numbers, rows=tuple(unused)
    )


def _one_order(seen: _Passes, log: Log) -> Iterator[Finding]:
    """Yield the finding on rows that were shuffled once, but by Keras' `fit` with a seed."""
    first = seen.whole[0]
    is_of_fit = log.has_fitted and not hasattr(log.fitted[0], "element_spec")
    if seen.are_whole_batches or is_of_fit or not seen.is_one_order or len(first) <= LEAST - 1:
        return
    if first != sorted(first):
        yield _finding(Fault.SAME_ORDER_EVERY_PASS, 1.0, seen.windows.numbers, rows=tuple(first))


def _few_labels(windows: Windows, pieces: list[Piece], labels: np.ndarray | None) -> Finding | None:
    """Find batches of one or two labels, where the data have many and random batches have more."""
    num = 0 if labels is None else len(np.unique(labels))
    if labels is None or not 1 < num <= len(labels) // LEAST:
        return None
    whole = [piece for piece in pieces if np.count_nonzero(piece.rows != PAD) >= 2 * LEAST]
    most = FEW - 1 if num > FEW else 1

    def num_few(labels: np.ndarray) -> int:
        return sum(len(np.unique(labels[piece.rows[piece.rows != PAD]])) <= most for piece in whole)

    few, draw = num_few(labels), np.random.default_rng(0)
    by_chance = float(np.median([num_few(draw.permutation(labels)) for _ in range(NUM_DRAWS)]))
    if 2 * few <= len(pieces) or by_chance >= CHANCE * len(pieces):
        return None
    numbers = few, len(pieces), most, num
    return _finding(
        Fault.BATCHES_OF_FEW_LABELS, few / len(pieces), windows.numbers, numbers=numbers
    )


def _are_alike(windows: Windows) -> bool:
    """Whether each replica gets the same rows."""
    num = [len({piece.called.replica for piece in u.pieces}) for u in windows.updates]
    same = [
        len({piece.rows.tobytes() for piece in u.pieces}) == 1 < len(u.pieces)
        for u in windows.updates
    ]
    return len(num) > 1 and min(num) > 1 and all(same)


def carried(windows: Windows) -> Iterator[Finding]:
    """Find updates of microbatches of two passes, if their gradient is of all of them."""
    shared = [
        u for u in windows.updates if len({windows.place[p.called.order][0] for p in u.pieces}) > 1
    ]
    shared = [
        u for u in shared if len({frozenset(p.rows.tolist()) for p in u.pieces}) == len(u.pieces)
    ]
    known = [piece for piece in windows.pieces if piece.called.order in windows.place]
    first = {
        row
        for piece in known
        if not windows.place[piece.called.order][0]
        for row in piece.rows.tolist()
    }
    early = {u.number: _num_early(windows, u) for u in shared}
    sizes = {
        len(u.pieces) - early.get(u.number, 0) for u in windows.updates[:-1]
    }  # if counted anew in each pass
    are_even = 1 in (
        len(sizes),
        len({len(u.pieces) for u in windows.updates[:-1]}),
    )  # else they are the author's
    if (
        not shared
        or not are_even
        or len(first) < _NEARLY_ALL * len({r for p in known for r in p.rows.tolist()})
    ):
        return  # rows come again by chance
    update = shared[0]
    num, whole = early[update.number], len(update.pieces)
    line = update.applied.line
    yield _finding(
        Fault.WINDOW_CARRIED_OVER, num / whole, [*early], numbers=(num, whole), line=line
    )


def _num_early(windows: Windows, update: Update) -> int:
    """Return the number of an update's microbatches from the pass before its last."""
    numbers = [windows.place[piece.called.order][0] for piece in update.pieces]
    return sum(number < numbers[-1] for number in numbers)


def _again(windows: Windows) -> Finding | None:
    """Find batches that make two updates in a row, in the midst of a pass, where others make one."""
    updates = [update for update in windows.updates if update.pieces]
    again = [b for a, b in pairwise(updates) if np.array_equal(a.rows, b.rows)]
    once = [update for update in updates if all(update is not other for other in again)]
    cuts = [
        [sum(len(u.rows) for u in cut) for cut in passes(each)][:-1] for each in (updates, once)
    ]
    if not again or len(set(cuts[1])) > 1 or len(set(cuts[0])) < 2:
        return None
    numbers, line = [u.number for u in again], again[0].applied.line
    count = len(again), len(updates)
    return _finding(
        Fault.BATCH_TRAINED_ON_TWICE, len(again) / len(updates), numbers, numbers=count, line=line
    )


def _doubled(windows: Windows, num_rows: int) -> Finding | None:
    """Find passes that all end with a batch some of whose rows were already used."""
    again = doubled(windows.updates, num_rows)
    if len(again) < 2:
        return None
    last = next(update for update in windows.updates if update.number in again)
    num = min(int(np.count_nonzero(part)) for part in again.values())
    line = last.applied.line
    return _finding(Fault.ROWS_TWICE_IN_A_PASS, num / num_rows, [*again], numbers=(num,), line=line)


def _overlap(windows: Windows, pieces: list[Piece]) -> Finding | None:
    """Find batches that begin with the last rows of the batch before, mostly the same number of rows."""
    shared = [_shared(a.rows, b.rows) for a, b in pairwise(pieces)]
    sizes, counts = np.unique([num for num in shared if num] or [0], return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if not usual or counts.max() < max(2, MOSTLY * len(shared)):
        return None
    return _finding(
        Fault.BATCHES_OVERLAP, usual / len(pieces[0].rows), windows.numbers, numbers=(usual,)
    )


def _shared(one: np.ndarray, two: np.ndarray) -> int:
    """Return how many rows at the end of one batch begin the next, less than all."""
    sizes = range(1, min(len(one), len(two)))
    return max((n for n in sizes if np.array_equal(one[-n:], two[:n])), default=0)


def _whole_stream(pieces: list[Piece]) -> list[list[int]]:
    """Return whole passes, one after the other, that are cut into batches across their ends; [] if they are not."""
    rows = _rows_of(pieces)
    num = len(set(rows))
    lists = [rows[start : start + num] for start in range(0, len(rows), num)] if num else []
    ends = np.cumsum([np.count_nonzero(piece.rows != PAD) for piece in pieces])
    are_across = len(lists) > 1 and num not in ends
    return lists if are_across and all(len({*each}) == len(each) for each in lists) else []


def _is_drawn(lists: list[list[int]], num_rows: int) -> bool:
    """Whether rows come again, sooner or later, before most others have come."""
    sizes = [len(each) for each in lists]
    return len(sizes) > 2 and len(set(sizes)) > 1 and 2 * float(np.median(sizes)) <= num_rows


def altered(rows: Rows, labels: list[np.ndarray], pieces: list[Piece]) -> Iterator[Finding]:
    """Yield the finding on inputs that are no rows of the data: in another order, or with labels among them."""
    shapes = [leaf.shape[1:] for leaf in pieces[0].called.inputs] if pieces else []
    looked = [p for p in pieces if [leaf.shape[1:] for leaf in p.called.inputs] == shapes][
        :NUM_LOOKED
    ]
    if not looked or len(shapes) != len(rows.leaves):
        return
    for change, leaves in _ways(rows.leaves, labels, looked[0]):
        if _share(Rows(leaves), looked) >= _ALMOST_ALL:
            where = Where(updates=tuple(range(1, len(pieces) + 1)), line=looked[0].called.line)
            yield Finding(change, 1.0, where=where)
            return


def _ways(
    leaves: list[np.ndarray], labels: list[np.ndarray], piece: Piece
) -> Iterator[tuple[Change, list[np.ndarray]]]:
    """Yield (the change, the data as the model would have received them); numbers of inputs from 1."""
    num = range(len(leaves))
    for order in permutations(num) if 1 < len(leaves) <= MOST_LEAVES else ():
        moved = [(i, j) for i, j in enumerate(order) if i != j]
        if moved and all(leaves[i].shape == leaves[j].shape for i, j in moved):
            numbers = tuple(float(1 + i) for pair in moved for i in pair)
            yield Change(Fault.INPUTS_SWAPPED, numbers=numbers), [leaves[j] for j in order]
    for i in num:
        shape = piece.called.inputs[i].shape[1:]
        for label in labels:
            if label.shape[1:] == shape and label.ndim > 1:
                change = Change(
                    Fault.LABELS_AMONG_THE_INPUTS, numbers=(1.0 + i, float(len(leaves)))
                )
                yield change, [label if j == i else leaf for j, leaf in enumerate(leaves)]


def _share(rows: Rows, pieces: list[Piece]) -> float:
    """Return the share of input rows that are rows of the data."""
    given = pieces[0].called.inputs
    if len(rows.leaves) != len(given):
        return 0.0
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(rows.leaves, given, strict=True)):
        return 0.0
    held = np.concatenate([rows.find(piece.called.inputs) for piece in pieces])
    return float(np.mean(held != PAD)) if len(held) else 0.0
