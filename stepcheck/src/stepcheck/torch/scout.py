"""The watch of an unmodified script: each module that it trains, the batches of its loaders, and its named arrays."""

import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from stepcheck.command.stop import COMMAND, Enough, Limit
from stepcheck.torch.calls import Calls, later
from stepcheck.torch.flow import Flow
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.processes import Group
from stepcheck.torch.state import bare, is_transformed, replaced, trained, unpacked, values
from stepcheck.trace.log import Log, room
from stepcheck.trace.loops import Loop, Watched
from stepcheck.user_code.source import is_of_user, line_here

_MOST_MODULES = 4
_LONGER = 10.0  # seconds that a script goes on when enough was seen: other modules may be trained later
_FEW = 3  # forward passes of a module before which the script's arrays are looked for
_FUNC = "a module that functions of `torch.func` call: their gradients are not watched"
_SPAWNED = (
    "the processes that `torch.multiprocessing.spawn` starts: put `with stepcheck.watch(model, ...) as report:` around "
    "the loop in their function, or let `torchrun --nproc-per-node N -m stepcheck run SCRIPT` start them"
)
_CUDA = "a module on {}: the audit of PyTorch looks at modules on the CPU"


def _is_array(value: Any) -> bool:
    """Whether a value is an array, or a plain tensor on the CPU, of several rows."""
    if isinstance(value, Tensor):
        return bool(value.ndim) and value.device.type == "cpu" and value.layout is torch.strided
    return isinstance(value, np.ndarray) and bool(value.ndim)


@dataclass
class Seen(Watched):
    """A module that the script trains, its record, losses, clips, schedulers, and the processes that train it."""

    watcher: Any = None
    calls: Any = None
    group: Group | None = None


class Scout:
    """Watches all modules that are not a part of another, for the time of a `with`.

    Args:
        num_updates: the script was seen after this many updates of each of its modules; None for 30, or as many as are
            cheap until the data were seen twice.

    Attributes:
        loop: the modules that are called for a gradient, as of one loop.
        loaders: the loaders that the script iterates over, each once.
        arrays: by name, the tensors and arrays of the script's own functions.
        names: the modules' names, by their ids.
        flow: of the gradients, layers and losses one by one.
        limit: the end of the script, and the audits that it makes itself.
        elsewhere: in words, the modules that cannot be watched.
    """

    framework = "torch"

    def __init__(self, num_updates: int | None):
        self._least, self._is_exact = num_updates or 30, num_updates is not None
        self.limit = Limit(self._least)
        self.loop, self.flow = Loop(self), Flow()
        self.loaders: list[DataLoader] = []
        self.arrays: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.elsewhere = ""
        self._here, self._hooks, self._num_called = threading.local(), ExitStack(), Counter[int]()
        self._until = math.inf
        self._order: Iterator[int] | None = None  # of all records

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch all modules and loaders inside; afterwards PyTorch is as it was."""
        before = nn.Module.__call__, DataLoader.__iter__
        spawn = replaced(multiprocessing, "spawn", self._spawning(multiprocessing.spawn))
        nn.Module.__call__, DataLoader.__iter__ = self._called(before[0]), self._iterating(before[1])
        try:
            with self.flow.on(), later(), spawn, self._hooks:
                yield
        finally:
            nn.Module.__call__, DataLoader.__iter__ = before

    @property
    def watched(self) -> list[Seen]:
        """The modules, in the order of their first calls."""
        return [*self.loop.watched.values()]  # type: ignore[list-item]

    def settle(self) -> None:
        """Close the records."""
        self._hooks.close()

    def _called(self, call: Callable) -> Callable:
        @wraps(call)
        def called(module: nn.Module, *arguments: Any, **others: Any) -> Any:
            if is_transformed():
                self.elsewhere = self.elsewhere or _FUNC * (not torch.compiler.is_compiling())
                return call(module, *arguments, **others)
            depth = vars(self._here).get("depth", 0)
            has_own = bool((COMMAND.get() or self.limit).reports)
            if depth == 0 and torch.is_grad_enabled() and not has_own:
                num = len(self.loop.watched)
                self._meet(bare(module), arguments, others)
                if num < len(self.loop.watched):  # so that its watcher hears of this call
                    return nn.Module.__call__(module, *arguments, **others)
            elif depth == 0 and id(module) not in self.flow.without and trained(module):
                self.flow.without[id(module)] = module, line_here()
            self._here.depth = depth + 1
            try:
                return call(module, *arguments, **others)
            finally:
                self._here.depth = depth

        return called

    def _meet(self, module: nn.Module, arguments: tuple, others: dict) -> None:
        """Watch a module from its first call on; end the script when enough was seen."""
        if id(module) in self.loop.watched:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and self.loop.trained and self.loop.is_seen(self._least, is_exact=self._is_exact):
                now = time.monotonic()
                self._until = min(self._until, now + _LONGER)
                is_alone = all(each.group is None for each in self.watched)  # others end when this one does
                if self._is_exact or (is_alone and now > self._until):
                    self.limit.is_asked.set()
                    raise Enough
        elif len(self.loop.watched) < _MOST_MODULES and self._can_watch(module):
            leaves = unpacked((arguments, others)).leaves
            if leaves:
                num = sum(leaf.ndim > 0 and leaf.shape[:1] == leaves[0].shape[:1] for leaf in leaves)
                self._watch(module, num)
        if id(module) in self.loop.watched and self._num_called[id(module)] < _FEW:
            self._num_called[id(module)] += 1
            self._look(sys._getframe(2))

    def _spawning(self, spawn: Callable) -> Callable:
        @wraps(spawn)
        def spawning(*arguments: Any, **others: Any) -> Any:
            self.elsewhere = _SPAWNED
            return spawn(*arguments, **others)

        return spawning

    def _can_watch(self, module: nn.Module) -> bool:
        values = [*module.parameters(), *module.buffers()]
        if isinstance(module, nn.modules.loss._Loss) or any(map(is_lazy, values)) or not trained(module):
            return False
        if devices := sorted({str(value.device) for value in values} - {"cpu"}):
            self.elsewhere = _CUDA.format(", ".join(devices))
        return not self.elsewhere

    def _watch(self, module: nn.Module, num_inputs: int) -> None:
        log, before = Log(room(sum(p.numel() for _, p in trained(module)))), values(module).params
        log.begin(before)
        group = Group.now()
        self._order = self._order or (itertools.count() if group is None else group.orders())
        watcher = Watcher(module, log, num_inputs, order=self._order)
        seen = Seen(module, log, before, None, [log], watcher=watcher, calls=(calls := Calls(watcher)), group=group)
        self.loop.watched[id(module)] = seen
        self._hooks.enter_context(watcher.on())
        self._hooks.enter_context(calls.on())

    def _look(self, frame: FrameType | None) -> None:
        """Keep the arrays that the script's own functions have names for."""
        while frame is not None:
            if is_of_user(frame.f_code.co_filename):
                named = {**frame.f_globals, **frame.f_locals}
                self.names |= {id(v): name for name, v in named.items() if isinstance(v, nn.Module)}
                self.arrays |= {name: v for name, v in named.items() if _is_array(v)}
            frame = frame.f_back

    def _iterating(self, iterate: Callable) -> Callable:
        @wraps(iterate)
        def iterating(loader: DataLoader) -> Any:
            if all(loader is not other for other in self.loaders):
                self.loaders.append(loader)
            return iterate(loader)

        return iterating
