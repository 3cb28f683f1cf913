"""Length buckets under a token budget: a batch holds rows of similar length, in a few fixed
shapes.
"""

from dataclasses import dataclass, replace

import numpy as np

from wholestep import tree
from wholestep.data.order import Order, Selection
from wholestep.data.sequences import Sequences
from wholestep.data.shapes import NONE, LengthOptions, assign, best, given
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
    shapes: np.ndarray
    sizes: np.ndarray
    by_bucket: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray
    seed: int
    shuffle: bool

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return int(self.firsts[-1])

    @property
    def comes_short(self) -> bool:
        """Whether any batch has fewer rows than its bucket's others."""
        return bool(np.any(np.diff(self.starts) % self.sizes))

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The rows of a full batch and the padded length of each sequence, for every bucket."""
        return [
            (int(size), *shape)
            for size, shape in zip(self.sizes, self.shapes.tolist(), strict=True)
        ]

    def select(self, epoch: int, step: int) -> Selection:
        """Select the rows of a batch; its layout is their padded shape."""
        number = Order(self.num_batches, self.seed, self.shuffle).rows(epoch, step, step + 1)[0]
        k = int(np.searchsorted(self.firsts, number, side="right")) - 1
        size, (start, end) = int(self.sizes[k]), self.starts[k : k + 2]
        order = Order(int(end - start), self.seed, self.shuffle, stream=k + 1)
        rows = self.by_bucket[
            start + order.batch(epoch, int(number - self.firsts[k]), size)
        ].astype(np.int64)
        return Selection(rows, rows, size, self.shapes[k])

    def load(self, selection: Selection, places: np.ndarray | slice = slice(None)) -> Tree:
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
        totals = sequences.totals
        if totals.max() > tokens:
            raise too_large(sequences, int(np.argmax(totals)), int(totals.max()), tokens)
        shapes = best(sequences.lengths, tokens)
    else:
        shapes = given(options.boundaries, sequences.paths)
        sequences = sequences.cut(shapes.max(axis=0)) if options.truncate else sequences
    bucket_of = assign(sequences.lengths, shapes)
    counts = np.array([np.count_nonzero(bucket_of == k) for k in range(len(shapes))])
    if counts.sum() < len(bucket_of):
        raise too_long(sequences, int(np.argmax(bucket_of == NONE)), shapes.max(axis=0))
    places = shapes.sum(axis=1)
    for k in np.flatnonzero((counts > 0) & (places > tokens)):
        longest = int(np.argmax(np.where(bucket_of == k, sequences.totals, -1)))
        raise too_large(sequences, longest, int(places[k]), tokens)
    shapes, places, counts = (values[counts > 0] for values in (shapes, places, counts))
    sizes = np.minimum(tokens // places, counts)
    by_bucket = np.argsort(bucket_of, kind="stable").astype(np.int32)
    return Buckets(
        sequences, shapes, sizes, by_bucket, ends(counts), ends(-(-counts // sizes)), seed, shuffle
    )


def ends(counts: np.ndarray) -> np.ndarray:
    """Return the start of each of several consecutive parts of these sizes, and the end."""
    return np.concatenate([[0], np.cumsum(counts)])


def too_long(sequences: Sequences, row: int, largest: np.ndarray) -> BatchError:
    """Return the error that names a row that no shape holds."""
    most = ", ".join(
        f"{tree.name(path, 'length')} {n}" for path, n in zip(sequences.paths, largest, strict=True)
    )
    must = f"No row may be longer than the largest shape ({most})."
    return BatchError(
        message(must, sequences.describe(row), "a larger boundary, or truncate=True to cut it off.")
    )


def too_large(sequences: Sequences, row: int, places: int, tokens: int) -> BatchError:
    """Return the error that names a row that takes more places than the budget."""
    must = f"No row may take more places than tokens={tokens}."
    received = f"{sequences.describe(row)}, which takes {places} places in its shape"
    return BatchError(
        message(must, received, "more tokens, or smaller boundaries with truncate=True.")
    )
