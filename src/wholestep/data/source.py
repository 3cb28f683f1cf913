"""Sources of rows: arrays, a sequence of rows, ready-made batches, or a stream of batches."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import isroutine
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import (
    by_leaf,
    checked,
    is_array,
    is_nest_of_arrays,
    refuse_lists,
    stack,
    text_as_arrays,
    to_numpy,
    with_arrays,
    without_none,
)
from wholestep.data.ready import BatchStream, IndexedBatches, is_loader, length_of, read, workers_of
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
    """Nested arrays with one leading row axis, some of them sparse; their batches are dense."""

    arrays: Tree
    num_rows: int
    transform: Callable[[Tree], Tree]

    def load(self, rows: np.ndarray) -> Tree:
        """Return these rows of every leaf."""
        return self.transform(tree.map_leaves(lambda leaf: _rows_of(leaf, rows), self.arrays))


@dataclass(frozen=True)
class IndexedRows:
    """A sequence with `__len__` and `__getitem__`, whose items are rows."""

    items: Any
    num_rows: int
    transform: Callable[[Tree], Tree]

    def load(self, rows: np.ndarray) -> Tree:
        """Return these items, stacked."""
        loaded = self._get(rows)
        if isinstance(loaded, dict):  # a Hugging Face dataset returns columns
            batch = {k: stack((k,), rows, v, _UNEVEN) for k, v in loaded.items()}
        else:
            columns = by_leaf(loaded, rows, loaded[0])
            leaves = [stack(path, rows, column, _UNEVEN) for path, column in columns]
            batch = keras.tree.pack_sequence_as(with_arrays(loaded[0]), leaves)
        return checked(self.transform(batch))

    def each(self, rows: np.ndarray) -> list:
        """Return these items unchanged, as a list."""
        loaded = self._get(rows)
        if isinstance(loaded, dict):
            return [dict(zip(loaded, values, strict=True)) for values in zip(*loaded.values(), strict=True)]
        return loaded

    def _get(self, rows: np.ndarray) -> Any:
        numbers = [int(row) for row in rows]
        if hasattr(self.items, "__getitems__"):
            return read(self.items.__getitems__, numbers, f"rows {', '.join(map(str, numbers[:8]))}", self.num_rows)
        return [read(self.items.__getitem__, number, f"row {number}", self.num_rows) for number in numbers]


Source = Arrays | SparseArrays | IndexedRows | IndexedBatches | BatchStream


def open_source(source: object, transform: Callable[[Tree], Tree] | None = None, *, by_length: bool = False) -> Source:
    """Return the source of a user's data; `transform` is applied to every loaded batch.

    Args:
        by_length: whether rows have uneven lengths: then a list of vectors is a list of rows.

    Raises:
        BatchError: data of an unknown kind, no rows, or leaves of different length.
    """
    transform, source = transform or _same, text_as_arrays(source)
    if isinstance(source, keras.utils.PyDataset):
        return IndexedBatches(source, transform, workers_of(source))
    if is_nest_of_arrays(source) and not _is_list_of_rows(source, by_length):
        stay_sparse = has_sparse(source) and not by_length
        arrays = tree.map_leaves(_as_rows if stay_sparse else to_numpy, without_none(source))
        num_rows = tree.num_rows(arrays, "data")
        if num_rows == 0:
            raise BatchError(
                message("The data must have at least one row.", "0 rows", "pass arrays that are not empty.")
            )
        if stay_sparse:
            return SparseArrays(checked(arrays), num_rows, transform)
        if by_length:
            return Arrays(checked(arrays), num_rows, transform)
        return Arrays(checked(transform(arrays)), num_rows)
    if type(source).__module__.startswith("tensorflow.python.distribute"):
        must, attempt = "The data must be whole.", "give the tf.data.Dataset itself; the trainer shares the rows."
        raise BatchError(message(must, f"a {type(source).__name__}, which a strategy has shared out", attempt))
    if isinstance(source, type) or isroutine(source):
        must, name = "Data must be a data set or an iterator, not a function or class that makes it.", source.__name__
        call = f"{name}()" if name.isidentifier() else "f()"
        raise BatchError(message(must, f"{name}, not called", f"call it, as in fit({call})."))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_loader(source):
        if type(source) is tuple and not by_length and len({(type(part), _shape(part)) for part in source}) > 1:
            for i, part in enumerate(source):
                refuse_lists(part, f"data[{i}]")
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


def _shape(part: object) -> tuple[int, ...]:
    return np.asarray(part, object).shape


def _as_rows(leaf: object) -> np.ndarray | SparseRows:
    return SparseRows.of(leaf) if isinstance(leaf, SparseRows) or is_sparse(leaf) else to_numpy(leaf)


def _rows_of(leaf: np.ndarray | SparseRows, rows: np.ndarray) -> np.ndarray:
    return to_numpy(leaf.load(rows)) if isinstance(leaf, SparseRows) else leaf[rows]


def _is_list_of_rows(source: object, by_length: bool) -> bool:
    """Whether a list holds a nested item for each row, rather than an array for each leaf.

    A list of arrays and nests of arrays with the same number of rows, such as a model's inputs, holds leaves. A vector
    as a leaf holds a number for each row, which has no length; so with `by_length`, vectors are rows.
    """
    if not isinstance(source, list):
        return False
    if by_length and all(is_array(item) and len(item.shape) == 1 for item in source):
        return True
    nested = [isinstance(item, dict | list | tuple) for item in source]
    return any(nested) and (all(nested) or len({np.shape(leaf)[:1] for leaf in tree.leaves(source)}) > 1)
