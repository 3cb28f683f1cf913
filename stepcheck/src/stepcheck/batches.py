"""A batch of any framework as arrays of numpy, by name, and back: rows are the first
axis.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Number
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message

_TRIES = 8  # draws for a value that differs from the present one
_MAKERS: dict[str, Callable[[np.ndarray, Any], Any]] = {
    "torch": lambda values, like: like.new_tensor(values),
    "tensorflow": lambda values, like: sys.modules["tensorflow"].constant(
        values, like.dtype
    ),
    "jaxlib": lambda values, like: sys.modules["jax"].device_put(values, like.sharding),
}


@dataclass(frozen=True)
class Batch:
    """A batch, and the values of its leaves that have rows, by name."""

    tree: Any
    values: Mapping[str, np.ndarray]
    num_rows: int

    def changed(self, changes: Mapping[str, np.ndarray]) -> Any:
        """Return a copy with other values in some leaves, of the types that the batch
        has.
        """

        def given(name: str, leaf: Any) -> Any:
            values = changes.get(name, self.values.get(name))
            return leaf if values is None else _like(values, leaf)

        return mapped(given, self.tree)

    def others(
        self, name: str, where: np.ndarray, real: np.ndarray, draw: np.random.Generator
    ) -> dict[str, np.ndarray] | None:
        """Return a leaf with values of its real places elsewhere, unlike the present
        ones.

        Args:
            name: of the leaf.
            where: the places that change, of shape (rows, ...): the first axes of the
                leaf.
            real: the places whose values are drawn from, of the same shape.
            draw: how.

        Returns:
            None if no place can get another value.
        """
        values = self.values[name].copy()
        pool, present = values[real], values[where]
        if not len(pool) or not len(present):
            return None
        chosen = present
        for _ in range(_TRIES):
            is_same = equal(chosen, present).reshape(-1, *(1,) * (present.ndim - 1))
            drawn = pool[draw.integers(len(pool), size=len(present))]
            chosen = np.where(is_same, drawn, chosen)
        if np.all(equal(chosen, present)):
            if values.dtype.kind != "f":
                return None
            chosen = present + 1
        values[where] = chosen
        return {name: values}


def equal(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return at which places of the first axis two arrays are equal.

    >>> equal(np.array([[1, 2], [3, 4]]), np.array([1, 2])).tolist()
    [True, False]
    """
    is_equal = some == others
    return np.all(is_equal.reshape(len(some), -1), axis=1)


def read(tree: Any) -> Batch:
    """Return a batch to change.

    Raises:
        SpecificationError: it has no array, or an array without rows.
    """
    named = dict(leaves(tree, "batch"))
    arrays = {name: leaf for name, leaf in named.items() if _length(leaf) is not None}
    if not any(map(_length, arrays.values())):
        must = "batch must hold an array, of shape (rows, ...)."
        raise SpecificationError(
            message(must, tree, "pass arrays, tensors, or dicts of them.")
        )
    lengths = Counter(
        length for each in arrays.values() if (length := _length(each) or 1) > 1
    )
    num_rows = max(lengths, key=lambda length: (lengths[length], length), default=1)
    values = {}
    for name, leaf in arrays.items():
        if _length(leaf) == num_rows:
            values[name] = numbers(name, leaf)
        elif _length(leaf) != 1 and not isinstance(leaf, list | tuple):
            must = f"Each array of the batch must have its {num_rows} rows on the first axis."
            attempt = (
                "let `update` keep it, or pass np.arange(rows), and take the rows in "
                "`update`."
            )
            raise SpecificationError(
                message(must, f"{name} of shape {tuple(leaf.shape)}", attempt)
            )
    return Batch(tree, values, num_rows)


def mapped(function: Callable[[str, Any], Any], node: Any, name: str = "batch") -> Any:
    """Return nested data, each leaf replaced by a function of its name and itself.

    >>> mapped(lambda name, leaf: name, {"x": 1, "more": (2, {"y": 3})})
    {'x': 'x', 'more': ('more[0]', {'y': "more[1]['y']"})}
    """

    def of(key: Any, child: Any) -> Any:
        is_first = name in ("batch", "weights") and isinstance(key, str)
        return mapped(function, child, key if is_first else f"{name}[{key!r}]")

    if hasattr(node, "keys") and hasattr(node, "__getitem__"):
        made = copy(node)
        for key in [*node.keys()]:
            made[key] = of(key, node[key])
        return made
    if is_dataclass(node) and not isinstance(node, type):
        own = {
            each.name: of(each.name, getattr(node, each.name)) for each in fields(node)
        }
        return replace(node, **own)
    if isinstance(node, list | tuple) and not _is_column(node):
        children = [of(i, child) for i, child in enumerate(node)]
        return (
            type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
        )
    return function(name, node)


def leaves(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Return (name, leaf) of each leaf."""
    found: list[tuple[str, Any]] = []
    mapped(lambda name, leaf: found.append((name, leaf)), tree, root)
    return iter(found)


def numbers(name: str, leaf: Any) -> np.ndarray:
    """Return a copy of a leaf's values.

    Raises:
        SpecificationError: they cannot be read.
    """
    plain = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf
    is_unknown = "torch.bfloat16" in str(getattr(plain, "dtype", ""))
    try:
        return np.asarray(plain.float() if is_unknown else plain).copy()
    except (TypeError, ValueError, NotImplementedError) as error:
        must = f"{name} must be an array that numpy can read."
        raise SpecificationError(
            message(must, type(leaf).__name__, "a dense one.")
        ) from error


def _like(values: np.ndarray, leaf: Any) -> Any:
    """Return values as a leaf is: of its type and dtype, on its device."""
    if isinstance(leaf, list | tuple):
        return type(leaf)(values.tolist())
    maker = _MAKERS.get(type(leaf).__module__.partition(".")[0])
    return np.array(values) if maker is None else maker(values, leaf)


def _length(leaf: Any) -> int | None:
    """Return the length of the first axis; None of a leaf that has none."""
    if isinstance(leaf, list | tuple):
        return len(leaf)
    shape = getattr(leaf, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None


def _is_column(node: list | tuple) -> bool:
    """Whether these are numbers or words, perhaps one for each row."""
    return bool(node) and all(isinstance(each, Number | str) for each in node)
