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


def rules(port: Any, optimizer: Optimizer) -> tuple[StepRule | None, ...]:
    """Return the settings of an optimizer's step by parameter; of one with other
    parameters those of its first group.

    Args:
        port: of the model; this function is its method.
    """
    parameters = [p for p in port.model.parameters() if p.requires_grad]
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    is_own = any(id(p) in groups for p in parameters)
    first = None if is_own else optimizer.param_groups[0]
    own = [groups.get(id(p), first) for p in parameters]
    return tuple(
        None if group is None else rule_of(optimizer, group, 0.0) for group in own
    )


def rule_of(
    optimizer: Optimizer, group: dict[str, Any], count: float
) -> StepRule | None:
    """Return the settings of the step of a group's parameters, where they are known of
    its optimizer's class.

    Args:
        count: the number of steps before, by which Adagrad's rate falls.
    """
    kind = type(optimizer)
    known = {name: _plain(value) for name, value in group.items() if name != "params"}
    settings: dict[str, Any] = {
        "rate": known.get("lr"),
        "weight_decay": known.get("weight_decay", 0.0),
        "maximize": bool(known.get("maximize", False)),
    }
    if kind is optim.SGD:
        momentum = known["momentum"]
        settings |= {
            "momentum": momentum,
            "dampening": known["dampening"] if momentum else 0.0,
        }
        return StepRule(**settings, nesterov=bool(known["nesterov"]))
    settings["epsilon"] = known.get("eps", 0.0)
    if kind in (optim.Adam, optim.AdamW):
        first, second = known["betas"]
        settings |= {"momentum": first, "dampening": first, "beta_2": second}
        is_decoupled = kind is optim.AdamW or bool(
            known.get("decoupled_weight_decay", False)
        )
        own: dict[str, Any] = {
            "is_decoupled": is_decoupled,
            "amsgrad": bool(known["amsgrad"]),
        }
        return StepRule(**settings, **own, is_corrected=True)
    if kind is optim.RMSprop:
        settings |= {"momentum": known["momentum"], "beta_2": known["alpha"]}
        return StepRule(
            **settings, divides_first=True, centered=bool(known["centered"])
        )
    if kind is optim.Adagrad:
        settings["rate"] = known["lr"] / (1 + count * known["lr_decay"])
        return StepRule(
            **settings, beta_2=1.0, initial=known["initial_accumulator_value"]
        )
    return None


def _plain(value: Any) -> Any:
    """Return a number that may be a tensor, or a pair of such."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
