"""How long the sequences of every row are: from arrays, from a nest of arrays, or from a function of a row."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, SpecificationError, say
from wholestep.sequences import Sequences, with_arrays
from wholestep.source import Arrays, Items, to_numpy

Tree = Any

_AT_ONCE = 1024
_MOST = 2**27  # so that the lengths of a row add up in 32 bits


def measure(source: Arrays | Items, length: Any, pad: Any) -> Sequences:
    """Return the sequences of a source.

    Args:
        length: int (rows,), a nest of such arrays that names parts of a row, or a function of a row.
        pad: what stands in the padding: one value, or a nest that names parts of a row; 0 where it names none.

    Raises:
        SpecificationError: lengths or paddings that do not belong to these rows.
        BatchError: arrays that are narrower than their lengths say, or not equally wide.
    """
    row = _row(source)
    named = _evaluated(source, length) if callable(length) else _flat(length)
    paths = tuple(path for path, _ in named)
    lengths = np.stack([_checked(tree.name(path, "length"), values, source.num_rows) for path, values in named])
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


def _row(source: Arrays | Items) -> Tree:
    if isinstance(source, Arrays):
        return tree.map_leaves(lambda leaf: leaf[0], source.arrays)
    return tree.map_leaves(to_numpy, with_arrays(source.each(np.arange(1))[0]))


def _flat(nest: Any) -> list[tuple[tuple, Any]]:
    """Return (path, values) for every part of a row that a nest names."""
    return [(path, values) for path, values in keras.tree.flatten_with_path(with_arrays(nest)) if values is not None]


def _evaluated(source: Arrays | Items, length: Callable) -> list[tuple[tuple, np.ndarray]]:
    found: list = []
    for start in range(0, source.num_rows, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, source.num_rows))
        if isinstance(source, Items):
            found += [length(row) for row in source.each(numbers)]
        else:
            found += [length(tree.map_leaves(lambda leaf, n=n: leaf[n], source.arrays)) for n in numbers]
    paths = [path for path, _ in keras.tree.flatten_with_path(found[0])]
    return list(zip(paths, np.array([tree.leaves(one) for one in found]).T, strict=True))


def _checked(label: str, values: Any, num_rows: int) -> np.ndarray:
    """Return the lengths as int32 (rows,)."""
    values = np.asarray(values)
    if values.shape != (num_rows,) or values.dtype.kind not in "iu":
        must = f"{label} must be whole numbers, one for each of {num_rows} rows."
        received = f"shape {values.shape} of {values.dtype}"
        raise SpecificationError(say(must, received, "pass np.array([len(row) for row in rows]), or length=len."))
    if values.min() < 0 or values.max() > _MOST:
        received = f"lengths from {values.min()} to {values.max()}"
        raise SpecificationError(say(f"{label} must lie between 0 and {_MOST}.", received, "look at the lengths."))
    return values.astype(np.int32, copy=False)


def _owner(path: tuple, paths: tuple) -> int | None:
    return next((i for i, part in enumerate(paths) if path[: len(part)] == part), None)


def _pads(pad: Any, leaves: list, owner: tuple) -> tuple:
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
            raise SpecificationError(say(f"{label} must be a number that the leaf can hold.", received, "pass 0."))
    return tuple(0 if i is None else named[i][1] for i in found)


def _holds(dtype: np.dtype, value: Any) -> bool:
    with np.errstate(all="ignore"):
        return dtype.kind == "f" or bool(np.asarray(value).astype(dtype) == value)


def _refuse(label: str, what: str, leaves: list) -> None:
    received = ", ".join(f"{tree.name(path, 'row')} of shape {np.shape(leaf)}" for path, leaf in leaves)
    raise SpecificationError(say(f"{label} must name {what}.", received, "use the keys of a row."))


def _check_widths(sequences: Sequences) -> None:
    assert isinstance(sequences.source, Arrays)
    named = tree.named_leaves(sequences.source.arrays, "data")
    for s, lengths in enumerate(sequences.lengths):
        widths = {label: leaf.shape[1] for (label, leaf), of in zip(named, sequences.owner, strict=True) if of == s}
        received = ", ".join(f"{label}: {width} wide" for label, width in widths.items())
        if len(set(widths.values())) > 1:
            raise BatchError(
                say(
                    "Arrays that share a length must be equally wide.",
                    received,
                    "name the sequences that have lengths of their own: length={'source': ..., 'target': ...}.",
                )
            )
        longest = int(np.argmax(lengths))
        if lengths[longest] > min(widths.values()):
            received += f"; {sequences.describe(longest)}"
            raise BatchError(say("Arrays must be as wide as their longest row.", received, "look at the lengths."))
