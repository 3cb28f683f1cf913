"""PyTorch's optimizers: the state before and after a step, and the options."""

from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepcheck.steps import StepRule
from stepcheck.torch.state import sampled, trained
from stepcheck.torch.steps import SLOTS, Rules, rule_of

# Options that change no step, or that other stages judge.
_ELSEWHERE = {
    "lr",
    "initial_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}


class Step(NamedTuple):
    """A module's parameters, and an optimizer's slots of them, before or after a step.

    Attributes:
        names: of each slot the index of its parameter, and its name in a step rule.
        groups: the options of each parameter that the optimizer moves, by its index.
    """

    params: list[np.ndarray]
    slots: list[np.ndarray]
    names: list[tuple[int, str]]
    rules: Rules
    groups: dict[int, dict[str, Any]]

    @property
    def rate(self) -> float:
        """The learning rate of the first of these parameters; NaN without one."""
        rate = next(iter(self.groups.values())).get("lr")
        return float("nan") if rate is None else float(rate)


def groups_of(
    module: nn.Module, optimizer: Optimizer
) -> dict[int, dict[str, Any]]:
    """Return the group of each parameter of a module that an optimizer moves, by its
    index.
    """
    groups = {
        id(p): group
        for group in optimizer.param_groups
        for p in group["params"]
    }
    params = enumerate(trained(module))
    return {i: groups[id(p)] for i, (_, p) in params if id(p) in groups}


def state_of(module: nn.Module, optimizer: Optimizer, *, is_kept: bool) -> Step:
    """Return the state before or after a step, without numbers if none are kept."""
    groups = groups_of(module, optimizer)
    if not is_kept:
        return Step([], [], [], (), groups)
    params = [p for _, p in trained(module)]
    rules: list[StepRule | None] = [None] * len(params)
    names, slots = [], []
    for i, group in groups.items():
        state = optimizer.state.get(params[i], {})
        if not params[i].is_complex():
            rules[i] = rule_of(optimizer, group, float(state.get("step", 0)))
        for name, value in state.items():
            if isinstance(value, Tensor | int | float):
                names.append((i, SLOTS.get(name, "")))
                is_tensor = isinstance(value, Tensor)
                slots.append(sampled(value) if is_tensor else np.asarray(value))
    return Step([*map(sampled, params)], slots, names, tuple(rules), groups)


def grads_of(
    module: nn.Module, optimizer: Optimizer, *, is_kept: bool
) -> list[np.ndarray | None]:
    """Return the gradients that the optimizer has of the parameters, of large ones in
    part; empty ones if none are kept.
    """
    # by which a fused step divides
    scale = getattr(optimizer, "grad_scale", None)
    own = groups_of(module, optimizer)
    grads: list[np.ndarray | None] = []
    for i, (_, p) in enumerate(trained(module)):
        grad = p.grad if i in own else None
        if grad is None or not is_kept:
            grads.append(None if grad is None else np.zeros(0))
        else:
            grads.append(sampled(grad if scale is None else grad / scale))
    return grads


def decay(optimizer: Any) -> float | None:
    """Return the weight decay of an optimizer's groups, the largest."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max(
        (group.get("weight_decay") or 0.0 for group in groups), default=None
    )


def numbers_of(optimizer: Any) -> dict[str, Any]:
    """Return the options of an optimizer's first group that change a step, by Keras'
    names.
    """
    return _numbers(optimizer.param_groups[0])


def differing(used: Any, stated: Any) -> dict[str, tuple[Any, Any]]:
    """Return the options that change a step and differ for a parameter, the first one:
    (used, stated).
    """
    own, meant = _by_parameter(used), _by_parameter(stated)
    found: dict[str, tuple[Any, Any]] = {}
    for p in (each for each in meant if each in own):
        for name, value in meant[p].items():
            if own[p].get(name, value) != value:
                found.setdefault(name, (own[p][name], value))
    return found


def _by_parameter(optimizer: Any) -> dict[int, dict[str, float]]:
    groups = [
        (_numbers(group), group["params"]) for group in optimizer.param_groups
    ]
    return {id(p): numbers for numbers, params in groups for p in params}


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    own = dict(group)
    own |= zip(("beta_1", "beta_2"), own.get("betas", ()), strict=False)
    own["epsilon"] = own.pop("eps", None)
    if not own.get("weight_decay"):
        own.pop("decoupled_weight_decay", None)
    return {
        name: float(value)
        for name, value in own.items()
        if name not in _ELSEWHERE and isinstance(value, Real | Tensor)
    }
