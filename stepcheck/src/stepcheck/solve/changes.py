"""Changes of a gradient after it was summed: clips, and the weights added to it."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np

from stepcheck.faults import Fault
from stepcheck.solve.coefficients import Explanation, proved
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.ratios import least
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import ROUNDED, SOLVED, distance, shortened
from stepcheck.values import Change, Detail, Finding, Where

CLIPS = "clipnorm", "global_clipnorm", "clipvalue"
_SAME_IN_PART = 0.1  # of lengths, where some places represent a large gradient
_SAME_SPARSE = 0.3  # `tf.clip_by_global_norm` takes sparse gradients before equal rows are added up
_COST = 1.2

Schedule = Callable[[int], float]  # the learning rate by update, from 0
_Pair = tuple[np.ndarray, np.ndarray]
_Shares = Callable[[Evidence], np.ndarray]


def clipped_apart(evidence: list[Evidence]) -> Iterator[Explanation | None]:
    """Yield that each microbatch's gradient is clipped to one norm, or each sum so far."""
    several = [e for e in evidence if len(e.update.pieces) > 1]
    lengths = [float(np.linalg.norm(e.handed)) for e in several]
    bound = max(lengths, default=0.0)
    if sum(length >= (1 - 2 * SOLVED) * bound for length in lengths) > 1:
        made = [_in_turn(e, bound) + e.penalty for e in evidence]
        change = Change(
            Fault.CLIP_PER_MICROBATCH, Detail.CLIPPED_IN_TURN, (bound,)
        )
        yield proved([change], _COST, evidence, made)
    for shares in (_shares, _equal):  # of means, or of sums
        if bound := _bound_of_parts(several, shares):
            made = [_each(e, bound, shares) for e in evidence]
            change = Change(
                Fault.CLIP_PER_MICROBATCH, Detail.CLIPPED_BY_NORM, (bound,)
            )
            yield proved([change], _COST, evidence, made)


def _in_turn(e: Evidence, bound: float) -> np.ndarray:
    return reduce(
        lambda one, two: shortened(one + two, bound), e.parts, 0 * e.handed
    )


def _shares(e: Evidence) -> np.ndarray:
    return np.array([weights[0].sum() for weights in e.weights]) / e.whole[0]


def _equal(e: Evidence) -> np.ndarray:
    return np.full(len(e.parts), 1 / e.whole[0])


def _each(e: Evidence, bound: float, shares: _Shares) -> np.ndarray:
    """Return the sum of the microbatches' gradients, each clipped, by their shares."""
    pairs = zip(shares(e), e.parts, strict=True)
    parts = (
        share * shortened(part / share, bound) for share, part in pairs if share
    )
    return sum(parts, e.penalty)


def _bound_of_parts(several: list[Evidence], shares: _Shares) -> float:
    """Return the norm to which the longer ones of the microbatches' gradients are cut,
    or 0.
    """
    clipped: list[float] = []
    for e in several:
        ratios = least(e.parts, e.handed - e.penalty)[0]
        for ratio, share, part in zip(ratios, shares(e), e.parts, strict=True):
            if share and ratio < 1 - SOLVED:
                clipped.append(ratio * np.linalg.norm(part / share))
    return float(np.median(clipped)) if len(clipped) > 1 else 0.0


def is_skipped(evidence: list[Evidence]) -> bool:
    """Whether forward passes are left out whose gradients are longer than all others:
    by a limit.
    """
    kept, left_out = [0.0], list[float]()
    for e in evidence:
        ratios = least(e.parts, e.handed - e.penalty)[0]
        for ratio, share, part in zip(ratios, _shares(e), e.parts, strict=True):
            length = float(np.linalg.norm(part)) / (share or 1.0)
            (left_out if abs(ratio) <= SOLVED else kept).append(length)
    return bool(left_out) and min(left_out) > max(kept)


def is_in_turn(evidence: list[Evidence]) -> bool:
    """Whether each update has the loss of one output alone, and not all of the same
    one.
    """
    terms = evidence[0].terms[0]
    used: list[int] = np.flatnonzero(terms.coefficients).tolist()
    chosen = set[int]()
    for e in evidence if len(used) > 1 else ():
        columns = [e.of_term(i) for i in used]
        numbers = least(columns, e.handed - e.penalty)[0]
        which = int(np.argmax(numbers))
        if e.apart(columns[which] + e.penalty) > e.meant.replay.tolerance.fits:
            return False
        chosen.add(which)
    return len(chosen) > 1


def clipped(everything: list[Evidence]) -> list[np.ndarray] | None:
    """Return the references as the loop clips them: by a norm or by value, or each
    variable by its norm; None if the gradients are not these.
    """
    replay = everything[0].meant.replay
    same = _SAME_IN_PART if replay.is_in_part else SOLVED
    same = _SAME_SPARSE if replay.is_sparse else same
    fits = replay.tolerance.fits
    pairs = [(e.handed, e.reference) for e in everything]
    for order in (2, np.inf, 1):
        if (made := _by_norm(pairs, fits, same, order)) is not None:
            return made
    bound = max(np.max(np.abs(handed), initial=0.0) for handed, _ in pairs)
    by_value = [np.clip(meant, -bound, bound) for _, meant in pairs]
    both = zip(everything, by_value, strict=True)
    if all(distance(e.handed, own) <= fits for e, own in both):
        return by_value
    parts = [(e.cut(e.handed), e.cut(e.reference)) for e in everything]
    names = [*parts[0][0]]
    if any([*own] != names for pair in parts for own in pair):
        return None
    columns = []
    for name in names:
        pairs = [(own[name], meant[name]) for own, meant in parts]
        if (made := _by_norm(pairs, fits, same)) is None:
            return None
        columns.append(made)
    return [np.concatenate(own) for own in zip(*columns, strict=True)]


def _by_norm(
    pairs: list[_Pair], fits: float, same: float, order: float = 2
) -> list[np.ndarray] | None:
    """Return gradients, the longer ones cut to one length by the norm of this order, if
    the loop's are these.
    """
    cut: list[float] = []
    lengths: list[float] = []
    made: list[np.ndarray] = []
    for handed, meant in pairs:
        size = meant @ meant
        factor = handed @ meant / size if size else 1.0
        made.append(factor * meant)
        if factor > 1 + fits or distance(handed, made[-1]) > fits:
            return None
        lengths.append(float(np.linalg.norm(handed, order)))
        if factor < 1 - fits:
            cut.append(lengths[-1])
    least_cut = min(cut, default=1.0)
    longest = least_cut * (1 + max(same, fits))
    return made if not cut or 0 < max(lengths) <= longest else None


def added(everything: list[Evidence]) -> tuple[float, bool] | None:
    """Return (the multiple of the weights or their signs that is added to the
    references, which).

    It may be added to some variables alone; None if it is not.
    """
    for of in (np.positive, np.sign):
        if (factor := _added(everything, of)) is not None:
            return factor, of is np.sign
    return None


def _added(everything: list[Evidence], of: Callable) -> float | None:
    found: list[
        tuple[float, float]
    ] = []  # of a variable in an update: (factor, length)
    floor = ROUNDED * max(
        max(float(np.linalg.norm(e.reference)), e.scale) for e in everything
    )
    fits = everything[0].meant.replay.tolerance.fits
    for e in everything:
        weights = e.cut(
            of(e.meant.replay.flat([*e.update.applied.params])[e.mask])
        )
        more, made = e.cut(e.handed - e.reference), e.cut(e.reference)
        for name, own in weights.items():
            size = float(own @ own)
            factor = float(more[name] @ own) / size if size else 0.0
            if abs(factor) * size**0.5 > floor:
                found.append((factor, size**0.5))
                made[name] = made[name] + factor * own
        if e.apart(np.concatenate([*made.values()])) > fits:
            return None
    factors, lengths = np.transpose(found)
    usual = float(np.average(factors, weights=lengths**2))
    far = np.abs(factors - usual) * lengths
    is_one = np.all(far <= floor + SOLVED * np.abs(usual) * lengths)
    return usual if is_one else None


def otherwise(everything: list[Evidence], optimizer: Any) -> Iterator[Finding]:
    """Yield that right gradients are clipped otherwise than by the meant optimizer, or
    not.
    """
    bounds = clips_of(optimizer)
    if not any(bounds) or everything[0].meant.replay.is_in_part:
        return
    if not all(e.mask.all() for e in everything):
        return
    apart = []
    for e in everything:
        meant = bounded(e, sum(e.parts, e.penalty), bounds)
        apart.append(
            distance(meant, bounded(e, e.handed, e.update.applied.clips))
        )
    replay = everything[0].meant.replay
    differs = _SAME_SPARSE if replay.is_sparse else replay.tolerance.differs
    wrong = [
        e for far, e in zip(apart, everything, strict=True) if far > differs
    ]
    without = max(e.without for e in everything)
    if not wrong or without > replay.tolerance.differs:
        return
    stated = {
        name: bound for name, bound in zip(CLIPS, bounds, strict=True) if bound
    }
    names, numbers = tuple(stated), tuple(stated.values())
    change = Change(Fault.CLIPPED_OTHERWISE, numbers=numbers, names=names)
    where = Where(
        tuple(e.update.number for e in wrong), line=wrong[0].update.applied.line
    )
    yield Finding(change, max(apart), where=where)


def bounded(
    e: Evidence, gradient: np.ndarray, bounds: tuple[float, float, float]
) -> np.ndarray:
    """Return a gradient as an optimizer with these bounds clips it."""
    of_each, of_all, of_numbers = bounds
    if of_each:
        parts = e.meant.replay.parts(gradient).values()
        return np.concatenate([shortened(part, of_each) for part in parts])
    if of_all:
        return shortened(gradient, of_all)
    return (
        np.clip(gradient, -of_numbers, of_numbers) if of_numbers else gradient
    )
