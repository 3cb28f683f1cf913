"""The data of a loop: as the user passes them, as its module and its loss get them, and as the script names them."""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from stepcheck.errors import SpecificationError, message
from stepcheck.port import ByPass
from stepcheck.report.found import Likely
from stepcheck.torch.losses import Function, Loss
from stepcheck.torch.state import array, undrawn, unpacked
from stepcheck.trace.log import Called, Log
from stepcheck.trace.rows import Origin
from stepcheck.trace.windows import PAD, Rows
from stepcheck.tree import Tree
from stepcheck.user_code.source import is_of_user


def weighed(data: tuple, loss: Loss | Function | None) -> tuple:
    """Return (x, y, sample weights or None); further arguments of a function are in a tuple with its labels."""
    x, y, *more = data
    num = loss.num_labels if isinstance(loss, Function) else 1
    if more and num == 1 + len(more):
        return x, (y, *more), None
    if num > 1 and not isinstance(y, tuple):
        must = f"{num + 1} arguments of loss need as many parts of data."
        attempt = (
            "data=(x, y, weights); several outputs are one argument, a tuple: loss=lambda outputs, y: f(*outputs, y)."
        )
        raise SpecificationError(message(must, f"{len(data)} parts", attempt))
    if more and (len(more) > 1 or isinstance(more[0], tuple) or more[0].size != len(more[0])):
        raise _no_rows(f"{len(data)} parts")
    if isinstance(loss, Function):
        loss.has_sample_weights = bool(more)
    return x, y, more[0].reshape(-1) if more else None


def rows_of(data: Any) -> tuple[Tree, ...]:
    """Return (x, y, ...) as arrays: of tensors or arrays, or of all items of a map-style dataset.

    Raises:
        SpecificationError: these are no rows of inputs and labels.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, tuple | list | dict)):
        with undrawn(data):
            items = [data[i] for i in range(len(data))]
        if items and all(isinstance(item, dict) and "labels" in item for item in items):  # as Transformers has them
            items = [({n: v for n, v in item.items() if n != "labels"}, item["labels"]) for item in items]
        if not items or any(not isinstance(item, tuple | list) or len(item) < 2 for item in items):
            raise _no_rows(f"a dataset whose items are {_shape_of(items[0] if items else ())}")
        data = tuple(_stacked([item[part] for item in items]) for part in range(len(items[0])))
    if not isinstance(data, tuple | list) or len(data) < 2:
        raise _no_rows(f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__)
    parts = tuple(map(_arrays, data))
    lengths = {len(leaf) if leaf.ndim else 0 for part in parts for leaf in _leaves(part)}
    if len(lengths) != 1 or 0 in lengths:
        raise _no_rows(f"arrays of {', '.join(map(str, sorted(lengths)))} rows")
    return parts


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
    must = "data must be (x, y) or (x, y, weights), tensors or arrays of equally many rows, or a map-style dataset."
    attempt = (
        "data=(x, y); of several inputs or labels data=((a, b), (y, z)), in the order in which the module and the loss "
        "take them."
    )
    return SpecificationError(message(must, received, attempt))


def _shape_of(item: Any) -> str:
    """Return a dataset's item in words."""
    if not isinstance(item, tuple | list):
        return f"no pairs, but of type {type(item).__name__}"
    return f"of {len(item)} parts ({', '.join(type(part).__name__ for part in item)})"


class Data(NamedTuple):
    """The data of a loop: inputs, labels, the labels by pass where they belong to no row, and all in words.

    `beside`: the arrays of as many rows that are no inputs, by name; `origin`: as of a `Case`.
    """

    x: Tree
    y: np.ndarray
    by_pass: ByPass | None
    told: str
    beside: dict[str, np.ndarray] = {}
    origin: Origin = "found"

    @property
    def has_labels(self) -> bool:
        """Whether labels are known."""
        return self.by_pass is not None or bool(self.y.size)


def by_pass_of(called: list[Called], targets: dict[int, np.ndarray]) -> ByPass | None:
    """Return the labels by pass, if all passes have some."""
    whole = [c.order for c in called if c.is_whole]
    return {order: (targets[order],) for order in whole} if whole and all(o in targets for o in whole) else None


def called_for(log: Log) -> list[Called]:
    """Return the passes on rows of which a gradient was taken, or all if it is not known."""
    called = [each for each in log.called if each.differentiated is not False] or log.called
    return [each for each in called if each.inputs and each.inputs[0].ndim]


def as_given(called: list[Called], targets: dict[int, np.ndarray]) -> Data:
    """Return the rows that a module was given, each once, with the labels of the passes."""
    if not called:
        return Data(np.zeros((1, 1)), np.zeros((1, 0)), None, "data: none, as the model is not called")
    num = len(called[0].inputs)
    alike = [c for c in called if len(c.inputs) == num and all(leaf.ndim for leaf in c.inputs)]
    ends = Counter(tuple(leaf.shape[2:] for leaf in c.inputs) for c in alike)
    if not ends:
        return Data(np.zeros((1, 1)), np.zeros((1, 0)), None, "data: none, as the model is given no rows")
    usual = ends.most_common(1)[0][0]
    alike = [c for c in alike if tuple(leaf.shape[2:] for leaf in c.inputs) == usual]
    leaves = [np.concatenate(as_wide([c.inputs[i] for c in alike])) for i in range(num)]
    firsts = {b"".join(leaf[i].tobytes() for leaf in leaves): i for i in reversed(range(len(leaves[0])))}
    kept = sorted(firsts.values())
    leaves = [leaf[kept] for leaf in leaves]
    told = f"data: the {len(kept)} rows that the model is given, and the labels that its loss is given"
    by_pass = by_pass_of(called, targets)
    y = np.zeros(len(kept)) if by_pass else np.zeros((len(kept), 0))
    return Data(leaves[0] if num == 1 else tuple(leaves), y, by_pass, told, origin="as given")


_CARRIED = Likely(
    "The state that the model returns for a batch is given to it with the next one, whose rows do not follow on these: "
    "they come in another order. Begin each batch without a state."
)
_FEW = 3  # updates that show it
_NUM_FRAMES, _MOST = 4, 12  # of the script, and the tensors of a pass
_LARGER, _WIDE = 4, 64  # how many times larger than the outputs such a tensor may be; numbers of a row that always may


class Beside:
    """Keeps these tensors, by name and by the order of the pass, and notes the passes that get an output once more."""

    def __init__(self) -> None:
        self.named: dict[str, dict[int, np.ndarray]] = {}
        self._last: Called | None = None
        self._again: list[tuple[Called, Called]] = []  # a pass, and the next one, which gets an output of it

    def note(self, called: Called, inputs: list[Tensor] | None = None) -> None:
        """Keep the tensors that the script's running functions name now, and that are none of a pass's inputs."""
        if not called.is_whole or not called.outputs or not called.outputs[0].ndim:
            return
        if inputs is not None:
            last, self._last = self._last, called
            if last is not None and any(_is_same(leaf, out) for leaf in inputs for out in last.outputs):
                self._again.append((last, called))
        num, own = len(called.outputs[0]), {id(leaf) for leaf in inputs or ()}
        most = max(_LARGER * called.outputs[0].size, _WIDE * num)
        found = (
            (name, value)
            for name, value in _values(sys._getframe(1))
            if id(value) not in own and value.shape[:1] == (num,) and value.numel() <= most
        )
        for name, value in islice(found, _MOST):
            self.named.setdefault(name, {}).setdefault(called.order, array(value))

    def carried(self, log: Log, rows: Rows) -> Iterator[str]:
        """Yield a note if a state goes from update to update, and the rows do not follow on those of the one before."""
        steps = [step.order for step in log.applied]
        pairs = [(one, two) for one, two in self._again if any(one.order < step < two.order for step in steps)]
        found = [tuple(rows.find(each.inputs) for each in pair) for pair in pairs]
        known = [(one, two) for one, two in found if len(one) == len(two) and np.all(one != PAD) and np.all(two != PAD)]
        if len(known) >= _FEW and all(np.ptp(two - one) for one, two in known):
            yield _CARRIED


def _is_same(leaf: Tensor, out: np.ndarray) -> bool:
    return (
        leaf.is_floating_point() and leaf.shape == out.shape and leaf.numel() > 1 and np.array_equal(array(leaf), out)
    )


def _values(frame: FrameType | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors without a gradient, with the names of the innermost functions first."""
    num = 0
    while frame is not None and num < _NUM_FRAMES:
        if is_of_user(frame.f_code.co_filename):
            num += 1
            for name, value in list(frame.f_locals.items()):
                for inner, part in _parts(value):
                    if _is_plain(part):
                        yield f"{name}{inner}", torch.as_tensor(part)
        frame = frame.f_back


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (an ending for its name, the value) of a value, or of each in it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), _MOST))
    elif isinstance(value, tuple | list) and len(value) <= _MOST:
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        yield "", value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and value.device.type == "cpu"
        return is_dense and value.ndim > 0 and not value.requires_grad and not value.is_complex()
    return isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "fiub"


def as_wide(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return arrays of places, which end with zeros where others have more places."""
    if len({each.shape[1:2] for each in parts}) < 2 or min(each.ndim for each in parts) < 2:
        return parts
    width = max(each.shape[1] for each in parts)
    return [np.pad(p, [(0, 0), (0, width - p.shape[1]), *[(0, 0)] * (p.ndim - 2)]) for p in parts]
