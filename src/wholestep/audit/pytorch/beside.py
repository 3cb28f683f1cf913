"""The tensors of as many rows that a script names beside a forward pass: targets, noise, weights."""

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.audit.found import Likely
from wholestep.audit.log import Called, Log
from wholestep.audit.pytorch.state import array
from wholestep.audit.source import is_of_user
from wholestep.audit.windows import PAD, Rows

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
