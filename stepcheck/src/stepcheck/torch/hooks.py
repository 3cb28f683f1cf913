"""The watch on a module and on all optimizers, by PyTorch's own hooks, for the time of
a `with`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stepcheck.faults import Stage
from stepcheck.seams import replaced
from stepcheck.torch.beside import Beside
from stepcheck.torch.device import CPU, device_of
from stepcheck.torch.nests import Nest, Place, mapped, unpacked
from stepcheck.torch.optimizers import Step, grads_of, groups_of, state_of
from stepcheck.torch.state import (
    Kind,
    Random,
    Setting,
    array,
    bare,
    is_silent,
    modes,
    of_torch,
    own_loss,
    rows_in,
    sampled,
    trained,
    trained_in,
    untrained,
)
from stepcheck.trace.log import Applied, Called, Log, Other
from stepcheck.trace.measure import outline
from stepcheck.user_code.source import line_here
from stepcheck.values import Reason


@dataclass
class _Stepping:
    """The beginning of an optimizer step that runs, and the numbers of passes and steps
    before it.
    """

    step: Step
    grads: list[np.ndarray | None]
    num_called: int
    num_applied: int


@dataclass
class Watcher:
    """Writes the forward passes of a module and the steps of all optimizers to a log.

    Args:
        num_inputs: of the module's arguments, how many have the rows of the data; None
            for all of as many rows.
        order: of all records.

    Attributes:
        is_running: whether a pass has begun; `is_cast`: and `torch.autocast` with it.
        is_waiting: whether a gradient was taken since the last step.
        is_taking: whether gradients are taken for a result, and not added to those that
            are there.
        beside: keeps other modules, if the loss that is meant may call some.
        labels: by the order of a pass, those that a loss of PyTorch, or the module, was
            given; `own`: the loss that the module has computed, the divisor of a sum.
    """

    module: nn.Module
    log: Log
    num_inputs: int | None
    order: Iterator[int] = field(default_factory=itertools.count)
    is_running: bool = False
    is_cast: bool = False
    is_waiting: bool = False
    is_taking: bool = False
    beside: Beside | None = None
    labels: dict[int, Any] = field(default_factory=dict)
    own: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    # Passes whose gradients were added since the last step, and of all passes: those of
    # which a gradient was taken, and since the last step thrown away.
    _added: list[Called] = field(default_factory=list)
    _differentiated: set[int] = field(default_factory=set)
    _thrown: set[int] = field(default_factory=set)
    _steps: Counter[int] = field(default_factory=Counter)
    _before: dict[int, _Stepping] = field(default_factory=dict)

    def run(
        self, call: Callable, module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """Run a forward pass, and record it."""
        begun = self.harmless(self._begin, args, kwargs)
        self.is_running = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            self.is_running = False
        if begun is not None:
            self.harmless(self._end, *begun, args, kwargs, output)
        return output

    def is_of(self, owner: Any) -> bool:
        """Whether this is the module, or `torch.compile` and the like around it."""
        return isinstance(owner, nn.Module) and bare(owner) is self.module

    def harmless(self, hook: Callable, *arguments: Any, **others: Any) -> Any:
        """Return the result of a hook; its error ends the record, and not the loop."""
        try:
            return hook(*arguments, **others)
        except Exception as error:  # ours, inside of the user's loop
            self.log.is_open = False
            self.log.leave(
                Reason.FAILED, told=f"{type(error).__name__}: {error}"
            )
            return None

    def close(self) -> None:
        """Sort the log, and mark the passes of which a gradient was taken.

        Without any gradient, it is not known which of those with a graph.
        """
        self.log.close()
        grads = (
            g for step in self.log.applied for g in step.grads if g is not None
        )
        is_known = bool(self._differentiated) or any(map(np.any, grads))
        for i, each in enumerate(self.log.called):
            is_told = is_known or not each.setting.has_graph
            is_taken = each.order in self._differentiated if is_told else None
            self.log.called[i] = replace(each, differentiated=is_taken)

    def _begin(self, args: tuple, kwargs: dict) -> tuple[Called, Nest] | None:
        """Return a pass as it begins, and its arguments."""
        module, log = self.module, self.log
        if not log.is_open:
            return None
        if not all(isinstance(p, nn.Parameter) for p in module.parameters()):
            log.leave(Reason.OTHER_WEIGHTS_OF_MODEL, Stage.GRADIENT)
            # else steps have its gradients
            log.is_open = not torch.is_grad_enabled()
            return None
        nest = unpacked((args, kwargs))
        leaves = list(map(array, nest.leaves))
        chosen = rows_in(nest.leaves, self.num_inputs)
        is_kept = log.wants([leaves[i] for i in chosen])
        groups = (trained(module), untrained(module)) if is_kept else ((), ())
        kept = sampled if log.is_run else array
        params, buffers = (
            [kept(value) for _, value in group] for group in groups
        )
        kind = device_of(module).type
        self.is_cast = torch.is_autocast_enabled(kind)
        cast = torch.get_autocast_dtype(kind) if self.is_cast else None
        called = Called(
            order=-1,
            inputs=leaves,
            outputs=[],
            params=params,
            buffers=buffers,
            differentiated=None,
            line=line_here(),
            setting=Setting(nest.form, Random.now(), cast=cast),
            trained=trained_in(module),
            mode=modes(module),
        )
        return called, nest

    def _end(
        self, begun: Called, nest: Nest, args: tuple, kwargs: dict, output: Any
    ) -> None:
        """Add a pass that has ended to the log."""
        given, out = nest.leaves, unpacked(output, has_objects=False)
        heard = [
            i for i, leaf in enumerate(out.leaves) if leaf.grad_fn is not None
        ]
        losses = [i for i in heard if not out.leaves[i].ndim]
        labels, num = None, None
        if losses:
            labels, num = own_loss(self.module, args, kwargs)
        chosen = rows_in(given, self.num_inputs, labels)
        places = {i: Place(n) for n, i in enumerate(chosen)}
        inputs = [given[i] for i in chosen]
        random, has_graph = begun.setting.random, bool(heard)

        def placed(i: int) -> Any:
            return places[i] if i in places else given[i].detach().clone()

        setting = replace(
            begun.setting,
            given=mapped(placed, nest.form),
            kinds=[
                Kind(x.dtype, x.requires_grad, x.device == CPU) for x in inputs
            ],
            output=out.form,
            has_graph=has_graph,
            is_through=any(leaf.requires_grad for leaf in given),
            is_cast=self.is_cast,
        )
        draws = self.log.is_run and not random.is_now
        called = replace(
            begun,
            order=next(self.order),
            inputs=[begun.inputs[i] for i in chosen],
            outputs=list(map(array, out.leaves)) if begun.is_whole else [],
            setting=setting,
            is_training=self.module.training and has_graph,
            random=random.digest() if draws else "",
        )
        self.log.add(called)
        if not out.leaves:
            self.log.leave(
                Reason.NO_TENSOR, Stage.GRADIENT, type(output).__name__
            )
        if labels is not None and not self.log.is_run:
            self.labels[called.order] = array(labels)
            self.own[called.order] = float(out.leaves[losses[0]].detach()), num
            heard = losses[:1]
        for i in heard:
            hook = partial(self.harmless, self._heard, called, i)
            out.leaves[i].register_hook(hook)

    def _heard(self, called: Called, i: int, derivative: Tensor) -> None:
        """Keep the derivative by a pass's i-th output."""
        self._differentiated.add(called.order)
        if self.beside is not None:
            called.setting.beside.update(self.beside.now)
        if self.log.is_open and not self.is_taking:
            self._added.append(called)
        self.note_line(called)
        self.is_waiting = True
        if self.log.is_open and called.is_whole:
            with suppress(
                RuntimeError
            ):  # many derivatives at once have no numbers
                self.log.derive(called, i, array(derivative))

    def drop(self) -> None:
        """Note that gradients are thrown away before a step; of passes on adversarial
        rows' way they are not meant.

        Such passes have a gradient by their inputs, of which the rows are made that the
        next one has without.
        """
        self._thrown |= {
            each.order for each in self._added if each.setting.is_through
        }

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note the state before a step."""
        if not self.log.is_open or not self.is_own(optimizer):
            return
        has_closure = len(args) > 1 or bool(kwargs)  # which runs passes inside
        is_kept = self.log.wants_step(0) or has_closure
        self._before[id(optimizer)] = _Stepping(
            step=state_of(self.module, optimizer, is_kept=is_kept),
            grads=grads_of(self.module, optimizer, is_kept=is_kept),
            num_called=len(self.log.called),
            num_applied=len(self.log.applied),
        )

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Add a step that was made to the log."""
        before = self._before.pop(id(optimizer), None)
        was_skipped = getattr(optimizer, "found_inf", False)  # by a fused step
        if not self.log.is_open or was_skipped:
            return
        if before is None:
            self._added = []
            self.log.add(Other(next(self.order)))
            return
        if any(not called.setting.is_through for called in self._added):
            self._differentiated -= self._thrown
        self._thrown.clear()
        self.is_waiting, self._added = False, []
        self.log.optimizers[id(optimizer)] = optimizer
        if (
            len(self.log.applied) == before.num_applied
        ):  # else one inside has made it
            self._add_step(optimizer, before)

    def _add_step(self, optimizer: Optimizer, before: _Stepping) -> None:
        """Add a step that was made to the log."""
        log, grads, step = self.log, before.grads, before.step
        orders = {each.order for each in log.called[before.num_called :]}
        inside = orders & self._differentiated
        if len(inside) > 1:
            log.leave(Reason.CLOSURE)
            log.is_open = False
            return
        if inside:  # the closure has taken the gradient
            grads = grads_of(self.module, optimizer, is_kept=True)
        is_kept = bool(step.params) and log.wants_step(0)
        after = state_of(self.module, optimizer, is_kept=is_kept)
        own = [*step.groups]
        has_outlines = log.is_run and not is_kept
        log.add(
            Applied(
                order=next(self.order),
                optimizer=id(optimizer),
                grads=grads if is_kept else [],
                params=step.params if is_kept else [],
                slots=step.slots if is_kept else [],
                params_after=after.params,
                slots_after=after.slots,
                learning_rate=after.rate,
                iterations=self._steps[id(optimizer)],
                line=line_here(),
                built=tuple(own),
                lost=tuple(i for i in own if grads[i] is None),
                kind=type(optimizer).__name__,
                trained=trained_in(self.module),
                outlines=_outlines(self.module) if has_outlines else [],
                rules=step.rules,
                slots_of=(tuple(step.names), tuple(after.names)),
            )
        )
        self._steps[id(optimizer)] += 1

    def note_line(self, called: Called | None = None) -> None:
        """Note that this line computes the loss of a pass, or takes its gradient; by
        default of the last pass.
        """
        called = (
            self.log.called[-1]
            if called is None and self.log.called
            else called
        )
        if called is not None and (line := line_here()) is not None:
            called.setting.lines.append(line)

    def is_own(self, optimizer: Any) -> bool:
        """Whether an optimizer moves a parameter of the module."""
        is_optimizer = isinstance(optimizer, Optimizer)
        return is_optimizer and bool(groups_of(self.module, optimizer))


def _outlines(module: nn.Module) -> list[np.ndarray]:
    """Return the outlines of the gradient and the weights of each trained parameter."""
    params = [p for _, p in trained(module)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return [
        np.stack([*map(outline, map(sampled, part))])
        for part in (grads, params)
    ]


@contextmanager
def listening(
    watchers: list[Watcher], found: Callable[[nn.Module], Watcher] | None = None
) -> Iterator[None]:
    """Let watchers record inside; afterwards PyTorch is as it was, also after an error.

    Args:
        watchers: one for each module.
        found: adds the watcher of a module that runs and has none.
    """
    ears = _Ears(watchers, found)
    live = [ears]
    with ExitStack() as stack:
        stack.callback(ears.close)
        stack.callback(live.clear)
        recorded = _recorded(nn.Module.__call__, live)
        stack.enter_context(replaced(nn.Module, "__call__", recorded))
        stack.callback(register_optimizer_step_pre_hook(ears.before).remove)
        stack.callback(register_optimizer_step_post_hook(ears.after).remove)
        yield


@dataclass
class _Ears:
    """The watchers of all modules, and the steps that run: closures call modules."""

    watchers: list[Watcher]
    found: Callable[[nn.Module], Watcher] | None
    steps: list[tuple] = field(default_factory=list)

    def of_pass(self, module: nn.Module) -> Watcher | None:
        """Return the watcher of a module that begins to run; None inside of another
        one's pass.
        """
        is_inside = any(watcher.is_running for watcher in self.watchers)
        every = () if is_inside else self.watchers
        own = next((each for each in every if each.is_of(module)), None)
        if own is not None:
            return own
        for watcher in self.watchers:
            if watcher.beside is not None:
                watcher.harmless(watcher.beside.note, module)
        return None if is_inside else self._new(module)

    def _new(self, module: nn.Module) -> Watcher | None:
        has_lazy = any(map(is_lazy, module.parameters()))
        if self.found is None or has_lazy or not trained(module):
            return None
        own = self.found(bare(module))
        for step in self.steps:
            own.harmless(own.before_step, *step)
        return own

    def close(self) -> None:
        """Close all logs."""
        for watcher in self.watchers:
            watcher.close()

    def before(self, *step: Any) -> None:
        """Hear of a step that begins."""
        if not is_silent():
            self.steps.append(step)
            for watcher in self.watchers:
                watcher.harmless(watcher.before_step, *step)

    def after(self, *step: Any) -> None:
        """Hear of a step that was made."""
        if not is_silent():
            self.steps.clear()
            for watcher in self.watchers:
                watcher.harmless(watcher.after_step, *step)


def _recorded(call: Callable, live: list[_Ears]) -> Callable:
    """Return the call of modules by which watchers record theirs, also where it was
    compiled before.
    """

    @wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # DistributedDataParallel writes buffers, and then calls the module.
        is_outer = isinstance(module, nn.parallel.DistributedDataParallel)
        if is_silent() or not live or is_outer:
            return call(module, *args, **kwargs)
        watcher = live[0].of_pass(module)
        if watcher is None:
            return call(module, *args, **kwargs)
        return watcher.run(call, module, args, kwargs)

    return of_torch(called)
