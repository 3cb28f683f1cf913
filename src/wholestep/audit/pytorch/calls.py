"""The functions and schedulers that a loop calls beside its module and its optimizer, for the time of a `with`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, autograd, nn
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
_VIEWS, _SCALES = ("Squeeze", "Unsqueeze"), ("Div", "Mul")  # operations, as autograd names them
_OWN = {nn.CrossEntropyLoss: ("Softmax",), nn.BCEWithLogitsLoss: ("Sigmoid",)}  # before a loss that has them inside


class Calls:
    """The losses, clips and schedulers of a loop.

    Attributes:
        losses: by their text, the losses of which a gradient may be taken.
        is_whole: whether each gradient by the outputs was that of such a loss of them alone, times a number.
        moves: of each move of a schedule: (the optimizer's steps before it, the rate before, the rate after).
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self.losses: dict[str, Loss] = {}
        self.moves: list[tuple[int, float, float]] = []
        self.is_whole = True
        self._depth, self._schedulers = 0, dict[int, Any]()
        self._plain: list[tuple[Any, bool]] = []  # of losses of the outputs: the node, whether it is a mean

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            for owner, name in _clips():
                stack.enter_context(_replaced(owner, name, self._clip(getattr(owner, name))))
            for function, kind in FUNCTIONS.items():
                if getattr(functional, function.__name__, None) is function:
                    stack.enter_context(_replaced(functional, function.__name__, self._loss(function, kind)))
            for name in ("backward", "grad"):
                stack.enter_context(_replaced(autograd, name, self._taking(getattr(autograd, name))))
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
                if _leads(given["input"].grad_fn, self.watcher.latest, _OWN.get(kind, ())):
                    self._plain.append((result.grad_fn, module.reduction == "mean"))
            return result

        return told

    def _taking(self, take: Callable) -> Callable:
        """Return a function that takes gradients, and notes whether they are of a loss of the outputs alone."""

        @wraps(take)
        def told(*arguments: Any, **others: Any) -> Any:
            roots: Any = arguments[0] if arguments else others.get("tensors", others.get("outputs"))
            nodes = [root.grad_fn for root in ([roots] if isinstance(roots, Tensor) else roots)]
            before = self.watcher.num_heard
            result = take(*arguments, **others)
            if self.watcher.num_heard > before:
                losses, means = [n for n, _ in self._plain], [n for n, is_mean in self._plain if is_mean]
                self.is_whole &= any(_leads(node, losses) or _leads(node, means, _SCALES) for node in nodes)
                self._plain.clear()
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


def _leads(node: Any, ends: list[Any], through: tuple[str, ...] = ()) -> bool:
    """Whether the graph leads from a node to one of the ends, by views and such operations alone."""
    while node is not None and not any(node is end for end in ends):
        before = [each for each, _ in node.next_functions if each is not None]
        if len(before) != 1 or not node.name().startswith((*_VIEWS, *through)):
            return False
        (node,) = before
    return node is not None


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
