"""Nests of tensors: the arguments and outputs of modules, taken apart and put together."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution


class Place(int):
    """The place of a tensor in a nest, by its number."""


class Nest(NamedTuple):
    """A nest with places for its tensors, and these."""

    form: Any
    leaves: list[Tensor]


def mapped(function: Callable, nest: Any, *, has_objects: bool = True) -> Any:
    """Return a nest with a function of each tensor or place, called in the order of
    names; of a distribution its parameters.

    Args:
        has_objects: whether other objects stay, which may hold a graph; else they are
            None.
    """
    again = partial(mapped, function, has_objects=has_objects)
    if isinstance(nest, Tensor | np.ndarray | Place):
        return function(nest)
    if isinstance(nest, Distribution):
        own = {
            name: each for name, each in vars(nest).items() if name[0] != "_"
        }
        return {name: again(each) for name, each in own.items()}
    if isinstance(nest, Mapping):
        found = {name: again(nest[name]) for name in sorted(nest, key=str)}
        ordered = {name: found[name] for name in nest}
        kind: Any = type(nest)
        return ordered if kind is dict else kind(ordered)
    if isinstance(nest, tuple | list):
        parts = map(again, nest)
        return (
            type(nest)(*parts)
            if hasattr(nest, "_fields")
            else type(nest)(parts)
        )
    return nest if has_objects or not hasattr(nest, "__dict__") else None


def unpacked(nest: Any, *, has_objects: bool = True) -> Nest:
    """Take the tensors out of a nest.

    >>> nest = unpacked({"b": torch.ones(1), "a": (torch.zeros(1), 5)})
    >>> nest.leaves, packed(nest.form, [1, 2])
    ([tensor([0.]), tensor([1.])], {'b': 2, 'a': (1, 5)})
    """
    leaves: list[Tensor] = []

    def taken(leaf: Any) -> Place:
        is_array = isinstance(leaf, np.ndarray)
        leaves.append(torch.as_tensor(leaf) if is_array else leaf)
        return Place(len(leaves) - 1)

    return Nest(mapped(taken, nest, has_objects=has_objects), leaves)


def packed(form: Any, leaves: list) -> Any:
    """Return leaves at their places in a nest."""
    return mapped(
        lambda own: leaves[own] if isinstance(own, Place) else own, form
    )
