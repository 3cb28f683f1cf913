"""Rows that hold sequences: their lengths, leaves and padding."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import by_leaf, checked, stack_column, to_numpy, with_arrays
from wholestep.data.shapes import LONGEST
from wholestep.data.source import Arrays, IndexedRows
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.tree import Tree

_AT_ONCE = 1024
_NAME_ALL = "name every sequence: length={'source': ..., 'target': ...}."


@dataclass(frozen=True)
class Sequences:
    """The sequences in the rows of a source, each with its length.

    Args:
        source: ragged rows, or arrays that are padded along axis 1.
        lengths: int32 (sequences, rows); none is above `limits`.
        paths: the path in a row of each sequence's length, () for one length of the whole row.
        row: a row, for its structure and dtypes; without empty sequences, if there is such a row.
        owner: for each leaf of a row the number of its sequence; None for a leaf outside of
            sequences.
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
        return replace(
            self, lengths=np.minimum(self.lengths, limits[:, None].astype(np.int32)), limits=limits
        )

    def describe(self, row: int) -> str:
        """Return the lengths of a row in words: "row 17, length['source'] 93"."""
        parts = [
            f"{tree.name(path, 'length')} {n[row]}"
            for path, n in zip(self.paths, self.lengths, strict=True)
        ]
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
            return self._loaded(
                self._nested([_sliced(leaf, rows, s, shape, pad) for leaf, s, pad in parts])
            )
        at = np.arange(len(rows))
        starts = np.zeros(len(rows), np.int64)
        leaves = [
            stack_column(path, rows, column, _NAME_ALL)
            if s is None
            else self._lay(i, rows, column, at, starts, (len(rows), shape[s]))
            for i, ((path, column), s) in enumerate(
                zip(self._columns(rows), self.owner, strict=True)
            )
        ]
        return self._loaded(self._nested(leaves))

    def packed(
        self, rows: np.ndarray, at: np.ndarray, starts: np.ndarray, shape: tuple, beside: dict
    ) -> Tree:
        """Return the rows' only sequence placed at [at[i], starts[i]] in arrays of this shape, with
        further leaves.
        """
        columns = enumerate(self._columns(rows))
        return self._loaded(
            self._nested(
                [self._lay(i, rows, column, at, starts, shape) for i, (_, column) in columns]
            )
            | beside
        )

    def _loaded(self, batch: Tree) -> Tree:
        return checked(self.source.transform(batch))

    def _nested(self, leaves: list) -> Any:
        return keras.tree.pack_sequence_as(self.row, leaves)

    def _columns(self, rows: np.ndarray) -> list[tuple[tuple, list]]:
        """Return (path, its part of each row) for every leaf, as arrays."""
        if isinstance(self.source, Arrays):
            return [
                (path, list(leaf[rows]))
                for path, leaf in keras.tree.flatten_with_path(self.source.arrays)
            ]
        columns = by_leaf(self.source.each(rows), rows, self.row)
        return [(path, [to_numpy(leaf) for leaf in column]) for path, column in columns]

    def _lay(
        self,
        i: int,
        rows: np.ndarray,
        column: list,
        at: np.ndarray,
        starts: np.ndarray,
        shape: tuple,
    ) -> np.ndarray:
        """Return leaf i of these rows, padded; row r begins at [at[r], starts[r]]."""
        owner = self.owner[i]
        assert owner is not None
        lengths = self.lengths[owner, rows]
        if isinstance(self.source, IndexedRows):
            self._check_lengths(i, rows, column, lengths)
        filled = [leaf for leaf in (tree.leaves(self.row)[i], *column) if len(leaf)] or [column[0]]
        self._check_places(i, rows, column, filled[0].shape[1:])
        laid = np.full(
            (*shape, *filled[0].shape[1:]),
            self.pads[i],
            np.result_type(*{leaf.dtype for leaf in filled}),
        )
        for leaf, length, row, start in zip(
            column, lengths.tolist(), at.tolist(), starts.tolist(), strict=True
        ):
            laid[row, start : start + length] = leaf[:length]
        return to_numpy(laid)

    def _check_places(self, i: int, rows: np.ndarray, column: list, shape: tuple) -> None:
        for row, leaf in zip(rows, column, strict=True):
            if len(leaf) and leaf.shape[1:] != shape:
                must = f"{self._label(i)} must have one shape at every place of every row."
                received = f"{leaf.shape[1:]} in row {row}, {shape} in others"
                raise BatchError(
                    message(must, received, "give all rows the same axes after the first.")
                )

    def _check_lengths(
        self, i: int, rows: np.ndarray, column: list[np.ndarray], lengths: np.ndarray
    ) -> None:
        found = np.array([leaf.shape[0] if leaf.ndim else -1 for leaf in column])
        for bad in np.flatnonzero(np.minimum(found, self.limits[self.owner[i]]) != lengths)[:1]:
            received = (
                f"shape {column[bad].shape} where the length is {lengths[bad]}, in row {rows[bad]}"
            )
            raise BatchError(
                message(
                    f"{self._label(i)} must be as long as its length says.", received, _NAME_ALL
                )
            )

    def _label(self, i: int) -> str:
        return tree.named_leaves(self.row, "row")[i][0].removeprefix("row") or "A row"


def _sliced(
    leaf: np.ndarray, rows: np.ndarray, s: int | None, shape: np.ndarray, pad: float
) -> np.ndarray:
    """Return these rows of an array, cut or padded to the width of its sequence."""
    if s is None:
        return leaf[rows]
    kept = leaf[rows, : shape[s]]
    lacks = [(0, 0), (0, int(shape[s]) - kept.shape[1]), *[(0, 0)] * (kept.ndim - 2)]
    return np.pad(kept, lacks, constant_values=pad) if lacks[1][1] else kept


def measure(
    source: Arrays | IndexedRows, length: Tree | Callable[[Any], Any], pad: Tree
) -> Sequences:
    """Return the sequences of a source.

    Args:
        length: int (rows,), a nest of such arrays that names parts of a row, or a function of a
            row.
        pad: the padding value, or a nest of values for parts of a row; 0 for the other parts.

    Raises:
        SpecificationError: lengths or paddings that do not belong to these rows.
        BatchError: arrays that are narrower than their lengths, or not equally wide; a row for
            which the function fails.
    """
    named = _evaluated(source, length) if callable(length) else _flat(length)
    paths = tuple(path for path, _ in named)
    lengths = np.stack(
        [_checked(tree.name(path, "length"), values, source.num_rows) for path, values in named]
    )
    row = _row(source, int(np.argmax((lengths > 0).all(axis=0))))
    leaves = keras.tree.flatten_with_path(row)
    owner = tuple(_owner(path, paths) if np.ndim(leaf) else None for path, leaf in leaves)
    for i, path in enumerate(paths):
        if i not in owner:
            _refuse(tree.name(path, "length"), "a part of a row that has an axis", leaves)
    limits = np.full(len(paths), np.iinfo(np.int64).max)
    sequences = Sequences(source, lengths, paths, row, owner, _pads(pad, leaves, owner), limits)
    if isinstance(source, Arrays):
        _check_widths(sequences)
    return sequences


def _row(source: Arrays | IndexedRows, number: int) -> Tree:
    (row,) = source.each(np.array([number]))
    return row if isinstance(source, Arrays) else tree.map_leaves(to_numpy, with_arrays(row))


def _flat(nest: Tree) -> list[tuple[tuple, Any]]:
    """Return (path, values) for every part of a row that a nest names."""
    return [
        (path, values)
        for path, values in keras.tree.flatten_with_path(with_arrays(nest))
        if values is not None
    ]


def _evaluated(source: Arrays | IndexedRows, length: Callable) -> list[tuple[tuple, list[int]]]:
    """Return (path, lengths) for every part of a row that the function names."""
    if length is len:
        _refuse_parts(keras.tree.flatten_with_path(_row(source, 0)))
    found: dict[tuple, list[int]] = {}
    for number, row in _rows(source):
        lengths = dict(keras.tree.flatten_with_path(_asked(length, row, number)))
        if number == 0:
            found = {path: [] for path in lengths}
        if lengths.keys() != found.keys():
            parts = [
                ", ".join(tree.name(path, "length") for path in each) for each in (lengths, found)
            ]
            received = f"{parts[0]} for row {number}, {parts[1]} for row 0"
            raise BatchError(
                message("length must name the same parts of every row.", received, "name them all.")
            )
        for path, value in lengths.items():
            found[path].append(_number(tree.name(path, "length"), value, number))
    return list(found.items())


def _rows(source: Arrays | IndexedRows) -> Iterator[tuple[int, Tree]]:
    for start in range(0, source.num_rows, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, source.num_rows))
        yield from zip(numbers.tolist(), source.each(numbers), strict=True)


def _asked(length: Callable, row: Tree, number: int) -> Any:
    try:
        return length(row)
    except Exception as error:  # a user's function may raise anything
        received = f"{type(error).__name__}: {error}, for row {number}"
        raise BatchError(
            message("length must return every row's length.", received, "look at this row.")
        ) from error


def _number(label: str, value: Any, row: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= LONGEST:
        received = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        must = f"{label} must be a whole number from 0 to {LONGEST}."
        raise BatchError(
            message(must, f"{received} for row {row}", "length=lambda row: len(row['tokens']).")
        )
    return number


def _refuse_parts(leaves: list) -> None:
    """Refuse length=len for rows that are nested, as it would count their parts."""
    if leaves[0][0] != ():
        path = next((path for path, leaf in leaves if np.ndim(leaf)), leaves[0][0])
        attempt = f"length=lambda row: len({tree.name(path, 'row')})."
        raise SpecificationError(
            message("length=len would count the parts of a row.", f"{len(leaves)} parts", attempt)
        )


def _checked(label: str, values: object, num_rows: int) -> np.ndarray:
    """Return the lengths as int32 (rows,)."""
    values = np.asarray(values)
    if values.shape != (num_rows,) or values.dtype.kind not in "iu":
        must = f"{label} must be whole numbers, one for each of {num_rows} rows."
        received = f"shape {values.shape} of {values.dtype}"
        raise SpecificationError(message(must, received, "length=lambda row: len(row['tokens'])."))
    for row in np.flatnonzero((values < 0) | (values > LONGEST))[:1]:
        must = f"{label} must lie between 0 and {LONGEST}."
        raise SpecificationError(
            message(must, f"{values[row]} for row {row}", "look at the lengths.")
        )
    return values.astype(np.int32, copy=False)


def _owner(path: tuple, paths: tuple) -> int | None:
    return next((i for i, part in enumerate(paths) if path[: len(part)] == part), None)


def _pads(pad: Tree, leaves: list, owner: tuple) -> tuple:
    named = _flat(pad)
    paths = tuple(path for path, _ in named)
    found = tuple(_owner(path, paths) for path, _ in leaves)
    for i, (path, value) in enumerate(named):
        label = tree.name(path, "pad")
        if i not in found:
            _refuse(label, "a part of a row", leaves)
        padded = [mine == i and s is not None for mine, s in zip(found, owner, strict=True)]
        like = [
            leaf.dtype for (_, leaf), is_padded in zip(leaves, padded, strict=True) if is_padded
        ]
        if np.ndim(value) or any(not _holds(dtype, value) for dtype in like):
            received = f"{value} for {', '.join(str(dtype) for dtype in like)}"
            raise SpecificationError(
                message(f"{label} must be a number that the leaf can hold.", received, "pass 0.")
            )
    return tuple(0 if i is None else named[i][1] for i in found)


def _holds(dtype: np.dtype, value: object) -> bool:
    with np.errstate(all="ignore"):
        return dtype.kind == "f" or bool(np.asarray(value).astype(dtype) == value)


def _refuse(label: str, what: str, leaves: list) -> None:
    received = ", ".join(
        f"{tree.name(path, 'row')} of shape {np.shape(leaf)}" for path, leaf in leaves
    )
    raise SpecificationError(
        message(f"{label} must name {what}.", received, "use the keys of a row.")
    )


def _check_widths(sequences: Sequences) -> None:
    assert isinstance(sequences.source, Arrays)
    named = tree.named_leaves(sequences.source.arrays, "data")
    for (label, leaf), of in zip(named, sequences.owner, strict=True):
        if of is not None and leaf.dtype == object:
            received = "rows of uneven length" if tree.is_ragged(leaf) else "text"
            raise BatchError(
                message(
                    f"{label} must hold numbers.", received, "pass sequences of numbers as a list."
                )
            )
    for s, lengths in enumerate(sequences.lengths):
        widths = {
            label: leaf.shape[1]
            for (label, leaf), of in zip(named, sequences.owner, strict=True)
            if of == s
        }
        received = ", ".join(f"{label}: {width} wide" for label, width in widths.items())
        if len(set(widths.values())) > 1:
            must = "Arrays that share a length must be equally wide."
            raise BatchError(
                message(
                    must, received, "name every sequence: length={'source': ..., 'target': ...}."
                )
            )
        longest = int(np.argmax(lengths))
        if lengths[longest] > min(widths.values()):
            received += f"; {sequences.describe(longest)}"
            raise BatchError(
                message(
                    "Arrays must be as wide as their longest row.", received, "look at the lengths."
                )
            )
