"""The lengths of the sequences of every row: from arrays, a nest of arrays, or a function of a row."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.data.leaves import to_numpy, with_arrays
from wholestep.data.sequences import Sequences
from wholestep.data.shapes import LONGEST
from wholestep.data.source import Arrays, IndexedRows
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.tree import Tree

_AT_ONCE = 1024


def measure(source: Arrays | IndexedRows, length: Tree | Callable[[Tree], Tree], pad: Tree) -> Sequences:
    """Return the sequences of a source.

    Args:
        length: int (rows,), a nest of such arrays that names parts of a row, or a function of a row.
        pad: the padding value, or a nest of values for parts of a row; 0 for the other parts.

    Raises:
        SpecificationError: lengths or paddings that do not belong to these rows.
        BatchError: arrays that are narrower than their lengths, or not equally wide; a row for which the function
            fails.
    """
    named = _evaluated(source, length) if callable(length) else _flat(length)
    paths = tuple(path for path, _ in named)
    lengths = np.stack([_checked(tree.name(path, "length"), values, source.num_rows) for path, values in named])
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
    if isinstance(source, Arrays):
        return tree.map_leaves(lambda leaf: leaf[number], source.arrays)
    return tree.map_leaves(to_numpy, with_arrays(source.each(np.array([number]))[0]))


def _flat(nest: Tree) -> list[tuple[tuple, Any]]:
    """Return (path, values) for every part of a row that a nest names."""
    return [(path, values) for path, values in keras.tree.flatten_with_path(with_arrays(nest)) if values is not None]


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
            parts = [", ".join(tree.name(path, "length") for path in each) for each in (lengths, found)]
            received = f"{parts[0]} for row {number}, {parts[1]} for row 0"
            raise BatchError(message("length must name the same parts of every row.", received, "name them all."))
        for path, value in lengths.items():
            found[path].append(_number(tree.name(path, "length"), value, number))
    return list(found.items())


def _rows(source: Arrays | IndexedRows) -> Iterator[tuple[int, Tree]]:
    for start in range(0, source.num_rows, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, source.num_rows))
        if isinstance(source, IndexedRows):
            yield from zip(numbers.tolist(), source.each(numbers), strict=True)
        else:
            yield from ((n, tree.map_leaves(lambda leaf, n=n: leaf[n], source.arrays)) for n in numbers.tolist())


def _asked(length: Callable, row: Tree, number: int) -> Any:
    try:
        return length(row)
    except Exception as error:  # a user's function may raise anything
        received = f"{type(error).__name__}: {error}, for row {number}"
        raise BatchError(message("length must return every row's length.", received, "look at this row.")) from error


def _number(label: str, value: Tree, row: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= LONGEST:
        received = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        must = f"{label} must be a whole number from 0 to {LONGEST}."
        raise BatchError(message(must, f"{received} for row {row}", "length=lambda row: len(row['tokens'])."))
    return number


def _refuse_parts(leaves: list) -> None:
    """Refuse length=len for rows that are nested, as it would count their parts."""
    if leaves[0][0] != ():
        path = next((path for path, leaf in leaves if np.ndim(leaf)), leaves[0][0])
        attempt = f"length=lambda row: len({tree.name(path, 'row')})."
        raise SpecificationError(message("length=len would count the parts of a row.", f"{len(leaves)} parts", attempt))


def _checked(label: str, values: object, num_rows: int) -> np.ndarray:
    """Return the lengths as int32 (rows,)."""
    values = np.asarray(values)
    if values.shape != (num_rows,) or values.dtype.kind not in "iu":
        must = f"{label} must be whole numbers, one for each of {num_rows} rows."
        received = f"shape {values.shape} of {values.dtype}"
        raise SpecificationError(message(must, received, "length=lambda row: len(row['tokens'])."))
    for row in np.flatnonzero((values < 0) | (values > LONGEST))[:1]:
        must = f"{label} must lie between 0 and {LONGEST}."
        raise SpecificationError(message(must, f"{values[row]} for row {row}", "look at the lengths."))
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
        like = [leaf.dtype for (_, leaf), is_padded in zip(leaves, padded, strict=True) if is_padded]
        if np.ndim(value) or any(not _holds(dtype, value) for dtype in like):
            received = f"{value} for {', '.join(str(dtype) for dtype in like)}"
            raise SpecificationError(message(f"{label} must be a number that the leaf can hold.", received, "pass 0."))
    return tuple(0 if i is None else named[i][1] for i in found)


def _holds(dtype: np.dtype, value: object) -> bool:
    with np.errstate(all="ignore"):
        return dtype.kind == "f" or bool(np.asarray(value).astype(dtype) == value)


def _refuse(label: str, what: str, leaves: list) -> None:
    received = ", ".join(f"{tree.name(path, 'row')} of shape {np.shape(leaf)}" for path, leaf in leaves)
    raise SpecificationError(message(f"{label} must name {what}.", received, "use the keys of a row."))


def _check_widths(sequences: Sequences) -> None:
    assert isinstance(sequences.source, Arrays)
    named = tree.named_leaves(sequences.source.arrays, "data")
    for (label, leaf), of in zip(named, sequences.owner, strict=True):
        if of is not None and leaf.dtype == object:
            received = "rows of uneven length" if tree.is_ragged(leaf) else "text"
            raise BatchError(message(f"{label} must hold numbers.", received, "pass sequences of numbers as a list."))
    for s, lengths in enumerate(sequences.lengths):
        widths = {label: leaf.shape[1] for (label, leaf), of in zip(named, sequences.owner, strict=True) if of == s}
        received = ", ".join(f"{label}: {width} wide" for label, width in widths.items())
        if len(set(widths.values())) > 1:
            raise BatchError(
                message(
                    "Arrays that share a length must be equally wide.",
                    received,
                    "name every sequence: length={'source': ..., 'target': ...}.",
                )
            )
        longest = int(np.argmax(lengths))
        if lengths[longest] > min(widths.values()):
            received += f"; {sequences.describe(longest)}"
            raise BatchError(message("Arrays must be as wide as their longest row.", received, "look at the lengths."))
