"""Packing: several short sequences in one row, distinguished by segment ids and positions.

The lengths that share a row are found once, on the histogram of lengths, at the same cost for any
number of rows (best-fit decreasing on counts, after Krell, Kosec, Perez and Fitzgibbon, "Efficient
sequence packing without cross-contamination", 2021). The rows of each length are permuted anew in
every epoch.
"""

from bisect import bisect_left, insort_left
from collections import Counter
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.buckets import ends, too_large, too_long
from wholestep.data.order import ALL, Order, Places, Selection, permute
from wholestep.data.sequences import RowLayout, Sequences
from wholestep.data.shapes import LengthOptions, user_shapes
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tree

ADDED = ("segment_ids", "positions")


@dataclass(frozen=True)
class Patterns:
    """The lengths that share a packed row, and the number of packed rows of each pattern.

    Pattern p has the slots first_slot[p] .. first_slot[p+1]-1; a slot takes `repeats` sequences of
    one `length`. The packs of the pattern are first_pack[p] .. first_pack[p+1]-1; the first pack
    takes the places from `first_place` on among all rows of that length.
    """

    first_pack: ndarray
    first_slot: ndarray
    length: ndarray
    repeats: ndarray
    first_place: ndarray

    def places(self, packs: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """Return (at, length, place): packs[at] holds sequence number `place` of its length."""
        pattern = np.searchsorted(self.first_pack, packs, side="right") - 1
        at, slot = _spread(self.first_slot[pattern], np.diff(self.first_slot)[pattern])
        repeats = self.repeats[slot]
        firsts = self.first_place[slot] + (packs - self.first_pack[pattern])[at] * repeats
        which, place = _spread(firsts, repeats)
        return at[which], self.length[slot][which], place


@dataclass(frozen=True)
class Packs:
    """Batches of packed rows, each with several rows of the source, by (seed, epoch, step).

    Args:
        width: places in a packed row.
        size: packed rows in a full batch.
        by_length: the row numbers, shortest first (rows,).
        starts: the start in `by_length` of the rows of each length, and the end, int64 (longest +
            2,).
    """

    sequences: Sequences
    width: int
    size: int
    patterns: Patterns
    by_length: ndarray
    starts: ndarray
    seed: int
    shuffle: bool

    @property
    def num_packs(self) -> int:
        """The number of packed rows in an epoch."""
        return int(self.patterns.first_pack[-1])

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.num_packs // self.size)

    @property
    def has_short_batch(self) -> bool:
        """Whether the last batch has fewer packed rows."""
        return self.num_packs % self.size != 0

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The packed rows of a full batch and their length."""
        return [(self.size, self.width)]

    def select(self, epoch: int, step: int) -> Selection:
        """Select the rows that are packed into a batch, and their layout."""
        layout = self._layout(epoch, step)
        last_of_pack = np.flatnonzero(np.diff(layout.at))
        parts = np.split(layout.rows, last_of_pack + 1)
        names = np.empty(len(parts), object)
        names[:] = parts
        return Selection(layout.rows, names, self.size, layout)

    def load(self, selection: Selection, places: Places = ALL) -> Tree:
        """Return a batch, or its packed rows at these places, as numpy arrays.

        Adds the leaves `segment_ids` (0 in padding) and `positions`.
        """
        layout: RowLayout = selection.layout.only(places)
        shape = (layout.num_packs, self.width)
        segments = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        which, place = _spread(layout.starts, self.sequences.lengths[0, layout.rows])
        at = layout.at[which]
        firsts = np.searchsorted(layout.at, layout.at)
        segments[at, place] = which - firsts[which] + 1
        positions[at, place] = place - layout.starts[which]
        added = dict(zip(ADDED, (segments, positions), strict=True))
        return self.sequences.packed(layout, shape, added)

    def in_order(self) -> "Packs":
        """Return the same packed rows in one order for all epochs."""
        return replace(self, shuffle=False)

    def _layout(self, epoch: int, step: int) -> RowLayout:
        order = Order(self.num_packs, self.seed, self.shuffle)
        packs = order.batch(epoch, step, self.size)
        at, length, place = self.patterns.places(packs)
        if self.shuffle:
            num = np.diff(self.starts)[length]
            places = place.astype(np.uint64)
            place = permute(places, num, self.seed, epoch, length + 1).astype(np.int64)
        rows = self.by_length[self.starts[length] + place].astype(np.int64)
        begins = ends(np.maximum(length, 1))[:-1]
        return RowLayout(rows, at, begins - begins[np.searchsorted(at, at)])


def make_packs(
    sequences: Sequences, tokens: int, options: LengthOptions, seed: int, shuffle: bool
) -> Packs:
    """Return the packs of rows that hold one sequence each, at most `tokens` places in a batch.

    Raises:
        SpecificationError: rows that cannot be packed, or several boundaries.
        BatchError: a row that is longer than a packed row, or takes more places than the budget.
    """
    _check(sequences)
    longest = int(np.argmax(sequences.lengths))
    width = max(1, int(sequences.lengths[0, longest]))
    if options.boundaries is not None:
        shapes = user_shapes(options.boundaries, sequences.paths)
        if len(shapes) > 1:
            must = "Packed rows have one length."
            attempt = f"boundaries=[{shapes.max()}]."
            raise SpecificationError(message(must, f"{len(shapes)} boundaries", attempt))
        boundary = shapes[0]
        if width > boundary[0] and not options.truncate:
            raise too_long(sequences, longest, boundary)
        width = int(boundary[0])
        sequences = sequences.cut(boundary)
    if width > tokens:
        raise too_large(sequences, longest, width, tokens)
    lengths = sequences.lengths[0].astype(np.uint16 if width < 2**16 else np.int32)
    by_length = np.argsort(lengths, kind="stable").astype(np.int32)
    counts = np.bincount(lengths, minlength=1)
    patterns = find_patterns(counts, width)
    size = min(tokens // width, int(patterns.first_pack[-1]))
    return Packs(sequences, width, size, patterns, by_length, ends(counts), seed, shuffle)


def find_patterns(counts: ndarray, width: int) -> Patterns:
    """Return how counts[length] sequences of each length share packed rows of this width.

    The longest come first; each goes to the packed row with the least room that still holds it. An
    empty sequence takes one place, so that no row is lost.

    >>> patterns = find_patterns(np.array([0, 0, 2, 0, 1, 1]), width=8)  # lengths 2, 2, 4 and 5
    >>> patterns.first_pack.tolist(), patterns.first_slot.tolist(), patterns.length.tolist()
    ([0, 1, 2], [0, 2, 4], [5, 2, 4, 2])
    """
    # (room left, number of packs, their slots), by room; of one room, the latest first
    packs: list[tuple[int, int, tuple]] = []
    by_room = itemgetter(0)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        need = max(length, 1)
        while left:
            place = bisect_left(packs, need, key=by_room)
            fullest = packs.pop(place) if place < len(packs) else (width, left, ())
            room, num, slots = fullest
            repeats = min(room // need, left)
            used = min(num, left // repeats)
            filled = (room - repeats * need, used, (*slots, (length, repeats)))
            insort_left(packs, filled, key=by_room)
            if used < num and slots:
                insort_left(packs, (room, num - used, slots), key=by_room)
            left -= used * repeats
    packs.reverse()
    packs.sort(key=by_room)  # of one room, the first comes first
    return _as_arrays(packs)


def _as_arrays(packs: list[tuple[int, int, tuple]]) -> Patterns:
    placed: Counter[int] = Counter()
    slots = []
    for _, num, pattern in packs:
        for length, repeats in pattern:
            slots.append((length, repeats, placed[length]))
            placed[length] += num * repeats
    length, repeats, first_place = np.array(slots, np.int64).T
    first_pack = ends([num for _, num, _ in packs])
    first_slot = ends([len(pattern) for _, _, pattern in packs])
    return Patterns(first_pack, first_slot, length, repeats, first_place)


def _spread(starts: ndarray, counts: ndarray) -> tuple[ndarray, ndarray]:
    """Return (i, starts[i] + j) for all i and all j < counts[i].

    >>> [values.tolist() for values in _spread(np.array([5, 9]), np.array([2, 1]))]
    [[0, 0, 1], [5, 6, 9]]
    """
    which = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return which, starts[which] + np.arange(len(which)) - before[which]


def _check(sequences: Sequences) -> None:
    row = sequences.row
    num = len(sequences.lengths)
    if not isinstance(row, dict) or not row.keys().isdisjoint(ADDED):
        received = type(row).__name__
        if isinstance(row, dict):
            received = f"keys {', '.join(map(str, row))}"
        must = "Packed rows must be dicts: segment_ids and positions are added to their leaves."
        raise SpecificationError(message(must, received, "give rows such as {'tokens': ...}."))
    if num > 1:
        must = (
            "Rows that are packed must hold one sequence, as source and target would not stay "
            "aligned."
        )
        attempt = "leave out pack=True for buckets."
        raise SpecificationError(message(must, f"{num} lengths", attempt))
    for leaf in sequences.leaves:
        if leaf.owner is None:
            must = (
                f"{tree.name(leaf.path, 'row')} must have an axis of the length: a packed row has "
                "no place for one value per row."
            )
            received = f"shape {np.shape(leaf.example)}"
            attempt = "repeat it for every place, or leave out pack."
            raise SpecificationError(message(must, received, attempt))
