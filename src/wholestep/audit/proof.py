"""The same numbers three times: the loop's, the reference's, and those of the reference with the fault."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from wholestep.audit.log import Applied

NUM_SHOWN = 3
HIDDEN = 0.05  # a step of the weights so close to another, by its length, is hardly another one


@dataclass(frozen=True)
class Line:
    """One number: what it is, and its three values; NaN where there is none."""

    what: str
    yours: float
    reference: float
    changed: float


@dataclass(frozen=True)
class Proof:
    """Numbers of one update.

    Attributes:
        where: of what they are, in words.
        step: the distance of the weights' step from the reference's; NaN if it was not computed again.
        parameters: of a gradient, by parameter: the distance from the reference, and from it with the fault.
    """

    where: str
    lines: tuple[Line, ...]
    step: float = float("nan")
    parameters: tuple[tuple[str, float, float], ...] = ()


def of_values(where: str, name: Callable[[int], str], values: Sequence[np.ndarray]) -> Proof:
    """Return the proof of (yours, reference, changed), vectors: the numbers in which the first two differ most."""
    yours, reference, changed = (np.ravel(np.asarray(each, "float64")) for each in values)
    return Proof(where, tuple(_lines(name, yours, reference, changed)))


def _lines(name: Callable[[int], str], yours: np.ndarray, reference: np.ndarray, changed: np.ndarray) -> list[Line]:
    order = np.argsort(-np.abs(yours - reference), kind="stable")[:NUM_SHOWN]
    return [Line(name(int(i)), float(yours[i]), float(reference[i]), float(changed[i])) for i in sorted(order)]


Grads = list[np.ndarray | None]


def stepped(optimizer: keras.optimizers.Optimizer, steps: list[tuple[Applied, Grads]]) -> list | None:
    """Return the weights after the last of an optimizer's own steps, with these gradients and from the log's weights.

    The first begins with the slots of the log, each later one with those that the one before leaves. None where they
    cannot be computed so: another optimizer made the steps, or their numbers are not whole.
    """
    try:
        config = optimizer.get_config()
    except Exception:  # a step of JAX that was ended halfway has given up the optimizer's numbers
        return None
    if "inner_optimizer" in config or config.get("gradient_accumulation_steps"):
        return None
    if any(a.optimizer != id(optimizer) or not a.is_whole or any(g is None for g in grads) for a, grads in steps):
        return None
    other = type(optimizer).from_config(config)
    variables = [keras.Variable(value, trainable=True) for value in steps[0][0].params]
    other.build(variables)
    slots = steps[0][0].slots
    if len(slots) == len(other.variables):  # else the optimizer was not built: its state is as it begins
        for variable, value in zip(other.variables, slots, strict=True):
            variable.assign(value)
    for applied, grads in steps:
        for variable, value in zip(variables, applied.params, strict=True):
            variable.assign(value)
        if not callable(getattr(other, "_learning_rate", None)):
            other.learning_rate = applied.learning_rate
        tensors = [keras.ops.convert_to_tensor(g, dtype=v.dtype) for g, v in zip(grads, variables, strict=True)]
        other.apply(tensors, variables)
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
