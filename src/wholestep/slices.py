"""Gradients by lookups: the gradient of each row that a lookup reads, before those of equal rows are summed.

On TensorFlow, `keras.Model.fit` hands them to the optimizer as `tf.IndexedSlices`, and Keras 3.15 squares or clips them
one by one. The lookups of a batch are those of its microbatches, however it is cut.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor


class Slices(NamedTuple):
    """A gradient by lookups: that of a row is the sum of the values with its index.

    Args:
        values: for each lookup, the gradients of the rows that it reads, (rows read, ...).
        indices: for each lookup, these rows, int (rows read,), with repetitions.
    """

    values: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]

    def dense(self, num_rows: int) -> Tensor:
        """Return the gradient of all rows of the table, (num_rows, ...)."""
        return ops.segment_sum(ops.concatenate(self.values), ops.concatenate(self.indices), num_rows)


Gradient = Tensor | Slices


class LookupSize(NamedTuple):
    """The number of rows of a table that a lookup reads in an update.

    Args:
        total: for the full batch.
        per_row: for each row of the batch; 0 if all share them, as those of a table of positions.
    """

    total: int
    per_row: int

    @classmethod
    def of(cls, path: str, few: tuple[int, int | None], full: tuple[int, int | None]) -> Self:
        """Return the size by the numbers (rows of the batch, rows read) of a part of a batch, and of all of it.

        Raises:
            SpecificationError: the number of rows read is neither constant nor proportional to the rows of the batch.

        >>> LookupSize.of("words", (2, 6), (8, 24))
        LookupSize(total=24, per_row=3)
        >>> LookupSize.of("positions", (2, 5), (8, 5))
        LookupSize(total=5, per_row=0)
        """
        (few_rows, few_reads), (rows, reads) = few, full
        if few_reads is not None and few_reads == reads:
            return cls(reads, 0)
        if few_reads is not None and reads is not None and few_reads * rows == reads * few_rows:
            return cls(reads, reads // rows)
        must = f"To cut a batch, each row must look up equally many rows of {path!r}, or all rows the same."
        found = " and ".join(f"{num or 'an unknown number'} for {size} rows" for size, num in (few, full))
        attempt = (
            "dense_gradients=True, which sums the gradients of equal rows of a table before the optimizer gets them, "
            "as on JAX; or full batches on one device."
        )
        raise SpecificationError(message(must, found, attempt))

    def add(self, total: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
        """Add the (values, indices) of a part of the batch, whose first row has this place in it."""
        values, indices = ops.cast(new[0], total[0].dtype), ops.cast(new[1], "int32")
        if not self.per_row:
            once = ops.where(ops.equal(first, 0), indices, ops.zeros_like(indices))
            return total[0] + values, total[1] + once
        start = first * self.per_row
        starts = [start] + [ops.zeros_like(start)] * (len(values.shape) - 1)
        return ops.slice_update(total[0], starts, values), ops.slice_update(total[1], [start], indices)


def zeros(sizes: Sequence[LookupSize], row_shape: tuple[int, ...], dtype: str) -> Slices:
    """Return the gradient of no lookup, with the place of all lookups of an update."""
    values = tuple(ops.zeros((size.total, *row_shape), dtype) for size in sizes)
    return Slices(values, tuple(ops.zeros((size.total,), "int32") for size in sizes))


def add(sizes: Sequence[LookupSize], total: Slices, new: Slices, first: Tensor) -> Slices:
    """Add the lookups of a part of the batch, whose first row has this place in it. The sum over replicas is right."""
    pairs = zip(sizes, zip(*total, strict=True), zip(*new, strict=True), strict=True)
    sums = [size.add(before, part, first) for size, before, part in pairs]
    return Slices(tuple(values for values, _ in sums), tuple(indices for _, indices in sums))
