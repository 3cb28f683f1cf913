"""The tensors of as many rows that a script names beside a forward pass: targets, noise, weights."""

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholestep.audit.log import Called
from wholestep.audit.pytorch.state import array
from wholestep.audit.source import is_of_user

_NUM_FRAMES, _MOST = 4, 12  # of the script, and the tensors of a pass
_LARGER, _WIDE = 4, 64  # how many times larger than the outputs such a tensor may be; numbers of a row that always may


class Beside:
    """Keeps these tensors, by name and by the order of the pass."""

    def __init__(self) -> None:
        self.named: dict[str, dict[int, np.ndarray]] = {}

    def note(self, called: Called, inputs: list[Tensor] | None = None) -> None:
        """Keep the tensors that the script's running functions name now, and that are none of a pass's inputs."""
        if not called.is_whole or not called.outputs or not called.outputs[0].ndim:
            return
        num, own = len(called.outputs[0]), {id(leaf) for leaf in inputs or ()}
        most = max(_LARGER * called.outputs[0].size, _WIDE * num)
        found = (
            (name, value)
            for name, value in _values(sys._getframe(1))
            if id(value) not in own and value.shape[:1] == (num,) and value.numel() <= most
        )
        for name, value in islice(found, _MOST):
            self.named.setdefault(name, {}).setdefault(called.order, array(value))


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
