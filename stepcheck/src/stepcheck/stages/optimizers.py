"""Optimizers by hand: which steps the weights make on the gradients that were meant, and at which rate."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from stepcheck.keras.literals import counted, is_even
from stepcheck.port import Port
from stepcheck.report.found import Likely, some
from stepcheck.solve.changes import Schedule, bounded
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.outputs import other_gradients, taken
from stepcheck.solve.ratios import least
from stepcheck.stages.stated import ADDED_UP, GROWN, as_stated
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import FINE, are_finite, distance
from stepcheck.trace.windows import Rule, Update, Windows

UNMOVED = Likely(
    "No weight moves: gradients are taken of the same rows again, and at the same weights. Write each step to the "
    "variables, `v.assign_sub(rate * g)`, or carry the new weights to the next step; `v = v - rate * g` does neither."
)
AT_FIRST = Likely(
    "The weights move, but every gradient is taken at the weights of the beginning, also when rows come again. Take it "
    "at the weights that the update before has made."
)
OWN_STEP = (
    "the gradients: the weights do not move by a rate times the gradient that was meant (another gradient? momentum? "
    "another optimizer?), and which it is cannot be told"
)
_ROUNDING, _SHARE = 4e-7, 0.01  # of a move: for a unit of the weights; by less it is made without the gradient
NUM_SPARE = 8  # numbers of a move beyond those that are solved for: no chance fits them
_BETAS = (0.9, 0.5, 0.0, 0.8, 0.95), (0.999, 0.99, 0.9, 0.95, 0.98, 1.0)  # of both moments; 1 adds the squares up
_EPSILONS = 1e-8, 1e-7, 0.0, 1e-6, 1e-5, 1e-3
_TINY = 1e-3  # a gradient that is so much smaller than most is known with few digits, and its step with none
_UNCORRECTED = (
    "The moments are corrected in no update, or in each as in the first: does the count of updates move? Is that meant?"
)
_NUM_MOVED, _SURE = 3, 3  # moves with a part of the gradient, before a rate of 0; times the distance of moves that fit
_MOST_DECAY = 0.0099  # of the weights in an update, and more than the rate: no decay times a rate is that large
_SHRUNK = (
    "Each update shrinks the weights by the share {:.3g}, so that they forget all but the last {:.0f} updates. A decay "
    "is multiplied by the rate, which makes it {:.3g}: is that missing?"
)
_BY_PASS = Likely(
    "The moments are corrected by the number of the pass over the data in place of that of the update: count updates, "
    "`step += 1` in each, and correct by 1 - beta ** step."
)
_AGAINST = (
    "The steps move {} against the others, so that the loss grows by them: are `+` and `-` mixed up? (An adversary, or "
    "a multiplier, moves so on purpose.)"
)
_ANEW = (
    "The optimizer's {} begin anew at update {}: make its state once, before the loop, and carry it on, as the weights."
)
_AS_PENALTY = (
    "The decay of {:g} is added to the gradient, as a penalty is, and goes through its moments. The optimizer that was "
    "meant takes it off the weights: `w -= rate * decay * w` beside the step."
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
        passes: by update, the number of its pass over the data, from 0; empty if they are not known.
        stated: both betas of the optimizer that was meant, and its epsilon; empty if it has none.
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
        params, falls, near = ([each[i] for i in places] for each in (self.params, self.falls, self.near))
        return self._replace(params=params, falls=falls, near=near)


def rated(meant: Meant, seen: Windows, updates: list[Update], schedule: Schedule | None) -> Windows:
    """Return updates by hand with their rates, if all are steps of one optimizer on the gradients that were meant."""
    replay, evidence = meant.replay, [Evidence(meant, update) for update in updates]
    if not evidence:
        return seen
    params = [replay.flat(list(update.applied.params)) for update in updates]
    lengths = [float(np.linalg.norm(each)) / max(e.norm, 1e-30) for each, e in zip(params, evidence, strict=True)]
    near = [max(replay.tolerance.differs, _ROUNDING * length) for length in lengths]
    falls, grads = [e.handed for e in evidence], [e.reference for e in evidence]
    shares, clips = [e.share for e in evidence], (0.0, 0.0, 0.0)
    rule: Rule | None = Rule(shares, "", momenta=(0.0,) * is_even(np.array(shares)))
    is_plain = all(r and distance(f, r * g) <= n for f, r, g, n in zip(falls, shares, grads, near, strict=True))
    if not is_plain:
        are_kernels = replay.flat([np.full(shape, float(len(shape) > 1)) for shape in replay.shapes])
        of_pass = tuple(seen.place[update.pieces[0].called.order][0] for update in updates)
        own = [float(np.asarray(getattr(meant.optimizer, name, 0.0))) for name in ("beta_1", "beta_2", "epsilon")]
        moves = Moves(params, falls, grads, near, are_kernels > 0, of_pass, own if own[1] else [])
        rule, clips = _clipped(moves, evidence)
        for others in other_gradients(evidence) if rule is None else ():
            if (solved_by := _clipped(moves._replace(grads=others), evidence))[0] is not None:
                (rule, clips), grads = solved_by, others
                break
    if rule is None and (rule := _by_parameter(replay, falls, grads, near)) is None:
        return as_stated(meant.optimizer, schedule, seen, updates) or _of_loss(seen, evidence)
    rates = np.abs(rule.rates)
    found, meant_rates = [], rates.tolist()
    if not rule.is_adaptive:
        own, note = counted(evidence, rates, is_finite=_is_finite(seen)) if schedule is None else ([], [])
        meant_rates = own or _meant_rates(evidence, rates, schedule)
        rule = rule._replace(notes=(*rule.notes, *note))
    for update, fall, grad, rate, own in zip(updates, falls, grads, rule.rates, meant_rates, strict=True):
        factor = rate / own if abs(rate) > FINE.differs * np.max(np.abs(rule.rates)) else 1.0
        handed = fall / own if is_plain else factor * grad  # of an ascent: of the other sign
        applied = replace(update.applied, grads=list(replay.parts(handed).values()), learning_rate=own, clips=clips)
        found.append(replace(update, applied=applied))
    return replace(seen, updates=found, rule=rule._replace(rates=meant_rates))


def _clipped(moves: Moves, evidence: list[Evidence]) -> tuple[Rule | None, tuple[float, float, float]]:
    """Return (the rule of all moves, the bounds of the stated optimizer if the gradients are clipped by them)."""
    optimizer = evidence[0].meant.optimizer
    rule, bounds = solved(moves) or _with_penalty(moves, optimizer), clips_of(optimizer)
    if rule is not None or not any(bounds):
        return rule, (0.0, 0.0, 0.0)
    clipped = [bounded(e, grad, bounds) for e, grad in zip(evidence, moves.grads, strict=True)]
    return solved(moves._replace(grads=clipped)), bounds


def _with_penalty(moves: Moves, optimizer: Any) -> Rule | None:
    """Return the rule of steps that have the decay of the optimizer in the gradient; None if none have."""
    if not (decay := getattr(optimizer, "weight_decay", None)):
        return None
    grads = [grad + decay * weights for grad, weights in zip(moves.grads, moves.params, strict=True)]
    rule = solved(moves._replace(grads=grads))
    return None if rule is None else rule._replace(notes=(*rule.notes, Likely(_AS_PENALTY.format(decay))))


def _by_parameter(replay: Port, falls: list[np.ndarray], grads: list[np.ndarray], near: list[float]) -> Rule | None:
    """Return the rule of plain steps with the rate of most weights, if some parameters move by the opposite sign.

    Fixed multiples of the same sign may be meant, as a smaller rate of the first layers is.
    """
    found = []
    for fall, grad, least_apart in zip(falls, grads, near, strict=True):
        pairs = [*zip(replay.parts(fall).values(), replay.parts(grad).values(), strict=True)]
        sizes = np.array([float(np.vdot(part, part)) for _, part in pairs])
        rates = np.array([float(np.vdot(*pair)) for pair in pairs]) / np.maximum(sizes, 1e-30)
        length = float(np.linalg.norm(fall))
        if any(distance(own, r * part, length) > least_apart for (own, part), r in zip(pairs, rates, strict=True)):
            return None
        found.append((rates, np.sqrt(sizes)))
    rates, sizes = (np.array(each) for each in zip(*found, strict=True))
    are_known = np.all(sizes > _TINY * sizes.max(axis=1, keepdims=True), axis=0)  # the others' are rounding
    rates, nums = rates[:, are_known], np.array([part.size for part in replay.parts(falls[0]).values()])[are_known]
    if len(falls) < _NUM_MOVED or not rates.all():
        return None
    times = rates[:, :, None] / rates[:, None]  # those of a parameter, as multiples of another's
    are_fixed = np.ptp(times, axis=0) <= FINE.differs * np.abs(times).max(axis=0)
    of_usual = nums @ (np.abs(times - 1).max(axis=0) <= FINE.differs)
    usual = int(of_usual.argmax())
    others = times[0, :, usual][np.abs(times[0, :, usual] - 1) > FINE.differs]
    if not (are_fixed[:, usual].all() and np.all(others < 0) and 2 * of_usual[usual] > nums.sum()):
        return None
    known = [name for name, is_known in zip(replay.names, are_known, strict=True) if is_known]
    names = some([name for name, other in zip(known, times[0, :, usual], strict=True) if other < 0])
    return Rule(rates[:, usual].tolist(), "", (Likely(_AGAINST.format(names)),))


def _of_loss(seen: Windows, evidence: list[Evidence]) -> Windows:
    """Return updates by hand with the gradients of the loop's loss, if these are no multiples of the meant ones."""
    pairs = [(taken(e), e.reference - e.penalty) for e in evidence]
    if not all(len(own) for own, _ in pairs):
        return seen
    shares = [float(own @ meant) / max(float(meant @ meant), 1e-30) for own, meant in pairs]
    differs = evidence[0].meant.replay.tolerance.differs
    if all(distance(own, share * meant) <= differs for share, (own, meant) in zip(shares, pairs, strict=True)):
        return seen
    made = [e.meant.replay.parts(own + e.penalty) for e, (own, _) in zip(evidence, pairs, strict=True)]
    steps = [replace(e.update.applied, grads=[*parts.values()]) for e, parts in zip(evidence, made, strict=True)]
    updates = [replace(e.update, applied=step) for e, step in zip(evidence, steps, strict=True)]
    return replace(seen, updates=updates, is_of_loss=True)


def _meant_rates(evidence: list[Evidence], rates: np.ndarray, schedule: Schedule | None) -> list[float]:
    """Return the rates that are meant: the others have a factor that belongs to the gradient, as a sum of rows has."""
    rows, parts, replicas = np.array([(e.whole[0], len(e.update.pieces), e.num_replicas) for e in evidence]).T
    most = max(float(rows.max()), 1e-30)
    shares, counts = rows / most, [rows, 0 * rows + most]
    if schedule is not None:
        meant, counts = np.array([schedule(e.update.number - 1) for e in evidence]), [*counts, shares, parts]
    else:
        meant = np.full(len(rates), float(np.asarray(getattr(evidence[0].meant.optimizer, "learning_rate", 0.0))))
        counts = counts if np.log10(most) % 1 else []  # a loop without this optimizer may have ten times its rate
    counts += [replicas] * bool(np.all(replicas > 1))
    places = np.array([e.num_places for e in evidence])
    counts += [rows / places] if np.all(places > 0) else []
    if np.all(meant > 0) and any(is_even(rates / (meant * each), 1.0) for each in counts):
        return meant.tolist()
    is_of_rows = np.all(rows > 0) and is_even(rates / rows) and not is_even(rates)
    return (rates / (rows if rates.max() > 1 else shares) if is_of_rows else rates).tolist()


def solved(moves: Moves) -> Rule | None:
    """Return the optimizer whose steps all moves are, on the meant gradients; None if they are none's."""
    return _with_momentum(moves) or _with_moments(moves)


def _with_momentum(moves: Moves) -> Rule | None:
    """Return the rule where each move is a sum of the gradient, of the move and the gradient before, and of decay."""
    for has_before in (False, True) if len(moves.falls) > 2 else (False,):
        numbers = []
        for t, grad in enumerate(moves.grads):
            before = [moves.falls[t - 1], *[moves.grads[t - 1]] * has_before] if t else []
            are_known = np.ones(len(grad), bool)
            if (found := _fitted(moves, t, [grad, *before], are_known, may_lack=t > _NUM_MOVED)) is None:
                break
            numbers.append(found)
        else:
            rates = [float(parts[0]) for parts, _ in numbers]
            if has_before:  # Nesterov's: of the gradient there is 1 + the momentum; Keras' does not scale by the rate
                momenta = np.array([float(parts[1]) for parts, _ in numbers[2:]])
                scaled = momenta * rates[1:-1] / rates[2:]
                momentum = float((scaled if is_even(scaled) and not is_even(momenta) else momenta)[-1])
                rates = [rate / (1 + momentum) for rate in rates]
            after = np.array([t for t in range(1, len(numbers)) if np.any(moves.falls[t - 1])], int)
            of_move = np.array([numbers[t][0][1] for t in after])
            scaled = of_move * [rates[t - 1] / (rates[t] or 1.0) for t in after]  # of a velocity, by its rate
            is_scaled = len(after) and is_even(scaled) and not (is_even(of_move) and _is_round(of_move[0]))
            of_move = scaled if is_scaled else of_move
            last = float(np.median(of_move)) if len(of_move) else 0.0
            is_lost = np.abs(of_move) <= FINE.differs
            told = f", and {last:.4g} times the move before" if abs(last) > FINE.differs else ""
            notes = [ADDED_UP] * (abs(last - 1) <= FINE.differs)
            if told and is_lost.any() and is_even(of_move[~is_lost]):
                notes = [Likely(_ANEW.format("velocities", some(after[is_lost] + 1)))]
            steady = (last,) * is_even(of_move[~is_lost])
            rule = _decaying(Rule(rates, told, (*notes,), momenta=steady), moves, [decay for _, decay in numbers])
            return rule._replace(decay=Rule([], "").decay) if told else rule  # the move before has its decay in it
    return None


def _with_moments(moves: Moves) -> Rule | None:
    """Return the rule of Adam, RMSprop or Adagrad: a mean of the gradients, divided by a root of their squares."""
    stated, of_passes = moves.stated, [t for t, (a, b) in enumerate(pairwise(moves.passes), 1) if a != b]
    pairs = dict.fromkeys([*([(stated[0], stated[1])] if stated else []), *product(*_BETAS)])
    sizes = dict.fromkeys([*stated[2:], *_EPSILONS])
    ways = [*product([[]], pairs, sizes, (True, False))]
    ways += product([of_passes] * bool(of_passes), [*pairs][:1], [*sizes][:2], (True, False))
    for begins, betas, epsilon, is_corrected in ways:
        numbers = []
        counts = np.array([t - max(each for each in (0, *begins) if each <= t) for t in range(len(moves.falls))]) + 1
        for t, (first, second) in enumerate(_moments(moves.grads, betas[0], betas[1], begins)):
            root = np.sqrt(second)
            are_known = root > _TINY * np.sqrt(np.mean(second))
            size = epsilon * np.sqrt(1 - betas[1] ** counts[t]) if is_corrected else epsilon
            found = _fitted(moves, t, [first / np.maximum(root + size, 1e-30)], are_known)
            if found is None:
                break
            numbers.append(found)
        if len(numbers) == len(moves.falls):
            factors = np.array([float(parts[0]) for parts, _ in numbers])
            rule = _named(factors, betas[0], betas[1], np.array(moves.passes), counts)
            notes = [Likely(_ANEW.format("moments", some(each + 1 for each in begins)))] * bool(begins)
            rule = rule._replace(is_adaptive=True, notes=(*rule.notes, *notes), momenta=betas)
            return _decaying(rule, moves, [decay for _, decay in numbers])
    return None


def _named(factors: np.ndarray, first: float, second: float, passes: np.ndarray, counts: np.ndarray) -> Rule:
    """Return the rule of Adam: its rates are the factors of the moments by their corrections, the meant ones if even.

    A correction divides a moment by 1 - beta ** count: by its beta, none, the other moment's, or of the next count, or
    of the number of the pass.
    """
    squares = second if second < 1 else 0.0

    def rates(one: float, two: float, late: int = 0) -> np.ndarray:
        return factors * (1 - one ** (counts + late)) / np.sqrt(1 - two ** (counts + late))

    told = f" (its mean with {first:g}, over the root of its mean square with {second:g})"
    meant, has_both = rates(first, squares), 0 < first != squares > 0
    if is_even(meant) or not squares > 0:
        return Rule((meant if is_even(meant) or not is_even(factors) else factors).tolist(), told)
    if is_even(factors):
        as_first = float(factors[0]) * (1 - first) / np.sqrt(1 - second)
        is_frozen = _is_round(as_first) and not _is_round(float(factors[0]))
        note = Likely(_FROZEN.format(float(f"{as_first:.2g}"))) if is_frozen else _UNCORRECTED
        return Rule(factors.tolist(), told, (note,) * (first > 0))
    if len(passes) == len(counts) and has_both:
        for late in (0, 1):
            counts_of_passes = passes + late
            found = factors * (1 - first**counts_of_passes) / np.sqrt(1 - squares**counts_of_passes)
            if np.all(counts_of_passes > 0) and is_even(found):
                return Rule(found.tolist(), told, (_BY_PASS,))
    for one, two, late in product((first, 0.0, squares), (squares, 0.0, first), (0, 1)) if has_both else ():
        if is_even(found := rates(one, two, late)):
            used = ("mean", one, first), ("mean square", two, squares)
            wrong = [
                f"the {name} is {f'divided by 1 - {beta:g} ** count' if beta else 'not corrected'}, and not divided "
                f"by 1 - {own:g} ** count"
                for name, beta, own in used
                if beta != own
            ]
            note = "; ".join([*wrong, *["the count is that of the next update"] * late])
            return Rule(found.tolist(), told, (Likely(f"A moment is not corrected as in Adam: {note}."),))
    return Rule(meant.tolist(), told)


def _decaying(rule: Rule, moves: Moves, decays: list[np.ndarray]) -> Rule:
    """Return a rule with the share by which each update shrinks the weights beside its step, if it does."""
    if not len(moving := np.flatnonzero(rule.rates)):
        return rule
    rates, moves = np.array(rule.rates)[moving], moves.at(moving)
    for i, are_own in enumerate((moves.are_kernels, ~moves.are_kernels)):
        shares = np.array([decays[t][i] for t in moving])
        sizes = np.array([np.linalg.norm(w[are_own]) for w in moves.params])
        bounds = [_SURE * near * np.linalg.norm(fall) for near, fall in zip(moves.near, moves.falls, strict=True)]
        if not i and np.all(sizes) and np.all(np.abs(shares) * sizes <= bounds):
            rule = rule._replace(decay=(0.0, float(np.median(bounds / (np.abs(rates) * sizes)))))
        if not np.all(np.abs(shares) * sizes > bounds) or not (is_even(shares) or is_even(shares / rates)):
            continue
        if shares[0] < 0:
            return rule._replace(notes=(*rule.notes, Likely(GROWN.format(-shares[0]))))
        by_rate = f"{shares[0] / rates[0]:.4g} times the rate"
        size = f"{shares[0]:.4g}" if is_even(rates) else by_rate
        size += f", {by_rate}" * bool(is_even(rates) and _is_round(float(shares[0] / rates[0])))
        size = size if is_even(shares / rates) else f"{shares[0]:.4g}, at any rate"
        told = f"{rule.told}, and shrinks the weights by {size}"
        note = _SHRUNK.format(float(shares[0]), 1 / float(shares[0]), float(shares[0] * rates[0]))
        is_likely = bool(shares.min() >= _MOST_DECAY and np.all(shares > rates))
        found = float(np.median(shares / rates)), float(np.median(np.array(bounds) / (np.abs(rates) * sizes)))
        return rule._replace(told=told, notes=(*rule.notes, *[Likely(note)] * is_likely), decay=found)
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
    moves: Moves, t: int, parts: list[np.ndarray], are_known: np.ndarray, *, may_lack: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the factors of parts, and of the weights of kernels and others, that make a move; None if none do.

    Args:
        may_lack: whether the gradient may be no part of it, as at a rate of 0.
    """
    kernels = moves.are_kernels[are_known]
    weights, fall = moves.params[t][are_known], moves.falls[t][are_known]
    basis = np.stack([*(part[are_known] for part in parts), weights * kernels, weights * ~kernels])
    are_there = basis.any(axis=1)
    if len(fall) < are_there.sum() + NUM_SPARE or 2 * len(fall) < np.count_nonzero(moves.falls[t]):
        return None
    factors = np.zeros(len(basis))
    factors[are_there] = least(list(basis[are_there]), fall)[0]
    share = abs(float(factors[0])) * float(np.linalg.norm(parts[0][are_known]))  # of the gradient, or its mean
    has_share = may_lack or share >= _SHARE * float(np.linalg.norm(fall))
    return (factors[:-2], factors[-2:]) if has_share and distance(fall, factors @ basis) <= moves.near[t] else None


def by_hand(seen: Windows, framework: str) -> list[str]:
    """Return a note if no optimizer of the framework moves the weights, with the rate if it is known."""
    if not seen.is_by_hand:
        return []
    rates = [u.applied.learning_rate for u in seen.updates]
    others = f"by {rates[0]:.4g} times the gradient first, by {rates[-1]:.4g} times last"
    told = f"by {max(rates):.4g} times the gradient" if np.ptp(rates) <= FINE.differs * max(rates) else others
    told = f", here {told}{seen.rule.told}" if seen.rule is not None and not seen.rule.is_stated else ""
    notes = [*seen.rule.notes] if seen.rule is not None else []
    if not _is_finite(seen):
        notes.append(Likely(f"Weights are not finite from update {seen.updates[-1].number + 1} on: not judged."))
    return [f"The weights are moved by no optimizer of {framework}: an update is any move of them{told}.", *notes]


def _is_finite(seen: Windows) -> bool:
    """Whether the weights stay finite after the updates."""
    return all(are_finite(piece.called.params) for piece in seen.rest)
