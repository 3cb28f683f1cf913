"""The settings of Keras' optimizers as step rules, and where they keep their slots."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops, optimizers

from stepcheck.errors import attempt
from stepcheck.steps import Epsilon, StepRule, Velocity
from stepcheck.trace.log import Applied, clips_of

_SLOTS = {  # the attributes of an optimizer, and what `stepcheck.steps.Slots` calls them
    "momentums": "mean",
    "_momentums": "mean",
    "_velocities": "square",
    "_accumulators": "square",
    "_velocity_hats": "most",
    "_average_gradients": "centre",
}
Rules = tuple[StepRule | None, ...]
_KINDS = (
    optimizers.SGD,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.RMSprop,
    optimizers.Adagrad,
)


def rules(optimizer: Any, variables: list[keras.Variable], grads: list) -> Rules:
    """Return the settings of an optimizer's step for each variable, at a rate of 0;
    None where they are not known.

    Averages that overwrite the weights, and constraints, are no part of a rule.

    Args:
        grads: of each variable, as the optimizer gets it, or None.
    """
    overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if type(optimizer) not in _KINDS or overwrites:
        return (None,) * len(variables)
    rule = _rule(optimizer)
    pairs = zip(variables, grads, strict=True)
    return tuple(_of_variable(optimizer, v, rule, grad) for v, grad in pairs)


def _of_variable(
    optimizer: Any, variable: keras.Variable, rule: StepRule, grad: Any
) -> Any:
    if variable.constraint is not None or variable.overwrite_with_gradient:
        return None
    is_of_rows = type(grad).__name__ == "IndexedSlices" and rule.beta_2 is not None
    rule = replace(rule, is_of_rows=is_of_rows)
    decay = optimizer.weight_decay
    has_decay = decay is not None and optimizer._use_weight_decay(variable)
    return (
        replace(rule, weight_decay=float(decay), is_decoupled=True)
        if has_decay
        else rule
    )


def _rule(optimizer: Any) -> StepRule:
    """Return the rule of an optimizer without its decay (`update_step` of each class)."""
    clips = clips_of(optimizer)
    if isinstance(optimizer, optimizers.SGD):
        return StepRule(
            0.0,
            momentum=float(optimizer.momentum),
            nesterov=bool(optimizer.nesterov and optimizer.momentum),
            velocity=Velocity.NEGATED,
            clips=clips,
        )
    epsilon = float(optimizer.epsilon)
    if isinstance(optimizer, optimizers.Adagrad):
        initial = float(optimizer.initial_accumulator_value)
        return StepRule(
            0.0,
            beta_2=1.0,
            epsilon=epsilon,
            place=Epsilon.INSIDE,
            clips=clips,
            initial=initial,
        )
    if isinstance(optimizer, optimizers.RMSprop):
        return StepRule(
            0.0,
            momentum=float(optimizer.momentum),
            beta_2=float(optimizer.rho),
            epsilon=epsilon,
            place=Epsilon.INSIDE,
            velocity=Velocity.RATED,
            divides_first=True,
            centered=bool(optimizer.centered),
            clips=clips,
        )
    return StepRule(
        0.0,
        momentum=float(optimizer.beta_1),
        dampening=float(optimizer.beta_1),
        beta_2=float(optimizer.beta_2),
        epsilon=epsilon,
        place=Epsilon.HAT,
        is_corrected=True,
        amsgrad=bool(optimizer.amsgrad),
        clips=clips,
    )


def slots_of(
    optimizer: Any, variables: list[keras.Variable]
) -> tuple[tuple[int, str], ...]:
    """Return, of each variable of an optimizer, (the index of its variable of the
    model, its name as a slot).
    """
    own = {id(v): i for i, v in enumerate(variables)}
    named: dict[int, tuple[int, str]] = {}
    for attribute, name in _SLOTS.items():
        slots = getattr(optimizer, attribute, None) or []
        for variable, slot in zip(optimizer._trainable_variables, slots, strict=False):
            if slot is not None and id(variable) in own:
                named[id(slot)] = own[id(variable)], name
    return tuple(named.get(id(v), (-1, "")) for v in optimizer.variables)


def at_rate(found: Rules, rate: float) -> Rules:
    """Return rules at a rate."""
    return tuple(rule and replace(rule, rate=rate) for rule in found)


def known_of(
    optimizer: Any,
    variables: list[keras.Variable],
    handed: dict[int, Any],
    slots_before: tuple[tuple[int, str], ...],
) -> dict[str, Any]:
    """Return the fields of a recorded step that are known without its numbers.

    Args:
        handed: the gradients, or None, by the identity of a variable.
    """
    grads = [handed.get(id(v)) for v in variables]
    found = rules(optimizer, variables, grads)
    return {
        "kind": type(optimizer).__name__,
        "lost": tuple(
            i for i, v in enumerate(variables) if handed.get(id(v), 0) is None
        ),
        "slots_of": (slots_before, slots_of(optimizer, variables)),
        "rules": tuple(
            own if g is not None else None for own, g in zip(found, grads, strict=True)
        ),
    }


def _copied(optimizer: Any) -> Any:
    """Return an optimizer with the same settings; None where they do not make it."""
    config, _ = attempt(
        optimizer.get_config
    )  # an error: of a step of JAX that was ended halfway
    if (
        not config
        or "inner_optimizer" in config
        or config.get("gradient_accumulation_steps")
    ):
        return None
    names = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
    if any(getattr(optimizer, name, None) for name in names):
        return None
    other, _ = attempt(lambda: type(optimizer).from_config(config))
    if other is not None:  # else an error of an optimizer with arguments of its own
        other.loss_scale_factor = None  # the gradients are divided already
    return other


def stepped(
    model: keras.Model,
    optimizer: Any,
    steps: list[tuple[Applied, list[np.ndarray | None]]],
) -> list | None:
    """Return the weights after the steps that a copy of an optimizer makes; as of
    `Port.stepped`.
    """
    if any(a.optimizer != id(optimizer) or not a.is_whole for a, _ in steps):
        return None
    other = _copied(optimizer)
    if other is None:
        return None
    variables = [keras.Variable(value, name="replayed") for value in steps[0][0].params]
    for variable, own in zip(variables, model.trainable_variables, strict=True):
        variable.constraint = own.constraint
    other.build(variables)
    slots = steps[0][0].slots
    if len(slots) == len(
        other.variables
    ):  # else the optimizer was not built: its state is as it begins
        for variable, value in zip(other.variables, slots, strict=True):
            variable.assign(value)
    for applied, grads in steps:
        for variable, value in zip(variables, applied.params, strict=True):
            variable.assign(value)
        if not callable(getattr(other, "_learning_rate", None)):
            other.learning_rate = applied.learning_rate
        tensors = [
            (ops.convert_to_tensor(g, dtype=v.dtype), v)
            for g, v in zip(grads, variables, strict=True)
            if g is not None
        ]
        other.apply(*map(list, zip(*tensors, strict=True)))
    return [np.array(ops.convert_to_numpy(v)) for v in variables]
