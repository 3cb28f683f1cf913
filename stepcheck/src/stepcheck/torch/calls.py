"""The functions and schedulers that a loop calls beside its module and its optimizer, for the time of a `with`."""

import inspect
import math
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
from torch.optim.optimizer import Optimizer

from stepcheck.report.found import Likely, some
from stepcheck.torch.hooks import Watcher
from stepcheck.torch.ledger import MOST, SCALES, leads, roots_of
from stepcheck.torch.losses import FUNCTIONS, Function, Loss, has_form, has_last
from stepcheck.torch.settings import Schedules
from stepcheck.torch.state import array, is_transformed, of_torch, replaced, trained
from stepcheck.trace.log import Line, Scaled
from stepcheck.user_code.source import line_here

_CLIPPED_LATE = Likely(
    "The gradients are clipped after the optimizer step, and not used any more. Clip between `loss.backward()` and "
    "`optimizer.step()`."
)
_IDLE = "{} sets the gradients of {} to zero, and makes no step: is its `step()` missing?"
_CLIPPED_EARLY = Likely(
    "The gradients are clipped when there are none, and then taken: nothing is clipped. Clip between `loss.backward()` "
    "and `optimizer.step()`."
)
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
        outputs: the indices of the module's outputs that the losses get; None for a changed output.
        targets: by the order of a pass, the labels that its loss was given.
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.log = watcher, watcher.log
        self.losses: dict[str, Loss | Function] = {}
        self.outputs: set[int | None] = set()
        self.targets: dict[int, np.ndarray] = {}
        self.schedules = Schedules(watcher)
        self.is_whole, self.is_scaled = True, False
        self._depth = 0
        self._cleared: dict[int, Optimizer] = {}
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
            stack.enter_context(replaced(nn.Module, "__call__", self._judging(nn.Module.__call__)))
            for name in ("backward", "grad"):
                taking = self._taking(getattr(autograd, name), is_result=name == "grad")
                stack.enter_context(replaced(autograd, name, taking))
            for kind, name, told in self.schedules.replacements():
                stack.enter_context(replaced(kind, name, told))
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
        lines |= dict.fromkeys(_SCHEDULED, self.schedules.line) | dict.fromkeys(_CLIPPED, of.get("clip"))
        lines |= {"not reset": of.get("zero", of.get("take")), "inference mode": of.get("eval")}
        self.log.lines.update({name: line for name, line in lines.items() if line is not None})
        if (fall := self.schedules.fall()) is not None:
            self.log.notes[fall] = None
        self.log.notes.update(dict.fromkeys(self._idle()))

    def _idle(self) -> Iterator[Likely]:
        """Yield the note on an optimizer that is cleared in each update and makes no step, while others do."""
        moved = {id(p) for each in self.watcher.optimizers for group in each.param_groups for p in group["params"]}
        for optimizer in self._cleared.values() if self.log.applied else ():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not self.watcher.num_steps(optimizer) and own.isdisjoint(moved):  # it is not around one that does
                names = some([name for name, p in trained(self.watcher.module) if id(p) in own])
                yield Likely(_IDLE.format(type(optimizer).__name__, names))

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
                self._cleared |= {id(owner): owner} if isinstance(owner, Optimizer) else {}
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
        self._keep_labels(given.get("target"))
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

    def _judging(self, call: Callable) -> Callable:
        """Return a call of modules by which the criteria of the user's are noted."""

        @wraps(call)
        def told(module: nn.Module, *arguments: Any, **others: Any) -> Any:
            if others or len(arguments) != 2 or not self._is_criterion(module, *arguments):
                return call(module, *arguments, **others)
            self._depth += 1  # the functions that it calls are parts of it
            try:
                result = call(module, *arguments)
            finally:
                self._depth -= 1
            self.watcher.harmless(self._note_criterion)(module, arguments[1], result)
            return result

        return of_torch(told)

    def _is_criterion(self, module: nn.Module, outputs: Any, labels: Any) -> bool:
        """Whether a module without parameters gets the output of the last pass and labels."""
        if is_transformed() or self._depth or self.watcher.running or not self.log.is_open:
            return False
        if len(self.watcher.latest) != 1 or type(module).__module__.startswith("torch."):
            return False
        if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor) or labels.requires_grad:
            return False
        (node, _), *_ = self.watcher.latest
        has_weights = any(True for _ in module.parameters())
        return node is not None and not has_weights and leads(outputs.grad_fn, [node])

    def _note_criterion(self, module: nn.Module, labels: Tensor, result: Any) -> None:
        self.watcher.note_line()
        if not isinstance(result, Tensor) or result.ndim or not result.requires_grad:
            self.is_whole = False
            return
        self._keep_labels(labels)
        self.outputs.add(0)
        self.losses.setdefault(f"{type(module).__name__} {id(module)}", Function(module))
        self._plain.append((result.grad_fn, "criterion"))

    def _keep_labels(self, labels: Any) -> None:
        if self.log.called and self.log.called[-1].is_whole and isinstance(labels, Tensor) and labels.ndim:
            self.targets.setdefault(self.log.called[-1].order, array(labels))

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
            if not is_result:
                self.watcher.harmless(self.watcher.begin_backward)()
            self.watcher.is_taking = is_result
            try:
                result = take(*arguments, **others)
            finally:
                self.watcher.is_taking = False
            self.watcher.is_waiting |= self.log.is_open and not is_result
            if self.watcher.num_heard > before:
                self._has_scale, self._scaled = has_scale, (None, None)
                self._note_number([] if has_scale else roots)
                if self.log.is_open and (self.losses or not self.is_whole):  # else no loss was heard
                    self._note_gradient(nodes, are_by_rows)
            return result

        return told

    def _note_number(self, roots: list[Tensor]) -> None:
        """Keep the number of which a gradient was taken."""
        called = next((each for each in reversed(self.log.called) if each.derivatives), None)
        if called is not None and self.log.is_open:
            is_one = len(roots) == 1 and roots[0].numel() == 1
            called.setting.numbers.append(float(roots[0].detach()) if is_one else math.nan)

    def _note_gradient(self, nodes: list[Any], are_by_rows: list[bool]) -> None:
        """Note whether a gradient was taken of a loss of the outputs alone, perhaps divided by the rows."""
        losses, means = [n for n, _ in self._plain], [n for n, how in self._plain if how == "mean"]
        sums = [n for n, how in self._plain if how == "sum"]
        divided = [by for by, node in zip(are_by_rows, nodes, strict=True) if leads(node, sums, SCALES)]
        is_bare = any(leads(node, losses) for node in nodes)
        own = [n for n, how in self._plain if how == "criterion"]  # whose division by the rows may be the mean
        whole = [node for by, node in zip(are_by_rows, nodes, strict=True) if not by]
        is_one = is_bare or any(leads(n, means, SCALES) for n in nodes) or any(leads(n, own, SCALES) for n in whole)
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

    def meant(self, loss: Loss | Function) -> Loss | Function | None:
        """Return the loss that is meant: the loop's loss, or its sum by the rows, if most are divided so; or None."""
        if not self.is_whole or not any(self._divisors):
            return loss if self.is_whole and not self._divisors else None
        return loss.by_rows() if isinstance(loss, Loss) and 2 * sum(self._divisors) > len(self._divisors) else None


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


def clips() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of the functions that clip gradients: the innermost, which every way of import calls."""
    home = nn.utils.clip_grad
    inner = "_clip_grads_with_norm_"
    yield home, inner if hasattr(home, inner) else "clip_grad_norm_"
    yield from ((owner, "clip_grad_value_") for owner in (home, nn.utils))
