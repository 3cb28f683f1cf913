"""Leaves of data: what users pass as arrays, rows and batches, with numpy arrays of numbers for leaves."""

import keras
import numpy as np

from wholestep import tree
from wholestep.data.sparse import dense, is_sparse
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_ATTEMPTS = {
    "O": "leave out what is None; pass rows of uneven length as a list, with tokens=... and length=...",
    "U": "encode strings as integers first: call the model's TextVectorization, StringLookup or Hashing on the data, "
    "and train the model that takes what it returns.",
    "c": "the real and the imaginary part as two features, np.stack([z.real, z.imag], axis=-1).",
}


def numpy_batch(batch: Tree) -> Tree:
    """Return a user's batch with numpy leaves, checked for kinds that cannot be trained on."""
    batch = tree.map_leaves(to_numpy, without_none(tuple(batch) if isinstance(batch, list) else batch))
    check_dtypes(batch)
    return batch


def without_none(batch: Tree) -> Tree:
    """Drop the last parts of (x, y, sample_weight) that are None.

    Raises:
        BatchError: a part that is None stands before one that is not.
    """
    if not isinstance(batch, tuple) or all(part is not None for part in batch):
        return batch
    parts = tuple(part for part in batch if part is not None)
    if any(part is None for part in batch[: len(parts)]):
        raise BatchError(
            message(
                "(x, y, sample_weight) must have labels where it has weights.", "None for y", "pass y, or no weights."
            )
        )
    return parts


def with_arrays(row: Tree) -> Tree:
    """Return a row in which a list of numbers is an array, a leaf."""

    def as_array(part: object) -> np.ndarray | None:
        is_list = isinstance(part, list) and all(isinstance(n, int | float | np.number) for n in part)
        return np.asarray(part) if is_list else None

    return keras.tree.traverse(as_array, row)


def by_leaf(loaded: list, rows: np.ndarray, like: Tree) -> list[tuple[tuple, list]]:
    """Return (path, its part of each row) for every leaf of these rows.

    Raises:
        BatchError: a row that is not nested like `like`.
    """
    paths = [path for path, _ in keras.tree.flatten_with_path(with_arrays(like))]
    flat = [keras.tree.flatten_with_path(with_arrays(row)) for row in loaded]
    for row, leaves in zip(rows, flat, strict=True):
        own = [path for path, _ in leaves]
        if own != paths:
            parts = [", ".join(tree.name(path, "row") for path in each) for each in (own, paths)]
            received = f"{parts[0]} in row {row}, {parts[1]} in others"
            raise BatchError(message("All rows must be nested alike.", received, "give every row the same leaves."))
    return [(path, [leaves[i][1] for leaves in flat]) for i, path in enumerate(paths)]


def stack(path: tuple, rows: np.ndarray, column: list, attempt: str) -> np.ndarray | None:
    """Return one leaf of these rows as one array; None of rows that have None there.

    Raises:
        BatchError: the rows' parts differ in shape.
    """
    if all(leaf is None for leaf in column):
        return None
    shapes = [np.shape(leaf) if hasattr(leaf, "shape") else np.asarray(leaf).shape for leaf in column]
    for row, shape in zip(rows, shapes, strict=True):
        if tuple(shape) != tuple(shapes[0]):
            must = f"{tree.name(path, 'row')} must have one shape in all rows of a batch."
            received = f"{tuple(shape)} in row {row}, {tuple(shapes[0])} in row {rows[0]}"
            raise BatchError(message(must, received, attempt))
    return to_numpy(np.stack(column))


def to_numpy(leaf: object) -> np.ndarray:
    """Return a leaf as numpy, dense; floats in Keras' floatx."""
    if is_sparse(leaf):
        leaf = dense(leaf)
    elif hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
    elif _is_column(leaf):
        leaf = leaf[:]  # type: ignore[index]
    array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else np.asarray(leaf)
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return array.astype(keras.config.floatx(), copy=False) if is_float else array


def check_dtypes(batch: Tree) -> None:
    """Refuse leaves that are not numbers."""
    if all(leaf.dtype.kind in "biuf" for leaf in tree.leaves(batch)):
        return
    for label, leaf in tree.named_leaves(batch):
        if leaf.dtype.kind not in "biuf":
            must = f"{label} must hold {'real ' if leaf.dtype.kind == 'c' else ''}numbers."
            holds_text = leaf.dtype.kind == "O" and any(isinstance(each, str | bytes) for each in leaf.flat)
            kind = "U" if holds_text or leaf.dtype.kind not in _ATTEMPTS else leaf.dtype.kind
            raise BatchError(message(must, "text" if holds_text else f"dtype {leaf.dtype}", _ATTEMPTS[kind]))


def is_nest_of_arrays(source: object) -> bool:
    """Whether this is an array, or nested dicts, lists and tuples of nothing else (None aside)."""
    if not isinstance(source, dict | list | tuple):
        return is_array(source)
    leaves = [leaf for leaf in tree.leaves(source) if leaf is not None]
    return bool(leaves) and all(is_array(leaf) for leaf in leaves)


def is_array(leaf: object) -> bool:
    """Whether this is a leaf that holds a number for each row, or can be turned into one."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or hasattr(leaf, "to_numpy") or _is_column(leaf)


def _is_column(leaf: object) -> bool:
    """Whether this is a column of a Hugging Face dataset, of which `[:]` is the content."""
    return type(leaf).__name__ == "Column" and type(leaf).__module__.startswith("datasets.")
