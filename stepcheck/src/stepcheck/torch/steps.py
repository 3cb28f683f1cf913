"""The settings of PyTorch's optimizers as step rules, and the names of their slots."""

from typing import Any

from torch import Tensor, optim
from torch.optim.optimizer import Optimizer

from stepcheck.steps import StepRule

SLOTS = {  # the names in the state of a parameter, and in `stepcheck.steps.Slots`
    "momentum_buffer": "mean",
    "exp_avg": "mean",
    "exp_avg_sq": "square",
    "square_avg": "square",
    "sum": "square",
    "grad_avg": "centre",
    "max_exp_avg_sq": "most",
    "step": "num_steps",
}
Rules = tuple[StepRule | None, ...]


def rules(port: Any, optimizer: Optimizer) -> Rules:
    """Return the settings of an optimizer's step by parameter; of one with other
    parameters those of its first group.

    Args:
        port: of the model; this function is its method.
    """
    groups = {
        id(p): group
        for group in optimizer.param_groups
        for p in group["params"]
    }
    own = [
        groups.get(id(p)) for p in port.model.parameters() if p.requires_grad
    ]
    first = None if any(own) else optimizer.param_groups[0]
    every = (first if group is None else group for group in own)
    return tuple(group and rule_of(optimizer, group, 0.0) for group in every)


def rule_of(
    optimizer: Optimizer, group: dict[str, Any], count: float
) -> StepRule | None:
    """Return the settings of the step of a group's parameters, where they are known of
    its optimizer's class.

    Args:
        count: the number of steps before, by which Adagrad's rate falls.
    """
    kind = type(optimizer)
    if kind not in (
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.RMSprop,
        optim.Adagrad,
    ):
        return None
    known = {
        name: _plain(value) for name, value in group.items() if name != "params"
    }
    settings: dict[str, Any] = {
        name: known[name]
        for name in ("momentum", "nesterov", "centered", "amsgrad", "maximize")
        if name in known
    }
    settings |= {"rate": known["lr"], "weight_decay": known["weight_decay"]}
    settings["epsilon"] = known.get("eps", 0.0)
    if kind is optim.SGD:
        settings["dampening"] = known["dampening"] if known["momentum"] else 0.0
    elif kind is optim.RMSprop:
        settings |= {"beta_2": known["alpha"], "divides_first": True}
    elif kind is optim.Adagrad:
        settings["rate"] /= 1 + count * known["lr_decay"]
        settings |= {
            "beta_2": 1.0,
            "initial": known["initial_accumulator_value"],
        }
    else:
        first, second = known["betas"]
        is_decoupled = kind is optim.AdamW or known.get(
            "decoupled_weight_decay", False
        )
        settings |= {"momentum": first, "dampening": first, "beta_2": second}
        settings |= {"is_corrected": True, "is_decoupled": is_decoupled}
    return StepRule(**settings)


def _plain(value: Any) -> Any:
    """Return a number that may be a tensor, or a pair of such."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return (
        float(value)
        if isinstance(value, Tensor) and value.numel() == 1
        else value
    )
