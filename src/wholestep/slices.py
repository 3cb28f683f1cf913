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
        total: for the full batch; None if it depends on values, as for ragged rows.
        per_row: for each row of the batch; 0 if all share them, as those of a table of positions.
    """

    total: int | None
    per_row: int = 0

    @classmethod
    def of(cls, path: str, few: tuple[int, int | None], full: tuple[int, int | None]) -> Self:
        """Return the size by the numbers (rows of the batch, rows read) of a part of a batch, and of all of it.

        Raises:
            SpecificationError: the number of rows read is known, and neither constant nor proportional to the rows of
                the batch.

        >>> LookupSize.of("words", (2, 6), (8, 24))
        LookupSize(total=24, per_row=3)
        >>> LookupSize.of("positions", (2, 5), (8, 5))
        LookupSize(total=5, per_row=0)
        """
        (few_rows, few_reads), (rows, reads) = few, full
        if few_reads is None or reads is None:
            return cls(None)
        if few_reads == reads:
            return cls(reads)
        if few_reads * rows == reads * few_rows:
            return cls(reads, reads // rows)
        must = f"To cut a batch, each row must look up equally many rows of {path!r}, or all rows the same."
        found = f"{few_reads} for {few_rows} rows and {reads} for {rows} rows"
        attempt = (
            "dense_gradients=True, which sums the gradients of equal rows of a table before the optimizer gets them, "
            "as on JAX; or full batches on one device."
        )
        raise SpecificationError(message(must, found, attempt))

    def add(self, total: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
        """Add the (values, indices) of a part of the batch, whose first row has this place in it."""
        values, indices = ops.cast(new[0], total[0].dtype), ops.cast(new[1], "int32")
        if self.total is None:
            return ops.concatenate([total[0], values]), ops.concatenate([total[1], indices])
        if not self.per_row:
            once = ops.where(ops.equal(first, 0), indices, ops.zeros_like(indices))
            return total[0] + values, total[1] + once
        start = first * self.per_row
        starts = [start] + [ops.zeros_like(start)] * (len(values.shape) - 1)
        return ops.slice_update(total[0], starts, values), ops.slice_update(total[1], [start], indices)


def zeros(sizes: Sequence[LookupSize], row_shape: tuple[int, ...], dtype: str, none: Tensor) -> Slices:
    """Return the gradient of no lookup, with room for all lookups of an update whose number is known.

    Args:
        none: 0, as a value of the program: an array with this number of rows may grow in a loop.
    """
    totals = [none if size.total is None else size.total for size in sizes]
    values = tuple(ops.zeros((total, *row_shape), dtype) for total in totals)
    return Slices(values, tuple(ops.zeros((total,), "int32") for total in totals))


def add(sizes: Sequence[LookupSize], total: Slices, new: Slices, first: Tensor) -> Slices:
    """Add the lookups of a part of the batch, whose first row has this place in it. The sum over replicas is right."""
    pairs = zip(sizes, zip(*total, strict=True), zip(*new, strict=True), strict=True)
    sums = [size.add(before, part, first) for size, before, part in pairs]
    return Slices(tuple(values for values, _ in sums), tuple(indices for _, indices in sums))
