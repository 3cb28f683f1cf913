"""The functions and schedulers that a loop calls beside its module and its optimizer, for the time of a `with`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

from wholestep.audit.found import Likely
from wholestep.audit.pytorch.hooks import Watcher
from wholestep.audit.pytorch.losses import FUNCTIONS, Loss
from wholestep.audit.pytorch.state import trained
from wholestep.audit.steps import Schedule

_CLIPPED_LATE = Likely(
    "The gradients are clipped after the optimizer step, and not used any more. Clip between `loss.backward()` and "
    "`optimizer.step()`."
)
_FEW = 3  # updates by which a schedule is judged


class Calls:
    """The losses, clips and schedulers of a loop.

    Attributes:
        losses: by their text, the losses of which a gradient may be taken.
        moves: of each move of a schedule: (the optimizer's steps before it, the rate before, the rate after).
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self.losses: dict[str, Loss] = {}
        self.moves: list[tuple[int, float, float]] = []
        self._depth, self._schedulers = 0, dict[int, Any]()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            for owner, name in _clips():
                stack.enter_context(_replaced(owner, name, self._clip(getattr(owner, name))))
            for function, kind in FUNCTIONS.items():
                if getattr(functional, function.__name__, None) is function:
                    stack.enter_context(_replaced(functional, function.__name__, self._loss(function, kind)))
            stack.enter_context(_replaced(LRScheduler, "step", self._move(LRScheduler.step)))
            yield

    def schedule(self) -> Schedule | None:
        """Return the rates by update, if a schedule moves in each update, but at another place or more than once.

        The schedule that moves once for each update after the optimizer's step is right, and so is one that moves after
        each pass: None for these.
        """
        at = [steps for steps, *_ in self.moves]
        counts = [at.count(step) for step in range(max(at, default=0))]  # of the updates that are over
        is_right = counts[:1] == [0] and set(counts[1:]) == {1}
        if len(counts) < _FEW or not all(counts[1:]) or is_right or len(self._schedulers) > 1:
            return None
        rates = [self.moves[0][1], *(after for *_, after in self.moves)]
        return lambda number: rates[min(number, len(rates) - 1)]

    def _clip(self, clip: Callable) -> Callable:
        """Return a clip that notes whether the step that it is for has already been made."""

        @wraps(clip)
        def told(parameters: Any, *arguments: Any, **others: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            own = {id(p) for _, p in trained(self.watcher.module)}
            is_late = self.log.is_open and bool(self.log.applied) and not self.watcher.is_waiting
            if is_late and any(id(p) in own for p in given):
                self.log.notes[_CLIPPED_LATE] = None
            return clip(given, *arguments, **others)

        return told

    def _loss(self, function: Callable, kind: type[nn.Module]) -> Callable:
        """Return a loss that is noted, if a gradient may be taken of it."""
        names, own = inspect.signature(function), inspect.signature(kind).parameters

        @wraps(function)
        def told(*arguments: Any, **others: Any) -> Any:
            self._depth += 1
            try:
                result = function(*arguments, **others)
            finally:
                self._depth -= 1
            if self.log.is_open and not self._depth and isinstance(result, Tensor) and result.requires_grad:
                self.watcher.note_line()
                given = names.bind(*arguments, **others).arguments
                options = {name: value for name, value in given.items() if name in own and value is not None}
                module = kind(**options)
                weights = [str(value) for value in options.values()]
                self.losses.setdefault(f"{module} {weights}", Loss(module))
            return result

        return told

    def _move(self, step: Callable) -> Callable:
        """Return the step of a schedule, of which the rates before and after are noted."""

        @wraps(step)
        def told(scheduler: Any, *arguments: Any, **others: Any) -> Any:
            optimizer = scheduler.optimizer
            before = float(optimizer.param_groups[0]["lr"])
            result = step(scheduler, *arguments, **others)
            is_first = getattr(scheduler, "last_epoch", 0) == 0  # as it begins
            if self.log.is_open and not is_first and self.watcher.is_own(optimizer):
                self._schedulers[id(scheduler)] = scheduler
                self.moves.append((self.watcher.num_steps(optimizer), before, float(optimizer.param_groups[0]["lr"])))
            return result

        return told


def _clips() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of the functions that clip gradients: the innermost, which every way of import calls."""
    home = nn.utils.clip_grad
    inner = "_clip_grads_with_norm_"
    yield home, inner if hasattr(home, inner) else "clip_grad_norm_"
    yield from ((owner, "clip_grad_value_") for owner in (home, nn.utils))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
