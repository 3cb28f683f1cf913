"""Sources of rows: arrays, a sequence of rows, ready-made batches, or a stream of batches."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras
import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.kinds import Data, Kind
from wholestep.data.leaves import (
    Transform,
    as_rows,
    by_leaf,
    checked,
    copied_batch,
    copying,
    refuse_lists,
    stack_column,
    to_numpy,
    with_arrays,
    without_none,
)
from wholestep.data.order import ALL, Order, Places, Selection
from wholestep.data.sparse import has_sparse
from wholestep.data.stream import BatchStream, length_of
from wholestep.data.workers import Forks, Threads, Workers, warn_of_copies
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_ENDLESS = np.iinfo(np.int64).max
_UNEVEN = "tokens=... and length=..., if rows are of uneven length."


def _same(batch: Tree) -> Tree:
    return batch


@dataclass(frozen=True)
class Arrays:
    """Nested arrays with a leading row axis; `transform` is for padded and packed batches."""

    arrays: Tree
    num_rows: int
    transform: Transform = _same

    def load(self, rows: ndarray) -> Tree:
        """Return these rows of every leaf."""
        return tree.map_leaves(lambda leaf: leaf[rows], self.arrays)

    def list_rows(self, rows: ndarray) -> list:
        """Return these rows, as a list."""
        return [self.load(row) for row in rows]


@dataclass(frozen=True)
class SparseArrays:
    """Nested arrays with one leading row axis, some of them sparse; their batches are dense."""

    arrays: Tree
    num_rows: int
    transform: Transform

    def load(self, rows: ndarray) -> Tree:
        """Return these rows of every leaf."""
        return self.transform(tree.map_leaves(lambda leaf: to_numpy(leaf[rows]), self.arrays))


@dataclass(frozen=True)
class IndexedRows:
    """A sequence with `__len__` and `__getitem__`, whose items are rows."""

    items: Any
    num_rows: int
    transform: Transform

    def load(self, rows: ndarray) -> Tree:
        """Return these items, stacked."""
        loaded = self._get(rows)
        if isinstance(loaded, dict):  # a Hugging Face dataset returns columns
            batch = {k: stack_column((k,), rows, v, _UNEVEN) for k, v in loaded.items()}
        else:
            columns = by_leaf(loaded, rows, loaded[0])
            leaves = [stack_column(path, rows, column, _UNEVEN) for path, column in columns]
            batch = keras.tree.pack_sequence_as(with_arrays(loaded[0]), leaves)
        return checked(self.transform(batch))

    def list_rows(self, rows: ndarray) -> list:
        """Return these items unchanged, as a list."""
        loaded = self._get(rows)
        if not isinstance(loaded, dict):
            return loaded
        values = zip(*loaded.values(), strict=True)
        return [dict(zip(loaded, row, strict=True)) for row in values]

    def _get(self, rows: ndarray) -> Any:
        numbers = rows.tolist()
        loaded: list = []
        try:
            if hasattr(self.items, "__getitems__"):
                return self.items.__getitems__(numbers)
            for number in numbers:
                loaded.append(self.items.__getitem__(number))  # noqa: PERF401 (hides StopIteration)
        except (IndexError, StopIteration) as error:
            missing = f"row {numbers[len(loaded)]}"
            if hasattr(self.items, "__getitems__"):
                missing = f"rows {', '.join(map(str, numbers[:8]))}"
            raise RowError(missing, self.num_rows, error) from error
        return loaded


@dataclass(frozen=True)
class IndexedBatches:
    """Ready-made batches that are loaded by number (`keras.utils.PyDataset`), and their order."""

    batches: Any
    transform: Transform
    workers: Workers | None
    order: Order
    size: ClassVar[int] = 1
    has_short_batch: ClassVar[bool] = True
    batch_shapes: ClassVar[list] = []

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if it is infinite."""
        return length_of(self.batches, lambda batches: batches.num_batches)

    def select(self, epoch: int, step: int) -> Selection:
        """Select a batch by its number; the layout is the numbers of this and the next batches."""
        num_batches = self.num_batches
        order = self.order  # hooks may change the number of batches between epochs
        if num_batches not in (None, order.num_rows):
            order = replace(order, num_rows=num_batches)
        num = 1 if self.workers is None else self.workers.most
        numbers = order.rows(epoch, step, min(step + num, order.num_rows))
        return Selection(numbers[:1], numbers[:1], 0, numbers)

    def load(self, selection: Selection, places: Places = ALL) -> Tree:
        """Return a batch. The workers load the next ones of the epoch meanwhile."""
        get = self.batches.__getitem__
        number = int(selection.rows[0])
        if self.workers is not None:
            self.workers.expect(selection.layout.tolist())
            get = self.workers.take
        try:
            batch = get(number)
        except (IndexError, StopIteration) as error:
            raise RowError(f"batch {number}", self.num_batches, error) from error
        return copied_batch(batch, self.transform)

    def ordered(self, seed: int, shuffle: bool) -> "IndexedBatches":
        """Return the batches in an order; infinitely many are not shuffled."""
        num = self.num_batches
        order = Order(_ENDLESS, seed, shuffle=False) if num is None else Order(num, seed, shuffle)
        return replace(self, order=order)

    def in_order(self) -> "IndexedBatches":
        """Return the batches in the order of their numbers."""
        return replace(self, order=replace(self.order, shuffle=False))

    def begin_epoch(self) -> None:
        """Call the data set's `on_epoch_begin`."""
        self.end_workers()
        self.batches.on_epoch_begin()

    def end_epoch(self) -> None:
        """Call the data set's `on_epoch_end`."""
        self.end_workers()
        self.batches.on_epoch_end()

    def run_forward(self, epoch: int, step: int) -> None:
        """Call the data set's epoch hooks up to a position."""
        for _ in range(epoch):
            self.begin_epoch()
            self.end_epoch()
        if step:
            self.begin_epoch()

    def end_workers(self) -> None:
        """End the workers, if there are some; the next batch starts others."""
        if self.workers is not None:
            self.workers.end()


Source = Arrays | SparseArrays | IndexedRows | IndexedBatches | BatchStream


def open_source(
    data: Data, transform: Transform | None = None, *, by_length: bool = False
) -> Source:
    """Return the source of a user's data; `transform` is applied to every loaded batch.

    Args:
        by_length: whether rows have uneven lengths: then a list of vectors is a list of rows.

    Raises:
        BatchError: data of an unknown kind, no rows, or leaves of different length.
    """
    content = data.content
    copies = _same if transform is None else copying(transform)
    if data.kind is Kind.NUMBERED:
        return IndexedBatches(content, copies, workers_of(content), Order(0))
    if data.are_arrays and not data.is_list_of_rows(by_length):
        return _open_arrays(without_none(content), transform, by_length=by_length)
    if data.kind in (Kind.ARRAYS, Kind.ROWS):
        if type(content) is tuple and not by_length:
            kinds = {(type(part), np.asarray(part, object).shape) for part in content}
            for i, part in enumerate(content if len(kinds) > 1 else ()):
                refuse_lists(part, f"data[{i}]")
        num_rows = length_of(content)
        _check_any(num_rows, "a sequence that is not empty.")
        return IndexedRows(content, num_rows, copies)
    if data.kind in (Kind.STREAM, Kind.BATCHES):
        return BatchStream(content, copies, prefetches=data.prefetches)
    raise _no_data(data)


def _open_arrays(
    arrays: Tree, transform: Transform | None, *, by_length: bool
) -> Arrays | SparseArrays:
    """Return the source of arrays; a transform is of all rows at once, if they are dense."""
    copies = _same if transform is None else copying(transform)
    stay_sparse = has_sparse(arrays) and not by_length
    arrays = tree.map_leaves(as_rows if stay_sparse else to_numpy, arrays)
    num_rows = tree.num_rows(arrays, "data")
    _check_any(num_rows, "arrays that are not empty.")
    if stay_sparse:
        return SparseArrays(checked(arrays), num_rows, copies)
    if by_length:
        return Arrays(checked(arrays), num_rows, copies)
    return Arrays(checked(arrays if transform is None else transform(arrays)), num_rows)


def _no_data(data: Data) -> BatchError:
    must = "Data must be nested arrays, a sequence of rows, or an iterable of batches."
    received = type(data.content).__name__
    attempt = (
        "pass arrays, a keras.utils.PyDataset, a tf.data.Dataset, a DataLoader or a generator "
        "of batches."
    )
    if data.kind is Kind.SHARED:
        must = "The data must be whole."
        received = f"a {received}, which a strategy has shared out"
        attempt = "give the tf.data.Dataset itself; the trainer shares the rows."
    if data.kind is Kind.FUNCTION:
        name = data.content.__name__
        must = "Data must be a data set or an iterator, not a function or class that makes it."
        received = f"{name}, not called"
        attempt = f"call it, as in fit({name if name.isidentifier() else 'f'}())."
    return BatchError(message(must, received, attempt))


def _check_any(num_rows: int, instead: str) -> None:
    if num_rows == 0:
        must = "The data must have at least one row."
        raise BatchError(message(must, "0 rows", f"pass {instead}"))


def workers_of(batches: keras.utils.PyDataset) -> Workers | None:
    """Return the workers of a data set that uses several threads, or processes; else None."""
    num = batches.workers
    most = max(num, batches.max_queue_size)
    get = batches.__getitem__
    if batches.use_multiprocessing and num > 0:
        warn_of_copies(batches)
        return Workers(Forks(get, num), get, most)
    return Workers(Threads(get, num), get, most) if num > 1 else None


class RowError(BatchError):
    """A source lacks a row, or batch, below its length."""

    def __init__(self, missing: str, length: int | None, error: Exception, place: str = ""):
        must = "A data set must have every row, or batch, below its length."
        cause = f"{type(error).__name__} ({error})"
        received = f"{cause} from {missing}{place}, where the length is {length}"
        super().__init__(message(must, received, "mend its __getitem__, or its __len__."))
        self.parts = (missing, length, error)

    def at(self, epoch: int, step: int) -> "RowError":
        """Return the same error, with the position in the data."""
        return RowError(*self.parts, f" in step {step} of epoch {epoch}")
