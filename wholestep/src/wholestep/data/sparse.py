"""Sparse arrays in the data: they stay sparse on the host, and each batch is made dense."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, message
from wholestep.tree import Tree


def is_sparse(leaf: object) -> bool:
    """Whether this is a sparse matrix or tensor: of SciPy, TensorFlow, JAX (BCOO) or PyTorch
    (COO).
    """
    is_indexed = hasattr(leaf, "indices") and (
        hasattr(leaf, "todense") or type(leaf).__name__ == "SparseTensor"
    )
    is_other = hasattr(leaf, "tocoo") or is_indexed or bool(getattr(leaf, "is_sparse", False))
    return isinstance(leaf, SparseRows) or is_other


def has_sparse(data: Tree) -> bool:
    """Whether some leaf is sparse."""
    return any(map(is_sparse, tree.leaves(data)))


def dense(leaf: Any) -> np.ndarray:
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
    begins: np.ndarray
    places: np.ndarray
    entries: np.ndarray

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
            raise BatchError(
                message(must, "one without axes", "pass an array of shape (rows, ...).")
            )
        # JAX pads with entries outside of the shape
        is_inside = np.all(at < np.array(shape), axis=1)
        at = at[is_inside]
        entries = entries[is_inside]
        order = np.argsort(at[:, 0], kind="stable")
        at = at[order]
        entries = entries[order]
        begins = np.searchsorted(at[:, 0], np.arange(shape[0] + 1))
        places = (
            np.ravel_multi_index(tuple(at[:, 1:].T), shape[1:])
            if len(shape) > 1
            else np.zeros(len(at), np.int64)
        )
        return cls(shape, begins, places, entries)

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
        first = self.begins[begin]
        last = self.begins[end]
        shape = (end - begin, *self.shape[1:])
        begins = self.begins[begin : end + 1] - first
        return SparseRows(shape, begins, self.places[first:last], self.entries[first:last])

    def load(self, rows: np.ndarray) -> np.ndarray:
        """Return these rows, dense."""
        counts = self.begins[rows + 1] - self.begins[rows]
        to = np.repeat(np.arange(len(rows)), counts)
        # Entry n of the result is entry n - (entries of the rows before) of its row.
        start = np.repeat(self.begins[rows] - np.cumsum(counts) + counts, counts)
        taken = start + np.arange(len(to))
        found = np.zeros((len(rows), int(np.prod(self.shape[1:], dtype=np.int64))), self.dtype)
        np.add.at(found, (to, self.places[taken]), self.entries[taken])
        return found.reshape(len(rows), *self.shape[1:])


def _entries_of(leaf: Any) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return the indices of the entries, int64 (entries, axes), the entries, and the shape."""
    if hasattr(leaf, "tocoo"):
        held = leaf.tocoo()
        at = held.coords if hasattr(held, "coords") else (held.row, held.col)
        return (
            np.stack([np.asarray(each, np.int64) for each in at], axis=1),
            held.data,
            tuple(held.shape),
        )
    if hasattr(leaf, "dense_shape"):
        return (
            np.asarray(leaf.indices),
            np.asarray(leaf.values),
            tuple(np.asarray(leaf.dense_shape).tolist()),
        )
    if hasattr(leaf, "todense"):
        if leaf.indices.shape[-1] != leaf.ndim:  # some axes of a BCOO may be dense
            return _entries_of_dense(np.asarray(leaf.todense()))
        return np.asarray(leaf.indices, np.int64), np.asarray(leaf.data), tuple(leaf.shape)
    held = leaf.detach().cpu().coalesce()
    return np.asarray(held.indices()).T, np.asarray(held.values()), tuple(held.shape)


def _entries_of_dense(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    at = np.argwhere(array)
    return at, array[tuple(at.T)], array.shape
