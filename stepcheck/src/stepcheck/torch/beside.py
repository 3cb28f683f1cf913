"""The modules that a loop calls beside the watched one, with their values at these
calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stepcheck.torch.state import Random, array, is_silent, modes, set_modes, tensor
from stepcheck.trace.measure import once


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

    @contextmanager
    def on(self, harmless: Callable[[Callable], Callable]) -> Iterator[None]:
        """Listen inside."""
        handle = register_module_forward_pre_hook(harmless(self._before))
        try:
            yield
        finally:
            handle.remove()

    def _before(self, module: nn.Module, inputs: tuple) -> None:
        if is_silent():
            return
        if id(module) not in self._parts:
            self._parts |= {id(part) for part in module.modules()}
            self.modules.append(module)
        for i, each in enumerate(self.modules):
            if each is module:
                old = self.now[i].values if i in self.now else []
                values = once([array(value) for value in _values(module)], old)
                self.now[i] = Held(values, modes(module), Random.now())


@contextmanager
def as_then(modules: list[nn.Module], then: dict[int, Held]) -> Iterator[None]:
    """Let modules have the values and modes of a pass, for the time of a `with`."""
    before = [
        (module, modes(module), [(value, value.data) for value in _values(module)])
        for module in (modules[i] for i in then)
    ]
    try:
        for i, held in then.items():
            set_modes(modules[i], held.modes)
            for own, value in zip(_values(modules[i]), held.values, strict=True):
                own.data = tensor(value, own)
        yield
    finally:
        for module, own_modes, pairs in before:
            set_modes(module, own_modes)
            for own, value in pairs:
                own.data = value


class Draws:
    """The random state at each call of a module that a stated function makes.

    A function that draws itself cannot be called again with the same draws: it is
    refused.
    """

    def __init__(self) -> None:
        self._after = Random.now()
        self._begun: set[int] = set()
        self._is_first = False

    @contextmanager
    def at(self, modules: list[nn.Module], then: dict[int, Held]) -> Iterator[None]:
        """Set the state at each call of these modules, inside."""
        handles = []
        for i, held in then.items():
            begin = partial(self._begin, i, held.random)
            handles.append(modules[i].register_forward_pre_hook(begin, prepend=True))
            handles.append(modules[i].register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end(self) -> None:
        """Note the state after a call."""
        self._after = Random.now()

    def check(self) -> None:
        """Refuse draws since the last call.

        Raises:
            ValueError: the function has drawn.
        """
        if not self._after.is_now:
            raise ValueError(
                "the function must not draw: pass what it draws as a part of data"
            )

    def _begin(self, i: int, random: Random, *call: Any) -> None:
        self.check()
        self._is_first = i not in self._begun
        if self._is_first:
            self._begun.add(i)
            random.set()

    def _end(self, *call: Any) -> None:
        if self._is_first:  # a later call has draws of its own, which are not known
            self.end()


def _values(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
