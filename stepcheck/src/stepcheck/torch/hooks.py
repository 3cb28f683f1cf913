"""The watch on a module and on all optimizers, by PyTorch's own hooks, for the time of a `with`."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepcheck.report.found import Likely, on_one_line
from stepcheck.torch.data import Beside
from stepcheck.torch.state import (
    Nest,
    Own,
    Random,
    Setting,
    array,
    bare,
    filled,
    grads_of,
    is_transformed,
    modes,
    of_torch,
    own_loss,
    rate_of,
    replaced,
    split,
    states_of,
    tensors_of,
    together,
    trained,
    trained_in,
    unpacked,
    untrained,
)
from stepcheck.torch.words import BARE, CUT, LEFT, OF_OTHERS, SEEDED, STEPLESS
from stepcheck.trace.log import Applied, Called, Line, Log, Other
from stepcheck.trace.measure import all_same
from stepcheck.user_code.source import line_here

_FUNCTIONAL = "passes with other weights than the module's (`functional_call`), and the gradients that go through them"
_FEW = 3  # passes by which random states are compared
_FAILED = "the updates from one on: the audit has ended there with an error of its own ({})"
_CLOSURE = "optimizer steps that run the model more than once, by a closure"


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
class Watcher:
    """Writes the forward passes of a module and the steps of all optimizers to a log.

    Args:
        num_inputs: of the module's arguments, how many have the rows of the data; None for all of as many rows.
        order: of all records.
        like: the shapes of the data's rows, if they are known.

    Attributes:
        optimizers: all that move a parameter of the module, in the order of their first steps.
        is_waiting: whether a gradient was taken since the last step.
        num_heard: how many derivatives by an output were taken.
        is_taking: whether gradients are taken for a result, and not added to those that are there.
        is_shared: whether losses of other optimizers' steps go through the module to their inputs.
        latest: of each output of the last pass: the node of the graph that made it, or None, and its shape.
        running: the passes that have begun.
        beside: the tensors that the script names beside a pass.
        first: the ids of the parameters that the module has at first.
        own: by the order of a pass, the loss that the module has computed itself.
        dropped: the line that threw away gradients before a step was made of them.
    """

    module: nn.Module
    log: Log
    num_inputs: int | None
    order: Iterator[int] = field(default_factory=itertools.count)
    optimizers: list[Optimizer] = field(default_factory=list)
    is_waiting: bool = False
    num_heard: int = 0
    is_taking: bool = False
    is_shared: bool = False
    latest: list[tuple[Any, torch.Size]] = field(default_factory=list)
    own: dict[int, Own] = field(default_factory=dict)
    dropped: Line | None = None
    running: list[_Begun] = field(default_factory=list)
    like: list[tuple[int, ...]] = field(default_factory=list)
    beside: Beside = field(default_factory=Beside)
    first: set[int] = field(default_factory=set)
    _added: list[Called] = field(default_factory=list)  # whose gradients were added since the last step
    _left: list[Called] = field(default_factory=list)  # and before that, but for no step of the module
    _is_left: bool = False  # whether the gradients of these may still be there
    _is_plain: bool = False
    _differentiated: set[int] = field(default_factory=set)
    _thrown: set[int] = field(default_factory=set)  # of passes with a gradient by their inputs, since the last step
    _steps: dict[int, int] = field(default_factory=dict)
    _before: dict[int, tuple] = field(default_factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record to the log inside; afterwards PyTorch is as it was, also after an error."""
        with ExitStack() as stack:
            live, self.first = [self], {id(p) for p in self.module.parameters()}
            stack.callback(self._close)
            stack.callback(live.clear)
            stack.enter_context(replaced(nn.Module, "__call__", _recorded(nn.Module.__call__, live)))
            for handle in (
                register_optimizer_step_pre_hook(self.harmless(self._before_step)),
                register_optimizer_step_post_hook(self.harmless(self._after_step)),
            ):
                stack.callback(handle.remove)
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
        def called(*arguments: Any) -> None:
            try:
                hook(*arguments)
            except Exception as error:
                self.log.is_open = False
                self.log.unseen[_FAILED.format(on_one_line(error))] = None

        return called

    def _close(self) -> None:
        """Sort the log, and mark the passes of which a gradient was taken."""
        self.log.close()
        self.latest = []
        called = [replace(each, differentiated=self._is_differentiated(each)) for each in self.log.called]
        self.log.called[:], self.log.applied[:] = called, together(self.log.applied, called)
        self.log.notes.update(dict.fromkeys(self._notes()))

    def _is_differentiated(self, called: Called) -> bool | None:
        """Whether a gradient was taken of a pass; without any gradient, it is not known which have a graph."""
        is_known = not called.setting.has_graph or bool(self._differentiated) or self._has_gradients()
        return called.order in self._differentiated if is_known else None

    def _has_gradients(self) -> bool:
        return any(g is not None and np.any(g) for step in self.log.applied for g in step.grads)

    def _notes(self) -> Iterator[str]:
        """Yield the faults of a loop whose gradients and steps do not meet, or whose draws are always the same."""
        steps = [step for step in self.log.applied if step.is_whole]
        is_bare = not self._has_gradients()
        if (
            steps
            and is_bare
            and not self._differentiated
            and any(called.setting.has_graph for called in self.log.called)
        ):
            yield CUT
        elif self._differentiated and not self.log.applied and self._has_stayed():
            yield OF_OTHERS if self.log.has_others else STEPLESS
        elif self._differentiated and is_bare and self.dropped and steps:
            yield Likely(f"{BARE} ({self.dropped})")
        elif self._differentiated and steps and all(g is None for step in steps for g in step.grads):
            yield BARE
        own = [each.setting for each in self.log.called if each.differentiated and each.setting.draws]
        if len(own) >= _FEW and all(torch.equal(each.random.of_torch, own[0].random.of_torch) for each in own):
            yield SEEDED

    def _has_stayed(self) -> bool:
        """Whether no weight has moved."""
        whole = [called for called in self.log.called if called.is_whole]
        return bool(whole) and all_same(whole[0].params, [array(p) for _, p in trained(self.module)])

    def _begin(self, args: tuple, kwargs: dict) -> None:
        if not self.log.is_open:
            return
        module = self.module
        if not all(isinstance(p, nn.Parameter) for p in module.parameters()):
            self.log.unseen[_FUNCTIONAL] = None
            self.log.is_open &= not torch.is_grad_enabled()  # the steps after it have gradients of it
            return
        flags = tuple(p.requires_grad for p in module.parameters())
        is_cast = torch.is_autocast_enabled("cpu")
        cast = torch.get_autocast_dtype("cpu") if is_cast else None
        setting = Setting(lambda leaves: leaves, modes(module), Random.now(), flags, cast=cast)
        nest = unpacked((args, kwargs))
        leaves = list(map(array, nest.leaves))
        is_kept = self.log.wants([leaves[i] for i in split(nest.leaves, self.num_inputs or len(leaves), self.like)])
        groups = (trained(module), untrained(module)) if is_kept else ([], [])
        params, buffers = ([array(v) for _, v in group] for group in groups)
        self.running.append(_Begun(nest, leaves, params, buffers, setting, is_cast, is_kept))

    def _end(self, args: tuple, kwargs: dict, output: Any) -> None:
        if not self.running:
            return
        begun, out = self.running.pop(), unpacked(tensors_of(output))
        nest = begun.nest
        order, own = next(self.order), own_loss(args, kwargs, output)
        if own is not None:
            self.own[order] = own[2]
        known = [i for i, leaf in enumerate(nest.leaves) if own is None or leaf is not own[1]]
        chosen = [known[i] for i in split([nest.leaves[i] for i in known], self.num_inputs or len(known), self.like)]
        rest = [None if i in chosen else leaf.detach().clone() for i, leaf in enumerate(nest.leaves)]
        inputs, packed = [begun.leaves[i] for i in chosen], partial(filled, nest.packed, chosen, rest)
        kept = (list(map(array, out.leaves)), begun.params, begun.buffers) if begun.is_kept else ([], [], [])
        draws = not torch.equal(torch.get_rng_state(), begun.setting.random.of_torch)
        nodes = [leaf.grad_fn for leaf in out.leaves]
        setting = replace(
            begun.setting,
            packed=packed,
            output=out.packed,
            draws=draws,
            has_graph=any(nodes),
            are_apart=len({*nodes} - {None}) < 2,
        )
        setting = replace(
            setting,
            is_through=any(leaf.requires_grad for leaf in nest.leaves),
            dtypes=tuple(nest.leaves[i].dtype for i in chosen),
            needs=tuple(nest.leaves[i].requires_grad for i in chosen),
            is_cast=begun.is_cast,
        )
        is_training = self.module.training and setting.has_graph
        how: dict[str, Any] = {"setting": setting, "trained": trained_in(self.module), "is_training": is_training}
        called = Called(order, inputs, *kept, None, line_here(), **how)
        self.log.add(called)
        self.beside.note(called, nest.leaves)
        if not out.leaves:
            self.log.unseen[f"an output of type {type(output).__name__}, in which no tensor is found"] = None
        self.latest = [(leaf.grad_fn, leaf.shape) for leaf in out.leaves]
        for i, leaf in enumerate(out.leaves):
            if leaf.grad_fn is not None and (own is None or leaf is own[0]):
                leaf.register_hook(self.harmless(self._heard(called, i)))

    def note_cast(self) -> None:
        """Note that a `torch.autocast` begins, perhaps inside of a pass."""
        if self.running:
            self.running[-1].is_cast = True

    def _heard(self, called: Called, i: int) -> Callable[[Tensor], None]:
        """Return a hook that keeps the derivative by a pass's i-th output."""

        def heard(derivative: Tensor) -> None:
            self._differentiated.add(called.order)
            if self.log.is_open and not self.is_taking:
                self._meet_others(called)
            self.note_line(called)
            self.is_waiting, self.num_heard = True, self.num_heard + 1
            if self.log.is_open and called.is_whole:
                self.beside.note(called)
                with suppress(RuntimeError):  # many derivatives at once have no numbers
                    found = array(derivative)
                    called.derivatives.setdefault(i, []).append(found)

        return heard

    def _meet_others(self, called: Called) -> None:
        """Note gradients that a loss of another optimizer's step has left, when the module's next ones are added.

        Such a loss goes through a module that is also given inputs without a graph, or is one of a pass that another
        loss has later.
        """
        self._is_plain |= not called.setting.is_through
        left, self._left = self._left, []
        is_shared = self._is_plain and any(each.setting.is_through for each in left)
        self.is_shared |= is_shared
        if self._is_left and self._has_some() and (is_shared or any(each is called for each in left)):
            self.log.notes[LEFT] = None
        self._added.append(called)

    def _has_some(self) -> bool:
        """Whether a parameter of the module has a gradient."""
        return any(p.grad is not None and bool(p.grad.any()) for _, p in trained(self.module))

    def begin_backward(self) -> None:
        """Note, before gradients are added, whether those of other optimizers' steps are gone.

        A later backward pass finds the gradients of this step: they are no leftover.
        """
        self._is_left = self._is_left and self._has_some()

    def drop(self, line: Line | None) -> None:
        """Note that a line throws away gradients before a step; of passes on adversarial rows' way they are not meant.

        Such passes have a gradient by their inputs, of which the rows are made that the next one has without.
        """
        self.dropped = line
        self._thrown |= {called.order for called in self._added if called.setting.is_through}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.log.is_open or not self.is_own(optimizer):
            return
        is_kept = self.log.wants_step(0) or len(args) > 1 or bool(kwargs)  # a closure runs passes inside
        self._before[id(optimizer)] = (
            *states_of(self.module, optimizer, is_kept=is_kept),
            grads_of(self.module, optimizer, is_kept=is_kept),
            is_kept,
            (len(self.log.called), len(self.log.applied)),
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before = self._before.pop(id(optimizer), None)
        if not self.log.is_open or getattr(optimizer, "found_inf", False):  # a fused step that was skipped
            return
        if before is None:
            self.log.has_others = True
            self._left, self._added, self._is_left = self._left + self._added, [], True
            self.log.add(Other(next(self.order)))
            return
        if any(not called.setting.is_through for called in self._added):
            self._differentiated -= self._thrown
        self._thrown.clear()
        self.is_waiting, self._left, self._added = False, [], []
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        params, slots, rates, grads, is_kept, (num_called, num_applied) = before
        if len(self.log.applied) > num_applied:  # the step of an optimizer inside of it
            return
        inside = [called for called in self.log.called[num_called:] if called.order in self._differentiated]
        if inside:  # the closure has taken the gradient
            grads = grads_of(self.module, optimizer, is_kept=True)
        is_kept = is_kept and len(inside) < 2 and self.log.wants_step(0)
        params_after, slots_after, _ = states_of(self.module, optimizer, is_kept=is_kept)
        count = self.num_steps(optimizer)
        self._steps[id(optimizer)] = count + 1
        states = grads, params, slots, params_after, slots_after
        if len(inside) > 1:
            self.log.unseen[_CLOSURE] = None
            for called in inside:
                for kept in (called.params, called.buffers, called.outputs, called.derivatives):
                    kept.clear()
            self._differentiated -= {called.order for called in inside[1:]}
        if not is_kept:
            states = [], [], [], [], []
        rate = rate_of(optimizer, rates.places[0][0])
        lost = tuple(i for _, _, i in rates.places if grads[i] is None)
        built = tuple(sorted(i for _, _, i in rates.places))
        self.log.add(
            Applied(
                *(next(self.order), id(optimizer), *states, rate, count, line_here()),
                built=built,
                lost=lost,
                kind=type(optimizer).__name__,
                setting=rates,
                trained=trained_in(self.module),
            )
        )

    def note_line(self, called: Called | None = None) -> None:
        """Note that this line computes the loss of a pass, or takes its gradient; by default of the last pass."""
        called = self.log.called[-1] if called is None and self.log.called else called
        if called is not None and (line := line_here()) is not None:
            called.setting.lines.append(line)

    def num_steps(self, optimizer: Optimizer) -> int:
        """Return the number of steps of an optimizer that were seen."""
        return self._steps.get(id(optimizer), 0)

    def is_own(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer moves a parameter of the module."""
        own = {id(p) for _, p in trained(self.module)}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _recorded(call: Callable, live: list[Watcher]) -> Callable:
    """Return the call of modules by which a watcher records its module's, also where it was compiled before."""

    @wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_transformed() or not live or live[0].running or not live[0].is_of(module):
            return call(module, *args, **kwargs)
        if isinstance(module, nn.parallel.DistributedDataParallel):  # it writes buffers, and then calls the module
            return call(module, *args, **kwargs)
        return live[0].run(call, module, args, kwargs)

    return of_torch(called)
