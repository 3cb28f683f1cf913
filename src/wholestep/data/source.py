"""Where rows come from: arrays, a sequence of rows, ready-made batches, or a stream of them."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import (
    by_leaf,
    check_dtypes,
    is_array,
    is_nest_of_arrays,
    numpy_batch,
    stack,
    to_numpy,
    with_arrays,
    without_none,
)
from wholestep.data.sparse import SparseRows, has_sparse, is_sparse
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_UNEVEN = "tokens=... and length=..., if rows are of uneven length."


def _same(batch: Tree) -> Tree:
    return batch


@dataclass(frozen=True)
class Arrays:
    """Nested arrays with one leading row axis; `transform` is for batches that are padded or packed from them."""

    arrays: Tree
    num_rows: int
    transform: Callable[[Tree], Tree] = _same

    def load(self, rows: np.ndarray) -> Tree:
        """Return these rows of every leaf."""
        return tree.map_leaves(lambda leaf: leaf[rows], self.arrays)


@dataclass(frozen=True)
class SparseArrays:
    """Nested arrays with one leading row axis, of which some are sparse; batches of them are dense."""

    arrays: Tree
    num_rows: int
    transform: Callable[[Tree], Tree]

    def load(self, rows: np.ndarray) -> Tree:
        """Return these rows of every leaf."""
        return self.transform(tree.map_leaves(lambda leaf: _rows_of(leaf, rows), self.arrays))


@dataclass(frozen=True)
class IndexedRows:
    """A sequence with `__len__` and `__getitem__`, one row an item."""

    items: Any
    num_rows: int
    transform: Callable[[Tree], Tree]

    def load(self, rows: np.ndarray) -> Tree:
        """Return these items, stacked."""
        loaded = self._get(rows)
        if isinstance(loaded, dict):  # a Hugging Face dataset gives columns
            batch = {k: stack((k,), rows, v, _UNEVEN) for k, v in loaded.items()}
        else:
            columns = by_leaf(loaded, rows, loaded[0])
            leaves = [stack(path, rows, column, _UNEVEN) for path, column in columns]
            batch = keras.tree.pack_sequence_as(with_arrays(loaded[0]), leaves)
        batch = self.transform(batch)
        check_dtypes(batch)
        return batch

    def each(self, rows: np.ndarray) -> list:
        """Return these items one by one, as they are."""
        loaded = self._get(rows)
        if isinstance(loaded, dict):
            return [dict(zip(loaded, values, strict=True)) for values in zip(*loaded.values(), strict=True)]
        return loaded

    def _get(self, rows: np.ndarray) -> Any:
        numbers = [int(row) for row in rows]
        if hasattr(self.items, "__getitems__"):
            return _read(self.items.__getitems__, numbers, f"rows {', '.join(map(str, numbers[:8]))}", self.num_rows)
        return [_read(self.items.__getitem__, number, f"row {number}", self.num_rows) for number in numbers]


@dataclass(frozen=True)
class IndexedBatches:
    """Batches as the user made them, to be had by number (`keras.utils.PyDataset`)."""

    batches: Any
    transform: Callable[[Tree], Tree]

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if there is no end."""
        return length_of(self.batches, lambda batches: batches.num_batches)

    def load(self, rows: np.ndarray) -> Tree:
        """Return one batch, by its number."""
        number = int(rows[0])
        batch = numpy_batch(_read(self.batches.__getitem__, number, f"batch {number}", self.num_batches))
        return self.transform(tree.map_leaves(np.array, batch))  # a copy, as in BatchStream

    def begin_epoch(self) -> None:
        """Tell the data set that an epoch begins."""
        self.batches.on_epoch_begin()

    def run_forward(self, epoch: int, step: int) -> None:
        """Tell the data set of all epochs before this one, and of this one if some of it is over."""
        for _ in range(epoch):
            self.begin_epoch()
            self.end_epoch()
        if step:
            self.begin_epoch()

    def end_epoch(self) -> None:
        """Tell the data set that an epoch is over."""
        self.batches.on_epoch_end()


@dataclass
class BatchStream:
    """Batches as the user made them, one after the other. An iterator that ends cannot begin again."""

    batches: Iterable
    transform: Callable[[Tree], Tree]

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if unknown."""
        try:
            return length_of(self.batches)
        except TypeError:
            return None

    @property
    def begins_again(self) -> bool:
        """Whether a second epoch can be drawn."""
        return not isinstance(self.batches, Iterator)

    def __iter__(self) -> Iterator[Tree]:
        return self.drawn_from(iter(self.batches))

    def drawn_from(self, iterator: Iterator) -> Iterator[Tree]:
        """Draw the batches of an iterator over these, prepared."""
        told, num = self.num_batches, 0
        for batch in iterator:
            num += 1
            # A copy: a generator may fill the same arrays again while this batch waits for its turn.
            yield self.transform(tree.map_leaves(np.array, numpy_batch(batch)))
        if self.begins_again and told not in (None, num):
            must = "The length of the data must be the number of batches; all that came were used."
            received = f"{num} batches of {type(self.batches).__name__}, whose length says {told}"
            warnings.warn(message(must, received, "mend its __len__, or leave it out."), UserWarning, stacklevel=2)


class Kept:
    """The batches of an iterator, from the first on whenever they are asked for: what came is kept on the host."""

    def __init__(self, batches: Iterator):
        self._rest = batches
        self._kept: list = []

    def __iter__(self) -> Iterator[Tree]:
        place = 0
        while place < len(self._kept) or self._draws():
            yield self._kept[place]
            place += 1

    def _draws(self) -> bool:
        for batch in self._rest:
            # A copy, as in BatchStream.
            self._kept.append(tree.map_leaves(np.array, batch))
            return True
        return False


Source = Arrays | SparseArrays | IndexedRows | IndexedBatches | BatchStream


def open_source(source: object, transform: Callable[[Tree], Tree] | None = None, *, by_length: bool = False) -> Source:
    """Return the source behind whatever a user may pass; `transform` is applied to every loaded batch.

    Args:
        by_length: whether rows are of uneven length: then a list of vectors is a list of rows.

    Raises:
        BatchError: nothing of the kind, no rows, or leaves of different length.
    """
    transform = transform or _same
    if isinstance(source, keras.utils.PyDataset):
        return IndexedBatches(source, transform)
    if is_nest_of_arrays(source) and not _is_list_of_rows(source, by_length):
        stay_sparse = has_sparse(source) and not by_length
        arrays = tree.map_leaves(_as_rows if stay_sparse else to_numpy, without_none(source))
        check_dtypes(arrays)
        num_rows = tree.num_rows(arrays, "data")
        if num_rows == 0:
            raise BatchError(
                message("The data must have at least one row.", "0 rows", "pass arrays that are not empty.")
            )
        if stay_sparse:
            return SparseArrays(arrays, num_rows, transform)
        return Arrays(arrays, num_rows, transform) if by_length else Arrays(transform(arrays), num_rows)
    if type(source).__module__.startswith("tensorflow.python.distribute"):
        must, attempt = "The data must be whole.", "give the tf.data.Dataset itself; the trainer shares the rows."
        raise BatchError(message(must, f"a {type(source).__name__}, which a strategy has shared out", attempt))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not _is_stream(source):
        num_rows = length_of(source)
        if num_rows == 0:
            raise BatchError(
                message("The data must have at least one row.", "0 rows", "pass a sequence that is not empty.")
            )
        return IndexedRows(source, num_rows, transform)
    if hasattr(source, "__iter__"):
        return BatchStream(source, transform)
    raise BatchError(
        message(
            "Data must be nested arrays, a sequence of rows, or an iterable of batches.",
            type(source).__name__,
            "pass arrays, a keras.utils.PyDataset, a tf.data.Dataset, a DataLoader or a generator of batches.",
        )
    )


def length_of(source: object, ask: Callable = len) -> Any:
    """Return the length that a source tells, a whole number from 0; None if it tells that there is none.

    Raises:
        BatchError: it tells anything else.
    """
    cause: Exception | None = None
    try:
        length = ask(source)
    except (ValueError, OverflowError) as error:  # what Python says to a length below 0
        length, cause = str(error), error
    if cause is None and (length is None or (isinstance(length, int | np.integer) and length >= 0)):
        return length
    must = f"The length of {type(source).__name__} must be a whole number of at least 0."
    raise BatchError(message(must, length, "mend its __len__; leave it out if it is not known.")) from cause


class RowError(BatchError):
    """A source has no row, or batch, of a number below its own length."""

    def __init__(self, what: str, length: int | None, error: Exception, place: str = ""):
        must = "A data set must have every row, or batch, below its own length."
        received = f"{type(error).__name__} ({error}) from {what}{place}, where the length is {length}"
        super().__init__(message(must, received, "mend its __getitem__, or its __len__."))
        self.parts = (what, length, error)

    def at(self, epoch: int, step: int) -> "RowError":
        """Return the same, with the place in the data."""
        return RowError(*self.parts, f" in step {step} of epoch {epoch}")


def _as_rows(leaf: object) -> np.ndarray | SparseRows:
    return SparseRows.of(leaf) if isinstance(leaf, SparseRows) or is_sparse(leaf) else to_numpy(leaf)


def _rows_of(leaf: np.ndarray | SparseRows, rows: np.ndarray) -> np.ndarray:
    return to_numpy(leaf.load(rows)) if isinstance(leaf, SparseRows) else leaf[rows]


def _read(get: Callable, number: int | list[int], what: str, length: int | None) -> Any:
    try:
        return get(number)
    except IndexError as error:
        raise RowError(what, length, error) from error


def _is_stream(source: object) -> bool:
    return hasattr(source, "element_spec") or type(source).__module__.startswith("torch.utils.data.dataloader")


def _is_list_of_rows(source: object, by_length: bool) -> bool:
    """A list of nested items is a sequence of rows; a list of arrays is one row of several leaves.

    A leaf that is a vector holds a number for each row; as these have no length, vectors are rows where one is needed.
    """
    if not isinstance(source, list):
        return False
    if by_length and all(is_array(item) and len(item.shape) == 1 for item in source):
        return True
    return any(isinstance(item, dict | list | tuple) for item in source)
