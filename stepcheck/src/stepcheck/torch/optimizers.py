"""The steps and the options of PyTorch's optimizers."""

import copy
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn

from stepcheck.errors import attempt
from stepcheck.torch.state import Rates, array, tensor
from stepcheck.trace.log import Applied

_KERAS = {"eps": "epsilon"}
# Options that change no step, or that other stages judge.
_ELSEWHERE = {"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
Grads = list[np.ndarray | None]


def stepped(optimizer: Any, steps: list[tuple[Applied, Grads]]) -> list | None:
    """Return the weights after an optimizer's steps with other gradients, as
    `Port.stepped`.
    """
    if any(a.optimizer != id(optimizer) or not a.is_whole for a, _ in steps):
        return None
    other, _ = attempt(lambda: copy.deepcopy(optimizer))
    if other is None:  # an error of one with attributes of its own
        return None
    first: Rates = steps[0][0].setting
    own = {i: other.param_groups[g]["params"][at] for g, at, i in first.places}
    if any(
        g is not None and i not in own
        for _, grads in steps
        for i, g in enumerate(grads)
    ):
        return None  # of another optimizer that steps beside it
    for hooks in (other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks):
        hooks.clear()  # the user's
    for p in (p for group in other.param_groups for p in group["params"]):
        p.grad = None
    _restore_slots(other, own, steps[0][0])
    for applied, grads in steps:
        for group, options in zip(
            other.param_groups, applied.setting.groups, strict=True
        ):
            group.update(options)
        for i, p in own.items():
            p.data = tensor(applied.params[i], p).to(p.dtype)
            p.grad = None if (grad := grads[i]) is None else tensor(grad, p).to(p.dtype)
        _, error = attempt(other.step)
        if error is not None:  # of one that needs a closure
            return None
    last = steps[-1][0].params
    return [array(own[i]) if i in own else last[i] for i in range(len(last))]


def _restore_slots(
    optimizer: Any, own: dict[int, nn.Parameter], applied: Applied
) -> None:
    """Give an optimizer the state in which a recorded step began."""
    before = {i: optimizer.state.pop(p, {}) for i, p in own.items()}
    places = applied.setting.slots
    for (i, name, device), value in zip(places, applied.slots, strict=True):
        like = before[i].get(name)
        made = value.item() if device is None else tensor(value).to(device)
        if isinstance(like, Tensor):
            made = made.to(like.dtype)
        optimizer.state[own[i]][name] = made


def decay(optimizer: Any) -> float | None:
    """Return the weight decay of an optimizer's groups, the largest."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max((group.get("weight_decay") or 0.0 for group in groups), default=None)


def numbers_of(optimizer: Any) -> dict[str, Any]:
    """Return the options of an optimizer's first group that change a step, by Keras'
    names.
    """
    return _options(optimizer.param_groups[0])


def differing(
    used: Any, stated: Any, trained: list[tuple[str, nn.Parameter]]
) -> dict[str, tuple[Any, Any]]:
    """Return the options that change a step and differ: (used, stated).

    They are compared by parameter. An option that differs for some parameters alone has
    the name of the first of them.
    """
    own, meant = _by_parameter(used), _by_parameter(stated)
    named = [(name, id(p)) for name, p in trained if id(p) in own.keys() & meant]
    found: dict[str, tuple[Any, Any]] = {}
    for option in dict.fromkeys(option for _, p in named for option in meant[p]):
        pairs = {
            name: (own[p].get(option, 0.0), meant[p].get(option, 0.0))
            for name, p in named
        }
        wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if wrong:
            first = next(iter(wrong))
            are_all = len(wrong) == len(named) and len({*wrong.values()}) == 1
            found[option if are_all else f"{option} of {first}"] = wrong[first]
    return found


def _options(group: dict[str, Any]) -> dict[str, float]:
    own = {_KERAS.get(name, name): value for name, value in group.items()}
    own |= zip(("beta_1", "beta_2"), group.get("betas", ()), strict=False)
    if not group.get("weight_decay"):
        own.pop("decoupled_weight_decay", None)
    return {
        name: float(value)
        for name, value in own.items()
        if name not in _ELSEWHERE and isinstance(value, Real | Tensor)
    }


def _by_parameter(optimizer: Any) -> dict[int, dict[str, float]]:
    groups = [(_options(group), group["params"]) for group in optimizer.param_groups]
    return {id(p): options for options, params in groups for p in params}
