"""A batch of any framework as arrays of numpy, by name, and back."""

import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.tree import map_leaves, named_leaves

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """A batch, and the values of its arrays that have rows, by name."""

    tree: Any
    values: Values
    num_rows: int

    def changed(self, changes: Values) -> Any:
        """Return a copy with other values in some arrays, of the batch's types."""
        values, named = self.values | changes, leaves(self.tree, "batch")
        copies = (
            _like(values[n], leaf) if n in values else leaf for n, leaf in named
        )
        return map_leaves(lambda _: next(copies), self.tree)


def read(tree: Any) -> Batch:
    """Return a batch to change; an error if it has no array, or an array without rows."""
    named = leaves(tree, "batch")
    shapes = {name: tuple(getattr(leaf, "shape", ())) for name, leaf in named}
    num_rows = max((shape[0] for shape in shapes.values() if shape), default=0)
    for name, shape in shapes.items():
        # of a list of rows
        is_text = shape == () and name.endswith(f"[{num_rows - 1}]")
        if num_rows < 2 or shape[:1] not in ((), (1,), (num_rows,)) or is_text:
            must = "Each array of the batch must have its rows, two or more, on the first axis."
            advice = "pass np.arange(rows), and take the rows in `update`."
            raise SpecificationError(
                message(must, f"{name} of shape {shape}", advice)
            )
    values = {
        n: numbers(leaf) for n, leaf in named if shapes[n][:1] == (num_rows,)
    }
    return Batch(tree, values, num_rows)


def leaves(tree: Any, root: str) -> list[tuple[str, Any]]:
    """Return (name, leaf) of each leaf; that of a dict by its key."""
    key = rf"^{root}\['(.+?)'\]"
    return [
        (re.sub(key, r"\1", name), leaf)
        for name, leaf in named_leaves(tree, root)
    ]


def numbers(leaf: Any) -> np.ndarray:
    """Return a copy of a leaf's values."""
    plain = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf
    is_unknown = "torch.bfloat16" in str(getattr(plain, "dtype", ""))
    return np.asarray(plain.float() if is_unknown else plain).copy()


def _like(values: np.ndarray, leaf: Any) -> Any:
    """Return values as a leaf is: of its type and dtype, on its device."""
    framework = type(leaf).__module__.partition(".")[0]
    if framework == "torch":
        return leaf.new_tensor(values)
    if framework == "tensorflow":
        return sys.modules["tensorflow"].constant(values, leaf.dtype)
    if framework == "jaxlib":
        return sys.modules["jax"].device_put(values, leaf.sharding)
    return np.array(values)
