"""Sparse arrays in the data: they stay sparse on the host, and each batch is made dense."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.errors import BatchError, message
from wholestep.tree import Tree


def is_sparse(leaf: object) -> bool:
    """Whether this is sparse: of SciPy, TensorFlow, JAX (BCOO) or PyTorch (COO)."""
    if isinstance(leaf, SparseRows) or hasattr(leaf, "tocoo") or getattr(leaf, "is_sparse", False):
        return True
    is_of_engine = hasattr(leaf, "todense") or type(leaf).__name__ == "SparseTensor"
    return is_of_engine and hasattr(leaf, "indices")


def has_sparse(data: Tree) -> bool:
    """Whether some leaf is sparse."""
    return any(map(is_sparse, tree.leaves(data)))


def dense(leaf: Any) -> ndarray:
    """Return a sparse leaf as a dense array."""
    rows = SparseRows.of(leaf)
    return rows.load(np.arange(rows.shape[0]))


@dataclass(frozen=True)
class SparseRows:
    """The rows of a sparse array, as its entries only.

    Args:
        shape: the array's shape; the first axis counts the rows.
        begins: the index of each row's first entry, and the end: int64 (rows + 1,).
        places: the index of each entry in its flat row: int64 (entries,).
        entries: (entries,). Entries at the same place are added up, as SciPy and JAX do.

    >>> rows = SparseRows((3, 2), np.array([0, 1, 1, 3]), np.array([1, 0, 1]), np.array([5, 6, 7]))
    >>> rows.load(np.array([2, 0])).tolist()
    [[6, 7], [0, 5]]
    >>> rows[1:].shape
    (2, 2)
    """

    shape: tuple[int, ...]
    begins: ndarray
    places: ndarray
    entries: ndarray

    @classmethod
    def of(cls, leaf: Any) -> "SparseRows":
        """Return the rows of a sparse leaf.

        Raises:
            BatchError: the leaf has no axis.
        """
        if isinstance(leaf, cls):
            return leaf
        at, entries, shape = _entries_of(leaf)
        if not shape:
            must = "A sparse array must have an axis of rows."
            attempt = "pass an array of shape (rows, ...)."
            raise BatchError(message(must, "one without axes", attempt))
        inside = np.flatnonzero(np.all(at < np.array(shape), axis=1))  # JAX pads beyond the shape
        by_row = inside[np.argsort(at[inside, 0], kind="stable")]
        at = at[by_row]
        begins = np.searchsorted(at[:, 0], np.arange(shape[0] + 1))
        strides = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        places = at[:, 1:] @ np.array(strides, np.int64)
        return cls(shape, begins, places, entries[by_row])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the entries."""
        return self.entries.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """Return consecutive rows, still sparse, or the rows with these numbers, dense."""
        if not isinstance(rows, slice):
            return self.load(rows)
        begin, end, step = rows.indices(len(self))
        assert step == 1
        end = max(begin, end)
        begins = self.begins[begin : end + 1]
        entries = slice(begins[0], begins[-1])
        shape = (end - begin, *self.shape[1:])
        return SparseRows(shape, begins - begins[0], self.places[entries], self.entries[entries])

    def load(self, rows: ndarray) -> ndarray:
        """Return these rows, dense."""
        begins = self.begins[rows]
        counts = self.begins[rows + 1] - begins
        to = np.repeat(np.arange(len(rows)), counts)
        # Entry n of the result is entry n - (entries of the rows before) of its row.
        before = np.cumsum(counts) - counts
        entries = np.repeat(begins - before, counts) + np.arange(len(to))
        flat = np.zeros((len(rows), math.prod(self.shape[1:])), self.dtype)
        np.add.at(flat, (to, self.places[entries]), self.entries[entries])
        return flat.reshape(len(rows), *self.shape[1:])


def _entries_of(leaf: Any) -> tuple[ndarray, ndarray, tuple[int, ...]]:
    """Return the indices of the entries, int64 (entries, axes), the entries, and the shape."""
    if hasattr(leaf, "tocoo"):
        coo = leaf.tocoo()
        axes = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
        at = np.stack(axes, axis=1)
        entries = coo.data
        shape = coo.shape
    elif hasattr(leaf, "dense_shape"):
        at = leaf.indices
        entries = leaf.values
        shape = np.asarray(leaf.dense_shape).tolist()
    elif not hasattr(leaf, "todense"):
        coo = leaf.detach().cpu().coalesce()
        at = coo.indices().T
        entries = coo.values()
        shape = coo.shape
    elif leaf.indices.shape[-1] == leaf.ndim:
        at = leaf.indices
        entries = leaf.data
        shape = leaf.shape
    else:  # some axes of a BCOO may be dense
        array = np.asarray(leaf.todense())
        at = np.argwhere(array)
        entries = array[tuple(at.T)]
        shape = array.shape
    return np.asarray(at, np.int64), np.asarray(entries), tuple(shape)
