"""The functions and schedulers that a loop calls beside its module and its optimizer, for the time of a `with`."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from wholestep.audit.found import Likely
from wholestep.audit.log import Line, Scaled
from wholestep.audit.pytorch.graph import MOST, SCALES, leads, roots_of
from wholestep.audit.pytorch.hooks import Watcher
from wholestep.audit.pytorch.losses import FUNCTIONS, Loss, has_form, has_last
from wholestep.audit.pytorch.state import array, is_transformed, rate_of, replaced, trained
from wholestep.audit.source import line_here
from wholestep.audit.steps import Schedule

_CLIPPED_LATE = Likely(
    "The gradients are clipped after the optimizer step, and not used any more. Clip between `loss.backward()` and "
    "`optimizer.step()`."
)
_CLIPPED_EARLY = Likely(
    "The gradients are clipped when there are none, and then taken: nothing is clipped. Clip between `loss.backward()` "
    "and `optimizer.step()`."
)
_FEW = 3  # updates by which a schedule is judged
_OF_EPOCHS = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "ReduceLROnPlateau",
)  # schedules whose numbers are mostly those of epochs
_FAR, _SOON = 0.01, 200  # of the first rate: such a rate trains no more; updates in which a schedule of epochs has it
_ZEROED = "only the last microbatch", "first microbatch lost", "last microbatch lost", "last window dropped"
_CLIPPED = "clip per microbatch", "clip before unscale"
_SCHEDULED = "schedule by microbatch", "schedule one ahead"
_OWN = {nn.CrossEntropyLoss: ("Softmax",), nn.BCEWithLogitsLoss: ("Sigmoid",)}  # before a loss that has them inside


class Calls:
    """The losses, clips and schedulers of a loop.

    Attributes:
        losses: by their text, the losses of which a gradient may be taken.
        is_whole: whether each gradient by the outputs was that of such a loss of them alone, times a number.
        is_scaled: whether one was multiplied or divided by a number.
        outputs: which of the module's outputs these are given; None for one that is changed before.
        targets: by the order of a pass, the labels that its loss was given.
        moves: of each move of a schedule: (the optimizer's steps before it, the rate before, the rate after).
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self.losses: dict[str, Loss] = {}
        self.outputs: set[int | None] = set()
        self.targets: dict[int, np.ndarray] = {}
        self.moves: list[tuple[int, float, float]] = []
        self.is_whole, self.is_scaled, self._is_given = True, False, False
        self._depth, self._num_inside, self._schedulers = 0, 0, dict[int, Any]()
        self._lines: dict[str, Line] = {}  # the last one that clips, takes gradients, and so on
        self._plain: deque[tuple[Any, str]] = deque(maxlen=MOST)  # of losses of the outputs: the node, the reduction
        self._scaled: tuple[Any, Any] = (None, None)  # of the last loss that was scaled: its node, and the loss's
        self._has_scale = self._clips_scaled = False  # whether the gradients have the scale, and had it when clipped
        self._divisors: list[bool] = []  # of sums: whether they are divided by the rows

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            for owner, name in clips():
                stack.enter_context(replaced(owner, name, self._clip(getattr(owner, name))))
            for function, kind in FUNCTIONS.items():
                now = getattr(functional, function.__name__)
                told = self._loss(getattr(now, "direct", now), kind)
                stack.enter_context(replaced(functional, function.__name__, told))
            for name in ("backward", "grad"):
                taking = self._taking(getattr(autograd, name), is_result=name == "grad")
                stack.enter_context(replaced(autograd, name, taking))
            for kind in kinds(LRScheduler):
                for name, how in (("step", self._move), ("_initial_step", self._silent)):
                    if name in vars(kind):
                        stack.enter_context(replaced(kind, name, how(vars(kind)[name])))
            for name, of in (("scale", self._scaling), ("unscale_", self._unscaling), ("step", self._checked)):
                stack.enter_context(replaced(GradScaler, name, of(getattr(GradScaler, name))))
            stack.enter_context(replaced(torch.autocast, "__enter__", self._casting(torch.autocast.__enter__)))
            for owner in (Optimizer, nn.Module):
                stack.enter_context(replaced(owner, "zero_grad", self._zeroing(owner.zero_grad)))
            stack.enter_context(replaced(nn.Module, "eval", self._evaluating(nn.Module.eval)))
            yield
        self._close()

    def _close(self) -> None:
        """Write the lines of causes, and the note on a rate that falls."""
        of, lines = self._lines, dict.fromkeys(_ZEROED, self.watcher.dropped)
        lines |= dict.fromkeys(_SCHEDULED, of.get("schedule")) | dict.fromkeys(_CLIPPED, of.get("clip"))
        lines |= {"not reset": of.get("zero", of.get("take")), "inference mode": of.get("eval")}
        self.log.lines.update({name: line for name, line in lines.items() if line is not None})
        if (fall := self._fall()) is not None:
            self.log.notes[fall] = None

    def _fall(self) -> str | None:
        """Return the note on a schedule of epochs that moves in each update, and lets the rate fall."""
        kinds = {type(each).__name__ for each in self._schedulers.values()}
        at = {steps for steps, *_ in self.moves}
        if len(kinds) != 1 or not kinds <= {*_OF_EPOCHS} or len(at) < _FEW or len(at) < max(at) - min(at):
            return None
        first, last = self.moves[0][1], self.moves[-1][2]
        told = f"{next(iter(kinds))} makes a step in each update ({self._lines.get('schedule')}): the learning rate "
        told += f"falls from {first:.4g} to {last:.4g} in {len(at)} updates. If its numbers are those of epochs, call "
        told += "`scheduler.step()` once per epoch."
        is_soon = any(after <= _FAR * first for *_, after in self.moves[:_SOON])
        return (Likely(told) if is_soon else told) if last < first else None

    def _note(self, what: str) -> None:
        """Keep the line of the user's that calls here."""
        if self.log.is_open and (line := line_here()) is not None:
            self._lines[what] = line

    def _zeroing(self, zero: Callable) -> Callable:
        """Return a `zero_grad` whose line is kept, as is the line that throws away gradients."""

        @wraps(zero)
        def told(owner: Any, *arguments: Any, **others: Any) -> Any:
            if self.log.is_open and (self.watcher.is_of(owner) or self._is_own(owner)):
                self._note("zero")
                if self.watcher.is_waiting:
                    self.watcher.drop(self._lines.get("zero"))
            return zero(owner, *arguments, **others)

        return told

    def _is_own(self, owner: Any) -> bool:
        return isinstance(owner, Optimizer) and self.watcher.is_own(owner)

    def _evaluating(self, evaluate: Callable) -> Callable:
        @wraps(evaluate)
        def told(module: nn.Module) -> nn.Module:
            if self.watcher.is_of(module):
                self._note("eval")
            return evaluate(module)

        return told

    def schedule(self) -> Schedule | None:
        """Return the rates by update, if a schedule moves in each update, but at another place or more than once.

        The schedule that moves once for each update after the optimizer's step is right, and so is one that moves after
        each pass: None for these, and for one that is given a number or a metric, and does not count its steps.
        """
        at = [steps for steps, *_ in self.moves]
        counts = [at.count(step) for step in range(max(at, default=0))]  # of the updates that are over
        is_right = counts[:1] == [0] and set(counts[1:]) == {1}
        if len(counts) < _FEW or not all(counts[1:]) or is_right or len(self._schedulers) > 1 or self._is_given:
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
            if any(id(p) in own for p in given):
                self._note("clip")
                self._clips_scaled |= self._has_scale
                if is_late:
                    is_early = not any(p.grad is not None and p.grad.any() for p in given)
                    self.log.notes[_CLIPPED_EARLY if is_early else _CLIPPED_LATE] = None
            return clip(given, *arguments, **others)

        return told

    def _loss(self, function: Callable, kind: type[nn.Module]) -> Callable:
        """Return a loss that is noted, if a gradient may be taken of it."""
        names = inspect.signature(function)

        @wraps(function)
        def told(*arguments: Any, **others: Any) -> Any:
            if is_transformed():
                return function(*arguments, **others)
            self._depth += 1
            try:
                result = function(*arguments, **others)
            finally:
                self._depth -= 1
            is_own = not self._depth and not self.watcher.running  # no loss inside of the module
            if self.log.is_open and is_own and isinstance(result, Tensor) and result.requires_grad:
                self.watcher.harmless(self._note_loss)(kind, names.bind(*arguments, **others), result)
            return result

        return told

    def _note_loss(self, kind: type[nn.Module], bound: inspect.BoundArguments, result: Tensor) -> None:
        """Note a loss of which a gradient may be taken, and the output of the module that it gets."""
        self.watcher.note_line()
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if value is not None}
        if self.log.called and self.log.called[-1].is_whole and isinstance(given.get("target"), Tensor):
            self.targets.setdefault(self.log.called[-1].order, array(given["target"]))
        options = {name: value for name, value in given.items() if name not in ("input", "target")}
        if not has_form(kind, given["input"], options):
            self.is_whole = False
            return
        places = [
            (i, node, shape)
            for i, (node, shape) in enumerate(self.watcher.latest)
            if node is not None and shape.numel() == given["input"].numel()  # no part of an output is selected
        ]
        at = next((i for i, node, _ in places if leads(given["input"].grad_fn, [node], _OWN.get(kind, ()))), None)
        self.outputs.add(at)
        is_last = at is not None and has_last(given["input"], self.watcher.latest[at])
        loss = Loss(kind(**options), has_last=is_last, at=at)
        key = [array(value).tobytes() if isinstance(value, Tensor) else value for value in options.values()]
        self.losses.setdefault(f"{kind.__name__} {key}", loss)
        if at is not None:
            self._plain.append((result.grad_fn, loss.given.reduction))

    def _taking(self, take: Callable, *, is_result: bool) -> Callable:
        """Return a function that takes gradients, and notes whether they are of a loss of the outputs alone."""

        @wraps(take)
        def told(*arguments: Any, **others: Any) -> Any:
            roots, arguments, others = roots_of(arguments, others)
            nodes = [getattr(root, "grad_fn", None) for root in roots]
            scaled, loss = self._scaled
            has_scale = scaled is not None and any(node is scaled for node in nodes)
            nodes = [loss if has_scale and node is scaled else node for node in nodes]
            before, are_by_rows = self.watcher.num_heard, list(map(self._is_by_rows, nodes))  # which a graph forgets
            self._note("take")
            self.watcher.is_taking = is_result
            try:
                result = take(*arguments, **others)
            finally:
                self.watcher.is_taking = False
            self.watcher.is_waiting |= self.log.is_open and not is_result
            if self.watcher.num_heard > before:
                self._has_scale, self._scaled = has_scale, (None, None)
                if self.log.is_open and (self.losses or not self.is_whole):  # else no loss was heard
                    self._note_gradient(nodes, are_by_rows)
            return result

        return told

    def _note_gradient(self, nodes: list[Any], are_by_rows: list[bool]) -> None:
        """Note whether a gradient was taken of a loss of the outputs alone, perhaps divided by the rows."""
        losses, means = [n for n, _ in self._plain], [n for n, how in self._plain if how == "mean"]
        sums = [n for n, how in self._plain if how == "sum"]
        divided = [by for by, node in zip(are_by_rows, nodes, strict=True) if leads(node, sums, SCALES)]
        is_bare = any(leads(node, losses) for node in nodes)
        is_one = is_bare or any(leads(node, means, SCALES) for node in nodes)
        self.is_scaled |= is_one and not is_bare
        self._divisors += [any(divided)] * bool(sums and not is_one)
        self.is_whole &= is_one or bool(divided)
        self._plain.clear()

    def _scaling(self, scale: Callable) -> Callable:
        """Return a `GradScaler.scale` that links the scaled loss to the loss."""

        @wraps(scale)
        def told(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, Tensor) and result is not outputs:
                self._scaled = result.grad_fn, outputs.grad_fn
                now = scaler.get_scale()
                self.log.add(Scaled(next(self.watcher.order), is_finite=True, is_last=False, scale=now))
            return result

        return told

    def _unscaling(self, unscale: Callable) -> Callable:
        @wraps(unscale)
        def told(scaler: Any, optimizer: Any) -> None:
            unscale(scaler, optimizer)
            self._has_scale &= not self._is_own(optimizer)

        return told

    def _checked(self, step: Callable) -> Callable:
        """Return a `GradScaler.step` of which is noted whether the optimizer has made one."""

        @wraps(step)
        def told(scaler: Any, optimizer: Any, *arguments: Any, **others: Any) -> Any:
            num = self.watcher.num_steps(optimizer)
            result = step(scaler, optimizer, *arguments, **others)
            if scaler.is_enabled() and self.log.is_open and self._is_own(optimizer):
                is_finite = self.watcher.num_steps(optimizer) > num
                self.watcher.is_waiting &= is_finite
                self.log.add(Scaled(next(self.watcher.order), is_finite, is_last=self._clips_scaled))
            return result

        return told

    def _casting(self, enter: Callable) -> Callable:
        @wraps(enter)
        def told(cast: Any) -> Any:
            self.watcher.note_cast()
            return enter(cast)

        return told

    def _is_by_rows(self, node: Any) -> bool:
        """Whether a number is divided by the rows of the last pass on its way to a loss."""
        rows = [called.inputs[0].shape[:1] for called in self.log.called[-1:] if called.inputs]
        numbers, shapes = list[float](), [shape[0] for shape in rows if shape and shape[0]]
        while node is not None and node.name().startswith(SCALES):
            other = getattr(node, "_saved_other", None)
            numbers += [float(other)] if isinstance(other, Tensor) and not other.ndim else []
            node = node.next_functions[0][0]
        return any(abs(number * factor - 1) < 1e-6 for number in numbers for num in shapes for factor in (num, 1 / num))

    def meant(self, loss: Loss) -> Loss | None:
        """Return the loss that is meant: the loop's loss, or its sum by the rows, if most are divided so; or None."""
        if not self.is_whole or not any(self._divisors):
            return loss if self.is_whole and not self._divisors else None
        return loss.by_rows() if 2 * sum(self._divisors) > len(self._divisors) else None

    def _silent(self, function: Callable) -> Callable:
        """Return a function inside of which no step of a scheduler is noted: the first one, or those of its parts."""

        @wraps(function)
        def told(*arguments: Any, **others: Any) -> Any:
            self._num_inside += 1
            try:
                return function(*arguments, **others)
            finally:
                self._num_inside -= 1

        return told

    def _move(self, step: Callable) -> Callable:
        """Return the step of a schedule, of which the rates before and after are noted."""

        @wraps(step)
        def told(scheduler: Any, *arguments: Any, **others: Any) -> Any:
            if self._num_inside:
                return step(scheduler, *arguments, **others)
            optimizer = scheduler.optimizer
            before = rate_of(optimizer)
            result = self._silent(step)(scheduler, *arguments, **others)
            if self.log.is_open and self.watcher.is_own(optimizer):
                self._schedulers[id(scheduler)] = scheduler
                self._is_given |= bool(arguments or others)
                self._note("schedule")
                self.moves.append((self.watcher.num_steps(optimizer), before, rate_of(optimizer)))
            return result

        return told


@contextmanager
def later() -> Iterator[None]:
    """Let a loss that is looked up here, and called once a `Calls` listens, be heard: `cross_entropy(model(x), y)`."""
    with ExitStack() as stack:
        for function in FUNCTIONS:
            stack.enter_context(
                replaced(functional, function.__name__, _looked_up_again(getattr(functional, function.__name__)))
            )
        yield


def _looked_up_again(function: Callable) -> Callable:
    @wraps(function)
    def again(*arguments: Any, **others: Any) -> Any:
        now = getattr(functional, function.__name__)
        return (function if now is again else now)(*arguments, **others)

    again.direct = function  # type: ignore[attr-defined]
    return again


def kinds(base: Any) -> Iterator[Any]:
    """Yield a class and all that are derived of it."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def clips() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of the functions that clip gradients: the innermost, which every way of import calls."""
    home = nn.utils.clip_grad
    inner = "_clip_grads_with_norm_"
    yield home, inner if hasattr(home, inner) else "clip_grad_norm_"
    yield from ((owner, "clip_grad_value_") for owner in (home, nn.utils))
