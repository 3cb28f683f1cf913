"""Leaves of data: user-passed arrays, rows and batches are converted to numpy arrays of numbers."""

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.sparse import SparseRows, dense, is_sparse
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_ATTEMPTS = {
    "O": "leave out what is None; pass rows of uneven length as a list, with tokens=... and "
    "length=...",
    "U": "encode strings as integers first: call the model's TextVectorization, StringLookup or "
    "Hashing on the data, "
    "as in dataset.map(layer) or Batches(..., transform=...), and train the model on the layer's "
    "output; the "
    "TensorFlow engine takes text as it is.",
    "c": "the real and the imaginary part as two features, np.stack([z.real, z.imag], axis=-1).",
}
NUMBER_CLASSES = (
    "number the classes: np.unique(y, return_inverse=True)[1], or "
    "keras.layers.StringLookup(vocabulary=..., num_oov_indices=0)(y)."
)
_AS_FLOATS = 'turn the objects into numbers first: .astype("float32").'
_NUMBERS = "biuf"
Transform = Callable[[Any], Any]
# bytes of an array whose copy is aligned, so that an engine need not copy it again
_LARGE = 1 << 16


def numpy_batch(batch: Tree) -> Tree:
    """Return a user's batch with numpy leaves, checked for kinds that cannot be trained on."""
    return checked(_with_numpy(batch, to_numpy))


def copied_batch(batch: Tree, prepare: Transform | None = None) -> Tree:
    """Return a copy of a user's batch, prepared and checked: a generator may refill its arrays."""
    copied = _with_numpy(batch, lambda leaf: np.array(to_numpy(leaf)))
    return checked(copied if prepare is None else _transformed(prepare, copied))


def copying(transform: Transform) -> Transform:
    """Return a transform whose results are copies, as the given one may refill its arrays.

    Arrays that are also arrays of the batch are not copied, as no other batch shares them.
    """

    def transformed(batch: Tree) -> Tree:
        shared = {id(leaf): leaf for leaf in tree.leaves(batch)}
        result = _transformed(transform, batch)
        return tree.map_leaves(lambda leaf: leaf if id(leaf) in shared else _copied(leaf), result)

    return transformed


def _transformed(transform: Transform, batch: Tree) -> Any:
    try:
        return transform(batch)
    except StopIteration as error:
        must = "A transform has raised StopIteration, which would end the data."
        raise RuntimeError(must) from error


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, SparseRows):
        return leaf
    array = _in_numpy(leaf)
    is_large = _is_array_of_numbers(array) and array.nbytes >= _LARGE
    return tree.aligned_copy(array) if is_large else copy.copy(array)


def _in_numpy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, ndarray | SparseRows) else to_numpy(leaf)


def text_as_arrays(source: Tree) -> Any:
    """Return data in which lists of strings are arrays: alone, or parts of a tuple or a dict."""
    if isinstance(source, tuple):
        return tuple(map(text_as_arrays, source)) if type(source) is tuple else source
    if type(source) is dict:
        return {name: text_as_arrays(part) for name, part in source.items()}
    is_text = isinstance(source, list) and source and all(map(_is_string, source))
    # else each string takes the room of the longest
    return np.array(source, object) if is_text else source


def _is_string(value: object) -> bool:
    return isinstance(value, str | bytes)


def _with_numpy(batch: Tree, convert: Callable[[Any], ndarray]) -> Tree:
    """Return a user's batch with converted leaves."""
    # most batches need no look inside
    if type(batch) is not tuple or not all(map(_is_array_of_numbers, batch)):
        batch = text_as_arrays(batch)
        batch = without_none(tuple(batch) if isinstance(batch, list) else batch)
    return tree.map_leaves(convert, batch)


def without_none(batch: Tree) -> Any:
    """Drop the last parts of (x, y, sample_weight) that are None.

    Raises:
        BatchError: a None comes before another part, or there are more than three parts, some of
            them None.
    """
    if not isinstance(batch, tuple) or all(part is not None for part in batch):
        return batch
    if len(batch) > 3:
        must = "A batch must be x, (x, y) or (x, y, sample_weight)."
        received = f"{len(batch)} parts, of which some are None"
        raise BatchError(message(must, received, "leave out what is None."))
    parts = tuple(part for part in batch if part is not None)
    if any(part is None for part in batch[: len(parts)]):
        must = "(x, y, sample_weight) must have labels where it has weights."
        raise BatchError(message(must, "None for y", "pass y, or no weights."))
    return parts


def with_arrays(row: Tree) -> Tree:
    """Return a row in which a list of numbers is an array, a leaf."""

    def as_array(part: object) -> ndarray | None:
        numbers = int, float, np.number
        if isinstance(part, list) and all(isinstance(number, numbers) for number in part):
            return np.asarray(part)
        return None

    return keras.tree.traverse(as_array, row)


def by_leaf(loaded: list, rows: ndarray, like: Tree) -> list[tuple[tuple, list]]:
    """Return (path, its part of each row) for every leaf of these rows.

    Raises:
        BatchError: a row is not nested like `like`.
    """
    paths = _flattened(like)[0]
    columns = []
    for number, row in zip(rows, loaded, strict=True):
        row_paths, leaves = _flattened(row)
        if row_paths != paths:
            must = "All rows must be nested alike."
            received = f"{_names(row_paths)} in row {number}, {_names(paths)} in others"
            raise BatchError(message(must, received, "give every row the same leaves."))
        columns.append(leaves)
    by_path = zip(paths, zip(*columns, strict=True), strict=True)
    return [(path, list(column)) for path, column in by_path]


def _flattened(row: Tree) -> tuple[list[tuple], list]:
    """Return the paths of the leaves of a row, and the leaves."""
    pairs = keras.tree.flatten_with_path(with_arrays(row))
    return [path for path, _ in pairs], [leaf for _, leaf in pairs]


def _names(paths: list[tuple]) -> str:
    return ", ".join(tree.name(path, "row") for path in paths)


def stack_column(path: tuple, rows: ndarray, column: list, attempt: str) -> ndarray | None:
    """Return one leaf of these rows as one array; None if all rows have None there.

    Raises:
        BatchError: the rows' parts differ in shape.
    """
    if all(leaf is None for leaf in column):
        return None
    first = tuple(np.shape(column[0]))
    for row, leaf in zip(rows, column, strict=True):
        shape = tuple(np.shape(leaf))
        if shape != first:
            must = f"{tree.name(path, 'row')} must have one shape in all rows of a batch."
            received = f"{shape} in row {row}, {first} in row {rows[0]}"
            raise BatchError(message(must, received, attempt))
    if all(map(_is_string, column)):
        return np.array(column, object)
    return to_numpy(np.stack(column))


def to_numpy(leaf: object) -> ndarray:
    """Return a leaf as numpy, dense; floats in Keras' floatx."""
    if type(leaf) is ndarray:
        return _in_floatx(leaf)
    if is_sparse(leaf):
        leaf = dense(leaf)
    elif type(leaf).__name__ == "RaggedTensor":
        tensor: Any = leaf
        return tree.ragged(to_numpy(tensor.values), np.asarray(tensor.row_splits))
    elif hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(leaf.dtype) else leaf  # type: ignore[attr-defined]
    elif _is_column(leaf):
        leaf = text_as_arrays(leaf[:])  # type: ignore[index]
    return _in_floatx(_of_pandas(leaf) if hasattr(leaf, "to_numpy") else np.asarray(leaf))


def as_rows(leaf: object) -> ndarray | SparseRows:
    """Return a leaf whose rows can be sliced by their numbers: numpy, or the entries if sparse."""
    return SparseRows.of(leaf) if is_sparse(leaf) else to_numpy(leaf)


def _in_floatx(array: ndarray) -> ndarray:
    kind = array.dtype.kind
    if kind == "f" or (kind == "V" and array.dtype.name == "bfloat16"):
        return array.astype(keras.config.floatx(), copy=False)
    return array


def _of_pandas(leaf: Any) -> ndarray:
    """Return a table as an array; a pandas column as an array of shape (rows, 1), as in Keras."""
    array = np.asarray(leaf.to_numpy())
    if type(leaf).__module__.split(".")[0] != "pandas":
        return array
    if leaf.ndim == 1:
        return array[:, None]
    if array.dtype == object and all(dtype.kind in _NUMBERS for dtype in leaf.dtypes):
        # numbers mixed with booleans
        return np.asarray(leaf.to_numpy(dtype=keras.config.floatx()))
    return array


def checked(batch: Tree) -> Tree:
    """Return a batch that can be trained on.

    It holds numbers and, on TensorFlow, text and ragged rows.

    Raises:
        BatchError: it holds other data.
    """
    if all(map(_is_array_of_numbers, tree.leaves(batch))):
        return batch
    batch = tree.map_leaves(_in_numpy, batch)
    takes_text = keras.config.backend() == "tensorflow"
    for path, leaf in keras.tree.flatten_with_path(batch):
        if leaf is None or leaf.dtype.kind in _NUMBERS or (takes_text and _is_text_or_ragged(leaf)):
            continue
        part = tree.part_of(path, batch)
        name = tree.name(path)
        raise _unknown_kind(f"{part} ({name})" if part else name, leaf, is_label=part == "y")
    return tree.map_leaves(
        lambda leaf: leaf.astype(object) if leaf.dtype.kind in "US" else leaf, batch
    )


def _is_array_of_numbers(leaf: object) -> bool:
    return isinstance(leaf, ndarray) and leaf.dtype.kind in _NUMBERS


def _is_text_or_ragged(leaf: ndarray) -> bool:
    if not tree.is_ragged(leaf):
        return leaf.dtype.kind in "US" or all(map(_is_string, leaf.flat))
    rows = [row for row in leaf if isinstance(row, ndarray) and row.ndim]
    kinds = {(row.shape[1:], row.dtype) for row in rows}
    if len(rows) < len(leaf) or len(kinds) > 1:
        return False
    return all(row.dtype.kind in _NUMBERS or _is_text_or_ragged(row) for row in rows if len(row))


def _unknown_kind(name: str, leaf: ndarray, *, is_label: bool) -> BatchError:
    kind = leaf.dtype.kind
    must = f"{name} must hold {'real ' if kind == 'c' else ''}numbers."
    received = f"dtype {leaf.dtype}"
    if kind == "O" and any(map(_is_string, leaf.flat)):
        received = "text"
        kind = "U"
    elif tree.is_ragged(leaf):
        received = "rows of uneven length"
        dtypes = sorted({str(np.asarray(row).dtype) for row in leaf})
        if len(dtypes) > 1:
            received += f" and of several dtypes ({', '.join(dtypes)})"
    attempt = _ATTEMPTS.get(kind, _ATTEMPTS["U"])
    if _is_of_numbers(leaf):
        attempt = _AS_FLOATS
    elif is_label and attempt is _ATTEMPTS["U"]:
        attempt = NUMBER_CLASSES
    return BatchError(message(must, received, attempt))


def _is_of_numbers(leaf: ndarray) -> bool:
    """Whether an array of objects holds numbers alone; None would become NaN, text is no number."""
    if leaf.dtype != object or any(part is None or _is_string(part) for part in leaf.flat):
        return False
    try:
        leaf.astype(keras.config.floatx())
    except (TypeError, ValueError):
        return False
    return True


def holds_numbers(part: object, depth: int = 9) -> bool:
    """Whether this is a list or tuple of Python numbers, or of such lists, at most `depth` deep."""
    if not isinstance(part, list | tuple) or not part or not depth:
        return False
    if isinstance(part[0], int | float):
        return True
    return all(holds_numbers(item, depth - 1) for item in part)


def refuse_lists(part: Tree, name: str) -> None:
    """Refuse lists of numbers in place of arrays, also in a dict or a list of several parts.

    Raises:
        BatchError: there is such a list.
    """
    if holds_numbers(part):
        content = "numbers" if holds_numbers(part, depth=1) else "lists of numbers"
        received = f"a {type(part).__name__} of {content}"
        must = f"{name} must hold arrays."
        raise BatchError(message(must, received, f"pass np.asarray({name})."))
    if isinstance(part, dict | list | tuple):
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            refuse_lists(item, f"{name}[{key!r}]")


def is_array(leaf: object) -> bool:
    """Whether this is an array, or can be turned into an array."""
    is_typed = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_typed or hasattr(leaf, "to_numpy") or _is_column(leaf)


def _is_column(leaf: object) -> bool:
    """Whether this is a column of a Hugging Face dataset, whose content is `[:]`."""
    return type(leaf).__name__ == "Column" and type(leaf).__module__.startswith("datasets.")
