"""Rows that hold sequences: their lengths, leaves and padding."""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.leaves import by_leaf, checked, stack_column, to_numpy, with_arrays
from wholestep.data.shapes import LONGEST
from wholestep.data.source import Arrays, IndexedRows
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.tree import Tree

_AT_ONCE = 1024
_NAME_ALL = "name every sequence: length={'source': ..., 'target': ...}."
_LENGTH_OF_TOKENS = "length=lambda row: len(row['tokens'])."


class RowLeaf(NamedTuple):
    """A leaf of all rows.

    Args:
        path: its path in a row.
        example: the leaf of one row, not empty if there is such a row.
        owner: the number of its sequence; None for a leaf outside of sequences.
        pad: its padding value.
    """

    path: tuple
    example: Any
    owner: int | None = None
    pad: float = 0

    @property
    def label(self) -> str:
        """The name of the leaf in errors."""
        return tree.name(self.path, "") or "A row"


Leaves = dict[tuple, RowLeaf]


class RowLayout(NamedTuple):
    """The layout of a batch: source row rows[i] begins at [at[i], starts[i]]. int64 (segments,)."""

    rows: ndarray
    at: ndarray
    starts: ndarray

    @property
    def num_packs(self) -> int:
        """The number of packed rows."""
        return int(self.at[-1]) + 1

    def only(self, places: ndarray | slice) -> "RowLayout":
        """Return the layout of these packed rows alone; `places` are ascending."""
        packs = np.arange(self.num_packs)[places]
        inside = np.isin(self.at, packs)
        at = np.searchsorted(packs, self.at[inside])
        return RowLayout(self.rows[inside], at, self.starts[inside])


@dataclass(frozen=True)
class Sequences:
    """The sequences in the rows of a source, each with its length.

    Args:
        source: ragged rows, or arrays that are padded along axis 1.
        lengths: int32 (sequences, rows); none is above `limits`.
        paths: the path in a row of each sequence's length, () for one length of the whole row.
        row: a row, for its structure.
        leaves: the leaves of a row.
        limits: the longest kept length of each sequence, int64 (sequences,).
    """

    source: Arrays | IndexedRows
    lengths: ndarray
    paths: tuple[tuple, ...]
    row: Tree
    leaves: tuple[RowLeaf, ...]
    limits: ndarray

    @property
    def totals(self) -> ndarray:
        """The sum of every row's lengths, int32 (rows,)."""
        return self.lengths.sum(axis=0, dtype=np.int32)

    def cut(self, limits: ndarray) -> "Sequences":
        """Return the same sequences, cut off at these lengths."""
        lengths = np.minimum(self.lengths, limits[:, None].astype(np.int32))
        return replace(self, lengths=lengths, limits=limits)

    def describe(self, row: int) -> str:
        """Return the lengths of a row in words: "row 17, length['source'] 93"."""
        names = [tree.name(path, "length") for path in self.paths]
        lengths = self.lengths[:, row]
        parts = [f"{name} {length}" for name, length in zip(names, lengths, strict=True)]
        return ", ".join([f"row {row}", *parts])

    @property
    def widths(self) -> ndarray:
        """The width of the arrays of each sequence, int64 (sequences,)."""
        widths = {leaf.owner: len(leaf.example) for leaf in self.leaves if leaf.owner is not None}
        return np.array([widths[number] for number in range(len(self.paths))])

    def padded(self, rows: ndarray, shape: ndarray) -> Tree:
        """Return these rows with every sequence padded to its part of the shape (sequences,)."""
        parts: list[ndarray | None] = []
        if isinstance(self.source, Arrays):
            arrays = tree.leaves(self.source.arrays)
            for array, leaf in zip(arrays, self.leaves, strict=True):
                width = None if leaf.owner is None else int(shape[leaf.owner])
                parts.append(_sliced(array, rows, width, leaf.pad))
            return self._loaded(self._nested(parts))
        num = len(rows)
        layout = RowLayout(rows, np.arange(num), np.zeros(num, np.int64))
        for leaf, column in self._columns(rows):
            if leaf.owner is None:
                part = stack_column(leaf.path, rows, column, _NAME_ALL)
            else:
                part = self._lay(leaf, column, layout, (num, shape[leaf.owner]))
            parts.append(part)
        return self._loaded(self._nested(parts))

    def packed(self, layout: RowLayout, shape: tuple, added: dict) -> Tree:
        """Return rows of one sequence in arrays of this shape, with the leaves `added`."""
        columns = self._columns(layout.rows)
        parts = [self._lay(leaf, column, layout, shape) for leaf, column in columns]
        return self._loaded(self._nested(parts) | added)

    def _loaded(self, batch: Tree) -> Tree:
        return checked(self.source.transform(batch))

    def _nested(self, parts: list) -> Any:
        if not isinstance(self.source, Arrays):
            return keras.tree.pack_sequence_as(self.row, parts)
        remaining = iter(parts)
        return tree.map_leaves(lambda _: next(remaining), self.row)

    def _columns(self, rows: ndarray) -> list[tuple[RowLeaf, list[ndarray]]]:
        """Return every leaf with its part of each of these rows, as arrays."""
        if isinstance(self.source, Arrays):
            columns = [list(array[rows]) for array in tree.leaves(self.source.arrays)]
        else:
            by_path = by_leaf(self.source.list_rows(rows), rows, self.row)
            columns = [[to_numpy(part) for part in column] for _, column in by_path]
        return list(zip(self.leaves, columns, strict=True))

    def _lay(
        self, leaf: RowLeaf, column: list[ndarray], layout: RowLayout, shape: tuple
    ) -> ndarray:
        """Return a leaf of these rows, padded."""
        rows = layout.rows
        lengths = self.lengths[leaf.owner, rows].tolist()
        if isinstance(self.source, IndexedRows):
            self._check_lengths(leaf, rows, column, lengths)
        filled = [part for part in (leaf.example, *column) if len(part)] or column[:1]
        place_shape = filled[0].shape[1:]
        for row, part in zip(rows, column, strict=True):
            if len(part) and part.shape[1:] != place_shape:
                must = f"{leaf.label} must have one shape at every place of every row."
                received = f"{part.shape[1:]} in row {row}, {place_shape} in others"
                attempt = "give all rows the same axes after the first."
                raise BatchError(message(must, received, attempt))
        dtype = np.result_type(*{part.dtype for part in filled})
        laid = np.full((*shape, *place_shape), leaf.pad, dtype)
        ats = layout.at.tolist()
        starts = layout.starts.tolist()
        for at, start, length, part in zip(ats, starts, lengths, column, strict=True):
            laid[at, start : start + length] = part[:length]
        return to_numpy(laid)

    def _check_lengths(
        self, leaf: RowLeaf, rows: ndarray, column: list[ndarray], lengths: list[int]
    ) -> None:
        limit = int(self.limits[leaf.owner])
        for row, part, length in zip(rows, column, lengths, strict=True):
            if not part.ndim or min(len(part), limit) != length:
                must = f"{leaf.label} must be as long as its length says."
                received = f"shape {part.shape} where the length is {length}, in row {row}"
                raise BatchError(message(must, received, _NAME_ALL))


def _sliced(array: ndarray, rows: ndarray, width: int | None, pad: float) -> ndarray:
    """Return these rows of an array, cut or padded to a width; None to keep all."""
    if width is None:
        return array[rows]
    kept = array[rows, :width]
    lacking = width - kept.shape[1]
    if not lacking:
        return kept
    sides = np.zeros((kept.ndim, 2), int)
    sides[1, 1] = lacking
    return np.pad(kept, sides, constant_values=pad)


def measure(source: Arrays | IndexedRows, length: Tree | Callable, pad: Tree) -> Sequences:
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
    lengths = np.stack([_checked(path, values, source.num_rows) for path, values in named])
    has_no_empty = (lengths > 0).all(axis=0)
    row = _row(source, int(np.argmax(has_no_empty)))
    parts = keras.tree.flatten_with_path(row)
    if isinstance(source, Arrays):  # a part of None stays None
        parts = [(path, leaf) for path, leaf in parts if leaf is not None]
    leaves = {path: RowLeaf(path, leaf) for path, leaf in parts}
    for number, path in enumerate(paths):
        owned = [leaf for leaf in _below(path, leaves) if np.ndim(leaf.example)]
        if not owned:
            _refuse(tree.name(path, "length"), "a part of a row that has an axis", leaves)
        for leaf in owned:
            leaves[leaf.path] = leaf._replace(owner=number)
    _add_pads(leaves, pad)
    limits = np.full(len(paths), np.iinfo(np.int64).max)
    sequences = Sequences(source, lengths, paths, row, tuple(leaves.values()), limits)
    if isinstance(source, Arrays):
        _check_widths(sequences, source.arrays)
    return sequences


def _row(source: Arrays | IndexedRows, number: int) -> Tree:
    (row,) = source.list_rows(np.array([number]))
    return row if isinstance(source, Arrays) else tree.map_leaves(to_numpy, with_arrays(row))


def _flat(nest: Tree) -> list[tuple[tuple, Any]]:
    """Return (path, values) for every part of a row that a nest names."""
    named = keras.tree.flatten_with_path(with_arrays(nest))
    return [(path, values) for path, values in named if values is not None]


def _evaluated(source: Arrays | IndexedRows, length: Callable) -> list[tuple[tuple, list[int]]]:
    """Return (path, lengths) for every part of a row that the function names."""
    if length is len:
        _refuse_parts(keras.tree.flatten_with_path(_row(source, 0)))
    by_path: dict[tuple, list[int]] = {}
    for number, row in _rows(source):
        named = dict(keras.tree.flatten_with_path(_length_of(length, row, number)))
        if number == 0:
            by_path = {path: [] for path in named}
        if named.keys() != by_path.keys():
            must = "length must name the same parts of every row."
            received = f"{_names(named)} for row {number}, {_names(by_path)} for row 0"
            raise BatchError(message(must, received, "name them all."))
        for path, value in named.items():
            by_path[path].append(_number(path, value, number))
    return list(by_path.items())


def _names(paths: Iterable[tuple]) -> str:
    return ", ".join(tree.name(path, "length") for path in paths)


def _rows(source: Arrays | IndexedRows) -> Iterator[tuple[int, Tree]]:
    for start in range(0, source.num_rows, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, source.num_rows))
        yield from zip(numbers.tolist(), source.list_rows(numbers), strict=True)


def _length_of(length: Callable, row: Tree, number: int) -> Any:
    try:
        return length(row)
    except Exception as error:  # a user's function may raise anything
        must = "length must return every row's length."
        received = f"{type(error).__name__}: {error}, for row {number}"
        raise BatchError(message(must, received, "look at this row.")) from error


def _number(path: tuple, value: Any, row: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= LONGEST:
        shown = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        must = f"{tree.name(path, 'length')} must be a whole number from 0 to {LONGEST}."
        raise BatchError(message(must, f"{shown} for row {row}", _LENGTH_OF_TOKENS))
    return number


def _refuse_parts(leaves: list) -> None:
    """Refuse length=len for rows that are nested, as it would count their parts."""
    first = leaves[0][0]
    if first != ():
        path = next((path for path, leaf in leaves if np.ndim(leaf)), first)
        must = "length=len would count the parts of a row."
        attempt = f"length=lambda row: len({tree.name(path, 'row')})."
        raise SpecificationError(message(must, f"{len(leaves)} parts", attempt))


def _checked(path: tuple, values: object, num_rows: int) -> ndarray:
    """Return the lengths as int32 (rows,)."""
    label = tree.name(path, "length")
    values = np.asarray(values)
    if values.shape != (num_rows,) or values.dtype.kind not in "iu":
        must = f"{label} must be whole numbers, one for each of {num_rows} rows."
        received = f"shape {values.shape} of {values.dtype}"
        raise SpecificationError(message(must, received, _LENGTH_OF_TOKENS))
    for row in np.flatnonzero((values < 0) | (values > LONGEST))[:1]:
        must = f"{label} must lie between 0 and {LONGEST}."
        received = f"{values[row]} for row {row}"
        raise SpecificationError(message(must, received, "look at the lengths."))
    return values.astype(np.int32, copy=False)


def _below(path: tuple, leaves: Leaves) -> list[RowLeaf]:
    """Return the leaves of the part of a row at this path."""
    return [leaf for leaf in leaves.values() if leaf.path[: len(path)] == path]


def _add_pads(leaves: Leaves, pad: Tree) -> None:
    for path, value in _flat(pad):
        label = tree.name(path, "pad")
        named = _below(path, leaves)
        if not named:
            _refuse(label, "a part of a row", leaves)
        dtypes = [leaf.example.dtype for leaf in named if leaf.owner is not None]
        if np.ndim(value) or not all(_holds(dtype, value) for dtype in dtypes):
            must = f"{label} must be a number that the leaf can hold."
            received = f"{value} for {', '.join(map(str, dtypes))}"
            raise SpecificationError(message(must, received, "pass 0."))
        for leaf in named:
            leaves[leaf.path] = leaf._replace(pad=value)


def _holds(dtype: np.dtype, value: object) -> bool:
    with np.errstate(all="ignore"):
        return dtype.kind == "f" or bool(np.asarray(value).astype(dtype) == value)


def _refuse(label: str, part: str, leaves: Leaves) -> None:
    received = ", ".join(
        f"{tree.name(path, 'row')} of shape {np.shape(leaf.example)}"
        for path, leaf in leaves.items()
    )
    must = f"{label} must name {part}."
    raise SpecificationError(message(must, received, "use the keys of a row."))


def _check_widths(sequences: Sequences, arrays: Tree) -> None:
    widths: list[dict[str, int]] = [{} for _ in sequences.paths]
    named = tree.named_leaves(arrays, "data")
    for (label, array), leaf in zip(named, sequences.leaves, strict=True):
        if leaf.owner is None:
            continue
        if array.dtype == object:
            received = "rows of uneven length" if tree.is_ragged(array) else "text"
            attempt = "pass sequences of numbers as a list."
            raise BatchError(message(f"{label} must hold numbers.", received, attempt))
        widths[leaf.owner][label] = array.shape[1]
    for lengths, by_label in zip(sequences.lengths, widths, strict=True):
        received = ", ".join(f"{label}: {width} wide" for label, width in by_label.items())
        least = min(by_label.values())
        if max(by_label.values()) > least:
            must = "Arrays that share a length must be equally wide."
            raise BatchError(message(must, received, _NAME_ALL))
        longest = int(np.argmax(lengths))
        if lengths[longest] > least:
            must = "Arrays must be as wide as their longest row."
            received += f"; {sequences.describe(longest)}"
            raise BatchError(message(must, received, "look at the lengths."))
