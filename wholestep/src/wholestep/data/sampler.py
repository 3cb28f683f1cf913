"""The rows of a batch, by (seed, epoch, step): a fixed number, of similar lengths, or packed."""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from wholestep.checks import count
from wholestep.data.buckets import Buckets, make_buckets
from wholestep.data.order import ALL, Order, Places, Selection
from wholestep.data.packing import Packs, make_packs
from wholestep.data.sequences import measure
from wholestep.data.shapes import LengthOptions
from wholestep.data.sizes import Run, SizeSchedule, runs_of, size_schedule
from wholestep.data.source import Arrays, IndexedBatches, IndexedRows, Source, SparseArrays
from wholestep.data.stream import BatchStream
from wholestep.errors import BatchError, SpecificationError, message, shown, warn
from wholestep.tree import Tree

_SIZE = (
    "batch_size=32, or leave it out; labels are part of the source: Batches((x, y), batch_size=32)."
)


@dataclass(frozen=True)
class _RowBatches:
    """Batches of rows, each as large as its run says; the last of an epoch may have fewer."""

    source: Arrays | SparseArrays | IndexedRows
    order: Order
    batch_shapes: ClassVar[list[tuple[int, ...]]] = []  # there is no token budget

    def run(self, epoch: int, step: int) -> Run:
        """Return the batches of one size to which a batch belongs."""
        raise NotImplementedError

    def select(self, epoch: int, step: int) -> Selection:
        """Select the rows of a batch."""
        run = self.run(epoch, step)
        start = run.place(step)
        rows = self.order.rows(epoch, start, min(start + run.size, self.order.num_rows))
        return Selection(rows, rows, run.size)

    def load(self, selection: Selection, places: Places = ALL) -> Tree:
        """Return a batch, or its rows at these places, as numpy arrays."""
        return self.source.load(selection.rows[places])

    def in_order(self) -> Self:
        """Return batches of the rows in ascending order."""
        return replace(self, order=replace(self.order, shuffle=False))


@dataclass(frozen=True)
class FixedSize(_RowBatches):
    """Batches of `size` rows."""

    size: int

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.order.num_rows // self.size)

    @property
    def has_short_batch(self) -> bool:
        """Whether the last batch has fewer rows."""
        return self.order.num_rows % self.size != 0

    def run(self, epoch: int, step: int) -> Run:
        """Return all batches of the epoch."""
        return Run(0, 0, self.size, self.num_batches)


@dataclass(frozen=True)
class GrowingSize(_RowBatches):
    """Batches whose sizes a schedule gives; the number of batches differs by epoch."""

    size: SizeSchedule
    has_short_batch: ClassVar[bool] = True
    # by the epochs so far: its first update, and its runs
    _epochs: dict[int, tuple[int, list[Run]]] = field(default_factory=dict, compare=False)

    def num_batches_in(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        last = self._runs(epoch)[-1]
        return last.first + last.num

    def run(self, epoch: int, step: int) -> Run:
        """Return the batches of one size to which a batch belongs."""
        runs = self._runs(epoch)
        return runs[bisect_right(runs, step, key=lambda run: run.first) - 1]

    def _runs(self, epoch: int) -> list[Run]:
        known = self._epochs
        first = 0
        for number in range(len(known), epoch + 1):
            if number:
                before, runs = known[number - 1]
                first = before + runs[-1].first + runs[-1].num
            known[number] = first, list(runs_of(self.size, self.order.num_rows, number, first))
        return known[epoch][1]


Sampler = FixedSize | GrowingSize | Buckets | Packs | IndexedBatches | BatchStream


def open_sampler(
    source: Source,
    batch_size: object,
    tokens: int | None,
    options: LengthOptions,
    seed: int,
    shuffle: bool | str,
) -> Sampler:
    """Return batches of `batch_size` rows, 32 if it is None, or of `tokens` places.

    Ready-made batches keep their sizes.

    Raises:
        SpecificationError: a size below 1, an unknown `shuffle`, or options that do not fit the
            rows.
        BatchError: a row that is too long.
    """
    is_ready = isinstance(source, BatchStream | IndexedBatches)
    _refuse_sizes(is_ready, batch_size, tokens, options)
    if isinstance(source, BatchStream):
        return source
    if isinstance(source, IndexedBatches):
        return source.ordered(seed, bool(shuffle))
    if tokens is not None:
        return _by_length(source, tokens, options, seed, bool(shuffle))
    if isinstance(shuffle, str) and shuffle != "batch":
        must = 'shuffle must be True, False or "batch".'
        raise SpecificationError(message(must, shown(shuffle), "shuffle=True, or leave it out."))
    if (schedule := size_schedule(batch_size)) is not None:
        if shuffle == "batch":
            must = 'shuffle="batch" needs batches of one size.'
            raise SpecificationError(message(must, shown(batch_size), "shuffle=True."))
        return GrowingSize(source, Order(source.num_rows, seed, bool(shuffle)), schedule)
    size = 32 if batch_size is None else count("batch_size", batch_size, _SIZE)
    size = min(size, source.num_rows)
    block = size if shuffle == "batch" else 0
    return FixedSize(source, Order(source.num_rows, seed, bool(shuffle), block=block), size)


def _by_length(
    source: Source, tokens: int, options: LengthOptions, seed: int, shuffle: bool
) -> Buckets | Packs:
    tokens = count("tokens", tokens, "the places of a batch, such as 4096.")
    if options.length is None:
        must = "tokens needs the length of every row."
        attempt = "length=lambda row: len(row['tokens'])."
        raise SpecificationError(message(must, "no length", attempt))
    if options.truncate and options.boundaries is None:
        must = "truncate=True needs boundaries at which rows are cut off."
        attempt = "boundaries=[..., the longest kept length]."
        raise SpecificationError(message(must, "no boundaries", attempt))
    assert isinstance(source, Arrays | IndexedRows)
    sequences = measure(source, options.length, options.pad)
    if options.pack:
        return make_packs(sequences, tokens, options, seed, shuffle)
    buckets = make_buckets(sequences, tokens, options, seed, shuffle)
    is_padded = isinstance(source, Arrays) and np.all(buckets.shapes <= sequences.widths)
    if is_padded and options.pad != 0:
        warn("pad has no effect: arrays hold their padding already.")
    return buckets


def _refuse_sizes(
    is_ready: bool, batch_size: object, tokens: object, options: LengthOptions
) -> None:
    """Refuse sizes of ready-made batches, both sizes at once, and length options without `tokens`.

    Raises:
        SpecificationError: such sizes or options were given.
    """
    sizes = {"batch_size": batch_size, "tokens": tokens}
    passed = [name for name, size in sizes.items() if size is not None]
    received = " and ".join(f"{name}={sizes[name]}" for name in passed)
    if is_ready and passed:
        must = "Ready-made batches have their own size."
        attempt = f"leave {passed[0]} out."
        if tokens is not None:
            must = (
                "Ready-made batches have their own size; rows under a token budget need "
                "__len__ and __getitem__."
            )
            attempt = "list(rows) if these are single rows, or leave tokens out."
        raise SpecificationError(message(must, received, attempt))
    if len(passed) > 1:
        must = "A batch is measured in rows or in tokens."
        raise SpecificationError(message(must, received, "leave batch_size or tokens out."))
    defaults = LengthOptions._field_defaults
    changed = [k for k, value in options._asdict().items() if value is not defaults[k]]
    if tokens is None and changed:
        must = "Batches by length need a token budget."
        received = f"{', '.join(changed)} without tokens"
        raise SpecificationError(message(must, received, "tokens=4096."))


def no_such_position(epoch: object, step: object, num: int | None) -> BatchError:
    """Return the error for a position that batches do not have."""
    received = f"epoch {epoch}, step {step}"
    if num is not None:
        received += f" where an epoch has {num} batches"
    must = "A position is an epoch and the number of one of its batches, both counted from 0."
    attempt = "seek(*batches.position) of such batches, or seek(epoch)."
    return BatchError(message(must, received, attempt))
