"""Batches: a source, an order and a position in it. The position is two integers."""

import copy
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.checks import is_count, takes
from wholestep.data.ready import BatchStream, IndexedBatches, RowError
from wholestep.data.sampler import LengthOptions, Sampler, by_length, fixed_size, refuse_sizes
from wholestep.data.source import Arrays, Source, open_source
from wholestep.data.stream import Stream
from wholestep.errors import BatchError, SpecificationError, message, shown
from wholestep.safety import waiting
from wholestep.tree import Tree


class Batches:
    """The batches of a source, epoch after epoch.

    The rows of update t of epoch e are a pure function of (seed, e, t): each epoch is a new permutation of all rows,
    independent of microbatches and machine. Ready-made batches (`keras.utils.PyDataset`, generators,
    `tf.data.Dataset`, `DataLoader`) are used unchanged; a PyDataset's batches are shuffled among themselves.

    With `tokens`, rows of similar length make a batch, padded to one of a few fixed shapes, with as many rows as the
    budget allows; each shape compiles one program. The rows of a shape and the batches of all shapes are permuted each
    epoch. Every row is used once; a row that is too long is an error, and a shape's last batch may have fewer rows.
    Leaves whose rows differ in dtype are loaded in their common dtype.

    Args:
        source: nested arrays with a leading row axis (sparse ones too), a sequence of rows (`__len__` and
            `__getitem__`), a `keras.utils.PyDataset`, or an iterable of batches. A row is an array, a number, or a
            dict, tuple or list of them; a list of numbers is an array. A list of arrays is one array for each leaf of
            the rows; under `tokens` a list of vectors is a list of rows.
        batch_size: rows in an update, 32 if not given; not for ready-made batches. The last may be short: none is lost.
        seed, shuffle: the integer seed of the order, and whether rows are permuted; "batch": within their batch.
        tokens: instead of `batch_size`, the size of a batch, padding included, over all its sequences: rows times the
            sum of their padded lengths. For ragged rows, or arrays that are padded along axis 1.
        length: the length of every row: int (rows,), for every leaf of a row that has an axis; or a nest of such
            arrays with the length of each part of a row, `{"source": ..., "target": ...}`; or a function of a row that
            returns its length or such a nest: `lambda row: len(row["text"])`.
        boundaries: the shapes: integers, or nests of integers where `length` is a nest. None chooses the fewest
            shapes, at most 12, whose padded size is within 5 % of the best 12 shapes.
        pad: the padding value of ragged rows, and of arrays that are narrower than their shape: a number, or a nest
            that names leaves, `{"labels": -100}`.
        truncate: whether sequences are cut off at the largest of the boundaries rather than refused.
        pack: whether several rows (dicts of sequences of one length) share a row as long as the longest, or as the one
            boundary. Adds the int32 leaves `segment_ids` (from 1; 0 in the padding) and `positions` (from 0).
        transform: a function of every loaded batch; with `tokens`, of the padded or packed batch, `segment_ids` and
            `positions` included. Arrays without `tokens` are transformed once, as a whole.

    Raises:
        SpecificationError: a batch size below 1, or any for ready-made batches; a seed that is not an integer; a
            length, boundary or padding that does not belong to these rows.
        BatchError: the source holds no rows, or leaves of different length; a row that no shape holds, that exceeds
            the budget, or for which the `length` function fails.

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
        "Batches takes the data as one argument, labels and weights included, and settings by name.",
        "Batches((x, y), batch_size=32), or Batches({'x': x, 'y': y}) for an objective.",
    )
    def __init__(
        self,
        source: object,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool | str = True,
        tokens: int | None = None,
        length: Tree | Callable[[Tree], Tree] = None,
        boundaries: Tree = None,
        pad: Tree = 0,
        truncate: bool = False,
        pack: bool = False,
        transform: Callable[[Tree], Tree] | None = None,
    ):
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise SpecificationError(message("seed must be a whole number.", shown(seed), "seed=0."))
        seed = int(seed)
        self.source: Source = open_source(source, transform, by_length=tokens is not None)
        self.is_ready: bool = isinstance(self.source, IndexedBatches | BatchStream)
        options = LengthOptions(length, boundaries, pad, truncate, pack)
        refuse_sizes(self.is_ready, batch_size, tokens, options)
        self.sampler: Sampler
        if tokens is not None:
            self.sampler = by_length(self.source, tokens, options, seed, bool(shuffle))
        elif not isinstance(self.source, BatchStream):
            self.sampler = fixed_size(self.source, batch_size, seed, shuffle)
        self.position: tuple[int, int] = (0, 0)
        self._stream: Stream | None = Stream(self.source) if isinstance(self.source, BatchStream) else None
        self.unused: list = []  # ready-made batches that a feed loaded and its loop did not use

    def __repr__(self) -> str:
        num = "an unknown number of batches" if self.num_batches is None else f"{self.num_batches} batches"
        return f"<Batches: {num} an epoch; next: batch {self.position[1]} of epoch {self.position[0]}>"

    @property
    def arrays(self) -> Tree | None:
        """The source's arrays; None for any other source."""
        return self.source.arrays if isinstance(self.source, Arrays) else None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        if isinstance(self.source, IndexedBatches | BatchStream):
            return self.source.num_batches
        return self.sampler.num_batches

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The rows of a full batch and the padded length of each sequence, for every shape under a token budget."""
        return [] if isinstance(self.source, BatchStream) else self.sampler.batch_shapes

    @property
    def comes_short(self) -> bool:
        """Whether a batch may have fewer rows than the others of its shape."""
        return self.is_ready or self.sampler.comes_short

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        if (num := self.num_batches) is None:
            raise TypeError("This source has no known number of batches.")
        return num

    def seek(self, epoch: int, step: int = 0) -> None:
        """Go to a position: the next batch is batch `step` of `epoch`. A stream runs forward to it.

        The position after the last batch is the beginning of the next epoch. An iterator keeps its next batch.

        Raises:
            BatchError: there is no such position; a stream is then at the beginning of its epoch.
        """
        num = self.num_batches
        if not all(is_count(n, 0) for n in (epoch, step)) or (num is not None and step > num):
            raise _no_such_place(epoch, step, num)
        position = (int(epoch) + 1, 0) if step and step == num else (int(epoch), int(step))
        if self._stream is None:
            self.unused = []
        elif self._stream.begins_again:
            self._run_to(self._stream, *position)
        self.position = position

    def _run_to(self, stream: Stream, epoch: int, step: int) -> Tree:
        """Restart a stream, unless it is at its beginning, and run forward to a step."""
        if self.position[1] or self.unused:
            stream.restart()
            self.unused = []
        self.position = (epoch, 0)
        with waiting():
            done, last = stream.skip(step)
        if done < step:
            raise _no_such_place(epoch, step, done)
        return last

    def run_forward(self, epoch: int, step: int) -> Tree:
        """Run from the beginning to a position, with all side effects of the data. Return a stream's last batch.

        The epoch hooks of a data set are called for every epoch, as they may shuffle; a stream runs every pass.

        Raises:
            BatchError: there is no such position.
        """
        if isinstance(self.source, IndexedBatches):
            self.source.run_forward(epoch, step)
        if self._stream is None:
            return self.seek(epoch, step)
        with waiting():
            last = self._stream.run_through(epoch)
        last = self._run_to(self._stream, epoch, step) if step else last
        self.position = (epoch, step)
        return last

    @property
    def stream_state(self) -> Any:
        """The state of a stream after the last batch taken; None if the stream has no state."""
        return None if self._stream is None else self._stream.state

    def known_stream_state(self) -> Any:
        """Return a state of the stream, for its kind; None if the stream has no state."""
        with waiting():
            return None if self._stream is None else self._stream.known_state(self.position[1])

    def go_on(self, position: tuple[int, int], state: object) -> None:
        """Restore a stream's position and the state that it had there."""
        assert self._stream is not None
        self._stream.go_on(state)
        self.position = position

    def rewind(self) -> None:
        """Go to the first batch of the first epoch; an iterator stays where it is."""
        if self._stream is None or self._stream.begins_again:
            self.seek(0)

    def in_order(self) -> "Batches":
        """Return the same batches in one order for all epochs, from the first; for an iterator, itself."""
        if self._stream is not None and not self._stream.begins_again:
            return self
        ordered = copy.copy(self)
        ordered.position, ordered.unused = (0, 0), []
        if isinstance(self.source, BatchStream):
            ordered._stream = Stream(self.source)
        else:
            ordered.sampler = self.sampler.in_order()
        return ordered

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the row numbers of a batch, int64 (rows,); for a PyDataset, the batch's number."""
        self._check(epoch, step)
        return self.sampler.rows(epoch, step)

    def load(self, epoch: int, step: int, places: np.ndarray | slice = slice(None)) -> Tree:
        """Return a batch, or its rows at these places, as numpy arrays, nested as the source nests them."""
        self._check(epoch, step)
        try:
            return self.sampler.load(epoch, step, places)
        except RowError as error:
            raise error.at(epoch, step) from error.__cause__

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over the rest of the epoch's batches."""
        epoch = self.position[0]
        while True:
            try:
                batch = next(self)
            except StopIteration:
                return
            yield batch
            if self.position[0] != epoch:
                return

    def __next__(self) -> Tree:
        """Return the next batch and move on; the end of a stream ends the epoch and raises StopIteration."""
        try:
            batch, self.position = self.take(self.position)
        except StopIteration:
            self.position = (self.position[0] + 1, 0)
            raise
        return batch

    def take(self, position: tuple[int, int], places: np.ndarray | slice = slice(None)) -> tuple[Tree, tuple[int, int]]:
        """Return the batch at a position and the position after it; for a stream, its next batch."""
        if self.unused:
            batch = self.unused.pop(0)
            return batch.host, batch.end
        if self._stream is not None:
            return self._stream.draw(position[1]), (position[0], position[1] + 1)
        if isinstance(self.source, IndexedBatches) and position[1] == 0:
            self.source.begin_epoch()
        batch, after = self.load(*position, places), self.after(*position)
        if isinstance(self.source, IndexedBatches) and after[0] > position[0]:
            self.source.end_epoch()
        return batch, after

    def after(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the next position; after the last batch of an epoch, the start of the next epoch."""
        num = self.num_batches
        return (epoch, step + 1) if num is None or step + 1 < num else (epoch + 1, 0)

    def _check(self, epoch: int, step: int) -> None:
        num = self.num_batches
        if step < 0 or (num is not None and step >= num):
            raise _no_such_place(epoch, step, num)

    def example(self) -> Tree:
        """Return a batch, for its shapes, without consuming it.

        Raises:
            BatchError: there is none, or its leaves differ in their number of rows.
        """
        epoch, step = (0, 0) if self._stream is None else self.position
        try:
            batch = self._example()
            if self.is_ready:
                tree.num_rows(batch)
        except BatchError as error:
            raise error.at(epoch, step) from error.__cause__
        return batch

    def _example(self) -> Tree:
        with waiting():
            if self._stream is None:
                return self.load(0, 0)
            if self.unused:
                return self.unused[0].host
            batch = self._stream.peek(self.position[1])
            if batch is None and self._stream.begins_again and self.position[1]:
                batch = self._stream.first()
        if batch is None:
            must = "The data must have at least one batch."
            raise BatchError(message(must, "none", "pass a stream that is not spent."))
        return batch

    @property
    def has_ended(self) -> bool:
        """Whether an iterator has ended; it cannot restart."""
        return self._stream is not None and self._stream.has_ended and not self._stream.begins_again

    def is_spent(self) -> bool:
        """Whether an iterator has no more batches. Waits for its next batch, and keeps it."""
        if self._stream is None or self._stream.begins_again or self.unused:
            return False
        with waiting():
            return self._stream.peek(self.position[1]) is None


def _no_such_place(epoch: object, step: object, num: int | None) -> BatchError:
    received = f"epoch {epoch}, step {step}" + ("" if num is None else f" where an epoch has {num} batches")
    must = "A position is an epoch and the number of one of its batches, both counted from 0."
    return BatchError(message(must, received, "seek(*batches.position) of such batches, or seek(epoch)."))


def sized(source: object, batch_size: int | None, **how: Any) -> Batches:
    """Return the batches of a source; `batch_size` is ignored for ready-made batches."""
    batches = Batches(source, **how)
    return batches if batches.is_ready or batch_size is None else Batches(source, batch_size, **how)
