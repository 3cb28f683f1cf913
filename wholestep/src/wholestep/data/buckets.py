"""Length buckets under a token budget: batches of rows of similar length, in a few fixed shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.order import ALL, Order, Places, Selection
from wholestep.data.sequences import Sequences
from wholestep.data.shapes import NONE, LengthOptions, assign_shapes, best_shapes, user_shapes
from wholestep.errors import BatchError, message
from wholestep.tree import Tree


@dataclass(frozen=True)
class Buckets:
    """Batches of rows in buckets, which have few shapes.

    The rows of a batch are a pure function of (seed, epoch, step): the rows of each bucket are
    permuted, and so are the batches of all buckets. No permutation is stored, so the cost of a
    batch depends on its rows only.

    Args:
        shapes: the padded length of each sequence, int64 (buckets, sequences).
        sizes: rows in a full batch of each bucket, int64 (buckets,).
        by_bucket: the row numbers bucket by bucket (rows,).
        starts: where in `by_bucket` each bucket starts, and the end, int64 (buckets + 1,).
        firsts: the number of batches in the buckets before each, and of all, int64 (buckets + 1,).
    """

    sequences: Sequences
    shapes: ndarray
    sizes: ndarray
    by_bucket: ndarray
    starts: ndarray
    firsts: ndarray
    seed: int
    shuffle: bool

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return int(self.firsts[-1])

    @property
    def has_short_batch(self) -> bool:
        """Whether any batch has fewer rows than its bucket's others."""
        return bool(np.any(np.diff(self.starts) % self.sizes))

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The rows of a full batch and the padded length of each sequence, for every bucket."""
        shapes = np.column_stack([self.sizes, self.shapes])
        return [tuple(shape) for shape in shapes.tolist()]

    def select(self, epoch: int, step: int) -> Selection:
        """Select the rows of a batch; its layout is their padded shape."""
        batches = Order(self.num_batches, self.seed, self.shuffle)
        number = int(batches.rows(epoch, step, step + 1)[0])
        bucket = int(np.searchsorted(self.firsts, number, side="right")) - 1
        size = int(self.sizes[bucket])
        start, end = self.starts[bucket : bucket + 2].tolist()
        order = Order(end - start, self.seed, self.shuffle, stream=bucket + 1)
        places = order.batch(epoch, number - int(self.firsts[bucket]), size)
        rows = self.by_bucket[start + places].astype(np.int64)
        return Selection(rows, rows, size, self.shapes[bucket])

    def load(self, selection: Selection, places: Places = ALL) -> Tree:
        """Return a batch, or its rows at these places, as numpy arrays."""
        return self.sequences.padded(selection.rows[places], selection.layout)

    def in_order(self) -> "Buckets":
        """Return the same buckets one after the other, the rows of each in ascending order."""
        return replace(self, shuffle=False)


def make_buckets(
    sequences: Sequences, tokens: int, options: LengthOptions, seed: int, shuffle: bool
) -> Buckets:
    """Return the buckets of rows that hold sequences, at most `tokens` places in a batch.

    Raises:
        BatchError: a row that no shape holds, or that takes more places than the budget.
    """
    if options.boundaries is None:
        _check_places(sequences, sequences.totals, tokens)
        shapes = best_shapes(sequences.lengths, tokens)
    else:
        shapes = user_shapes(options.boundaries, sequences.paths)
        if options.truncate:
            sequences = sequences.cut(shapes.max(axis=0))
    shape_of = assign_shapes(sequences.lengths, shapes)
    counts = np.bincount(shape_of, minlength=NONE + 1)
    if counts[NONE]:
        raise too_long(sequences, int(np.argmax(shape_of)), shapes.max(axis=0))
    _check_places(sequences, shapes.sum(axis=1)[shape_of], tokens)
    used = np.flatnonzero(counts)
    counts = counts[used]
    shapes = shapes[used]
    sizes = np.minimum(tokens // shapes.sum(axis=1), counts)
    by_bucket = np.argsort(shape_of, kind="stable").astype(np.int32)
    firsts = ends(-(-counts // sizes))
    return Buckets(sequences, shapes, sizes, by_bucket, ends(counts), firsts, seed, shuffle)


def _check_places(sequences: Sequences, places: ndarray, tokens: int) -> None:
    row = int(np.argmax(places))
    if places[row] > tokens:
        raise too_large(sequences, row, places[row], tokens)


def ends(counts: Sequence[int] | ndarray) -> ndarray:
    """Return the start of each of several consecutive parts of these sizes, and the end."""
    return np.concatenate([[0], np.cumsum(counts)])


def too_long(sequences: Sequences, row: int, largest: ndarray) -> BatchError:
    """Return the error that names a row that no shape holds."""
    names = [tree.name(path, "length") for path in sequences.paths]
    most = ", ".join(f"{name} {length}" for name, length in zip(names, largest, strict=True))
    must = f"No row may be longer than the largest shape ({most})."
    attempt = "a larger boundary, or truncate=True to cut it off."
    return BatchError(message(must, sequences.describe(row), attempt))


def too_large(sequences: Sequences, row: int, places: int, tokens: int) -> BatchError:
    """Return the error that names a row that takes more places than the budget."""
    must = f"No row may take more places than tokens={tokens}."
    received = f"{sequences.describe(row)}, which takes {places} places in its shape"
    attempt = "more tokens, or smaller boundaries with truncate=True."
    return BatchError(message(must, received, attempt))
