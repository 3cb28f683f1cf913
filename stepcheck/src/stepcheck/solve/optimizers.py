"""Optimizers by hand: which steps the weights make on the gradients that were meant,
and at which rate.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from stepcheck.solve.changes import Schedule, bounded
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.outputs import other_gradients, taken
from stepcheck.solve.ratios import least
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import FINE, distance, is_even
from stepcheck.trace.windows import Rule, Update, Windows

_ROUNDING, _SHARE = (
    4e-7,
    0.01,
)  # of a move: for a unit of the weights; by less it is made without the gradient
NUM_SPARE = 8  # numbers of a move beyond those that are solved for: no chance fits them
_BETAS = (
    (0.9, 0.5, 0.0, 0.8, 0.95),
    (0.999, 0.99, 0.9, 0.95, 0.98, 1.0),
)  # of both moments; 1 adds the squares up
_EPSILONS = 1e-8, 1e-7, 0.0, 1e-6, 1e-5, 1e-3
# a gradient that is so much smaller than most is known with few digits, and its step
# with none
_TINY = 1e-3
_NUM_MOVED, _SURE = (
    3,
    3,
)  # moves with a part of the gradient, before a rate of 0; times the distance of moves that fit


class Moves(NamedTuple):
    """The updates as vectors: the weights before, the weights minus those after, and
    the meant gradients.

    Attributes:
        near: by update, the distance up to which a move is reproduced.
        are_kernels: of each weight, whether it is in a parameter of more than one axis:
            often these alone decay.
        passes: by update, the number of its pass over the data, from 0; empty if they
            are not known.
        stated: both betas of the optimizer that was meant, and its epsilon; empty if it
            has none.
    """

    params: list[np.ndarray]
    falls: list[np.ndarray]
    grads: list[np.ndarray]
    near: list[float]
    are_kernels: np.ndarray
    passes: tuple[int, ...] = ()
    stated: Sequence[float] = ()

    def at(self, places: np.ndarray) -> "Moves":
        """Return the moves at some places, for what does not go from one to the next."""
        params, falls, near = (
            [each[i] for i in places] for each in (self.params, self.falls, self.near)
        )
        return self._replace(params=params, falls=falls, near=near)


def rated(
    meant: Meant, seen: Windows, updates: list[Update], schedule: Schedule | None
) -> Windows:
    """Return updates by hand with their rates, if all are steps of one optimizer on the
    gradients that were meant.
    """
    replay, evidence = meant.replay, [Evidence(meant, update) for update in updates]
    if not evidence:
        return seen
    params = [replay.flat(list(update.applied.params)) for update in updates]
    lengths = [
        float(np.linalg.norm(each)) / max(e.norm, 1e-30)
        for each, e in zip(params, evidence, strict=True)
    ]
    near = [max(replay.tolerance.differs, _ROUNDING * length) for length in lengths]
    falls, grads = [e.handed for e in evidence], [e.reference for e in evidence]
    shares, clips = [e.share for e in evidence], (0.0, 0.0, 0.0)
    rule: Rule | None = Rule(shares, momenta=(0.0,) * is_even(np.array(shares)))
    is_plain = all(
        r and distance(f, r * g) <= n
        for f, r, g, n in zip(falls, shares, grads, near, strict=True)
    )
    if not is_plain:
        are_kernels = replay.flat(
            [np.full(shape, float(len(shape) > 1)) for shape in replay.shapes]
        )
        of_pass = tuple(
            seen.place[update.pieces[0].called.order][0] for update in updates
        )
        own = [
            float(np.asarray(getattr(meant.optimizer, name, 0.0)))
            for name in ("beta_1", "beta_2", "epsilon")
        ]
        moves = Moves(
            params, falls, grads, near, are_kernels > 0, of_pass, own if own[1] else []
        )
        rule, clips = _clipped(moves, evidence)
        for others in other_gradients(evidence) if rule is None else ():
            if (solved_by := _clipped(moves._replace(grads=others), evidence))[
                0
            ] is not None:
                (rule, clips), grads = solved_by, others
                break
    if rule is None:
        return as_stated(meant.optimizer, schedule, seen, updates) or _of_loss(
            seen, evidence
        )
    rates = np.abs(rule.rates)
    found, meant_rates = [], rates.tolist()
    if not rule.is_adaptive:
        meant_rates = _meant_rates(evidence, rates, schedule)
    for update, fall, grad, rate, own in zip(
        updates, falls, grads, rule.rates, meant_rates, strict=True
    ):
        factor = (
            rate / own if abs(rate) > FINE.differs * np.max(np.abs(rule.rates)) else 1.0
        )
        handed = (
            fall / own if is_plain else factor * grad
        )  # of an ascent: of the other sign
        applied = replace(
            update.applied,
            grads=list(replay.parts(handed).values()),
            learning_rate=own,
            clips=clips,
        )
        found.append(replace(update, applied=applied))
    return replace(seen, updates=found, rule=rule._replace(rates=meant_rates))


def _clipped(
    moves: Moves, evidence: list[Evidence]
) -> tuple[Rule | None, tuple[float, float, float]]:
    """Return (the rule of all moves, the bounds of the stated optimizer if the
    gradients are clipped by them).
    """
    optimizer = evidence[0].meant.optimizer
    rule, bounds = solved(moves), clips_of(optimizer)
    if rule is not None or not any(bounds):
        return rule, (0.0, 0.0, 0.0)
    clipped = [
        bounded(e, grad, bounds) for e, grad in zip(evidence, moves.grads, strict=True)
    ]
    return solved(moves._replace(grads=clipped)), bounds


def _of_loss(seen: Windows, evidence: list[Evidence]) -> Windows:
    """Return updates by hand with the gradients of the loop's loss, if these are no
    multiples of the meant ones.
    """
    pairs = [(taken(e), e.reference - e.penalty) for e in evidence]
    if not all(len(own) for own, _ in pairs):
        return seen
    shares = [
        float(own @ meant) / max(float(meant @ meant), 1e-30) for own, meant in pairs
    ]
    differs = evidence[0].meant.replay.tolerance.differs
    if all(
        distance(own, share * meant) <= differs
        for share, (own, meant) in zip(shares, pairs, strict=True)
    ):
        return seen
    made = [
        e.meant.replay.parts(own + e.penalty)
        for e, (own, _) in zip(evidence, pairs, strict=True)
    ]
    steps = [
        replace(e.update.applied, grads=[*parts.values()])
        for e, parts in zip(evidence, made, strict=True)
    ]
    updates = [
        replace(e.update, applied=step) for e, step in zip(evidence, steps, strict=True)
    ]
    return replace(seen, updates=updates, is_of_loss=True)


def _meant_rates(
    evidence: list[Evidence], rates: np.ndarray, schedule: Schedule | None
) -> list[float]:
    """Return the rates that are meant: the others have a factor that belongs to the
    gradient, as a sum of rows has.
    """
    rows, parts, replicas = np.array(
        [(e.whole[0], len(e.update.pieces), e.num_replicas) for e in evidence]
    ).T
    most = max(float(rows.max()), 1e-30)
    shares, counts = rows / most, [rows, 0 * rows + most]
    if schedule is not None:
        meant, counts = (
            np.array([schedule(e.update.number - 1) for e in evidence]),
            [*counts, shares, parts],
        )
    else:
        meant = np.full(
            len(rates),
            float(
                np.asarray(getattr(evidence[0].meant.optimizer, "learning_rate", 0.0))
            ),
        )
        counts = (
            counts if np.log10(most) % 1 else []
        )  # a loop without this optimizer may have ten times its rate
    counts += [replicas] * bool(np.all(replicas > 1))
    places = np.array([e.num_places for e in evidence])
    counts += [rows / places] if np.all(places > 0) else []
    if np.all(meant > 0) and any(
        is_even(rates / (meant * each), 1.0) for each in counts
    ):
        return meant.tolist()
    is_of_rows = np.all(rows > 0) and is_even(rates / rows) and not is_even(rates)
    return (
        rates / (rows if rates.max() > 1 else shares) if is_of_rows else rates
    ).tolist()


def solved(moves: Moves) -> Rule | None:
    """Return the optimizer whose steps all moves are, on the meant gradients; None if
    they are none's.
    """
    return _with_momentum(moves) or _with_moments(moves)


def _with_momentum(moves: Moves) -> Rule | None:
    """Return the rule where each move is a sum of the gradient, of the move and the
    gradient before, and of decay.
    """
    for has_before in (False, True) if len(moves.falls) > 2 else (False,):
        numbers = []
        for t, grad in enumerate(moves.grads):
            before = (
                [moves.falls[t - 1], *[moves.grads[t - 1]] * has_before] if t else []
            )
            are_known = np.ones(len(grad), bool)
            if (
                found := _fitted(
                    moves, t, [grad, *before], are_known, may_lack=t > _NUM_MOVED
                )
            ) is None:
                break
            numbers.append(found)
        else:
            rates = [float(parts[0]) for parts, _ in numbers]
            # Nesterov's: of the gradient there is 1 + the momentum; Keras' does not
            # scale by the rate
            if has_before:
                momenta = np.array([float(parts[1]) for parts, _ in numbers[2:]])
                scaled = momenta * rates[1:-1] / rates[2:]
                momentum = float(
                    (scaled if is_even(scaled) and not is_even(momenta) else momenta)[
                        -1
                    ]
                )
                rates = [rate / (1 + momentum) for rate in rates]
            after = np.array(
                [t for t in range(1, len(numbers)) if np.any(moves.falls[t - 1])], int
            )
            of_move = np.array([numbers[t][0][1] for t in after])
            scaled = of_move * [
                rates[t - 1] / (rates[t] or 1.0) for t in after
            ]  # of a velocity, by its rate
            is_scaled = (
                len(after)
                and is_even(scaled)
                and not (is_even(of_move) and _is_round(of_move[0]))
            )
            of_move = scaled if is_scaled else of_move
            last = float(np.median(of_move)) if len(of_move) else 0.0
            is_lost = np.abs(of_move) <= FINE.differs
            steady = (last,) * is_even(of_move[~is_lost])
            rule = _decaying(
                Rule(rates, momenta=steady), moves, [decay for _, decay in numbers]
            )
            has_move = abs(last) > FINE.differs  # the move before has its decay in it
            return rule._replace(decay=Rule([]).decay) if has_move else rule
    return None


def _with_moments(moves: Moves) -> Rule | None:
    """Return the rule of Adam, RMSprop or Adagrad: a mean of the gradients, divided by
    a root of their squares.
    """
    stated, of_passes = (
        moves.stated,
        [t for t, (a, b) in enumerate(pairwise(moves.passes), 1) if a != b],
    )
    pairs = dict.fromkeys(
        [*([(stated[0], stated[1])] if stated else []), *product(*_BETAS)]
    )
    sizes = dict.fromkeys([*stated[2:], *_EPSILONS])
    ways = [*product([[]], pairs, sizes, (True, False))]
    ways += product(
        [of_passes] * bool(of_passes), [*pairs][:1], [*sizes][:2], (True, False)
    )
    for begins, betas, epsilon, is_corrected in ways:
        numbers = []
        counts = (
            np.array(
                [
                    t - max(each for each in (0, *begins) if each <= t)
                    for t in range(len(moves.falls))
                ]
            )
            + 1
        )
        for t, (first, second) in enumerate(
            _moments(moves.grads, betas[0], betas[1], begins)
        ):
            root = np.sqrt(second)
            are_known = root > _TINY * np.sqrt(np.mean(second))
            size = (
                epsilon * np.sqrt(1 - betas[1] ** counts[t])
                if is_corrected
                else epsilon
            )
            found = _fitted(
                moves, t, [first / np.maximum(root + size, 1e-30)], are_known
            )
            if found is None:
                break
            numbers.append(found)
        if len(numbers) == len(moves.falls):
            factors = np.array([float(parts[0]) for parts, _ in numbers])
            rates = _corrected(
                factors, betas[0], betas[1], np.array(moves.passes), counts
            )
            rule = Rule(rates.tolist(), is_adaptive=True, momenta=betas)
            return _decaying(rule, moves, [decay for _, decay in numbers])
    return None


def _corrected(
    factors: np.ndarray,
    first: float,
    second: float,
    passes: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Return the rates of Adam: the factors of the moments by their corrections, the
    ones that are even.

    A correction divides a moment by 1 - beta ** count: by its beta, none, the other
    moment's, or of the next count, or of the number of the pass.
    """
    squares = second if second < 1 else 0.0
    betas = [(first, squares), *product((first, 0.0, squares), (squares, 0.0, first))]
    ways = [(*pair, counts + late) for pair in betas for late in (0, 1)]
    if len(passes) == len(counts):
        ways += [
            (first, squares, passes + late)
            for late in (0, 1)
            if np.all(passes + late > 0)
        ]
    meant, *others = (
        factors * (1 - one**count) / np.sqrt(1 - two**count) for one, two, count in ways
    )
    return next((rates for rates in (meant, factors, *others) if is_even(rates)), meant)


def _decaying(rule: Rule, moves: Moves, decays: list[np.ndarray]) -> Rule:
    """Return a rule with the share by which each update shrinks the weights beside its
    step, if it does.
    """
    if not len(moving := np.flatnonzero(rule.rates)):
        return rule
    rates, moves = np.array(rule.rates)[moving], moves.at(moving)
    for i, are_own in enumerate((moves.are_kernels, ~moves.are_kernels)):
        shares = np.array([decays[t][i] for t in moving])
        sizes = np.array([np.linalg.norm(w[are_own]) for w in moves.params])
        lengths = [np.linalg.norm(fall) for fall in moves.falls]
        bounds = _SURE * np.array(moves.near) * lengths
        if not i and np.all(sizes) and np.all(np.abs(shares) * sizes <= bounds):
            rule = rule._replace(
                decay=(0.0, float(np.median(bounds / (np.abs(rates) * sizes))))
            )
        is_steady = is_even(shares) or is_even(shares / rates)
        if np.all(np.abs(shares) * sizes > bounds) and is_steady:
            least_shown = float(np.median(bounds / (np.abs(rates) * sizes)))
            return rule._replace(decay=(float(np.median(shares / rates)), least_shown))
    return rule


def _is_round(rate: float) -> bool:
    """Whether a rate has no more than two digits, as those that people write."""
    return abs(rate - float(f"{rate:.2g}")) <= FINE.differs * abs(rate)


def _moments(
    grads: list[np.ndarray], one: float, two: float, begins: Collection[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for t, grad in enumerate(grads):
        first, second = (first * 0, second * 0) if t in begins else (first, second)
        first = one * first + (1 - one) * grad
        second = two * second + (1 - two if two < 1 else 1.0) * np.square(grad)
        yield first, second


def _fitted(
    moves: Moves,
    t: int,
    parts: list[np.ndarray],
    are_known: np.ndarray,
    *,
    may_lack: bool = False,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the factors of parts, and of the weights of kernels and others, that make
    a move; None if none do.

    Args:
        may_lack: whether the gradient may be no part of it, as at a rate of 0.
    """
    kernels = moves.are_kernels[are_known]
    weights, fall = moves.params[t][are_known], moves.falls[t][are_known]
    basis = np.stack(
        [*(part[are_known] for part in parts), weights * kernels, weights * ~kernels]
    )
    are_there = basis.any(axis=1)
    if len(fall) < are_there.sum() + NUM_SPARE or 2 * len(fall) < np.count_nonzero(
        moves.falls[t]
    ):
        return None
    factors = np.zeros(len(basis))
    factors[are_there] = least(list(basis[are_there]), fall)[0]
    share = abs(float(factors[0])) * float(
        np.linalg.norm(parts[0][are_known])
    )  # of the gradient, or its mean
    has_share = may_lack or share >= _SHARE * float(np.linalg.norm(fall))
    return (
        (factors[:-2], factors[-2:])
        if has_share and distance(fall, factors @ basis) <= moves.near[t]
        else None
    )


def as_stated(
    optimizer: Any, schedule: Schedule | None, seen: Windows, updates: list[Update]
) -> Windows | None:
    """Return updates by hand with the gradients that steps of the stated SGD would have
    taken; None for others.
    """
    if type(optimizer).__name__ != "SGD" or optimizer.nesterov:
        return None
    rates = [
        schedule(u.number - 1)
        if schedule
        else float(np.asarray(optimizer.learning_rate))
        for u in updates
    ]
    moves = [
        [fall for fall in update.applied.grads if fall is not None]
        for update in updates
    ]
    if min(rates) <= 0 or any(
        len(own) < len(u.applied.grads) for own, u in zip(moves, updates, strict=True)
    ):
        return None
    found, before = [], [0 * fall for fall in moves[0]]
    for update, falls, rate in zip(updates, moves, rates, strict=True):
        grads = [
            (fall - optimizer.momentum * last) / rate
            for fall, last in zip(falls, before, strict=True)
        ]
        found.append(
            replace(
                update,
                applied=replace(update.applied, grads=[*grads], learning_rate=rate),
            )
        )
        before = falls
    return replace(seen, updates=found, rule=Rule(rates, is_stated=True))


def stated(optimizer: Any, seen: Windows) -> Schedule | None:
    """Return the constant rate of an optimizer that the user states, for a loop by hand
    with a constant rate.
    """
    rate = getattr(optimizer, "learning_rate", None)
    is_constant = (
        seen.is_by_hand and seen.rule is not None and is_even(np.array(seen.rule.rates))
    )
    return (
        (lambda number: float(np.asarray(rate)))
        if is_constant and rate is not None
        else None
    )
