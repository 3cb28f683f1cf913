"""Optimizer steps by hand, solved for: gradients, moments and weights whose sum is each move of the weights."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from wholestep.audit.found import Likely
from wholestep.audit.measure import FINE, distance
from wholestep.audit.ratios import least

NUM_SPARE = 8  # numbers of a move beyond those that are solved for: no chance fits them
_BETAS = (0.9, 0.5, 0.0, 0.8, 0.95), (0.999, 0.99, 0.9, 0.95, 0.98, 1.0)  # of both moments; 1 adds the squares up
_EPSILONS = 1e-8, 1e-7, 0.0, 1e-6, 1e-5, 1e-3
_SHARE = 0.01  # of a move: else it is made without the gradient
_TINY = 1e-3  # a gradient that is so much smaller than most is known with few digits, and its step with none
_UNCORRECTED = (
    "The moments are corrected in no update, or in each as in the first: does the count of updates move? Is that meant?"
)

_FROZEN = (
    "Each update corrects its moments as the first one, with a rate of {:g}: the count of updates stands still. Add 1 "
    "to it in each."
)


class Moves(NamedTuple):
    """The updates as vectors: the weights before, the weights minus those after, and the meant gradients.

    Attributes:
        near: by update, the distance up to which a move is reproduced.
        are_kernels: of each weight, whether it is in a parameter of more than one axis: often these alone decay.
    """

    params: list[np.ndarray]
    falls: list[np.ndarray]
    grads: list[np.ndarray]
    near: list[float]
    are_kernels: np.ndarray


class Rule(NamedTuple):
    """An optimizer that was solved for: its rate by update, in words, and a note on it, if there is one."""

    rates: list[float]
    told: str
    note: str = ""


def solved(moves: Moves) -> Rule | None:
    """Return the optimizer whose steps all moves are, on the meant gradients; None if they are none's."""
    return _with_momentum(moves) or _with_moments(moves)


def _with_momentum(moves: Moves) -> Rule | None:
    """Return the rule where each move is a sum of the gradient, of the move and the gradient before, and of decay."""
    for has_before in (False, True) if len(moves.falls) > 2 else (False,):
        found = [_of_momentum(moves, t, has_before) for t in range(len(moves.falls))]
        if all(each is not None for each in found):
            numbers = [each for each in found if each is not None]
            rates = [float(each[0] + (each[2] if has_before and len(each) > 2 else 0.0)) for each in numbers]
            if has_before:  # the second move and gradient before are one direction
                rates[:2] = rates[2:3] * 2
            told = f", and {numbers[-1][1]:.4g} times the move before" if len(numbers) > 1 else ""
            return Rule(rates, told)
    return None


def _of_momentum(moves: Moves, t: int, has_before: bool) -> np.ndarray | None:
    before = [moves.falls[t - 1], *[moves.grads[t - 1]] * has_before] if t else []
    return _fitted(moves, t, [moves.grads[t], *before], np.ones(len(moves.grads[t]), bool))


def _with_moments(moves: Moves) -> Rule | None:
    """Return the rule of Adam, RMSprop or Adagrad: a mean of the gradients, divided by a root of their squares."""
    for betas, epsilon, is_corrected in product(product(*_BETAS), _EPSILONS, (True, False)):
        numbers: list[float] = []
        for t, (first, second) in enumerate(_moments(moves.grads, *betas)):
            root = np.sqrt(second)
            are_known = root > _TINY * np.sqrt(np.mean(second))
            size = epsilon * np.sqrt(1 - betas[1] ** (t + 1)) if is_corrected else epsilon
            found = _fitted(moves, t, [first / np.maximum(root + size, 1e-30)], are_known)
            if found is None:
                break
            numbers.append(float(found[0]))
        if len(numbers) == len(moves.falls):
            return _named(np.array(numbers), *betas)
    return None


def _named(factors: np.ndarray, first: float, second: float) -> Rule:
    counts = np.arange(1, len(factors) + 1)
    corrected = factors * (1 - first**counts) / (np.sqrt(1 - second**counts) if second < 1 else 1.0)
    told = f" (its mean with {first:g}, over the root of its mean square with {second:g})"
    is_even = [float(np.ptp(each)) <= FINE.differs * float(np.max(np.abs(each))) for each in (factors, corrected)]
    is_plain = is_even[0] and not is_even[1]
    note = ""
    if is_plain and first > 0 and second < 1:
        as_first = float(factors[0]) * (1 - first) / np.sqrt(1 - second)
        is_frozen = _is_round(as_first) and not _is_round(float(factors[0]))
        note = Likely(_FROZEN.format(float(f"{as_first:.2g}"))) if is_frozen else _UNCORRECTED
    return Rule((factors if is_plain else corrected).tolist(), told, note)


def _is_round(rate: float) -> bool:
    """Whether a rate has no more than two digits, as those that people write."""
    return abs(rate - float(f"{rate:.2g}")) <= FINE.differs * abs(rate)


def _moments(grads: list[np.ndarray], one: float, two: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for grad in grads:
        first = one * first + (1 - one) * grad
        second = two * second + (1 - two if two < 1 else 1.0) * np.square(grad)
        yield first, second


def _fitted(moves: Moves, t: int, parts: list[np.ndarray], are_known: np.ndarray) -> np.ndarray | None:
    """Return the factors of parts, and of the weights, that make a move; None if none do."""
    kernels = moves.are_kernels[are_known]
    weights, fall = moves.params[t][are_known], moves.falls[t][are_known]
    basis = [*(part[are_known] for part in parts), weights * kernels, weights * ~kernels]
    basis = [each for each in basis if each.any()]
    if len(fall) < len(basis) + NUM_SPARE or 2 * len(fall) < np.count_nonzero(moves.falls[t]):
        return None
    factors = least(basis, fall)[0]
    is_made = distance(fall, factors @ np.stack(basis)) <= moves.near[t]
    share = abs(float(factors[0])) * float(np.linalg.norm(parts[0][are_known]))  # of the gradient, or its mean
    return factors if is_made and share > _SHARE * float(np.linalg.norm(fall)) else None
