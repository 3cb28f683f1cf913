"""Nested data: dicts, lists and tuples of arrays.

A leaf is named by its path; None is no leaf, and is kept. A `Tree` is such data. A
`Tensor` is one leaf: an array of numpy or the framework, or a tracer.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import optree

from stepcheck.errors import SpecificationError, message

Tree: TypeAlias = Any
Tensor: TypeAlias = Any
_NAMESPACE = "keras"  # where Keras registers the lists and dicts of its models


def map_leaves(function: Callable, tree: Tree, *others: Tree) -> Any:
    """Apply `function` to each leaf, or to corresponding leaves of several trees.

    >>> map_leaves(abs, {"x": -1, "optional": None})
    {'x': 1, 'optional': None}
    """
    return optree.tree_map(function, tree, *others, namespace=_NAMESPACE)


def leaves(tree: Tree) -> list:
    """Return the leaves in their flattening order.

    >>> leaves({"b": 1, "a": (2, None)})
    [2, 1]
    """
    return optree.tree_leaves(tree, namespace=_NAMESPACE)


def named_leaves(tree: Tree, root: str = "batch") -> list[tuple[str, Tensor]]:
    """Return (name, leaf) for every leaf.

    >>> named_leaves({"source": [5]})
    [("batch['source'][0]", 5)]
    """
    paths, found, _ = optree.tree_flatten_with_path(tree, namespace=_NAMESPACE)
    names = (root + "".join(f"[{key!r}]" for key in path) for path in paths)
    return list(zip(names, found, strict=True))


def num_rows(tree: Tree, root: str = "batch") -> int:
    """Return the common length of the leading axes of all leaves.

    Raises:
        SpecificationError: there is no leaf, a leaf has no leading axis, or the lengths
            differ.
    """
    shapes = {
        name: tuple(getattr(leaf, "shape", ()))
        for name, leaf in named_leaves(tree, root)
    }
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or () in sizes:
        must = f"All arrays in {root} must have the same number of rows."
        received = ", ".join(
            f"{name}: {shape}" for name, shape in shapes.items()
        )
        advice = "pass arrays of shape (rows, ...), of equal length."
        raise SpecificationError(message(must, received, advice))
    return int(sizes.pop()[0])
