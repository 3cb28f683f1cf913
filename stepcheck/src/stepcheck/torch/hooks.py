"""The watch on a module and on all optimizers, by PyTorch's own hooks, for the time of
a `with`.
"""

import itertools
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
from stepcheck.torch.state import (
    Nest,
    Own,
    Random,
    Setting,
    Step,
    alike,
    array,
    bare,
    filled,
    grads_of,
    is_silent,
    modes,
    of_torch,
    outlines,
    own_loss,
    rate_of,
    sampled,
    split,
    states_of,
    tensors_of,
    trained,
    trained_in,
    unpacked,
    untrained,
)
from stepcheck.trace.log import Applied, Called, Log, Other
from stepcheck.user_code.source import line_here
from stepcheck.values import Line, Reason


@dataclass
class _Begun:
    """The beginning of a forward pass that runs."""

    nest: Nest
    leaves: list[np.ndarray]
    params: list[np.ndarray]
    buffers: list[np.ndarray]
    setting: Setting
    is_cast: bool
    is_kept: bool


@dataclass
class _Stepping:
    """The beginning of an optimizer step that runs, and the numbers of passes and steps
    before it.
    """

    step: Step
    grads: list[np.ndarray | None]
    is_kept: bool
    num_called: int
    num_applied: int


@dataclass
class Watcher:
    """Writes the forward passes of a module and the steps of all optimizers to a log.

    Args:
        num_inputs: of the module's arguments, how many have the rows of the data; None
            for all of as many rows.
        order: of all records.
        like: the shapes of the data's rows, if they are known.

    Attributes:
        is_waiting: whether a gradient was taken since the last step.
        is_taking: whether gradients are taken for a result, and not added to those that
            are there.
        running: the passes that have begun.
        beside: keeps other modules, if the loss that is meant may call some.
        own: by the order of a pass, the loss that the module has computed itself.
        dropped: the line that threw away gradients before a step was made of them.
    """

    module: nn.Module
    log: Log
    num_inputs: int | None
    order: Iterator[int] = field(default_factory=itertools.count)
    like: list[tuple[int, ...]] = field(default_factory=list)
    is_waiting: bool = False
    is_taking: bool = False
    own: dict[int, Own] = field(default_factory=dict)
    dropped: Line | None = None
    running: list[_Begun] = field(default_factory=list)
    beside: Beside | None = None
    _added: list[Called] = field(
        default_factory=list
    )  # whose gradients were added since the last step
    _differentiated: set[int] = field(default_factory=set)
    _thrown: set[int] = field(
        default_factory=set
    )  # of passes with a gradient by their inputs, since the last step
    _steps: dict[int, int] = field(default_factory=dict)
    _before: dict[int, _Stepping] = field(default_factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record to the log inside; afterwards PyTorch is as it was, also after an
        error.
        """
        with listening([self]):
            yield

    def run(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run a forward pass, and record it."""
        self.harmless(self._begin)(args, kwargs)
        try:
            output = call(module, *args, **kwargs)
        except BaseException:
            self.running.clear()
            raise
        self.harmless(self._end)(args, kwargs, output)
        return output

    def is_of(self, owner: Any) -> bool:
        """Whether this is the module, or `torch.compile` and the like around it."""
        return isinstance(owner, nn.Module) and bare(owner) is self.module

    def harmless(self, hook: Callable) -> Callable:
        """Return a hook whose errors end the record, and not the user's loop."""

        @wraps(hook)
        def called(*arguments: Any, **others: Any) -> None:
            try:
                hook(*arguments, **others)
            except Exception as error:  # of our own, in the midst of the user's loop
                self.log.is_open = False
                self.log.leave(Reason.FAILED, told=f"{type(error).__name__}: {error}")

        return called

    def close(self) -> None:
        """Sort the log, and mark the passes of which a gradient was taken."""
        self.log.close()
        called = [
            replace(each, differentiated=self._is_differentiated(each))
            for each in self.log.called
        ]
        self.log.called[:] = called

    def _is_differentiated(self, called: Called) -> bool | None:
        """Whether a gradient was taken of a pass; without any gradient, it is not known
        which have a graph.
        """
        grads = (g for step in self.log.applied for g in step.grads)
        is_known = bool(self._differentiated) or any(
            g is not None and np.any(g) for g in grads
        )
        return (
            called.order in self._differentiated
            if is_known or not called.setting.has_graph
            else None
        )

    def _begin(self, args: tuple, kwargs: dict) -> None:
        if not self.log.is_open:
            return
        module = self.module
        if not all(isinstance(p, nn.Parameter) for p in module.parameters()):
            self.log.leave(Reason.OTHER_WEIGHTS_OF_MODEL, Stage.GRADIENT)
            self.log.is_open &= (
                not torch.is_grad_enabled()
            )  # the steps after it have gradients of it
            return
        flags = tuple(p.requires_grad for p in module.parameters())
        kind = device_of(module).type
        is_cast = torch.is_autocast_enabled(kind)
        cast = torch.get_autocast_dtype(kind) if is_cast else None
        setting = Setting(list, modes(module), Random.now(), flags, cast=cast)
        nest = unpacked((args, kwargs))
        leaves = list(map(array, nest.leaves))
        is_kept = self.log.wants([leaves[i] for i in self._rows_of(nest.leaves)])
        groups = (trained(module), untrained(module)) if is_kept else ([], [])
        kept = sampled if self.log.is_run else array
        params, buffers = ([kept(v) for _, v in group] for group in groups)
        self.running.append(
            _Begun(nest, leaves, params, buffers, setting, is_cast, is_kept)
        )

    def _rows_of(self, leaves: list[Tensor]) -> list[int]:
        """Return which of the arguments have rows of the data."""
        return split(leaves, self.num_inputs or len(leaves), self.like)

    def _end(self, args: tuple, kwargs: dict, output: Any) -> None:
        if not self.running:
            return
        begun, out = self.running.pop(), unpacked(tensors_of(output))
        given = begun.nest.leaves
        order, own = next(self.order), own_loss(args, kwargs, output)
        if own is not None:
            self.own[order] = own[2]
        known = [i for i, leaf in enumerate(given) if own is None or leaf is not own[1]]
        chosen = [known[i] for i in self._rows_of([given[i] for i in known])]
        rest = [
            None if i in chosen else leaf.detach().clone()
            for i, leaf in enumerate(given)
        ]
        has_graph = any(leaf.grad_fn for leaf in out.leaves)
        setting = replace(
            begun.setting,
            packed=partial(filled, begun.nest.packed, chosen, rest),
            output=out.packed,
            draws=not begun.setting.random.is_now,
            has_graph=has_graph,
            is_through=any(leaf.requires_grad for leaf in given),
            dtypes=tuple(given[i].dtype for i in chosen),
            needs=tuple(given[i].requires_grad for i in chosen),
            are_on_cpu=tuple(given[i].device == CPU for i in chosen),
            is_cast=begun.is_cast,
        )
        called = Called(
            order=order,
            inputs=[begun.leaves[i] for i in chosen],
            outputs=list(map(array, out.leaves)) if begun.is_kept else [],
            params=begun.params,
            buffers=begun.buffers,
            differentiated=None,
            line=line_here(),
            setting=setting,
            trained=trained_in(self.module),
            is_training=self.module.training and has_graph,
            mode=alike(setting.modes),
            random=setting.random.digest() if setting.draws and self.log.is_run else "",
        )
        self.log.add(called)
        if not out.leaves:
            self.log.leave(Reason.NO_TENSOR, Stage.GRADIENT, type(output).__name__)
        for i, leaf in enumerate(out.leaves):
            is_used = own is None or leaf is own[0] or self.log.is_run
            if leaf.grad_fn is not None and is_used:
                leaf.register_hook(self.harmless(self._heard(called, i)))

    def note_cast(self) -> None:
        """Note that a `torch.autocast` begins, perhaps inside of a pass."""
        if self.running:
            self.running[-1].is_cast = True

    def _heard(self, called: Called, i: int) -> Callable[[Tensor], None]:
        """Return a hook that keeps the derivative by a pass's i-th output."""

        def heard(derivative: Tensor) -> None:
            self._differentiated.add(called.order)
            if self.beside is not None:
                called.setting.beside.update(self.beside.now)
            if self.log.is_open and not self.is_taking:
                self._added.append(called)
            self.note_line(called)
            self.is_waiting = True
            if self.log.is_open and called.is_whole:
                with suppress(RuntimeError):  # many derivatives at once have no numbers
                    self.log.derive(called, i, array(derivative))

        return heard

    def drop(self, line: Line | None) -> None:
        """Note that a line throws away gradients before a step; of passes on
        adversarial rows' way they are not meant.

        Such passes have a gradient by their inputs, of which the rows are made that the
        next one has without.
        """
        self.dropped = line
        self._thrown |= {
            called.order for called in self._added if called.setting.is_through
        }

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note the state before a step."""
        if is_silent() or not self.log.is_open or not self.is_own(optimizer):
            return
        is_kept = (
            self.log.wants_step(0) or len(args) > 1 or bool(kwargs)
        )  # a closure runs passes inside
        self._before[id(optimizer)] = _Stepping(
            step=states_of(self.module, optimizer, is_kept=is_kept),
            grads=grads_of(self.module, optimizer, is_kept=is_kept),
            is_kept=is_kept,
            num_called=len(self.log.called),
            num_applied=len(self.log.applied),
        )

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Add a step that was made to the log."""
        before = self._before.pop(id(optimizer), None)
        was_skipped = getattr(optimizer, "found_inf", False)  # by a fused step
        if is_silent() or not self.log.is_open or was_skipped:
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
        ):  # else an optimizer inside of it has made the step
            self._add_step(optimizer, before)

    def _add_step(self, optimizer: Optimizer, before: _Stepping) -> None:
        """Add a step that was made to the log."""
        called = self.log.called[before.num_called :]
        inside = [each for each in called if each.order in self._differentiated]
        grads, slots = before.grads, before.step
        if inside:  # the closure has taken the gradient
            grads = grads_of(self.module, optimizer, is_kept=True)
        if len(inside) > 1:
            self._leave_out(inside)
        is_kept = before.is_kept and len(inside) < 2 and self.log.wants_step(0)
        after = states_of(self.module, optimizer, is_kept=is_kept)
        count = self.num_steps(optimizer)
        self._steps[id(optimizer)] = count + 1
        places = slots.rates.places
        self.log.add(
            Applied(
                order=next(self.order),
                optimizer=id(optimizer),
                grads=grads if is_kept else [],
                params=slots.params if is_kept else [],
                slots=slots.slots if is_kept else [],
                params_after=after.params,
                slots_after=after.slots,
                learning_rate=rate_of(optimizer, places[0][0]),
                iterations=count,
                line=line_here(),
                built=tuple(sorted(i for _, _, i in places)),
                lost=tuple(i for _, _, i in places if grads[i] is None),
                kind=type(optimizer).__name__,
                setting=slots.rates,
                trained=trained_in(self.module),
                outlines=outlines(self.module)
                if self.log.is_run and not is_kept
                else [],
                rules=slots.rates.rules,
                slots_of=(slots.rates.names, after.rates.names),
            )
        )

    def _leave_out(self, inside: list[Called]) -> None:
        """Leave out the numbers of the passes that the closure of one step runs."""
        self.log.leave(Reason.CLOSURE, Stage.GRADIENT)
        for called in inside:
            for kept in (
                called.params,
                called.buffers,
                called.outputs,
                called.derivatives,
            ):
                kept.clear()
        self._differentiated -= {called.order for called in inside[1:]}

    def note_line(self, called: Called | None = None) -> None:
        """Note that this line computes the loss of a pass, or takes its gradient; by
        default of the last pass.
        """
        called = self.log.called[-1] if called is None and self.log.called else called
        if called is not None and (line := line_here()) is not None:
            called.setting.lines.append(line)

    def num_steps(self, optimizer: Optimizer) -> int:
        """Return the number of steps of an optimizer that were seen."""
        return self._steps.get(id(optimizer), 0)

    def is_own(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer moves a parameter of the module."""
        own = {id(p) for _, p in trained(self.module)}
        return any(
            id(p) in own for group in optimizer.param_groups for p in group["params"]
        )


@contextmanager
def listening(
    watchers: list[Watcher], found: Callable[..., Watcher] | None = None
) -> Iterator[None]:
    """Let watchers record inside; afterwards PyTorch is as it was, also after an error.

    Args:
        watchers: one for each module; those that are found are added.
        found: makes the watcher of a module that runs, or of an optimizer's parameters,
            and has none.
    """
    live = [_Ears(watchers, found)]

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watcher in [] if is_silent() else live[0].of_step(optimizer):
            watcher.harmless(watcher.before_step)(optimizer, args, kwargs)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watcher in watchers:
            watcher.harmless(watcher.after_step)(optimizer, args, kwargs)

    with ExitStack() as stack:
        for watcher in watchers:
            stack.callback(watcher.close)
        stack.callback(live.clear)
        stack.enter_context(
            replaced(nn.Module, "__call__", _recorded(nn.Module.__call__, live))
        )
        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(after).remove)
        yield


class Alone(nn.Module):
    """Tensors that an optimizer moves and no module has."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield each tensor with its number."""
        yield from ((str(i), tensor) for i, tensor in enumerate(self.tensors))


@dataclass
class _Ears:
    """The watchers of all modules."""

    watchers: list[Watcher]
    found: Callable[..., Watcher] | None

    def of_pass(self, module: nn.Module) -> Watcher | None:
        """Return the watcher of a module that begins to run; None inside of another
        one's pass.
        """
        if any(watcher.running for watcher in self.watchers):
            return None
        own = next((each for each in self.watchers if each.is_of(module)), None)
        return self._new(bare(module)) if own is None else own

    def of_step(self, optimizer: Optimizer) -> list[Watcher]:
        """Return all watchers; tensors of an optimizer that has none get one."""
        if self.found is not None and not any(
            each.is_own(optimizer) for each in self.watchers
        ):
            self._new(
                Alone([p for group in optimizer.param_groups for p in group["params"]])
            )
        return self.watchers

    def _new(self, module: nn.Module) -> Watcher | None:
        if (
            self.found is None
            or not trained(module)
            or any(map(is_lazy, module.parameters()))
        ):
            return None
        own = {id(p) for _, p in trained(module)}
        for (
            watcher
        ) in self.watchers:  # of tensors that were moved before the module ran
            if isinstance(watcher.module, Alone) and own == {
                *map(id, watcher.module.tensors)
            }:
                return self.found(module, watcher)
        self.watchers.append(self.found(module))
        return self.watchers[-1]


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
