"""Batches: a source, an order and a position in it. The position is two integers."""

import copy
import sys
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.checks import is_count, takes
from wholestep.data.kinds import KeepsPosition, Position, classify
from wholestep.data.leaves import Transform, copying
from wholestep.data.order import ALL, Selection
from wholestep.data.sampler import GrowingSize, Sampler, no_such_position, open_sampler
from wholestep.data.shapes import LengthOptions
from wholestep.data.sizes import BatchSize
from wholestep.data.source import Arrays, IndexedBatches, RowError, Source, open_source
from wholestep.data.stream import BatchStream
from wholestep.errors import BatchError, SpecificationError, message, shown
from wholestep.safety import waiting
from wholestep.tree import Tree


class Batches(KeepsPosition):
    """The batches of a source, epoch after epoch.

    The rows of update t of epoch e are a pure function of (seed, e, t): each epoch is a new
    permutation of all rows, independent of microbatches and machine. Ready-made batches
    (`keras.utils.PyDataset`, generators, `tf.data.Dataset`, `DataLoader`) are used unchanged; a
    PyDataset's batches are shuffled among themselves.

    With `tokens`, rows of similar length make a batch, padded to one of a few fixed shapes, with as
    many rows as the budget allows; each shape compiles one program. The rows of a shape and the
    batches of all shapes are permuted each epoch. Every row is used once; a row that is too long is
    an error, and a shape's last batch may have fewer rows. Leaves whose rows differ in dtype are
    loaded in their common dtype.

    Args:
        source: nested arrays with a leading row axis (sparse ones too), a sequence of rows
            (`__len__` and `__getitem__`), a `keras.utils.PyDataset`, or an iterable of batches. A
            row is an array, a number, or a dict, tuple or list of them; a list of numbers is an
            array. A list of arrays is one array for each leaf of the rows; under `tokens` a list of
            vectors is a list of rows.
        batch_size: rows in an update, 32 if not given; not for ready-made batches. The last may be
            short: none is lost. Batches that grow: a list of (update, rows), `[(0, 64), (1000,
            256)]`, or a function of the update or of the epoch, `lambda epoch: 64 * 2 ** epoch`;
            both are counted from 0, at the first batch of the data.
        seed, shuffle: the integer seed of the order, and whether rows are permuted; "batch": within
            their batch.
        tokens: instead of `batch_size`, the size of a batch, padding included, over all its
            sequences: rows times the sum of their padded lengths. For ragged rows, or arrays that
            are padded along axis 1.
        length: the length of every row: int (rows,), for every leaf of a row that has an axis; or a
            nest of such arrays with the length of each part of a row, `{"source": ..., "target":
            ...}`; or a function of a row that returns its length or such a nest: `lambda row:
            len(row["text"])`.
        boundaries: the shapes: integers, or nests of integers where `length` is a nest. None
            chooses the fewest shapes, at most 12, whose padded size is within 5 % of the best 12
            shapes.
        pad: the padding value of ragged rows, and of arrays that are narrower than their shape: a
            number, or a nest that names leaves, `{"labels": -100}`.
        truncate: whether sequences are cut off at the largest of the boundaries rather than
            refused.
        pack: whether several rows (dicts of sequences of one length) share a row as long as the
            longest, or as the one boundary. Adds the int32 leaves `segment_ids` (from 1; 0 in the
            padding) and `positions` (from 0).
        transform: a function of every loaded batch; with `tokens`, of the padded or packed batch,
            `segment_ids` and `positions` included. Its results are copied: it may fill the same
            arrays again. Arrays without `tokens` are transformed once, as a whole.

    Raises:
        SpecificationError: a batch size below 1, or any for ready-made batches; a seed that is not
            an integer; a length, boundary or padding that does not belong to these rows.
        BatchError: the source holds no rows, or leaves of different length; a row that no shape
            holds, that exceeds the budget, or for which the `length` function fails.

    >>> import numpy as np
    >>> data = Batches({"x": np.arange(10)}, batch_size=4, seed=7)
    >>> len(data), [len(data.rows(0, step)) for step in range(3)]
    (3, [4, 4, 2])
    >>> data.seek(epoch=1, step=2)
    >>> data.position
    (1, 2)
    >>> rows = [{"text": np.arange(length)} for length in (3, 9, 4, 3, 10)]
    >>> data = Batches(rows, tokens=24, length=[3, 9, 4, 3, 10], boundaries=[4, 10])
    >>> data.shapes
    [(3, 4), (2, 10)]
    >>> sorted(batch["text"].shape for batch in data)
    [(2, 10), (3, 4)]
    """

    @takes(
        "Batches takes the data as one argument, labels and weights included, and settings by "
        "name.",
        "Batches((x, y), batch_size=32), or Batches({'x': x, 'y': y}) for an objective.",
    )
    def __init__(
        self,
        source: object,
        batch_size: BatchSize = None,
        *,
        seed: int = 0,
        shuffle: bool | str = True,
        tokens: int | None = None,
        length: Tree | Callable = None,
        boundaries: Tree = None,
        pad: Tree = 0,
        truncate: bool = False,
        pack: bool = False,
        transform: Transform | None = None,
    ):
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            must = "seed must be a whole number."
            raise SpecificationError(message(must, shown(seed), "seed=0."))
        self.source: Source = open_source(classify(source), transform, by_length=tokens is not None)
        self._stream: BatchStream | None = None
        self._numbered: IndexedBatches | None = None
        self._at = [0, 0, 0]
        self.unused: list = []  # ready-made batches that a feed loaded and its loop did not use
        self._prepare: Transform | None = None
        options = LengthOptions(length, boundaries, pad, truncate, pack)
        self.sampler: Sampler = open_sampler(
            self.source, batch_size, tokens, options, int(seed), shuffle
        )
        if isinstance(self.sampler, BatchStream):
            self._stream = self.sampler
        elif isinstance(self.sampler, IndexedBatches):
            self._numbered = self.sampler

    def __repr__(self) -> str:
        num = self.num_batches
        batches = f"{'an unknown number of' if num is None else num} batches an epoch"
        epoch, step = self.position
        return f"<Batches: {batches}; next: batch {step} of epoch {epoch}>"

    @property
    def arrays(self) -> Any:
        """The source's arrays, if their rows are the rows of batches; None for any other source."""
        if isinstance(self.source, Arrays) and self._prepare is None:
            return self.source.arrays
        return None

    @property
    def is_ready(self) -> bool:
        """Whether the batches come ready-made."""
        return self._stream is not None or self._numbered is not None

    @property
    def is_stream(self) -> bool:
        """Whether the batches come one after the other, without random access."""
        return self._stream is not None

    @property
    def is_iterator(self) -> bool:
        """Whether the batches are an iterator's, which cannot restart."""
        return self._stream is not None and not self._stream.begins_again

    @property
    def may_depend_on_updates(self) -> bool:
        """Whether a batch may depend on the updates before it, as of a generator."""
        return self._stream is not None and not self._stream.prefetches

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the epoch of the position; None if unknown."""
        return self.num_batches_in(self.position[0])

    def num_batches_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch; None if unknown.

        Where the batches of a `PyDataset` differ in number by epoch, it is that of now.
        """
        if isinstance(self.sampler, GrowingSize):
            return self.sampler.num_batches_in(epoch)
        return self.sampler.num_batches

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The rows and the padded lengths of a full batch, for every shape under a token budget."""
        return self.sampler.batch_shapes

    @property
    def has_short_batch(self) -> bool:
        """Whether a batch may have fewer rows than the others of its shape."""
        return self.sampler.has_short_batch

    def __len__(self) -> int:
        """The number of batches in the epoch of the position."""
        num = self.num_batches
        if num is None:
            raise TypeError("This source has no known number of batches.")
        return num

    def seek(self, epoch: int, step: int = 0) -> None:
        """Go to a position: the next batch is batch `step` of `epoch`. A stream runs forward to it.

        The position after the last batch is the beginning of the next epoch. An iterator keeps its
        next batch. A loop of `fit` or `steps` over the batches must have ended: it raises an error
        when it goes on.

        Raises:
            BatchError: there is no such position; a stream is then at the beginning of its epoch.
        """
        are_counts = is_count(epoch, 0) and is_count(step, 0)
        num = self.num_batches_in(int(epoch)) if are_counts else self.num_batches
        if not are_counts or (num is not None and step > num):
            raise no_such_position(epoch, step, num)
        position = (int(epoch), int(step))
        if step and step == num:
            position = (int(epoch) + 1, 0)
        self.note_move()
        if self._stream is None:
            self.unused.clear()
        elif not self.is_iterator:
            self._run_to(self._stream, *position)
        self.position = position

    def _run_to(self, stream: BatchStream, epoch: int, step: int) -> Tree:
        """Restart a stream, unless it is at its beginning, and run forward to a step."""
        self._restart(stream)
        self.position = (epoch, 0)
        with waiting():
            done, last = stream.skip(step)
        if done < step:
            raise no_such_position(epoch, step, done)
        return last

    def _restart(self, stream: BatchStream) -> None:
        if self.position[1] or self.unused:
            stream.restart()
            self.unused.clear()
            self.position = (self.position[0], 0)

    def run_forward(self, epoch: int, step: int) -> Any:
        """Run from the beginning to a position, with all side effects of the data.

        The epoch hooks of a data set are called for every epoch, as they may shuffle; a stream runs
        every pass, and its last batch is returned, unless batches are prepared.

        Raises:
            BatchError: there is no such position.
        """
        if self._numbered is not None:
            self._numbered.run_forward(epoch, step)
        if self._stream is None:
            self.seek(epoch, step)
            return None
        last = None
        self._restart(self._stream)
        with waiting():
            for _ in range(epoch):
                last = self._stream.skip(sys.maxsize)[1]
        if step:
            last = self._run_to(self._stream, epoch, step)
        self.position = (epoch, step)
        return last if self._prepare is None else None

    @property
    def stream_state(self) -> Any:
        """The state of a stream after the last batch taken; None if the stream has no state."""
        return None if self._stream is None else self._stream.state

    def known_stream_state(self) -> Any:
        """Return a state of the stream, for its kind; None if the stream has no state."""
        with waiting():
            return None if self._stream is None else self._stream.known_state(self.position[1])

    def restore_stream(self, position: Position, state: object) -> None:
        """Restore a stream's position and the state that it had there."""
        assert self._stream is not None
        self._stream.restore(state)
        self.unused.clear()
        self.position = position

    def rewind(self) -> None:
        """Go to the first batch of the first epoch; an iterator stays where it is."""
        if not self.is_iterator:
            self.seek(0)

    def in_order(self) -> "Batches":
        """Return the same batches in one order for all epochs, from the first (no iterator's)."""
        if self.is_iterator:
            return self
        ordered = copy.copy(self)
        ordered.position = (0, 0)
        ordered.unused.clear()
        ordered.sampler = self.sampler.in_order()
        if isinstance(ordered.sampler, BatchStream):
            ordered._stream = ordered.sampler
        return ordered

    def prepared(self, prepare: Transform) -> "Batches":
        """Return the same batches, each prepared; both have the same position."""
        prepared = copy.copy(self)
        prepared._at = self._at
        prepared.unused = self.unused
        prepared._prepare = copying(prepare)
        return prepared

    def __copy__(self) -> "Batches":
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._at = list(self._at)
        other.unused = list(self.unused)
        return other

    # ---- the batches ----

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the row numbers of a batch, int64 (rows,); for a PyDataset, the batch's number."""
        return self.select(epoch, step).rows

    def select(self, epoch: int, step: int) -> Selection:
        """Select the rows of a batch; not of a stream, which has no row numbers."""
        num = self.num_batches_in(epoch)
        if step < 0 or (num is not None and step >= num):
            raise no_such_position(epoch, step, num)
        assert not isinstance(self.sampler, BatchStream)
        return self.sampler.select(epoch, step)

    def load(self, epoch: int, step: int) -> Any:
        """Return a batch, as numpy arrays, nested as the source nests them."""
        selection = self.select(epoch, step)
        assert not isinstance(self.sampler, BatchStream)
        if self._numbered is not None:  # without the next ones, which workers would load ahead
            selection = selection._replace(layout=selection.rows)
        try:
            return self._prepared(self.sampler.load(selection))
        except RowError as error:
            raise error.at(epoch, step) from error.__cause__

    def _prepared(self, batch: Tree) -> Any:
        return batch if self._prepare is None else self._prepare(batch)

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over the rest of the epoch's batches."""
        epoch = self.position[0]
        while self.position[0] == epoch:
            try:
                yield next(self)
            except StopIteration:
                return

    def __next__(self) -> Any:
        """Return the next batch and move on; StopIteration at the end of an epoch of a stream."""
        epoch, step = self.position
        try:
            unused = self.take_unused(self.position)
            if unused is not None:
                self.position = unused.end
                return unused.host
            batch, self.position = self.take(self.position)
        except StopIteration:
            self.position = (epoch + 1, 0)
            raise
        except RowError as error:
            raise error.at(epoch, step) from error.__cause__
        return batch

    def take(
        self,
        position: Position,
        selection: Selection | None = None,
        places: np.ndarray | None = None,
    ) -> tuple[Any, Position]:
        """Return the batch at a position, or its rows at `places`, and the position after it.

        A stream's batch is the next one.
        """
        epoch, step = position
        if self._stream is not None:
            return self._draw(self._stream, step), (epoch, step + 1)
        if self._numbered is not None and step == 0:
            self._numbered.begin_epoch()
        assert not isinstance(self.sampler, BatchStream)
        selection = selection or self.select(epoch, step)
        batch = self.sampler.load(selection, ALL if places is None else places)
        batch = self._prepared(batch)
        num = self.num_batches_in(epoch)
        if num is None or step + 1 < num:
            return batch, (epoch, step + 1)
        if self._numbered is not None:
            self._numbered.end_epoch()
        return batch, (epoch + 1, 0)

    def _draw(self, stream: BatchStream, step: int) -> Any:
        """Return a stream's next batch; a batch whose preparation fails is drawn again."""
        batch = stream.peek(step)
        if batch is None:
            raise StopIteration
        batch = self._prepared(batch)
        stream.draw(step)
        return batch

    def take_unused(self, position: Position) -> Any:
        """Return the next batch that a feed loaded and its loop did not use; None if there is none.

        Raises:
            StopIteration: it belongs to the next epoch.
        """
        if not self.unused:
            return None
        if self.unused[0].start[0] > position[0]:
            raise StopIteration
        return self.unused.pop(0)

    def example(self) -> Any:
        """Return a batch, for its shapes, without consuming it.

        Raises:
            BatchError: there is none, or its leaves differ in their number of rows.
        """
        position = (0, 0) if self._stream is None else self.position
        try:
            batch = self._example()
            if self.is_ready:
                tree.num_rows(batch)
        except BatchError as error:
            raise error.at(*position) from error.__cause__
        return batch

    def _example(self) -> Tree:
        if self.unused:
            return self.unused[0].host
        with waiting():
            if self._stream is None:
                return self.load(0, 0)
            step = self.position[1]
            batch = self._stream.peek(step)
            if batch is None and step and not self.is_iterator:
                batch = self._stream.first()
        if batch is None:
            must = "The data must have at least one batch."
            raise BatchError(
                message(must, "none", "pass a stream with a whole batch that is not spent.")
            )
        return self._prepared(batch)

    @property
    def has_ended(self) -> bool:
        """Whether an iterator has ended; it cannot restart."""
        return self._stream is not None and self.is_iterator and self._stream.has_ended

    def is_spent(self) -> bool:
        """Whether an iterator has no more batches. Waits for its next batch, and keeps it."""
        if self._stream is None or not self.is_iterator or self.unused:
            return False
        with waiting():
            return self._stream.peek(self.position[1]) is None

    def close(self) -> None:
        """End the workers of a PyDataset, if it has some; the next batch starts others."""
        if self._numbered is not None:
            self._numbered.end_workers()
