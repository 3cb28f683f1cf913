"""The modules that a loop calls beside the watched one, with their state at these
calls.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stepcheck.torch.state import Random, array, modes, set_modes, tensor
from stepcheck.trace.measure import once

Begins = dict[nn.Module, list[Callable[[], Any]]]


class Held(NamedTuple):
    """The values, the modes and the random state of a module when it was called."""

    values: list[np.ndarray]
    modes: tuple[bool, ...]
    random: Random


class Beside:
    """Keeps other modules at their calls: a loss may be made of their outputs.

    Attributes:
        modules: the other modules, in the order of their first calls.
        now: by the place in `modules`, the state of a module at its last call.
    """

    def __init__(self, module: nn.Module):
        self.modules: list[nn.Module] = []
        self.now: dict[int, Held] = {}
        self._parts = {id(part) for part in module.modules()}

    def note(self, module: nn.Module) -> None:
        """Keep the state of a module that begins to run; of others, not of their parts."""
        if id(module) not in self._parts:
            self._parts |= {id(part) for part in module.modules()}
            self.modules.append(module)
        if module in self.modules:
            i = self.modules.index(module)
            old = self.now[i].values if i in self.now else []
            values = once([array(value) for value in _values(module)], old)
            self.now[i] = Held(values, modes(module), Random.now())


@contextmanager
def as_then(modules: list[nn.Module], then: dict[int, Held]) -> Iterator[None]:
    """Let modules have the values and modes of a pass, for the time of a `with`."""
    with ExitStack() as stack:
        for i, held in then.items():
            stack.callback(set_modes, modules[i], modes(modules[i]))
            set_modes(modules[i], held.modes)
            for own, value in zip(
                _values(modules[i]), held.values, strict=True
            ):
                stack.callback(setattr, own, "data", own.data)
                own.data = tensor(value, own)
        yield


@contextmanager
def beginning(model: nn.Module, begins: Begins) -> Iterator[None]:
    """Let each call of some modules begin as a recorded one, inside.

    Raises:
        ValueError: the model was not called as often, or something else has drawn.
    """
    after, is_known = Random.now(), False

    def begin(module: nn.Module, inputs: tuple) -> None:
        nonlocal is_known
        is_first = module is not model and bool(begins[module])
        is_known = is_first or (module is model and torch.is_grad_enabled())
        if is_known:
            _must(is_right=after.is_now and bool(begins[module]))
            begins[module].pop(0)()

    def end(module: nn.Module, inputs: tuple, output: Any) -> None:
        nonlocal after
        if is_known:  # another call has draws of its own, which are not known
            after = Random.now()

    with ExitStack() as stack:
        for module in begins:
            handle = module.register_forward_pre_hook(begin, prepend=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield
    _must(is_right=after.is_now and not begins[model])


def _must(*, is_right: bool) -> None:
    if not is_right:
        must = "the function must call the model as often as calls= says, and not draw"
        raise ValueError(must)


def _values(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
