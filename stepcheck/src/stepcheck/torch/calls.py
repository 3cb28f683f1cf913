"""The functions that a loop calls beside its module and its optimizer, for the time of
a `with`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from stepcheck.faults import Fault
from stepcheck.seams import replaced
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.losses import FUNCTIONS
from stepcheck.torch.state import array, is_silent, trained
from stepcheck.trace.log import Scaled
from stepcheck.user_code.source import line_here
from stepcheck.values import Line

_ZEROED = (Fault.PASSES_LEFT_OUT,)
_CLIPPED = Fault.CLIP_PER_MICROBATCH, Fault.CLIP_BEFORE_UNSCALE
_SCHEDULED = Fault.SCHEDULE_BY_MICROBATCH, Fault.SCHEDULE_ONE_AHEAD


class Seam(NamedTuple):
    """A function of PyTorch's that is listened to.

    `before` gets its arguments, `after` its result and these.
    """

    owner: Any
    name: str
    before: Callable | None = None
    after: Callable | None = None


class Calls:
    """Keeps the lines of a loop's losses, backward passes, clips and schedulers.

    Notes the checks of the loss scale, too.

    Attributes:
        targets: by the order of a pass, the labels that a loss of PyTorch was given.
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self.targets: dict[int, np.ndarray] = {}
        self._lines: dict[
            str, Line
        ] = {}  # the last one that clips, takes gradients, and so on
        self._has_scale = False  # whether the gradients have the scale
        self._clips_scaled = False  # whether they had it when they were clipped
        self._num_steps = 0  # before a checked step

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            stack.callback(self._close)
            for seam in self._seams():
                parts = [
                    part and self.watcher.harmless(part)
                    for part in (seam.before, seam.after)
                ]
                stack.callback(parts.clear)  # PyTorch may keep what it finds here
                heard = _heard(getattr(seam.owner, seam.name), parts)
                stack.enter_context(replaced(seam.owner, seam.name, heard))
            yield

    def _seams(self) -> Iterator[Seam]:
        """Yield the functions that are listened to, each once."""
        for function in FUNCTIONS:
            names = inspect.signature(function)
            yield Seam(
                functional, function.__name__, after=partial(self._after_loss, names)
            )
        yield Seam(
            autograd, "backward", partial(self._before_gradient, is_result=False)
        )
        yield Seam(autograd, "grad", partial(self._before_gradient, is_result=True))
        for owner, name in clips():
            yield Seam(owner, name, self._before_clip)
        for kind in _kinds(LRScheduler):
            if "step" in vars(kind):
                yield Seam(kind, "step", self._before_schedule)
        yield Seam(GradScaler, "scale", after=self._after_scale)
        yield Seam(GradScaler, "unscale_", self._before_unscale)
        yield Seam(GradScaler, "step", self._before_check, self._after_check)
        yield Seam(torch.autocast, "__enter__", lambda cast: self.watcher.note_cast())
        yield Seam(Optimizer, "zero_grad", self._before_zero)
        yield Seam(nn.Module, "zero_grad", self._before_zero)
        yield Seam(nn.Module, "eval", self._before_eval)

    def _close(self) -> None:
        """Write the lines of faults."""
        of = self._lines
        lines = dict.fromkeys(_ZEROED, self.watcher.dropped)
        lines |= dict.fromkeys(_SCHEDULED, of.get("schedule"))
        lines |= dict.fromkeys(_CLIPPED, of.get("clip"))
        lines |= {
            Fault.NOT_RESET: of.get("zero", of.get("take")),
            Fault.INFERENCE_MODE: of.get("eval"),
        }
        self.log.lines.update(
            {fault: line for fault, line in lines.items() if line is not None}
        )

    def _note(self, what: str) -> None:
        """Keep the line of the user's that calls here."""
        if self.log.is_open and (line := line_here()) is not None:
            self._lines[what] = line

    def _is_own(self, owner: Any) -> bool:
        return isinstance(owner, Optimizer) and self.watcher.is_own(owner)

    def _after_loss(
        self, names: inspect.Signature, result: Any, *arguments: Any, **others: Any
    ) -> None:
        """Keep the line and the labels of a loss of which a gradient may be taken."""
        is_open = (
            self.log.is_open and bool(self.log.called) and not self.watcher.running
        )
        if not is_open or not isinstance(result, Tensor) or not result.requires_grad:
            return
        self.watcher.note_line()
        last, labels = (
            self.log.called[-1],
            names.bind(*arguments, **others).arguments.get("target"),
        )
        if last.is_whole and isinstance(labels, Tensor) and labels.ndim:
            self.targets.setdefault(last.order, array(labels))

    def _before_gradient(self, *arguments: Any, is_result: bool, **others: Any) -> None:
        self._note("take")
        self.watcher.is_taking = is_result

    def _before_zero(self, owner: Any, *arguments: Any, **others: Any) -> None:
        if self.log.is_open and (self.watcher.is_of(owner) or self._is_own(owner)):
            self._note("zero")
            if self.watcher.is_waiting:
                self.watcher.drop(self._lines.get("zero"))

    def _before_eval(self, module: nn.Module) -> None:
        if self.watcher.is_of(module):
            self._note("eval")

    def _before_schedule(self, scheduler: Any, *arguments: Any, **others: Any) -> None:
        if self._is_own(getattr(scheduler, "optimizer", None)):
            self._note("schedule")

    def _before_clip(self, parameters: Any, *arguments: Any, **others: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        own = {id(p) for _, p in trained(self.watcher.module)}
        if any(id(p) in own for p in given):
            self._note("clip")
            self._clips_scaled |= self._has_scale

    def _after_scale(self, result: Any, scaler: GradScaler, outputs: Any) -> None:
        if isinstance(result, Tensor) and result is not outputs:
            self._has_scale = True
            order, scale = next(self.watcher.order), scaler.get_scale()
            self.log.add(Scaled(order, is_finite=True, is_last=False, scale=scale))

    def _before_unscale(self, scaler: GradScaler, optimizer: Any) -> None:
        self._has_scale &= not self._is_own(optimizer)

    def _before_check(
        self, scaler: GradScaler, optimizer: Any, *arguments: Any, **others: Any
    ) -> None:
        self._num_steps = self.watcher.num_steps(optimizer)

    def _after_check(
        self,
        result: Any,
        scaler: GradScaler,
        optimizer: Any,
        *arguments: Any,
        **others: Any,
    ) -> None:
        """Note whether the optimizer has made a step."""
        if scaler.is_enabled() and self.log.is_open and self._is_own(optimizer):
            is_finite = self.watcher.num_steps(optimizer) > self._num_steps
            self.watcher.is_waiting &= is_finite
            self._has_scale = False
            self.log.add(
                Scaled(next(self.watcher.order), is_finite, is_last=self._clips_scaled)
            )


def clips() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of the innermost functions that clip gradients."""
    home = nn.utils.clip_grad
    inner = "_clip_grads_with_norm_"
    yield home, inner if hasattr(home, inner) else "clip_grad_norm_"
    yield from ((owner, "clip_grad_value_") for owner in (home, nn.utils))


def _kinds(base: Any) -> Iterator[Any]:
    """Yield a class and all that are derived of it."""
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _heard(function: Callable, parts: list[Callable | None]) -> Callable:
    """Return a function that calls listeners before and after it, while there are any."""

    @wraps(function)
    def heard(*arguments: Any, **others: Any) -> Any:
        if not parts or is_silent():
            return function(*arguments, **others)
        if arguments and isinstance(
            arguments[0], Iterator
        ):  # of parameters, which is read once
            arguments = [*arguments[0]], *arguments[1:]
        before, after = parts
        if before is not None:
            before(*arguments, **others)
        result = function(*arguments, **others)
        if after is not None:
            after(result, *arguments, **others)
        return result

    return heard
