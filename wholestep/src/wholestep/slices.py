"""Gradients by lookups: a gradient for each row read, before gradients of equal rows are summed.

On TensorFlow, `keras.Model.fit` hands them to the optimizer as `tf.IndexedSlices`, and Keras 3.15
squares or clips them one by one. The lookups of a batch are those of its microbatches, however it
is cut.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor


class Slices(NamedTuple):
    """A gradient by lookups: the gradient of a row is the sum of the values with its index.

    Args:
        values: for each lookup, the gradients of the rows that it reads, (rows read, ...).
        indices: for each lookup, these rows, int (rows read,), with repetitions.
    """

    values: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]

    def joined(self) -> Self:
        """Return all lookups as one."""
        values = ops.concatenate(self.values)
        indices = ops.concatenate(self.indices)
        return self._replace(values=(values,), indices=(indices,))

    def dense(self, num_rows: int) -> Tensor:
        """Return the gradient of all rows of the table, (num_rows, ...)."""
        joined = self.joined()
        return ops.segment_sum(joined.values[0], joined.indices[0], num_rows)


Gradient = Tensor | Slices
Lookup = tuple[Tensor, Tensor]  # values, indices


class Part(NamedTuple):
    """A part of a batch: a microbatch, or a replica's share of it.

    Args:
        first: the place of its first row in the batch.
        number: its number among all parts.
    """

    first: Tensor
    number: Tensor


class LookupSize(NamedTuple):
    """The number of rows of a table that a lookup reads in an update.

    Args:
        total: for the full batch; None if it depends on values, as for ragged rows.
        per_row: for each row of the batch; 0 if their number is the same for any batch, as for a
            table of positions.
    """

    total: int | None
    per_row: int = 0

    @classmethod
    def of(cls, path: str, few: tuple[int, int | None], full: tuple[int, int | None]) -> Self:
        """Return the size by (rows of the batch, rows read), of a part of a batch and of all of it.

        Raises:
            SpecificationError: the number of rows read is known, and neither constant nor
                proportional to the rows of the batch.

        >>> LookupSize.of("words", (2, 6), (8, 24))
        LookupSize(total=24, per_row=3)
        >>> LookupSize.of("positions", (2, 5), (8, 5))
        LookupSize(total=5, per_row=0)
        """
        few_rows, few_reads = few
        rows, reads = full
        if few_reads is None or reads is None:
            return cls(None)
        if few_reads == reads:
            return cls(reads)
        if few_reads * rows == reads * few_rows:
            return cls(reads, reads // rows)
        must = (
            f"To cut a batch, each row must look up equally many rows of {path!r}, or all rows "
            "the same."
        )
        received = f"{few_reads} for {few_rows} rows and {reads} for {rows} rows"
        attempt = (
            "dense_gradients=True, which sums the gradients of equal rows of a table before the "
            "optimizer gets them, as on JAX; or full batches on one device."
        )
        raise SpecificationError(message(must, received, attempt))

    def room(self, num_parts: int, none: Tensor) -> int | Tensor:
        """Return the number of rows that all parts read; the tensor `none` if unknown."""
        if self.total is None:
            return none
        return self.total if self.per_row else self.total * num_parts

    def add(self, total: Lookup, new: Lookup, part: Part) -> Lookup:
        """Add the (values, indices) of a part of the batch."""
        values, indices = total
        new_values = ops.cast(new[0], values.dtype)
        new_indices = ops.cast(new[1], "int32")
        if self.total is None:
            return ops.concatenate([values, new_values]), ops.concatenate([indices, new_indices])
        start = part.first * self.per_row if self.per_row else part.number * self.total
        starts = [start] + [ops.zeros_like(start)] * (len(values.shape) - 1)
        values = ops.slice_update(values, starts, new_values)
        return values, ops.slice_update(indices, [start], new_indices)

    def merge(self, values: Tensor, indices: Tensor) -> Tensor:
        """Return the values of all parts; where all parts read the same rows, their sum and zeros.

        The full batch reads such rows once, and others, as random ones, once in each part.
        """
        if self.total is None or self.per_row:
            return values
        parts = ops.reshape(values, (-1, self.total, *values.shape[1:]))
        read = ops.reshape(indices, (-1, self.total))
        first = ops.sum(parts, axis=0, keepdims=True)
        summed = ops.concatenate([first, ops.zeros_like(parts[1:])])
        merged = ops.where(ops.all(read == read[:1]), summed, parts)
        return ops.reshape(merged, values.shape)


def zeros(
    sizes: Sequence[LookupSize],
    num_parts: int,
    row_shape: tuple[int, ...],
    dtype: str,
    none: Tensor,
) -> Slices:
    """Return a gradient without lookups, with room for the lookups of all parts of a batch.

    Args:
        none: 0, as a value of the program: an array with this number of rows may grow in a loop.
    """
    rooms = [size.room(num_parts, none) for size in sizes]
    values = tuple(ops.zeros((room, *row_shape), dtype) for room in rooms)
    return Slices(values, tuple(ops.zeros((room,), "int32") for room in rooms))


def add(sizes: Sequence[LookupSize], total: Slices, new: Slices, part: Part) -> Slices:
    """Add the lookups of a part of the batch. The totals of replicas may be added up."""
    new = new if len(new.values) == len(sizes) else new.joined()
    totals = zip(*total, strict=True)
    lookups = zip(sizes, totals, zip(*new, strict=True), strict=True)
    sums = [size.add(before, added, part) for size, before, added in lookups]
    return Slices(tuple(values for values, _ in sums), tuple(indices for _, indices in sums))


def merge(sizes: Sequence[LookupSize], total: Slices) -> Slices:
    """Return the gradient of a batch whose parts are all added."""
    lookups = zip(sizes, *total, strict=True)
    return total._replace(values=tuple(size.merge(*lookup) for size, *lookup in lookups))
