"""Rows that hold sequences: how long each of them is, which leaves belong to it, and what fills it up."""

from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, say
from wholestep.source import Arrays, Items, to_numpy

Tree = Any


@dataclass(frozen=True)
class Sequences:
    """The sequences in the rows of a source, each with a length of its own.

    Args:
        source: ragged rows, or arrays that are padded along axis 1.
        lengths: int32 (sequences, rows); none is above `limits`.
        paths: where in a row the length of each sequence was given, () for one length that holds for the whole row.
        row: a first row, for its structure.
        owner: for each leaf of a row the number of its sequence, None if it belongs to none.
        pads: for each leaf what stands in its padding.
        limits: how many places of each sequence are kept, int64 (sequences,).
    """

    source: Arrays | Items
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
        """Return the same sequences, cut off after so many places."""
        return replace(self, lengths=np.minimum(self.lengths, limits[:, None].astype(np.int32)), limits=limits)

    def describe(self, row: int) -> str:
        """Return the lengths of a row in words: "row 17, length['source'] 93"."""
        parts = [f"{tree.name(path, 'length')} {n[row]}" for path, n in zip(self.paths, self.lengths, strict=True)]
        return ", ".join([f"row {row}", *parts])

    def padded(self, rows: np.ndarray, shape: np.ndarray) -> Tree:
        """Return these rows with every sequence padded to its part of the shape (sequences,)."""
        if isinstance(self.source, Arrays):
            pairs = zip(tree.leaves(self.source.arrays), self.owner, strict=True)
            return self._nested([leaf[rows] if s is None else leaf[rows, : shape[s]] for leaf, s in pairs])
        at, starts = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        leaves = [
            to_numpy(np.stack(column)) if s is None else self._lay(i, rows, column, at, starts, (len(rows), shape[s]))
            for i, (column, s) in enumerate(zip(self._columns(rows), self.owner, strict=True))
        ]
        return self.source.transform(self._nested(leaves))

    def packed(self, rows: np.ndarray, at: np.ndarray, starts: np.ndarray, shape: tuple, beside: dict) -> Tree:
        """Return the rows' only sequence laid at[i], starts[i] in arrays of this (rows, length), with more beside."""
        columns = enumerate(self._columns(rows))
        batch = self._nested([self._lay(i, rows, column, at, starts, shape) for i, column in columns]) | beside
        return self.source.transform(batch) if isinstance(self.source, Items) else batch

    def _nested(self, leaves: list) -> Tree:
        return keras.tree.pack_sequence_as(self.row, leaves)

    def _columns(self, rows: np.ndarray) -> list:
        """Return the rows by leaf, each a list of arrays."""
        if isinstance(self.source, Arrays):
            return [list(leaf[rows]) for leaf in tree.leaves(self.source.arrays)]
        flat = [[to_numpy(leaf) for leaf in tree.leaves(with_arrays(row))] for row in self.source.each(rows)]
        for row, leaves in zip(rows, flat, strict=True):
            if len(leaves) != len(self.owner):
                received = f"{len(leaves)} leaves in row {row}, {len(self.owner)} in the first"
                raise BatchError(say("All rows must be nested alike.", received, "give every row the same leaves."))
        return list(zip(*flat, strict=True))

    def _lay(self, i: int, rows: np.ndarray, column: Any, at: Any, starts: Any, shape: tuple) -> np.ndarray:
        """Return leaf i of these rows, padded; row r begins at [at[r], starts[r]]."""
        owner = self.owner[i]
        assert owner is not None
        lengths = self.lengths[owner, rows]
        if isinstance(self.source, Items):
            self._check_lengths(i, rows, column, lengths)
        like = next((leaf for leaf in column if len(leaf)), column[0])
        laid = np.full((*shape, *like.shape[1:]), self.pads[i], like.dtype)
        for leaf, length, row, start in zip(column, lengths.tolist(), at.tolist(), starts.tolist(), strict=True):
            laid[row, start : start + length] = leaf[:length]
        return laid

    def _check_lengths(self, i: int, rows: np.ndarray, column: Any, lengths: np.ndarray) -> None:
        found = np.array([leaf.shape[0] if leaf.ndim else -1 for leaf in column])
        for bad in np.flatnonzero(np.minimum(found, self.limits[self.owner[i]]) != lengths)[:1]:
            label, row = tree.named_leaves(self.row, "row")[i][0].removeprefix("row"), rows[bad]
            raise BatchError(
                say(
                    f"{label or 'A row'} must be as long as its length says.",
                    f"shape {column[bad].shape} where the length is {lengths[bad]}, in row {row}",
                    "name the sequences that have lengths of their own: length={'source': ..., 'target': ...}.",
                )
            )


def with_arrays(row: Tree) -> Tree:
    """Return a row in which a list of numbers is an array, a leaf."""

    def as_array(part: Any) -> Any:
        is_list = isinstance(part, list) and all(isinstance(n, int | float | np.number) for n in part)
        return np.asarray(part) if is_list else None

    return keras.tree.traverse(as_array, row)
