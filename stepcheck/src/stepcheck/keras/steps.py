"""The settings of Keras' optimizers as step rules, and where they keep their slots."""

from dataclasses import replace
from inspect import signature
from numbers import Real
from typing import Any

import keras
from keras import optimizers

from stepcheck.steps import Epsilon, StepRule, Velocity
from stepcheck.trace.log import clips_of

_SLOTS = {  # the attributes of an optimizer, and what `stepcheck.steps.Slots` calls them
    "momentums": "mean",
    "_momentums": "mean",
    "_velocities": "square",
    "_accumulators": "square",
    "_velocity_hats": "most",
    "_average_gradients": "centre",
}
_JUDGED_ELSEWHERE = {  # arguments that change no step, or that other stages judge
    "name",
    "learning_rate",
    "loss_scale_factor",
    "gradient_accumulation_steps",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
}
Rules = tuple[StepRule | None, ...]
_KINDS = (
    optimizers.SGD,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.RMSprop,
    optimizers.Adagrad,
)


def rules(
    optimizer: Any, variables: list[keras.Variable], grads: list
) -> Rules:
    """Return the settings of an optimizer's step for each variable, at a rate of 0;
    None where they are not known.

    Averages that overwrite the weights, and constraints, are no part of a rule.

    Args:
        grads: of each variable, as the optimizer gets it; None for one without a step.
    """
    overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if type(optimizer) not in _KINDS or overwrites:
        return (None,) * len(variables)
    decay = optimizer.weight_decay
    found: list[StepRule | None] = []
    for variable, grad in zip(variables, grads, strict=True):
        rule = _rule(optimizer)
        is_of_rows = (
            type(grad).__name__ == "IndexedSlices" and rule.beta_2 is not None
        )
        rule = replace(rule, is_of_rows=is_of_rows)
        if decay is not None and optimizer._use_weight_decay(variable):
            rule = replace(rule, weight_decay=float(decay), is_decoupled=True)
        is_more = (
            variable.constraint is not None or variable.overwrite_with_gradient
        )
        found.append(None if is_more or grad is None else rule)
    return tuple(found)


def _rule(optimizer: Any) -> StepRule:
    """Return the rule of an optimizer without its decay (`update_step` of each class)."""
    rule = StepRule(
        0.0,
        epsilon=float(getattr(optimizer, "epsilon", 0.0)),
        place=Epsilon.INSIDE,
        clips=clips_of(optimizer),
    )
    if isinstance(optimizer, optimizers.Adagrad):
        initial = float(optimizer.initial_accumulator_value)
        return replace(rule, beta_2=1.0, initial=initial)
    if isinstance(optimizer, optimizers.SGD):
        return replace(
            rule,
            momentum=float(optimizer.momentum),
            nesterov=bool(optimizer.nesterov and optimizer.momentum),
            velocity=Velocity.NEGATED,
        )
    if isinstance(optimizer, optimizers.RMSprop):
        return replace(
            rule,
            momentum=float(optimizer.momentum),
            beta_2=float(optimizer.rho),
            velocity=Velocity.RATED,
            divides_first=True,
            centered=bool(optimizer.centered),
        )
    return replace(
        rule,
        momentum=float(optimizer.beta_1),
        dampening=float(optimizer.beta_1),
        beta_2=float(optimizer.beta_2),
        place=Epsilon.HAT,
        is_corrected=True,
        amsgrad=bool(optimizer.amsgrad),
    )


def at_rate(found: Rules, rate: float) -> Rules:
    """Return rules at a rate."""
    return tuple(rule and replace(rule, rate=rate) for rule in found)


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
        for variable, slot in zip(
            optimizer._trainable_variables, slots, strict=False
        ):
            if id(variable) in own:
                named[id(slot)] = own[id(variable)], name
    return tuple(named.get(id(v), (-1, "")) for v in optimizer.variables)


def numbers_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the arguments of an optimizer that change a step, as numbers.

    >>> numbers_of(keras.optimizers.SGD(0.1, momentum=0.9))["momentum"]
    0.9
    """
    names = {*signature(type(optimizer)).parameters} - _JUDGED_ELSEWHERE
    every = {name: getattr(optimizer, name, ...) for name in sorted(names)}
    return {k: v for k, v in every.items() if v is None or isinstance(v, Real)}
