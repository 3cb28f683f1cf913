"""The data of a loop: as the user states them, or as its module and its loss get them."""

import copy
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.port import ByPass
from stepcheck.torch.losses import Function
from stepcheck.torch.nests import unpacked
from stepcheck.torch.objective import OfModel
from stepcheck.torch.state import array, untouched
from stepcheck.trace.log import Called, Log
from stepcheck.trace.rows import keys
from stepcheck.tree import Tree

Data = tuple[Tree, Tree, np.ndarray | None]


def weighed(data: Any, loss: Any) -> Data:
    """Return (x, y, sample weights or None).

    Further arguments of a function are in a tuple with its labels.
    """
    if isinstance(loss, OfModel):
        x, *rest = rows_of(data, least=1)
        return x, tuple(rest), None
    x, y, *more = rows_of(data)
    num = loss.num_labels if isinstance(loss, Function) else 1
    if more and num == 1 + len(more):
        return x, (y, *more), None
    if num > 1 and not isinstance(y, tuple):
        must = f"{num + 1} arguments of loss need as many parts of data."
        way = "data=(x, y, weights); outputs are one argument: loss=lambda out, y: f(*out, y)."
        raise SpecificationError(message(must, f"{2 + len(more)} parts", way))
    if not more:
        return x, y, None
    if len(more) > 1 or np.size(more[0]) != len(more[0]):
        raise _no_rows(f"{2 + len(more)} parts")
    return x, y, np.reshape(more[0], -1)


def rows_of(data: Any, least: int = 2) -> tuple[Tree, ...]:
    """Return (x, y, ...) as arrays: of tensors or arrays, or of all items of a
    map-style dataset.

    Args:
        least: the number of parts that there must be.

    Raises:
        SpecificationError: these are no rows of inputs and labels.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif hasattr(data, "__getitem__") and not isinstance(
        data, tuple | list | dict
    ):
        data = _items(data)
    if not isinstance(data, tuple | list) or len(data) < least:
        num = len(data) if hasattr(data, "__len__") else 0
        raise _no_rows(f"{num} parts of type {type(data).__name__}")
    nests = [unpacked(part).leaves for part in data]
    lengths = {len(leaf) if leaf.ndim else 0 for nest in nests for leaf in nest}
    if len(lengths) != 1 or 0 in lengths or not all(nests):
        raise _no_rows(f"arrays of {', '.join(map(str, sorted(lengths)))} rows")
    return tuple(
        array(nest[0])
        if isinstance(part, np.ndarray | Tensor)
        else (*map(array, nest),)
        for part, nest in zip(data, nests, strict=True)
    )


def _items(dataset: Any) -> Any:
    """Return all items of a dataset as a loader makes a batch of them, of a dict of
    Transformers the labels apart.
    """
    copied, _ = attempt(lambda: copy.deepcopy(dataset))  # its generators draw
    own = dataset if copied is None else copied  # which has a file, or a lock
    with untouched():
        items = [own[i] for i in range(len(own))]
    found, error = attempt(lambda: default_collate(items))
    if error is not None:
        raise _no_rows("a dataset whose items make no batch") from error
    if isinstance(found, dict) and "labels" in found:
        labels = found.pop("labels")
        return found, labels
    return found


def _no_rows(received: str) -> SpecificationError:
    must = "data must be (x, y) or (x, y, weights), tensors or arrays of equally many rows,"
    must += " or a map-style dataset."
    way = "data=(x, y); of several inputs or labels data=((a, b), (y, z)), in the order in which "
    way += "the module and the loss take them."
    return SpecificationError(message(must, received, way))


def as_given(log: Log, labels: dict[int, Any]) -> tuple[Data, ByPass | None]:
    """Return the rows that a module was given, each once, and the labels by pass; None
    if these are not all known.
    """
    fits = [each for each in log.called if len(_lengths(each)) == 1]
    called = [each for each in fits if each.differentiated is not False] or fits
    if not called:
        return (np.zeros((1, 1)), np.zeros(1), None), None
    alike = [each for each in called if _ends(each) == _ends(called[0])]
    every = zip(*(each.inputs for each in alike), strict=True)
    leaves = [np.concatenate(_as_wide(parts)) for parts in every]
    firsts = {key: i for i, key in reversed([*enumerate(keys(leaves))])}
    x = tuple(leaf[sorted(firsts.values())] for leaf in leaves)
    whole = [each.order for each in called if each.is_whole]
    are_known = bool(whole) and labels.keys() >= {*whole}
    by_pass: ByPass = {order: (labels[order],) for order in whole if are_known}
    data = x[0] if len(x) == 1 else x, np.zeros(len(x[0])), None
    return data, by_pass or None


def _lengths(called: Called) -> set[int]:
    return {len(leaf) for leaf in called.inputs if leaf.ndim}


def _ends(called: Called) -> list[tuple[int, ...]]:
    return [leaf.shape[2:] for leaf in called.inputs]


def _as_wide(parts: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Return arrays of places, which end with zeros where others have more places."""
    if parts[0].ndim < 2:
        return [*parts]
    width = max(each.shape[1] for each in parts)
    missing = [[(0, 0), (0, width - each.shape[1])] for each in parts]
    return [
        np.pad(each, own + [(0, 0)] * (each.ndim - 2))
        for each, own in zip(parts, missing, strict=True)
    ]
