"""Rows that hold sequences: their lengths, leaves and padding."""

from dataclasses import dataclass, replace

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import by_leaf, checked, stack, to_numpy
from wholestep.data.source import Arrays, IndexedRows
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_NAME_ALL = "name every sequence: length={'source': ..., 'target': ...}."


@dataclass(frozen=True)
class Sequences:
    """The sequences in the rows of a source, each with its length.

    Args:
        source: ragged rows, or arrays that are padded along axis 1.
        lengths: int32 (sequences, rows); none is above `limits`.
        paths: the path in a row of each sequence's length, () for one length of the whole row.
        row: a row, for its structure and dtypes; without empty sequences, if there is such a row.
        owner: for each leaf of a row the number of its sequence; None for a leaf outside of sequences.
        pads: for each leaf its padding value.
        limits: the longest kept length of each sequence, int64 (sequences,).
    """

    source: Arrays | IndexedRows
    lengths: np.ndarray
    paths: tuple[tuple, ...]
    row: Tree
    owner: tuple[int | None, ...]
    pads: tuple
    limits: np.ndarray

    @property
    def totals(self) -> np.ndarray:
        """The sum of every row's lengths, int32 (rows,)."""
        return self.lengths.sum(axis=0, dtype=np.int32)

    def cut(self, limits: np.ndarray) -> "Sequences":
        """Return the same sequences, cut off at these lengths."""
        return replace(self, lengths=np.minimum(self.lengths, limits[:, None].astype(np.int32)), limits=limits)

    def describe(self, row: int) -> str:
        """Return the lengths of a row in words: "row 17, length['source'] 93"."""
        parts = [f"{tree.name(path, 'length')} {n[row]}" for path, n in zip(self.paths, self.lengths, strict=True)]
        return ", ".join([f"row {row}", *parts])

    @property
    def widths(self) -> np.ndarray:
        """The width of the arrays of each sequence, int64 (sequences,)."""
        assert isinstance(self.source, Arrays)
        leaves = tree.leaves(self.source.arrays)
        return np.array([leaves[self.owner.index(s)].shape[1] for s in range(len(self.paths))])

    def padded(self, rows: np.ndarray, shape: np.ndarray) -> Tree:
        """Return these rows with every sequence padded to its part of the shape (sequences,)."""
        if isinstance(self.source, Arrays):
            parts = zip(tree.leaves(self.source.arrays), self.owner, self.pads, strict=True)
            return self._loaded(self._nested([_sliced(leaf, rows, s, shape, pad) for leaf, s, pad in parts]))
        at, starts = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        leaves = [
            stack(path, rows, column, _NAME_ALL)
            if s is None
            else self._lay(i, rows, column, at, starts, (len(rows), shape[s]))
            for i, ((path, column), s) in enumerate(zip(self._columns(rows), self.owner, strict=True))
        ]
        return self._loaded(self._nested(leaves))

    def packed(self, rows: np.ndarray, at: np.ndarray, starts: np.ndarray, shape: tuple, beside: dict) -> Tree:
        """Return the rows' only sequence placed at [at[i], starts[i]] in arrays of this shape, with further leaves."""
        columns = enumerate(self._columns(rows))
        return self._loaded(
            self._nested([self._lay(i, rows, column, at, starts, shape) for i, (_, column) in columns]) | beside
        )

    def _loaded(self, batch: Tree) -> Tree:
        return checked(self.source.transform(batch))

    def _nested(self, leaves: list) -> Tree:
        return keras.tree.pack_sequence_as(self.row, leaves)

    def _columns(self, rows: np.ndarray) -> list[tuple[tuple, list]]:
        """Return (path, its part of each row) for every leaf, as arrays."""
        if isinstance(self.source, Arrays):
            return [(path, list(leaf[rows])) for path, leaf in keras.tree.flatten_with_path(self.source.arrays)]
        columns = by_leaf(self.source.each(rows), rows, self.row)
        return [(path, [to_numpy(leaf) for leaf in column]) for path, column in columns]

    def _lay(
        self, i: int, rows: np.ndarray, column: list, at: np.ndarray, starts: np.ndarray, shape: tuple
    ) -> np.ndarray:
        """Return leaf i of these rows, padded; row r begins at [at[r], starts[r]]."""
        owner = self.owner[i]
        assert owner is not None
        lengths = self.lengths[owner, rows]
        if isinstance(self.source, IndexedRows):
            self._check_lengths(i, rows, column, lengths)
        filled = [leaf for leaf in (tree.leaves(self.row)[i], *column) if len(leaf)] or [column[0]]
        self._check_places(i, rows, column, filled[0].shape[1:])
        laid = np.full((*shape, *filled[0].shape[1:]), self.pads[i], np.result_type(*{leaf.dtype for leaf in filled}))
        for leaf, length, row, start in zip(column, lengths.tolist(), at.tolist(), starts.tolist(), strict=True):
            laid[row, start : start + length] = leaf[:length]
        return to_numpy(laid)

    def _check_places(self, i: int, rows: np.ndarray, column: list, shape: tuple) -> None:
        for row, leaf in zip(rows, column, strict=True):
            if len(leaf) and leaf.shape[1:] != shape:
                must = f"{self._label(i)} must have one shape at every place of every row."
                received = f"{leaf.shape[1:]} in row {row}, {shape} in others"
                raise BatchError(message(must, received, "give all rows the same axes after the first."))

    def _check_lengths(self, i: int, rows: np.ndarray, column: list[np.ndarray], lengths: np.ndarray) -> None:
        found = np.array([leaf.shape[0] if leaf.ndim else -1 for leaf in column])
        for bad in np.flatnonzero(np.minimum(found, self.limits[self.owner[i]]) != lengths)[:1]:
            received = f"shape {column[bad].shape} where the length is {lengths[bad]}, in row {rows[bad]}"
            raise BatchError(message(f"{self._label(i)} must be as long as its length says.", received, _NAME_ALL))

    def _label(self, i: int) -> str:
        return tree.named_leaves(self.row, "row")[i][0].removeprefix("row") or "A row"


def _sliced(leaf: np.ndarray, rows: np.ndarray, s: int | None, shape: np.ndarray, pad: float) -> np.ndarray:
    """Return these rows of an array, cut or padded to the width of its sequence."""
    if s is None:
        return leaf[rows]
    kept = leaf[rows, : shape[s]]
    lacks = [(0, 0), (0, int(shape[s]) - kept.shape[1]), *[(0, 0)] * (kept.ndim - 2)]
    return np.pad(kept, lacks, constant_values=pad) if lacks[1][1] else kept
