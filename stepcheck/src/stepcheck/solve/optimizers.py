"""Optimizers by hand: which steps the weights make on the gradients that were meant,
and at which rate.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stepcheck.solve.changes import Schedule, bounded
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.outputs import other_gradients, taken
from stepcheck.solve.ratios import least
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import FINE, distance, is_even
from stepcheck.trace.windows import Rule, Update, Windows

NUM_SPARE = 8  # numbers of a move beyond those solved for: no chance fits them
_ROUNDING = 4e-7  # of a move, for a unit of the weights
_SHARE = 0.01  # of a move: with a smaller part of the gradient, others make it
_NUM_WITH_SHARE = 4  # first moves that have this part; later rates may be 0
_BETAS = (
    (0.9, 0.999),
    (0.9, 0.99),
    (0.9, 0.95),
    (0.0, 0.9),
    (0.0, 0.99),
    (0.0, 1.0),
)
_EPSILONS = 1e-8, 1e-7
_TINY = 1e-3  # of most: gradients so small have few digits, and their step none
_SURE = 1.5  # times the distance of moves that fit
_LEAST = 1e-30
_UNBOUND = 0.0, 0.0, 0.0

Arrays = list[np.ndarray]


class Moves(NamedTuple):
    """The updates as vectors: the weights before, minus their moves, the meant gradients.

    Attributes:
        near: by update, the distance up to which a move is reproduced.
        are_kernels: of each weight, whether it is in a parameter of more than one axis:
            often these alone decay.
        stated: the optimizer that was meant, or None.
    """

    params: Arrays
    falls: Arrays
    grads: Arrays
    near: list[float]
    are_kernels: np.ndarray
    stated: Any = None


def rated(
    meant: Meant,
    seen: Windows,
    updates: list[Update],
    schedule: Schedule | None,
) -> Windows:
    """Return updates by hand with their rates and gradients, if all are steps of one
    optimizer on the gradients that were meant, or on others that are known.
    """
    evidence = [Evidence(meant, update) for update in updates]
    if not evidence:
        return seen
    moves = _moves(evidence)
    shares = np.array([e.share for e in evidence])
    is_plain = _are_made(moves, shares)
    if is_plain:
        rule = Rule(shares.tolist(), momenta=(0.0,) * is_even(shares))
        clips = _UNBOUND
    else:
        found = _searched(moves, evidence)
        if found is None:
            return _of_loss(seen, evidence)
        moves, rule, clips = found
    rates = np.array(rule.rates)
    meant_rates = np.abs(rates)
    if not rule.is_adaptive:
        meant_rates = _meant_rates(evidence, meant_rates, schedule)
    factors = np.where(
        _are_small(rates), 1.0, rates / np.maximum(meant_rates, _LEAST)
    )
    changed = []
    for update, fall, grad, rate, factor in zip(
        updates,
        moves.falls,
        moves.grads,
        meant_rates.tolist(),
        factors,
        strict=True,
    ):
        handed = fall / rate if is_plain else factor * grad
        grads: list[Any] = [*meant.replay.parts(handed).values()]
        applied = replace(
            update.applied, grads=grads, learning_rate=rate, clips=clips
        )
        changed.append(replace(update, applied=applied))
    rule = rule._replace(rates=meant_rates.tolist())
    return replace(seen, updates=changed, rule=rule)


def _moves(evidence: list[Evidence]) -> Moves:
    replay, optimizer = evidence[0].meant.replay, evidence[0].meant.optimizer
    params = [replay.flat([*e.update.applied.params]) for e in evidence]
    near = []
    for e, weights in zip(evidence, params, strict=True):
        length = float(np.linalg.norm(weights)) / max(e.norm, _LEAST)
        near.append(max(replay.tolerance.differs, _ROUNDING * length))
    axes = replay.flat(
        [np.full(shape, float(len(shape))) for shape in replay.shapes]
    )
    falls, grads = [e.handed for e in evidence], [e.reference for e in evidence]
    return Moves(params, falls, grads, near, axes > 1, optimizer)


def _are_made(moves: Moves, shares: np.ndarray) -> bool:
    """Whether each move is its gradient times a number."""
    every = zip(moves.falls, moves.grads, shares, moves.near, strict=True)
    return all(
        r and distance(fall, r * grad) <= near for fall, grad, r, near in every
    )


def _are_small(rates: np.ndarray) -> np.ndarray:
    return np.abs(rates) <= FINE.differs * np.max(np.abs(rates))


def _searched(
    moves: Moves, evidence: list[Evidence]
) -> tuple[Moves, Rule, tuple[float, float, float]] | None:
    """Return (the moves with their gradients, the rule of all of them, the bounds by
    which the gradients are clipped).
    """
    bounds = clips_of(moves.stated)
    ways = [(moves.grads, _UNBOUND)]
    if any(bounds):
        pairs = zip(evidence, moves.grads, strict=True)
        ways.append(([bounded(e, grad, bounds) for e, grad in pairs], bounds))
    ways += [(others, _UNBOUND) for others in other_gradients(evidence)]
    for grads, clips in ways:
        rule = solved(moves._replace(grads=grads))
        if rule is not None:
            kept = moves if any(clips) else moves._replace(grads=grads)
            return kept, rule, clips
    return None


def _of_loss(seen: Windows, evidence: list[Evidence]) -> Windows:
    """Return updates with the gradients of the loop's loss, if these are no multiples
    of the meant ones.
    """
    differs = evidence[0].meant.replay.tolerance.differs
    updates, is_other = [], False
    for e in evidence:
        own, meant = taken(e), e.reference - e.penalty
        if not len(own):
            return seen
        share = float(own @ meant) / max(float(meant @ meant), _LEAST)
        is_other |= distance(own, share * meant) > differs
        grads: list[Any] = [*e.meant.replay.parts(own + e.penalty).values()]
        applied = replace(e.update.applied, grads=grads)
        updates.append(replace(e.update, applied=applied))
    return replace(seen, updates=updates, is_of_loss=True) if is_other else seen


def _meant_rates(
    evidence: list[Evidence], rates: np.ndarray, schedule: Schedule | None
) -> np.ndarray:
    """Return the rates that are meant: a factor by rows or replicas in others
    belongs to the gradient.
    """
    rows = np.array([e.whole[0] for e in evidence])
    most = max(float(rows.max()), _LEAST)
    counts = [rows, np.full(len(rows), most)]
    own = getattr(evidence[0].meant.optimizer, "learning_rate", 0.0)
    meant = np.full(len(rows), float(np.asarray(own)))
    if schedule is not None:
        meant = np.array([schedule(e.update.number - 1) for e in evidence])
        counts += [
            rows / most,
            np.array([len(e.update.pieces) for e in evidence]),
        ]
    elif (
        np.log10(most) % 1 == 0
    ):  # a rate of the loop's own may be ten times this one
        counts = []
    replicas = np.array([e.num_replicas for e in evidence])
    places = np.array([e.num_places for e in evidence])
    if np.all(replicas > 1):
        counts.append(replicas)
    if np.all(places > 0):
        counts.append(rows / places)
    if np.all(meant > 0) and any(
        is_even(rates / (meant * n), 1.0) for n in counts
    ):
        return meant
    if np.all(rows > 0) and is_even(rates / rows) and not is_even(rates):
        return rates / (rows if rates.max() > 1 else rows / most)
    return rates


def solved(moves: Moves) -> Rule | None:
    """Return the optimizer whose steps all moves are, on these gradients, or None."""
    return _with_momentum(moves) or _with_moments(moves)


def _with_momentum(moves: Moves) -> Rule | None:
    """Return the rule where each move is a sum of the gradient, of the move before, of
    the gradient before (Nesterov's), and of decay.
    """
    num = len(moves.falls)
    for has_gradient in (False, True) if num > 2 else (False,):
        numbers, decays = [], []
        for t, grad in enumerate(moves.grads):
            parts = [grad]
            if t:
                parts.append(moves.falls[t - 1])
            if t and has_gradient:
                parts.append(moves.grads[t - 1])
            found = _fitted(moves, t, parts, np.ones(len(grad), bool))
            if found is None:
                break
            numbers.append(found[0])
            decays.append(found[1])
        if len(numbers) == num:
            return _of_momentum(
                moves, numbers, decays, has_gradient=has_gradient
            )
    return None


def _of_momentum(
    moves: Moves, numbers: Arrays, decays: list[float], *, has_gradient: bool
) -> Rule:
    rates = np.array([own[0] for own in numbers])
    # the first move and the gradient are parallel
    start = 2 if has_gradient else 1
    after = [
        t for t in range(start, len(numbers)) if np.any(moves.falls[t - 1])
    ]
    momenta = np.array([numbers[t][1] for t in after])
    of_velocity = momenta * [rates[t - 1] / (rates[t] or 1.0) for t in after]
    if is_even(of_velocity) and not is_even(momenta):
        momenta = of_velocity  # which is multiplied by the rate of the step
    momenta = momenta[np.abs(momenta) > FINE.differs]
    last = float(np.median(momenta)) if len(momenta) else 0.0
    if has_gradient:
        rates = rates / (1 + last)
    rule = Rule(rates.tolist(), momenta=(last,) * is_even(momenta))
    return rule if last else _decaying(rule, moves, decays)


def _with_moments(moves: Moves) -> Rule | None:
    """Return the rule of Adam, RMSprop or Adagrad: a mean of the gradients, divided by
    a root of their squares.
    """
    betas, epsilons = [*_BETAS], [*_EPSILONS]
    if hasattr(moves.stated, "beta_2"):
        betas.insert(0, (moves.stated.beta_1, moves.stated.beta_2))
        epsilons.insert(0, moves.stated.epsilon)
    for pair, epsilon, is_corrected in product(betas, epsilons, (True, False)):
        numbers, decays = [], []
        for t, (first, second) in enumerate(_moments(moves.grads, *pair)):
            size = epsilon
            if is_corrected:
                size = epsilon * np.sqrt(1 - pair[1] ** (t + 1))
            root = np.sqrt(second)
            are_known = root > _TINY * np.sqrt(np.mean(second))
            step = first / np.maximum(root + size, _LEAST)
            found = _fitted(moves, t, [step], are_known)
            if found is None:
                break
            numbers.append(float(found[0][0]))
            decays.append(found[1])
        if len(numbers) == len(moves.falls):
            rates = _corrected(np.array(numbers), *pair)
            rule = Rule(rates.tolist(), is_adaptive=True, momenta=pair)
            return _decaying(rule, moves, decays)
    return None


def _corrected(factors: np.ndarray, one: float, two: float) -> np.ndarray:
    """Return the rates of Adam: the factors of its moments without their corrections,
    if these are even.
    """
    counts = np.arange(len(factors)) + 1
    of_squares = np.sqrt(1 - two**counts) if two < 1 else 1.0
    rates = factors * (1 - one**counts) / of_squares
    return factors if is_even(factors) and not is_even(rates) else rates


def _moments(
    grads: Arrays, one: float, two: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the means of the gradients and of their squares; at 1 the squares add up."""
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    gain = 1 - two if two < 1 else 1.0
    for grad in grads:
        first = one * first + (1 - one) * grad
        second = two * second + gain * np.square(grad)
        yield first, second


def _decaying(rule: Rule, moves: Moves, decays: list[float]) -> Rule:
    """Return a rule with the share by which each update shrinks the kernels beside its
    step, and the least share that shows.
    """
    moving = np.flatnonzero(rule.rates)
    if not len(moving):
        return rule
    rates, shares = np.array(rule.rates)[moving], np.array(decays)[moving]
    bounds = []
    for t in moving:
        kernels = moves.params[t][moves.are_kernels]
        length = moves.near[t] * np.linalg.norm(moves.falls[t])
        bounds.append(
            _SURE * length / max(float(np.linalg.norm(kernels)), _LEAST)
        )
    least_shown = float(np.median(bounds / np.abs(rates)))
    if np.all(np.abs(shares) <= bounds):
        return rule._replace(decay=(0.0, least_shown))
    is_steady = is_even(shares) or is_even(shares / rates)
    if is_steady and np.all(np.abs(shares) > bounds):
        return rule._replace(
            decay=(float(np.median(shares / rates)), least_shown)
        )
    return rule


def _fitted(
    moves: Moves, t: int, parts: Arrays, are_known: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """Return the factors of parts, the first of the gradient, and of the kernels, that
    make a move; None if none do.
    """
    kernels = moves.are_kernels[are_known]
    weights, fall = moves.params[t][are_known], moves.falls[t][are_known]
    own = [part[are_known] for part in parts]
    basis = np.stack([*own, weights * kernels, weights * ~kernels])
    are_there = basis.any(axis=1)
    num_moved = np.count_nonzero(moves.falls[t])
    if len(fall) < are_there.sum() + NUM_SPARE or 2 * len(fall) < num_moved:
        return None
    factors = np.zeros(len(basis))
    factors[are_there] = least([*basis[are_there]], fall)[0]
    share = abs(float(factors[0])) * float(np.linalg.norm(own[0]))
    if t < _NUM_WITH_SHARE and share < _SHARE * float(np.linalg.norm(fall)):
        return None
    if distance(fall, factors @ basis) > moves.near[t]:
        return None
    return factors[: len(own)], float(factors[-2])


def stated(optimizer: Any, seen: Windows) -> Schedule | None:
    """Return the constant rate of a stated optimizer, for a loop by hand with a
    constant rate.
    """
    rate = getattr(optimizer, "learning_rate", None)
    rates = [] if seen.rule is None else seen.rule.rates
    if rate is None or not rates or not is_even(np.array(rates)):
        return None
    return lambda number: float(np.asarray(rate))
