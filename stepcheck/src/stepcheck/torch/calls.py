"""The functions that a loop calls beside its module and its optimizer, for the time of
a `with`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from stepcheck.faults import Fault
from stepcheck.seams import replaced
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.losses import FUNCTIONS
from stepcheck.torch.state import array, is_silent, trained
from stepcheck.trace.log import Scaled
from stepcheck.user_code.source import line_here

# An owner, the name of its function, the method of `Calls` that gets the
# arguments before a call, and the one that gets the result and these after it.
Seam = tuple[Any, str, Callable | None, Callable | None]


class Calls:
    """Keeps the lines of a loop's losses, backward passes, clips and schedulers.

    Notes the labels of losses and the checks of the loss scale, too.
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self._has_scale = False  # whether the gradients have the scale
        self._clips_scaled = False  # whether they had it when they were clipped
        self._num_steps = 0  # before a checked step

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            for owner, name, *parts in self.seams():
                harmless = self.watcher.harmless
                own: list = [part and partial(harmless, part) for part in parts]
                stack.callback(own.clear)  # PyTorch may keep what it finds here
                heard = _heard(getattr(owner, name), own)
                stack.enter_context(replaced(owner, name, heard))
            yield

    def seams(self) -> Iterator[Seam]:
        """Yield the functions that are listened to, each once."""
        for function in FUNCTIONS:
            yield functional, function.__name__, None, self._after_loss
        for name, is_result in (("backward", False), ("grad", True)):
            yield (
                autograd,
                name,
                partial(self._before_gradient, is_result),
                None,
            )
        yield (
            nn.utils.clip_grad,
            "_clip_grads_with_norm_",
            self._before_clip,
            None,
        )
        for owner in (nn.utils, nn.utils.clip_grad):
            yield owner, "clip_grad_value_", self._before_clip, None
        for kind in vars(lr_scheduler).values():
            is_scheduler = isinstance(kind, type) and "step" in vars(kind)
            if is_scheduler and issubclass(kind, lr_scheduler.LRScheduler):
                yield kind, "step", self._before_schedule, None
        yield GradScaler, "scale", None, self._after_scale
        yield GradScaler, "unscale_", self._before_unscale, None
        yield GradScaler, "step", self._before_check, self._after_check
        yield torch.autocast, "__enter__", self._before_cast, None
        for owner in (Optimizer, nn.Module):
            yield owner, "zero_grad", self._before_zero, None
        yield nn.Module, "eval", self._before_eval, None

    def _note(self, *faults: Fault) -> None:
        """Keep the line of the user's that calls here as that of faults."""
        if self.log.is_open and (line := line_here()) is not None:
            self.log.lines.update(dict.fromkeys(faults, line))

    def _after_loss(
        self, result: Any, *given: Any, target: Any = None, **_: Any
    ) -> None:
        """Keep the line and the labels of a loss of which a gradient may be taken."""
        is_open = (
            self.log.is_open and self.log.called and not self.watcher.is_running
        )
        if (
            not is_open
            or not isinstance(result, Tensor)
            or not result.requires_grad
        ):
            return
        self.watcher.note_line()
        labels = target if len(given) < 2 else given[1]
        last = self.log.called[-1]
        if last.is_whole and isinstance(labels, Tensor) and labels.ndim:
            self.watcher.labels.setdefault(last.order, array(labels))

    def _before_gradient(self, is_result: bool, *_: Any, **__: Any) -> None:
        if Fault.NOT_RESET not in self.log.lines:
            self._note(Fault.NOT_RESET)
        self.watcher.is_taking = is_result

    def _before_zero(self, owner: Any, *_: Any, **__: Any) -> None:
        if self.log.is_open and (
            self.watcher.is_of(owner) or self.watcher.is_own(owner)
        ):
            self._note(Fault.NOT_RESET)
            if self.watcher.is_waiting:
                self._note(Fault.PASSES_LEFT_OUT)
                self.watcher.drop()

    def _before_eval(self, module: nn.Module) -> None:
        if self.watcher.is_of(module):
            self._note(Fault.INFERENCE_MODE)

    def _before_cast(self, cast: torch.autocast) -> None:
        self.watcher.is_cast |= getattr(cast, "_enabled", True)

    def _before_schedule(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self.watcher.is_own(getattr(scheduler, "optimizer", None)):
            self._note(Fault.SCHEDULE_BY_MICROBATCH, Fault.SCHEDULE_ONE_AHEAD)

    def _before_clip(
        self, parameters: list[Tensor], *_: Any, **__: Any
    ) -> None:
        own = {id(p) for _, p in trained(self.watcher.module)}
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        if any(id(p) in own for p in given):
            self._note(Fault.CLIP_PER_MICROBATCH, Fault.CLIP_BEFORE_UNSCALE)
            self._clips_scaled |= self._has_scale

    def _after_scale(
        self, result: Any, scaler: GradScaler, outputs: Any
    ) -> None:
        if isinstance(result, Tensor) and result is not outputs:
            self._has_scale = True
            order, scale = next(self.watcher.order), scaler.get_scale()
            self.log.add(
                Scaled(order, is_finite=True, is_last=False, scale=scale)
            )

    def _before_unscale(self, scaler: GradScaler, optimizer: Any) -> None:
        self._has_scale &= not self.watcher.is_own(optimizer)

    def _before_check(self, *_: Any, **__: Any) -> None:
        self._num_steps = len(self.log.applied)

    def _after_check(
        self,
        result: Any,
        scaler: GradScaler,
        optimizer: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        """Note whether the optimizer has made a step."""
        if (
            scaler.is_enabled()
            and self.log.is_open
            and self.watcher.is_own(optimizer)
        ):
            is_finite = len(self.log.applied) > self._num_steps
            self.watcher.is_waiting &= is_finite
            self._has_scale = False
            order = next(self.watcher.order)
            self.log.add(Scaled(order, is_finite, is_last=self._clips_scaled))


def _heard(function: Callable, parts: list[Callable | None]) -> Callable:
    """Return a function that calls listeners before and after it, while there are any."""

    @wraps(function)
    def heard(*arguments: Any, **others: Any) -> Any:
        if not parts or is_silent():
            return function(*arguments, **others)
        before, after = parts
        if arguments and isinstance(arguments[0], Iterator):  # read once
            arguments = [*arguments[0]], *arguments[1:]
        if before is not None:
            before(*arguments, **others)
        result = function(*arguments, **others)
        if after is not None:
            after(result, *arguments, **others)
        return result

    return heard
