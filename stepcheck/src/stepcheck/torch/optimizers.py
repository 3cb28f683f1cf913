"""PyTorch's optimizers: the state in which a step begins, the step, and the options."""

import copy
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepcheck.errors import attempt
from stepcheck.steps import StepRule
from stepcheck.torch.state import array, sampled, tensor, trained
from stepcheck.torch.steps import SLOTS, Rules, rule_of
from stepcheck.trace.log import Applied

# Options that change no step, or that other stages judge.
_ELSEWHERE = {"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
Grads = list[np.ndarray | None]


@dataclass(frozen=True)
class Rates:
    """All that an optimizer step needs beside its values.

    Attributes:
        groups: the options of each group.
        numbers: of each of the model's parameters that it moves: its number in the
            optimizer, and its index in the model.
        slots: of each slot the index of its parameter, and its name.
    """

    groups: list[dict[str, Any]]
    numbers: list[tuple[int, int]]
    slots: list[tuple[int, str]]

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """The slots by their names in a step rule."""
        return tuple((i, SLOTS.get(name, "")) for i, name in self.slots)


class Step(NamedTuple):
    """A module's parameters, an optimizer's slots of them, the rate, and the rest."""

    params: list[np.ndarray]
    slots: list[np.ndarray]
    rate: float
    rates: Rates
    rules: Rules


def _params(optimizer: Optimizer) -> list[tuple[dict, nn.Parameter]]:
    """Return the parameters of an optimizer, by their numbers, with their group."""
    groups = optimizer.param_groups
    return [(group, p) for group in groups for p in group["params"]]


def is_moved(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether an optimizer moves a parameter of a module."""
    own = {id(p) for _, p in trained(module)}
    return any(id(p) in own for _, p in _params(optimizer))


def state_of(module: nn.Module, optimizer: Optimizer, *, is_kept: bool) -> Step:
    """Return the state before or after a step, without numbers if none are kept."""
    params = [p for _, p in trained(module)]
    index = {id(p): i for i, p in enumerate(params)}
    own = [
        (n, index[id(p)], group)
        for n, (group, p) in enumerate(_params(optimizer))
        if id(p) in index
    ]
    rate = own[0][2].get("lr")
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    rates = Rates(copy.deepcopy(groups), [(n, i) for n, i, _ in own], [])
    learning_rate = float("nan") if rate is None else float(rate)
    if not is_kept:
        return Step([], [], learning_rate, rates, ())
    rules: list[StepRule | None] = [None] * len(params)
    slots = []
    for _, i, group in own:
        state = optimizer.state.get(params[i], {})
        if not params[i].is_complex():
            rules[i] = rule_of(optimizer, group, float(state.get("step", 0)))
        for name, value in state.items():
            if isinstance(value, Tensor | int | float):
                rates.slots.append((i, name))
                is_tensor = isinstance(value, Tensor)
                slots.append(sampled(value) if is_tensor else np.asarray(value))
    return Step([*map(sampled, params)], slots, learning_rate, rates, tuple(rules))


def grads_of(module: nn.Module, optimizer: Optimizer, *, is_kept: bool) -> Grads:
    """Return the gradients that the optimizer has of the parameters, of large ones in
    part; empty ones if none are kept.
    """
    scale = getattr(optimizer, "grad_scale", None)  # by which a fused step divides
    own = {id(p) for _, p in _params(optimizer)}
    grads = [p.grad if id(p) in own else None for _, p in trained(module)]
    if not is_kept:
        return [None if g is None else np.zeros(0) for g in grads]
    return [
        None if g is None else sampled(g if scale is None else g / scale) for g in grads
    ]


def stepped(optimizer: Any, steps: list[tuple[Applied, Grads]]) -> list | None:
    """Return the weights after an optimizer's steps with other gradients, as
    `Port.stepped`.
    """
    if any(a.optimizer != id(optimizer) or not a.is_whole for a, _ in steps):
        return None
    found, _ = attempt(lambda: _stepped(copy.deepcopy(optimizer), steps))
    return found  # None after an error: its attributes, or it needs a closure


def _stepped(other: Optimizer, steps: list[tuple[Applied, Grads]]) -> list | None:
    for hooks in (other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks):
        hooks.clear()  # the user's
    every = [p for _, p in _params(other)]
    for p in every:
        p.grad = None
    first = steps[0][0]
    own = {i: every[n] for n, i in first.setting.numbers}
    last = {i: other.state.pop(p, {}) for i, p in own.items()}
    for (i, name), value in zip(first.setting.slots, first.slots, strict=True):
        like = last[i].get(name)
        is_tensor = isinstance(like, Tensor)
        other.state[own[i]][name] = tensor(value, like) if is_tensor else value.item()
    for applied, grads in steps:
        for group, options in zip(
            other.param_groups, applied.setting.groups, strict=True
        ):
            group |= {**options, "params": group["params"]}
        for i, grad in enumerate(grads):
            if i in own:
                own[i].data = tensor(applied.params[i], own[i])
                own[i].grad = None if grad is None else tensor(grad, own[i])
            elif grad is not None:
                return None  # of another optimizer that steps beside it
        other.step()
    params = steps[-1][0].params
    return [array(own[i]) if i in own else params[i] for i in range(len(params))]


def decay(optimizer: Any) -> float | None:
    """Return the weight decay of an optimizer's groups, the largest."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max((group.get("weight_decay") or 0.0 for group in groups), default=None)


def numbers_of(optimizer: Any) -> dict[str, Any]:
    """Return the options of an optimizer's first group that change a step, by Keras'
    names.
    """
    own = dict(optimizer.param_groups[0])
    own |= zip(("beta_1", "beta_2"), own.get("betas", ()), strict=False)
    own["epsilon"] = own.pop("eps", None)
    if not own.get("weight_decay"):
        own.pop("decoupled_weight_decay", None)
    return {
        name: float(value)
        for name, value in own.items()
        if name not in _ELSEWHERE and isinstance(value, Real | Tensor)
    }
