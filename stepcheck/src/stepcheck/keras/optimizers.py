"""The arguments of Keras' optimizers."""

from inspect import signature
from numbers import Real
from typing import Any

import keras

_JUDGED_ELSEWHERE = {  # arguments that change no step, or that other stages judge
    *("name", "learning_rate", "loss_scale_factor", "gradient_accumulation_steps"),
    *("clipnorm", "global_clipnorm", "clipvalue"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency"),
}


def numbers_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the arguments of an optimizer that change a step, as numbers.

    >>> numbers_of(keras.optimizers.SGD(0.1, momentum=0.9))["momentum"]
    0.9
    """
    names = {*signature(type(optimizer)).parameters} - _JUDGED_ELSEWHERE
    every = {
        name: getattr(optimizer, name)
        for name in sorted(names)
        if hasattr(optimizer, name)
    }
    return {
        name: value
        for name, value in every.items()
        if value is None or isinstance(value, Real)
    }
