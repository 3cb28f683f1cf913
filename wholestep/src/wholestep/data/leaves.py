"""Leaves of data: user-passed arrays, rows and batches are converted to numpy arrays of numbers."""

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

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
# bytes of an array whose copy is aligned, so that an engine need not copy it again
_LARGE = 1 << 16


def numpy_batch(batch: Tree) -> Tree:
    """Return a user's batch with numpy leaves, checked for kinds that cannot be trained on."""
    return checked(raw_batch(batch))


def own_batch(batch: Tree, prepare: Callable[[Any], Any] | None = None) -> Tree:
    """Return a copy of a user's batch, prepared and checked: a generator may fill its arrays
    again.
    """
    copied = raw_batch(batch, lambda leaf: np.array(to_numpy(leaf)))
    return checked(copied if prepare is None else _transformed(prepare, copied))


def owned(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a transform whose results do not change: several are kept, and the given one may fill
    its arrays again.

    Arrays that are also arrays of the batch are not copied, as no other batch shares them.
    """

    def transformed(batch: Tree) -> Tree:
        given = tree.leaves(batch)
        known = {id(leaf) for leaf in given}
        found = _transformed(transform, batch)
        return tree.map_leaves(lambda leaf: leaf if id(leaf) in known else _copied(leaf), found)

    return transformed


def _transformed(transform: Callable[[Any], Any], batch: Tree) -> Any:
    try:
        return transform(batch)
    except StopIteration as error:
        raise RuntimeError(
            "A transform has raised StopIteration, which would end the data."
        ) from error


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, SparseRows):
        return leaf
    array = leaf if isinstance(leaf, np.ndarray) else to_numpy(leaf)
    is_large = _is_array_of_numbers(array) and array.nbytes >= _LARGE
    return tree.aligned_copy(array) if is_large else copy.copy(array)


def text_as_arrays(source: Tree) -> Any:
    """Return data in which lists of strings are arrays: alone, or parts of a tuple or a dict."""
    if isinstance(source, tuple):
        return tuple(map(text_as_arrays, source)) if type(source) is tuple else source
    if type(source) is dict:
        return {name: text_as_arrays(part) for name, part in source.items()}
    is_text = (
        isinstance(source, list)
        and source
        and all(isinstance(each, str | bytes) for each in source)
    )
    # else each string takes the room of the longest
    return np.array(source, dtype=object) if is_text else source


def raw_batch(batch: Tree, convert: Callable[[Any], np.ndarray] | None = None) -> Tree:
    """Return a user's batch with numpy leaves of any kind, by `convert` or else `to_numpy`."""
    # most batches need no look inside
    if type(batch) is not tuple or not all(map(_is_array_of_numbers, batch)):
        batch = text_as_arrays(batch)
        batch = without_none(tuple(batch) if isinstance(batch, list) else batch)
    return tree.map_leaves(convert or to_numpy, batch)


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
        raise BatchError(
            message(must, f"{len(batch)} parts, of which some are None", "leave out what is None.")
        )
    parts = tuple(part for part in batch if part is not None)
    if any(part is None for part in batch[: len(parts)]):
        must = "(x, y, sample_weight) must have labels where it has weights."
        raise BatchError(message(must, "None for y", "pass y, or no weights."))
    return parts


def with_arrays(row: Tree) -> Tree:
    """Return a row in which a list of numbers is an array, a leaf."""

    def as_array(part: object) -> np.ndarray | None:
        is_list = isinstance(part, list) and all(
            isinstance(n, int | float | np.number) for n in part
        )
        return np.asarray(part) if is_list else None

    return keras.tree.traverse(as_array, row)


def by_leaf(loaded: list, rows: np.ndarray, like: Tree) -> list[tuple[tuple, list]]:
    """Return (path, its part of each row) for every leaf of these rows.

    Raises:
        BatchError: a row is not nested like `like`.
    """
    paths = [path for path, _ in keras.tree.flatten_with_path(with_arrays(like))]
    flat = [keras.tree.flatten_with_path(with_arrays(row)) for row in loaded]
    for row, leaves in zip(rows, flat, strict=True):
        own = [path for path, _ in leaves]
        if own != paths:
            parts = [", ".join(tree.name(path, "row") for path in each) for each in (own, paths)]
            received = f"{parts[0]} in row {row}, {parts[1]} in others"
            raise BatchError(
                message(
                    "All rows must be nested alike.", received, "give every row the same leaves."
                )
            )
    return [(path, [leaves[i][1] for leaves in flat]) for i, path in enumerate(paths)]


def stack_column(path: tuple, rows: np.ndarray, column: list, attempt: str) -> np.ndarray | None:
    """Return one leaf of these rows as one array; None if all rows have None there.

    Raises:
        BatchError: the rows' parts differ in shape.
    """
    if all(leaf is None for leaf in column):
        return None
    shapes = [
        np.shape(leaf) if hasattr(leaf, "shape") else np.asarray(leaf).shape for leaf in column
    ]
    for row, shape in zip(rows, shapes, strict=True):
        if tuple(shape) != tuple(shapes[0]):
            must = f"{tree.name(path, 'row')} must have one shape in all rows of a batch."
            received = f"{tuple(shape)} in row {row}, {tuple(shapes[0])} in row {rows[0]}"
            raise BatchError(message(must, received, attempt))
    is_text = all(isinstance(leaf, str | bytes) for leaf in column)
    return np.array(column, dtype=object) if is_text else to_numpy(np.stack(column))


def to_numpy(leaf: object) -> np.ndarray:
    """Return a leaf as numpy, dense; floats in Keras' floatx."""
    if type(leaf) is np.ndarray:
        return _in_floatx(leaf)
    if is_sparse(leaf):
        leaf = dense(leaf)
    elif type(leaf).__name__ == "RaggedTensor":
        return tree.ragged(to_numpy(leaf.values), np.asarray(leaf.row_splits))  # type: ignore[attr-defined]
    elif hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(leaf.dtype) else leaf  # type: ignore[attr-defined]
    elif _is_column(leaf):
        leaf = text_as_arrays(leaf[:])  # type: ignore[index]
    return _in_floatx(_of_pandas(leaf) if hasattr(leaf, "to_numpy") else np.asarray(leaf))


def as_rows(leaf: object) -> np.ndarray | SparseRows:
    """Return a leaf whose rows can be sliced by their numbers: as numpy or, if it is sparse, as its
    entries.
    """
    return SparseRows.of(leaf) if is_sparse(leaf) else to_numpy(leaf)


def _in_floatx(array: np.ndarray) -> np.ndarray:
    is_float = array.dtype.kind == "f" or (
        array.dtype.kind == "V" and array.dtype.name == "bfloat16"
    )
    return array.astype(keras.config.floatx(), copy=False) if is_float else array


def _of_pandas(leaf: Any) -> np.ndarray:
    """Return a table as an array; a pandas column as an array of shape (rows, 1), as in Keras."""
    if type(leaf).__module__.partition(".")[0] != "pandas":
        return np.asarray(leaf.to_numpy())
    array = np.asarray(leaf.to_numpy())
    if (
        array.dtype == object
        and leaf.ndim == 2
        and all(dtype.kind in _NUMBERS for dtype in leaf.dtypes)
    ):
        # numbers mixed with booleans
        array = np.asarray(leaf.to_numpy(dtype=keras.config.floatx()))
    return array[:, None] if leaf.ndim == 1 else array


def checked(batch: Tree) -> Tree:
    """Return a batch that can be trained on: of numbers and, on TensorFlow, of text and ragged
    rows.

    Raises:
        BatchError: it holds other data.
    """
    if all(map(_is_array_of_numbers, tree.leaves(batch))):
        return batch
    batch = tree.map_leaves(
        lambda leaf: leaf if isinstance(leaf, np.ndarray | SparseRows) else to_numpy(leaf), batch
    )
    if all(leaf.dtype.kind in _NUMBERS for leaf in tree.leaves(batch)):
        return batch
    takes_text = keras.config.backend() == "tensorflow"
    for path, leaf in keras.tree.flatten_with_path(batch):
        if leaf is None or leaf.dtype.kind in _NUMBERS or (takes_text and _is_text_or_ragged(leaf)):
            continue
        part = tree.part_of(path, batch)
        raise _unknown_kind(
            f"{part} ({tree.name(path)})" if part else tree.name(path), leaf, is_label=part == "y"
        )
    return tree.map_leaves(
        lambda leaf: leaf.astype(object) if leaf.dtype.kind in "US" else leaf, batch
    )


def _is_array_of_numbers(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMBERS


def _is_text_or_ragged(leaf: np.ndarray) -> bool:
    if tree.is_ragged(leaf):
        shapes = {
            (each.shape[1:], each.dtype)
            for each in leaf
            if isinstance(each, np.ndarray) and each.ndim
        }
        is_even = len(shapes) == 1 and all(
            isinstance(each, np.ndarray) and each.ndim for each in leaf
        )
        return is_even and all(
            each.dtype.kind in _NUMBERS or _is_text_or_ragged(each) for each in leaf if len(each)
        )
    return leaf.dtype.kind in "US" or all(isinstance(each, str | bytes) for each in leaf.flat)


def _unknown_kind(name: str, leaf: np.ndarray, *, is_label: bool) -> BatchError:
    must = f"{name} must hold {'real ' if leaf.dtype.kind == 'c' else ''}numbers."
    holds_text = leaf.dtype.kind == "O" and any(isinstance(each, str | bytes) for each in leaf.flat)
    kind = "U" if holds_text or leaf.dtype.kind not in _ATTEMPTS else leaf.dtype.kind
    received = "text" if holds_text else f"dtype {leaf.dtype}"
    if tree.is_ragged(leaf):
        dtypes = sorted({str(np.asarray(row).dtype) for row in leaf})
        received = "rows of uneven length" + (
            f" and of several dtypes ({', '.join(dtypes)})" if len(dtypes) > 1 else ""
        )
    attempt = NUMBER_CLASSES if is_label and kind == "U" else _ATTEMPTS[kind]
    return BatchError(message(must, received, _AS_FLOATS if _is_of_numbers(leaf) else attempt))


def _is_of_numbers(leaf: np.ndarray) -> bool:
    """Whether an array of objects holds numbers alone; None would become NaN, and text is no
    number.
    """
    if leaf.dtype != object or any(
        each is None or isinstance(each, str | bytes) for each in leaf.flat
    ):
        return False
    try:
        leaf.astype(keras.config.floatx())
    except (TypeError, ValueError):
        return False
    return True


def holds_numbers(part: object, depth: int = 9) -> bool:
    """Whether this is a list or tuple of Python numbers, or of such lists, nested at most `depth`
    times.
    """
    if not isinstance(part, list | tuple) or not part or not depth:
        return False
    return isinstance(part[0], int | float) or all(holds_numbers(each, depth - 1) for each in part)


def refuse_lists(part: Tree, name: str) -> None:
    """Refuse lists of numbers in place of arrays, also in a dict or a list of several parts.

    Raises:
        BatchError: there is such a list.
    """
    if holds_numbers(part):
        received = (
            f"a {type(part).__name__} of "
            f"{'numbers' if holds_numbers(part, depth=1) else 'lists of numbers'}"
        )
        raise BatchError(
            message(f"{name} must hold arrays.", received, f"pass np.asarray({name}).")
        )
    if isinstance(part, dict | list | tuple):
        for key, each in part.items() if isinstance(part, dict) else enumerate(part):
            refuse_lists(each, f"{name}[{key!r}]")


def is_array(leaf: object) -> bool:
    """Whether this is an array, or can be turned into an array."""
    return (
        (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
        or hasattr(leaf, "to_numpy")
        or _is_column(leaf)
    )


def _is_column(leaf: object) -> bool:
    """Whether this is a column of a Hugging Face dataset, whose content is `[:]`."""
    return type(leaf).__name__ == "Column" and type(leaf).__module__.startswith("datasets.")
