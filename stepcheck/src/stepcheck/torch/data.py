"""The data of a loop: as the user states them, or as its module and its loss get them."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.port import ByPass
from stepcheck.torch.losses import Function
from stepcheck.torch.objective import OfModel
from stepcheck.torch.state import array, unpacked, untouched
from stepcheck.trace.log import Called, Log
from stepcheck.tree import Tree


def weighed(data: Any, loss: Any) -> tuple:
    """Return (x, y, sample weights or None).

    Further arguments of a function are in a tuple with its labels.
    """
    if isinstance(loss, OfModel):
        x, *rest = rows_of(data, least=1)
        return x, tuple(rest), None
    data = x, y, *more = rows_of(data)
    num = loss.num_labels if isinstance(loss, Function) else 1
    if more and num == 1 + len(more):
        return x, (y, *more), None
    if num > 1 and not isinstance(y, tuple):
        must = f"{num + 1} arguments of loss need as many parts of data."
        attempt = "data=(x, y, weights); outputs are one argument: loss=lambda out, y: f(*out, y)."
        raise SpecificationError(message(must, f"{len(data)} parts", attempt))
    if more and (
        len(more) > 1 or isinstance(more[0], tuple) or more[0].size != len(more[0])
    ):
        raise _no_rows(f"{len(data)} parts")
    return x, y, more[0].reshape(-1) if more else None


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
    elif isinstance(data, Dataset) or (
        hasattr(data, "__getitem__") and not isinstance(data, tuple | list | dict)
    ):
        with untouched():
            copied = _copied(data)
            items = [copied[i] for i in range(len(copied))]
        if items and all(
            isinstance(item, dict) and "labels" in item for item in items
        ):  # as Transformers has them
            items = [
                ({n: v for n, v in item.items() if n != "labels"}, item["labels"])
                for item in items
            ]
        if not items or any(
            not isinstance(item, tuple | list) or len(item) < least for item in items
        ):
            raise _no_rows(
                f"a dataset whose items are {_shape_of(items[0] if items else ())}"
            )
        data = tuple(
            _stacked([item[part] for item in items]) for part in range(len(items[0]))
        )
    if not isinstance(data, tuple | list) or len(data) < least:
        raise _no_rows(
            f"{len(data)} parts"
            if isinstance(data, tuple | list)
            else type(data).__name__
        )
    parts = tuple(map(_arrays, data))
    lengths = {
        len(leaf) if leaf.ndim else 0 for part in parts for leaf in _leaves(part)
    }
    if len(lengths) != 1 or 0 in lengths:
        raise _no_rows(f"arrays of {', '.join(map(str, sorted(lengths)))} rows")
    return parts


def _copied(dataset: Any) -> Any:
    """Return a copy of a dataset, whose generators draw; the dataset if it has no copy."""
    copied, error = attempt(lambda: copy.deepcopy(dataset))
    return copied if error is None else dataset  # it has a handle of a file, or a lock


def _leaves(part: Tree) -> tuple:
    return part if isinstance(part, tuple) else (part,)


def _arrays(part: Any) -> Tree:
    """Return an array, or a tuple of the arrays in a nest."""
    if isinstance(part, np.ndarray | Tensor):
        return array(torch.as_tensor(part))
    leaves = unpacked(_tensors(part)).leaves
    if not leaves:
        raise _no_rows(type(part).__name__)
    return tuple(map(array, leaves))


def _tensors(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _tensors(value) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return [_tensors(value) for value in part]
    return torch.as_tensor(part) if isinstance(part, np.ndarray) else part


def _stacked(rows: list[Any]) -> Any:
    """Return the items of a dataset as one array for each leaf."""
    if isinstance(rows[0], dict):
        return {name: _stacked([row[name] for row in rows]) for name in rows[0]}
    if isinstance(rows[0], tuple | list):
        return [_stacked([row[i] for row in rows]) for i in range(len(rows[0]))]
    try:
        return torch.stack([torch.as_tensor(row) for row in rows])
    except (RuntimeError, TypeError, ValueError) as error:
        raise _no_rows("rows of different shapes") from error


def _no_rows(received: str) -> SpecificationError:
    must = "data must be (x, y) or (x, y, weights), tensors or arrays of equally many rows,"
    must += " or a map-style dataset."
    attempt = (
        "data=(x, y); of several inputs or labels data=((a, b), (y, z)), in the order in which "
        "the module and the loss take them."
    )
    return SpecificationError(message(must, received, attempt))


def _shape_of(item: Any) -> str:
    """Return a dataset's item in words."""
    if not isinstance(item, tuple | list):
        return f"no pairs, but of type {type(item).__name__}"
    return f"of {len(item)} parts ({', '.join(type(part).__name__ for part in item)})"


class Given(NamedTuple):
    """The rows that a module was given, their labels by pass, None where these are not
    known.
    """

    x: Tree
    by_pass: ByPass | None

    @property
    def data(self) -> tuple[Tree, np.ndarray, None]:
        """The rows as data, with labels of no meaning."""
        return self.x, np.zeros(len(tree.leaves(self.x)[0])), None


def as_given(log: Log, labels: dict[int, np.ndarray]) -> Given:
    """Return the rows that a module was given, each once, with the labels by pass."""
    called = [
        each for each in log.called if each.differentiated is not False
    ] or log.called
    called = [
        each
        for each in called
        if len({leaf.shape[:1] for leaf in each.inputs} - {()}) == 1
    ]
    if not called:
        return Given(np.zeros((1, 1)), None)
    alike = [each for each in called if _ends(each) == _ends(called[0])]
    leaves = [
        np.concatenate(_as_wide(list(parts)))
        for parts in zip(*(each.inputs for each in alike), strict=True)
    ]
    firsts = {
        b"".join(leaf[i].tobytes() for leaf in leaves): i
        for i in reversed(range(len(leaves[0])))
    }
    kept = sorted(firsts.values())
    leaves = [leaf[kept] for leaf in leaves]
    whole = [each.order for each in called if each.is_whole]
    are_known = bool(whole) and labels.keys() >= {*whole}
    by_pass: ByPass | None = (
        {order: (labels[order],) for order in whole} if are_known else None
    )
    return Given(leaves[0] if len(leaves) == 1 else tuple(leaves), by_pass)


def _ends(called: Called) -> list[tuple[int, ...]]:
    return [leaf.shape[2:] for leaf in called.inputs]


def _as_wide(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of places, which end with zeros where others have more places."""
    if (
        len({each.shape[1:2] for each in parts}) < 2
        or min(each.ndim for each in parts) < 2
    ):
        return parts
    width = max(each.shape[1] for each in parts)
    return [
        np.pad(p, [(0, 0), (0, width - p.shape[1]), *[(0, 0)] * (p.ndim - 2)])
        for p in parts
    ]
