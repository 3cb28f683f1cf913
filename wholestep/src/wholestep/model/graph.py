"""The graph of a functional model: Python values where tensors are meant.

`==` of two symbolic tensors compares identity, so a mask made by it is the Python value False.
Reads private attributes of Keras: the nodes of a functional model, with the arguments of calls.
"""

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any

import keras
import numpy as np

from wholestep.errors import shown
from wholestep.keras_private import call_signature, nodes_by_depth
from wholestep.model.compiled import layers

_Node = Any  # a call of a layer or an operation


def values_for_tensors(model: keras.Model) -> list[str]:
    """Return the arguments that are one Python value where a tensor is meant, by calls.

    Operations take tensors alone. Layers also have flags, so of their arguments only masks count.

    >>> tokens, others = keras.Input((3,)), keras.Input((3,))
    >>> masked = keras.layers.Softmax(name="softmax")(tokens, mask=tokens == others)
    >>> values_for_tensors(keras.Model([tokens, others], masked))
    ["mask=False of 'softmax'"]
    """
    found = []
    for node in chain.from_iterable(map(_calls, layers(model))):
        operation = node.operation
        is_layer = isinstance(operation, keras.Layer)
        for parameter, value in _given(node):
            is_meant = "mask" in parameter.name or not is_layer
            if is_meant and not _is_flag(parameter) and _has_one_value(value, is_mask=is_layer):
                found.append(f"{parameter.name}={shown(value)} of {operation.name!r}")
    return list(dict.fromkeys(found))


def _calls(layer: keras.Layer) -> Iterator[_Node]:
    """Return the calls in a functional model, from inputs to outputs; none in another layer."""
    by_depth = nodes_by_depth(layer)
    for depth in sorted(by_depth, reverse=True):
        yield from by_depth[depth]


def _given(node: _Node) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Return the named parameters of a call and their values."""
    operation = node.operation
    is_layer = isinstance(operation, keras.Layer)
    signature = call_signature(operation) if is_layer else inspect.signature(operation.call)
    bound = signature.bind_partial(*node.arguments.args, **node.arguments.kwargs)
    for name, value in bound.arguments.items():
        yield signature.parameters[name], value


def _is_flag(parameter: inspect.Parameter) -> bool:
    """Whether a parameter takes a Python bool (`use_causal_mask`) or any names (`**kwargs`)."""
    is_declared = parameter.annotation in (bool, "bool") or isinstance(parameter.default, bool)
    return is_declared or parameter.kind is parameter.VAR_KEYWORD


def _has_one_value(value: Any, *, is_mask: bool) -> bool:
    """Whether an argument, or a part of it, is a Python bool, or a mask that is one number."""
    for leaf in keras.tree.flatten(value):
        if isinstance(leaf, bool):
            return True
        is_symbolic = leaf is None or isinstance(leaf, keras.KerasTensor)
        if is_mask and not is_symbolic and np.ndim(leaf) == 0:
            return True
    return False
