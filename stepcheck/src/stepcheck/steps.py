"""The step of an optimizer in numpy: one rule with settings for SGD, Adam, RMSprop,
Adagrad and their relatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

HALF_EPS = 2.0**-7  # of bfloat16, whose numbers may come as float32
_LOW_BITS = 0xFFFF  # of a float32 that no bfloat16 has
Clips = tuple[
    float, float, float
]  # of each gradient's norm, of the norm of all, of each number


class Epsilon(Enum):
    """The place of the number that keeps a divisor from 0.

    `BESIDE`: added to the root of the corrected mean of squares (Kingma and Ba 2015,
    algorithm 1; PyTorch). `HAT`: to the root before its correction (their section 2,
    "epsilon hat"; Keras' Adam). `INSIDE`: under the root (Keras' RMSprop and Adagrad).
    """

    BESIDE = auto()
    HAT = auto()
    INSIDE = auto()


class Velocity(Enum):
    """The content of the mean of gradients.

    `PLAIN`: gradients; the rate is a factor of the step (PyTorch; Keras' Adam).
    `RATED`: gradients times their rate (Keras' RMSprop). `NEGATED`: moves, gradients
    times minus their rate (Keras' SGD).
    """

    PLAIN = auto()
    RATED = auto()
    NEGATED = auto()


@dataclass(frozen=True)
class StepRule:
    """The settings of a step.

    Attributes:
        momentum: how much of the mean of gradients stays: the momentum of SGD and
            RMSprop, beta_1 of Adam.
        dampening: how much of the new gradient the mean leaves out; beta_1 for Adam.
        nesterov: whether the step looks ahead by the momentum (Sutskever et al. 2013).
        beta_2: how much of the mean of squares stays; 1 for their sum (Adagrad); None
            for no division.
        divides_first: whether the mean is one of divided gradients (RMSprop).
        is_corrected: whether both means are divided by 1 - beta ** count (Adam).
        centered: whether the square of the mean gradient is subtracted (Graves 2013).
        amsgrad: whether the largest mean of squares counts (Reddi et al. 2018).
        weight_decay: added to the gradient times the weights, or `is_decoupled` from it
            (Loshchilov and Hutter 2019).
        maximize: whether the step goes up.
        clips: bounds of the gradients before all.
        initial: of the sum or mean of squares.
        is_of_rows: whether the gradient came in rows, perhaps equal ones, whose squares
            are added up after that (`IndexedSlices` of TensorFlow): the mean of squares
            is not known then.
    """

    rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta_2: float | None = None
    epsilon: float = 0.0
    place: Epsilon = Epsilon.BESIDE
    velocity: Velocity = Velocity.PLAIN
    divides_first: bool = False
    is_corrected: bool = False
    centered: bool = False
    amsgrad: bool = False
    weight_decay: float = 0.0
    is_decoupled: bool = False
    maximize: bool = False
    clips: Clips = (0.0, 0.0, 0.0)
    initial: float = 0.0
    is_of_rows: bool = False


class Slots(NamedTuple):
    """The state of one parameter before or after a step; None where a rule has none, or
    none yet.

    Attributes:
        mean: of the gradients. square: of their squares. centre: of the gradients, to
            centre the squares.
        most: the largest `square` so far.
        num_steps: the number of steps so far.
    """

    mean: Any = None
    square: Any = None
    centre: Any = None
    most: Any = None
    num_steps: float = 0.0


def begun(rule: StepRule, weights: np.ndarray) -> Slots:
    """Return the state before the first step; PyTorch's SGD begins without a mean, and
    takes the first gradient.
    """
    zeros = np.zeros_like(weights)
    begins_bare = rule.beta_2 is None and rule.velocity is Velocity.PLAIN
    return Slots(
        None if begins_bare else zeros, zeros + rule.initial, zeros, zeros
    )


def stepped(
    rule: StepRule,
    weights: np.ndarray,
    grad: np.ndarray,
    slots: Slots,
    square: np.ndarray | None = None,
) -> tuple[np.ndarray, Slots]:
    """Return one parameter after a step, and its state; in the dtype of the weights.

    Args:
        grad: clipped already.
        square: the new mean of squares where it is known otherwise.

    >>> weights, slots = stepped(StepRule(0.1, momentum=0.9), np.ones(1), np.ones(1), Slots())
    >>> weights, slots = stepped(StepRule(0.1, momentum=0.9), weights, np.ones(1), slots)
    >>> weights.round(3).tolist()
    [0.71]
    """
    grad = -grad if rule.maximize else grad
    if rule.weight_decay and rule.is_decoupled:
        weights = weights * (1 - rule.rate * rule.weight_decay)
    elif rule.weight_decay:
        grad = grad + rule.weight_decay * weights
    count = slots.num_steps + 1
    slots = slots._replace(num_steps=count)
    root = None
    if rule.beta_2 is not None:
        slots = _squared(rule, grad, slots, square)
        root = _root(rule, slots)
        grad = grad / root if rule.divides_first else grad
    step, slots = _averaged(rule, grad, slots)
    if rule.is_corrected:
        step = step / (1 - rule.momentum**count)
    if root is not None and not rule.divides_first:
        step = step / root
    scale = {
        Velocity.PLAIN: rule.rate,
        Velocity.RATED: 1.0,
        Velocity.NEGATED: -1.0,
    }
    return weights - scale[rule.velocity] * step, slots


def _averaged(
    rule: StepRule, grad: np.ndarray, slots: Slots
) -> tuple[np.ndarray, Slots]:
    """Return the step before its rate and its division, and the slots with the new
    mean.
    """
    gains = {Velocity.PLAIN: 1 - rule.dampening, Velocity.RATED: rule.rate}
    gain = gains.get(rule.velocity, -rule.rate)
    if not rule.momentum:
        return gain * grad, slots
    mean = (
        grad if slots.mean is None else rule.momentum * slots.mean + gain * grad
    )
    step = gain * grad + rule.momentum * mean if rule.nesterov else mean
    return step, slots._replace(mean=mean)


def _squared(
    rule: StepRule, grad: np.ndarray, slots: Slots, square: np.ndarray | None
) -> Slots:
    """Return the slots with the new mean, or sum, of squares."""
    assert rule.beta_2 is not None
    gain = 1 - rule.beta_2 if rule.beta_2 < 1 else 1.0
    if square is None:
        square = rule.beta_2 * slots.square + gain * grad * grad
    slots = slots._replace(square=square)
    if rule.centered:
        slots = slots._replace(centre=rule.beta_2 * slots.centre + gain * grad)
    if rule.amsgrad:
        slots = slots._replace(most=np.maximum(slots.most, square))
    return slots


def _root(rule: StepRule, slots: Slots) -> np.ndarray:
    """Return the divisor of the step."""
    square = slots.most if rule.amsgrad else slots.square
    assert rule.beta_2 is not None
    if rule.centered:
        square = np.maximum(square - slots.centre * slots.centre, 0)
    correction = (
        float(np.sqrt(1 - rule.beta_2**slots.num_steps))
        if rule.is_corrected
        else 1.0
    )
    if rule.place is Epsilon.INSIDE:
        return np.sqrt(square + rule.epsilon)
    if rule.place is Epsilon.HAT:
        return (np.sqrt(square) + rule.epsilon) / correction
    return np.sqrt(square) / correction + rule.epsilon


def clipped(
    grads: Sequence[np.ndarray | None], clips: Clips
) -> list[np.ndarray | None]:
    """Return gradients by the first bound that is not 0, as Keras clips them: of each
    norm, of all, of each number.
    """
    each, whole, number = clips
    if not any(clips):
        return [*grads]
    sizes = [
        0.0 if grad is None else float(np.linalg.norm(grad)) for grad in grads
    ]
    if each:
        factors = [min(1.0, each / size) if size else 1.0 for size in sizes]
    else:
        size = float(np.linalg.norm(sizes))
        factors = [min(1.0, whole / size) if whole and size else 1.0] * len(
            sizes
        )
    pairs = zip(grads, factors, strict=True)
    found = [None if grad is None else grad * factor for grad, factor in pairs]
    if number and not (each or whole):
        return [
            None if grad is None else np.clip(grad, -number, number)
            for grad in found
        ]
    return found


def precision(weights: np.ndarray) -> float:
    """Return the relative distance of two neighbours in the dtype of weights; bfloat16
    may come as float32.

    >>> precision(np.array([1.1], "float32")) < 1e-6, precision(np.array([1.0, 0.5], "float32"))
    (True, 0.0078125)
    """
    if weights.dtype == np.float32 and not np.any(
        weights.view(np.uint32) & _LOW_BITS
    ):
        return HALF_EPS
    is_known = np.issubdtype(weights.dtype, np.floating)
    return float(np.finfo(weights.dtype).eps) if is_known else HALF_EPS
