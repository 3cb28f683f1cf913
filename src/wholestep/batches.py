"""Batches: a source, an order and a place in it. The place is two integers."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, say
from wholestep.order import Order
from wholestep.source import Arrays, Items, Ready, Stream, open_source

Tree = Any


class Batches:
    """The batches of a source, epoch after epoch.

    Which rows make update t of epoch e is a pure function of (seed, e, t): a full permutation of the rows, another one
    each epoch, whatever the microbatches or the machine. Batches that the user made (`keras.utils.PyDataset`,
    generators, `tf.data.Dataset`, `DataLoader`) are taken as they are; a PyDataset's are shuffled among themselves.

    Args:
        source: nested arrays with a leading row axis, a sequence of rows (`__len__` and `__getitem__`), a
            `keras.utils.PyDataset`, or an iterable of batches.
        batch_size: rows in an update, 32 if not given; not for ready-made batches. The last batch of an epoch may be
            shorter; no row is dropped and none is used twice.
        seed: the seed of the order.
        shuffle: whether rows are permuted at all.

    Raises:
        SpecificationError: a batch size below 1, or one for batches that are ready-made.
        BatchError: the source holds no rows, or leaves of different length.

    >>> import numpy as np
    >>> data = Batches({"x": np.arange(10)}, batch_size=4, seed=7)
    >>> len(data), [len(data.rows(0, step)) for step in range(3)]
    (3, [4, 4, 2])
    >>> data.seek(epoch=1, step=2)
    >>> data.position
    (1, 2)
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[[Tree], Tree] | None = None,
    ):
        self.source = open_source(source, transform)
        self.is_ready = isinstance(self.source, Ready | Stream)
        self.batch_size = self._check(batch_size)
        self.seed = seed
        self.shuffle = shuffle
        self.position = (0, 0)
        self._stream: Iterator[Tree] | None = None
        self._peeked: Tree | None = None
        self.unused: list = []  # what a feed loaded from a stream, but its loop did not use
        if not isinstance(self.source, Stream):
            self.order = Order(self._num_items(), seed, shuffle and self.num_batches is not None)

    @property
    def arrays(self) -> Tree | None:
        """The source's arrays, if that is what it is."""
        return self.source.arrays if isinstance(self.source, Arrays) else None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if only running through them can tell."""
        if isinstance(self.source, Ready | Stream):
            return self.source.num_batches
        return -(-self.source.num_rows // self.batch_size)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        if self.num_batches is None:
            raise TypeError("This source does not tell how many batches it has.")
        return self.num_batches

    def seek(self, epoch: int, step: int = 0) -> None:
        """Go to a place; the next batch is the one of this epoch and step. A stream runs forward to it."""
        if isinstance(self.source, Stream) and self.source.begins_again and (self.position[1] or step):
            self._stream = self._peeked = None
            for _ in range(step):
                next(self)
        self.position = (epoch, step)

    def in_order(self) -> "Batches":
        """Return the same batches from the first row to the last, with a place of their own; a stream is itself."""
        if isinstance(self.source, Stream):
            return self
        ordered = copy.copy(self)
        ordered.order, ordered.position = Order(self.order.num_rows, shuffle=False), (0, 0)
        return ordered

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Return the row numbers of a batch, int64 of shape (rows,); of a PyDataset, its own number."""
        start, size = (step, 1) if self.is_ready else (step * self.batch_size, self.batch_size)
        return self.order.rows(epoch, start, min(start + size, self.order.num_rows))

    def load(self, rows: np.ndarray) -> Tree:
        """Return these rows as numpy arrays, nested as the source nests them."""
        if isinstance(self.source, Ready):
            return self.source.load(int(rows[0]))
        assert isinstance(self.source, Arrays | Items)
        return self.source.load(rows)

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

    def take(self, place: tuple[int, int]) -> tuple[Tree, tuple[int, int]]:
        """Return the batch at a place and the place after it; a stream has only its next one."""
        if isinstance(self.source, Stream):
            return self._pull(), (place[0], place[1] + 1)
        if isinstance(self.source, Ready) and place[1] == 0:
            self.source.begin_epoch()
        batch, after = self.load(self.rows(*place)), self.after(*place)
        if isinstance(self.source, Ready) and after[0] > place[0]:
            self.source.end_epoch()
        return batch, after

    def after(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the place after this one; after the last batch of an epoch stands the next epoch."""
        return (epoch + 1, 0) if step + 1 == self.num_batches else (epoch, step + 1)

    def _pull(self) -> Tree:
        assert isinstance(self.source, Stream)
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        if self._stream is None:
            self._stream = iter(self.source)
        try:
            return next(self._stream)
        except StopIteration:
            self._stream = None if self.source.begins_again else self._stream
            raise

    def example(self) -> Tree:
        """Return a first batch, for its shapes. Uses nothing up."""
        if not isinstance(self.source, Stream):
            return self.load(self.rows(0, 0))
        if self._peeked is None:
            if self._stream is None:
                self._stream = iter(self.source)
            self._peeked = next(self._stream, None)
            if self._peeked is None:
                raise BatchError(
                    say("The data must have at least one batch.", "none", "pass a stream that is not spent.")
                )
        return self._peeked

    def _num_items(self) -> int:
        if isinstance(self.source, Ready):
            return self.source.num_batches or np.iinfo(np.int64).max
        assert isinstance(self.source, Arrays | Items)
        return self.source.num_rows

    def _check(self, batch_size: int | None) -> int:
        if self.is_ready and batch_size is not None:
            raise SpecificationError(
                say("Ready-made batches have their own size.", f"batch_size={batch_size}", "leave batch_size out.")
            )
        size = 32 if batch_size is None else batch_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise SpecificationError(
                say("batch_size must be a whole number of at least 1.", batch_size, "leave it out for 32.")
            )
        return int(size) if self.is_ready or size <= self._num_items() else self._num_items()


def in_sequence(source: Any, batch_size: int | None) -> Batches:
    """Return the batches of a source in their own order; the batch size is for those that are not ready-made."""
    batches = Batches(source, shuffle=False)
    return batches if batches.is_ready or batch_size is None else Batches(source, batch_size, shuffle=False)


def check_weights(batch: Tree, *, all_zero: bool) -> None:
    """Refuse sample weights that are negative or not finite, or (`all_zero`) that weigh no row at all.

    Raises:
        BatchError: as said, naming the first row.
    """
    if not isinstance(batch, tuple) or len(batch) < 3:
        return
    for label, weight in tree.named_leaves(batch[2], "sample_weight"):
        bad = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)).reshape(len(weight), -1).all(axis=1))
        if bad.size:
            raise BatchError(
                say(
                    f"{label} must be finite and not negative.",
                    f"{weight[bad[0]]} in row {bad[0]}",
                    "give rows that shall not count the weight 0.",
                )
            )
        if all_zero and not np.any(weight):
            raise BatchError(
                say(f"{label} must weigh at least one row.", "weights that are all 0", "leave sample_weight out.")
            )
