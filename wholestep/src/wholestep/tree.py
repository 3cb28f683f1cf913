"""Nested dicts, lists and tuples of arrays. A leaf is named by its path; None is kept, as no leaf.

A `Tree` is such data. A `Tensor` is one leaf: an array of numpy or the engine, or a tracer.

On the host, text is an array of strings, dtype object, and ragged rows are an array of arrays, one
for each row.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import numpy as np

from wholestep.errors import BatchError, message


class Tensor(Protocol):
    """An array of numpy or the engine, or a tracer. Results of operations are not checked."""

    @property
    def shape(self) -> Any:
        """The sizes of its axes."""

    @property
    def dtype(self) -> Any:
        """The type of its numbers."""

    def __getitem__(self, at: Any, /) -> Any: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __array__(self, dtype: Any = None, /) -> np.ndarray: ...
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...
    def __abs__(self) -> Any: ...
    def __neg__(self) -> Any: ...
    def __invert__(self) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...


Tree: TypeAlias = object


def map_leaves(function: Callable, tree: Tree, *others: Tree) -> Any:
    """Apply a function to the leaves of a tree, or to corresponding leaves of several trees.

    >>> map_leaves(abs, {"x": -1, "optional": None})
    {'x': 1, 'optional': None}
    """
    if isinstance(tree, np.ndarray):
        return function(tree, *others)
    if tree is None:
        return None
    if type(tree) is tuple and not others:  # as most batches are
        return tuple(
            [
                function(part) if isinstance(part, np.ndarray) else map_leaves(function, part)
                for part in tree
            ]
        )
    if type(tree) is tuple and all(
        type(other) is tuple and len(other) == len(tree) for other in others
    ):
        return tuple([map_leaves(function, *parts) for parts in zip(tree, *others, strict=True)])
    return _keras().map_structure(
        lambda *parts: None if parts[0] is None else function(*parts), tree, *others
    )


def leaves(tree: Tree) -> list:
    """Return the leaves in their flattening order."""
    if isinstance(tree, np.ndarray):
        return [tree]
    if tree is None:
        return []
    if type(tree) is tuple or type(tree) is list:
        return [
            leaf
            for part in tree
            for leaf in ((part,) if isinstance(part, np.ndarray) else leaves(part))
        ]
    return [leaf for leaf in _keras().flatten(tree) if leaf is not None]


def _keras() -> Any:
    """Return the trees of Keras, which is imported where data are nested."""
    import keras

    return keras.tree


def name(path: tuple, root: str = "batch") -> str:
    """Name a leaf by its path.

    >>> name(("source", 0))
    "batch['source'][0]"
    """
    return root + "".join(f"[{key!r}]" for key in path)


def part_of(path: tuple, batch: Tree) -> str:
    """Return the part of (x, y, sample_weight) with this leaf; "" if the batch is no such tuple."""
    is_known = isinstance(batch, tuple) and len(batch) in (2, 3)
    return ("x", "y", "sample_weight")[path[0]] if is_known else ""


def named_leaves(tree: Tree, root: str = "batch") -> list[tuple[str, Tensor]]:
    """Return (name, leaf) for every leaf."""
    leaves = _keras().flatten_with_path(tree)
    return [(name(path, root), leaf) for path, leaf in leaves if leaf is not None]


def num_rows(tree: Tree, root: str = "batch") -> int:
    """Return the common length of the leading axes of all leaves.

    Raises:
        BatchError: there is no leaf, a leaf has no leading axis, or the lengths differ.
    """
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves(tree)]
    lengths = {shape[0] if shape else None for shape in shapes}
    length = lengths.pop() if len(lengths) == 1 else None
    if length is not None:
        return int(length)
    return _checked_num_rows(tree, root)


def _checked_num_rows(tree: Tree, root: str) -> int:
    lengths = {}
    of_rows = "; or batch the data set, as by .batch(32)" if root == "batch" else ""
    for path, leaf in _keras().flatten_with_path(tree):
        if leaf is None:
            continue
        label = name(path, root)
        if len(getattr(leaf, "shape", None) or ()) == 0:
            text = message(
                f"{label} must be an array with a leading row axis.",
                _kind(leaf),
                f"pass an array of shape (rows, ...), such as np.asarray(a_list){of_rows}.",
            )
            raise BatchError(text)
        part = part_of(path, tree)
        lengths[f"{part} ({label})" if part else label] = int(leaf.shape[0])
    if not lengths:
        must = f"{root} must hold at least one array."
        raise BatchError(message(must, tree, "pass arrays with a leading row axis."))
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{label}: {length} rows" for label, length in lengths.items())
        must = "All arrays must have the same number of rows."
        raise BatchError(message(must, counts, f"pass arrays of equal length{of_rows}."))
    return next(iter(lengths.values()))


def num_bytes(tree: Tree) -> int:
    """Return the total number of bytes of the leaves; strings count as pointers."""
    return sum(_bytes_of(leaf) for leaf in leaves(tree))


def _bytes_of(leaf: Any) -> int:
    return sum(map(_bytes_of, leaf)) if is_ragged(leaf) else int(leaf.nbytes)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array, aligned to 64 bytes: a host engine uses it without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    return np.ndarray(shape, dtype, raw, -address(raw) % 64)


def aligned_copy(leaf: np.ndarray) -> np.ndarray:
    """Return an aligned copy of an array."""
    copy = aligned(leaf.shape, leaf.dtype)
    copy[...] = leaf
    return copy


# Bytes from which numpy asks for huge pages, where rows are gathered faster.
# They may take 0.1 s per 50 MiB.
HUGE = 4 << 20


class Copies:
    """Aligned copies of host arrays. A thread copies large arrays; `wait` waits for it."""

    def __init__(self) -> None:
        self.pending: dict[int, Future] = {}  # by the address of the copy

    def copy(self, leaf: np.ndarray) -> np.ndarray:
        """Return an aligned copy. The copy of a large array is complete after `wait`."""
        if leaf.nbytes < HUGE:
            return aligned_copy(leaf)
        copy = aligned(leaf.shape, leaf.dtype)
        thread = ThreadPoolExecutor(1, "wholestep-copy")
        self.pending[address(copy)] = thread.submit(np.copyto, copy, leaf)
        thread.shutdown(wait=False)
        return copy

    def wait(self) -> None:
        """Return when all copies are complete."""
        for copied in self.pending.values():
            copied.result()
        self.pending.clear()


def address(leaf: np.ndarray) -> int:
    """Return the address of an array's first number."""
    return int(leaf.__array_interface__["data"][0])


def is_ragged(leaf: object) -> bool:
    """Whether this is an array of arrays: rows that may differ in length."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype != object or leaf.ndim != 1:
        return False
    return len(leaf) > 0 and isinstance(leaf[0], np.ndarray)


def ragged(values: np.ndarray, splits: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return ragged rows: row i is the values from splits[i] to splits[i + 1].

    >>> [row.tolist() for row in ragged(np.array([5, 6, 7]), [0, 2, 2, 3])]
    [[5, 6], [], [7]]
    """
    rows = np.empty(len(splits) - 1, object)
    for i, (start, end) in enumerate(itertools.pairwise(splits)):
        rows[i] = values[start:end]
    return rows


def _kind(leaf: object) -> str:
    name = type(leaf).__name__
    shape = getattr(leaf, "shape", None)
    return name if shape is None else f"{name} of shape {tuple(shape)}"
