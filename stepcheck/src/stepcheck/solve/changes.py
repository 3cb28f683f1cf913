"""Changes of a gradient after it was summed: of single variables, clips, and the weights added to it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from stepcheck.faults import Fault
from stepcheck.solve.basis import Basis
from stepcheck.solve.coefficients import SAME, Made, Said
from stepcheck.solve.evidence import Evidence
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import FINE, ROUNDED, SOLVED, distance, shortened
from stepcheck.values import NOTHING, Change, Count, Detail, Finding, Known, Where

CLIPS = "clipnorm", "global_clipnorm", "clipvalue"
_SAME_IN_PART = 0.1  # of lengths, where some places represent a large gradient
_SAME_SPARSE = 0.3  # `tf.clip_by_global_norm` takes the norm of sparse gradients before equal rows are added up
_TINY, _NEAR = 1e-30, 10
_MORE, _EACH = 0.3, 1.2  # costs: of another kind of change, of each change of sums
_OF_MEANS = Count(  # the factor of a row
    below=(Known.MICROBATCHES_OF_FULL_WINDOW, Known.WEIGHT_OF_MICROBATCH),
    instead=Count(below=(Known.WEIGHT_OF_UPDATE,)),
)

Schedule = Callable[[int], float]  # the learning rate by update, from 0
_Gradients = list[np.ndarray]  # of one variable, by update


class _Way(NamedTuple):
    """A change of one variable's gradient: its kind, its cost, and the changed gradients."""

    detail: Detail
    told: float | str
    cost: float
    made: _Gradients


def by_variable(bases: list[Basis], fits: float, *, is_bare: bool) -> Said | None:
    """Return changes of single variables, if they explain all; `is_bare`: without the penalty."""
    cut = [basis.e.cut(basis.e.handed) for basis in bases]
    once = [basis.e.penalty if is_bare else 0 for basis in bases]
    of = [b.e.cut(b.e.reference - own) for b, own in zip(bases, once, strict=True)]
    names = list(cut[0])
    if any(set(own) != set(names) for own in cut):
        return None
    lengths = [max(float(np.linalg.norm(basis.e.reference)), basis.e.scale) for basis in bases]
    floor = [SOLVED * length for length in lengths]
    done: dict[str, _Way] = {}
    for name in names:
        handed, meant = [own[name] for own in cut], [own[name] for own in of]
        if _far(handed, meant, floor) <= fits:
            continue
        others = {other: [own[other] for own in of] for other in names if other != name}
        possible = _ways(handed, meant, others)
        fitting = [way for way in possible if _far(handed, way.made, floor) <= _NEAR * fits]
        if not fitting:
            return None
        done[name] = min(fitting, key=lambda way: way.cost)
    kinds: dict[tuple[Detail, float | str], list[str]] = {}
    for name, way in done.items():
        key = way.detail, way.told if way.detail is Detail.TIMES else 0.0
        kinds.setdefault(key, []).append(name)
    is_of_all = len(done) == len(names) > 1
    if not done or (is_of_all and [detail for detail, _ in kinds] == [Detail.TIMES]):
        return None
    changes = [Change(Fault.PENALTY_FORGOTTEN, count=NOTHING)] * is_bare
    costs = [is_bare + _MORE * (len(kinds) - 1)]
    for (detail, _), some in kinds.items():
        ways = [done[name] for name in some]
        changes.append(_of_variables(detail, [] if len(some) == len(names) > 1 else some, ways))
        costs.append(max(way.cost for way in ways))
    made: Made = [
        np.concatenate([done[n].made[i] if n in done else own[n] for n in names])
        for i, own in enumerate(of)
    ]
    return Said(changes, sum(costs), made, [])


def _of_variables(detail: Detail, names: list[str], ways: list[_Way]) -> Change:
    if detail is Detail.OF_OTHER_VARIABLE:  # each variable with its own
        pairs = [
            name
            for pair in zip(names, (str(way.told) for way in ways), strict=False)
            for name in pair
        ]
        return Change(Fault.GRADIENTS_SWAPPED, detail, names=tuple(pairs))
    numbers = tuple(dict.fromkeys(way.told for way in ways if not isinstance(way.told, str)))
    return Change(Fault.GRADIENT_CHANGED, detail, numbers, tuple(names))


def _far(one: _Gradients, two: _Gradients, floor: list[float]) -> float:
    return max(distance(a, b, scale) for a, b, scale in zip(one, two, floor, strict=True))


def _ways(handed: _Gradients, meant: _Gradients, others: dict[str, _Gradients]) -> Iterator[_Way]:
    """Yield the possible changes of a variable's gradient, the likeliest first."""
    pairs = [*zip(handed, meant, strict=True)]
    factor = float(np.median([float(h @ m) / max(float(m @ m), _TINY) for h, m in pairs]))
    is_plain = factor == 0 or abs(factor + 1) < SOLVED
    yield _Way(Detail.TIMES, factor, 1.0 if is_plain else 2.0, [factor * m for m in meant])
    for name, gradients in others.items():
        is_like = gradients[0].shape == meant[0].shape
        if is_like and not np.array_equal(gradients[0], meant[0]):
            yield _Way(Detail.OF_OTHER_VARIABLE, name, 0.8, gradients)
    bound = max(float(np.abs(h).max()) for h in handed)
    longest = max(float(np.linalg.norm(h)) for h in handed)
    cut, short = [np.clip(m, -bound, bound) for m in meant], [shortened(m, longest) for m in meant]
    yield _Way(Detail.CLIPPED_BY_VALUE, bound, 1.5, cut)
    yield _Way(Detail.CLIPPED_BY_NORM, longest, 1.5, short)
    yield _Way(Detail.CENTRED, "", 1.5, [m - m.mean() for m in meant])
    yield _Way(Detail.SIGN, bound, 1.5, [bound * np.sign(m) for m in meant])


def in_sums(bases: list[Basis]) -> Iterator[Said]:
    """Yield that sums of microbatches are shortened to one norm, in several updates.

    The sum so far may be shortened whenever a microbatch is added. A shortened whole sum is a sum of means: else there
    is only a clip, which may be meant.
    """
    lengths = [float(np.linalg.norm(b.e.handed)) for b in bases if len(b.sizes) > 1]
    bound = max(lengths, default=0.0)
    if sum(length >= (1 - SAME) * bound for length in lengths) < 2:
        return
    in_turn = Change(Fault.CLIP_PER_MICROBATCH, Detail.CLIPPED_IN_TURN, (bound,))
    are_even = not any(np.ptp(basis.counts[Known.WEIGHT_OF_MICROBATCH]) for basis in bases)
    fault = Fault.DIVIDED_BY_A_FULL_WINDOW if are_even else Fault.MEAN_OF_MEANS
    of_means = Change(fault, count=_OF_MEANS)
    clipped = replace(of_means, bound=bound)
    plain, means = [basis.parts() for basis in bases], [_of_means(basis) for basis in bases]
    ways = ([in_turn], plain, plain), ([clipped], means, plain), ([of_means, in_turn], means, means)
    for changes, parts, others in ways:
        made = [_sum(own, bound, is_in_turn=in_turn in changes) for own in parts]
        at_end = [_sum(own, bound) for own in others]
        if any(distance(one, two) > SOLVED for one, two in zip(made, at_end, strict=True)):
            made = [own + basis.e.penalty for own, basis in zip(made, bases, strict=True)]
            yield Said(changes, _EACH * len(changes), [*made], [])


def _of_means(basis: Basis) -> _Gradients:
    """Return the parts of the microbatches in the mean of their means."""
    num = min(len(basis.sizes), basis.e.meant.usual)
    own = basis.counts[Known.WEIGHT_OF_MICROBATCH][basis.starts]
    shares = basis.e.whole[0] / (num * own)
    return [share * part for share, part in zip(shares, basis.parts(), strict=True)]


def _sum(parts: _Gradients, bound: float, *, is_in_turn: bool = False) -> np.ndarray:
    """Return the sum of some gradients, shortened to a norm: at the end, or whenever one is added."""
    if not is_in_turn:
        return shortened(np.sum(parts, axis=0), bound)
    return reduce(lambda one, two: shortened(one + two, bound), parts, 0 * parts[0])


def clipped(everything: list[Evidence]) -> float | None:
    """Return how far the handed gradients are from the references clipped; None if they are not.

    Clipped is by norm, all together or variable by variable, or by value; or the mean over the inputs is taken off.
    """
    fits = everything[0].meant.replay.tolerance.fits
    return next((apart for apart in _clipped(everything, fits) if apart <= fits), None)


def _clipped(everything: list[Evidence], fits: float) -> Iterator[float]:
    replay = everything[0].meant.replay
    same = _SAME_IN_PART if replay.is_in_part else SOLVED
    same = _SAME_SPARSE if replay.is_sparse else same
    pairs = [(e.handed, e.reference) for e in everything]
    yield _by_norm(pairs, fits, same)
    bound = max(float(np.max(np.abs(handed), initial=0.0)) for handed, _ in pairs)
    yield max(distance(handed, np.clip(meant, -bound, bound)) for handed, meant in pairs)
    parts = [(e.cut(e.handed), e.cut(e.reference)) for e in everything]
    names = list(parts[0][0])
    if not all(set(handed) == set(names) for handed, _ in parts):
        return
    yield max(_by_norm([(h[n], m[n]) for h, m in parts], fits, same) for n in names)
    if not replay.is_in_part:
        shapes = dict(zip(replay.names, replay.shapes, strict=True))
        lists = [
            ([h[n] for n in names], [_centred(m[n], shapes[n]) for n in names]) for h, m in parts
        ]
        yield max(distance(handed, made) for handed, made in lists)


def _centred(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a gradient less its mean over all axes but the last, as gradient centralisation has it."""
    if len(shape) < 2:
        return gradient
    columns = gradient.reshape(-1, shape[-1])
    return (columns - columns.mean(axis=0)).ravel()


def _by_norm(pairs: list[tuple[np.ndarray, np.ndarray]], fits: float, same: float) -> float:
    """Return the largest distance from candidates cut to one length."""
    worst = 0.0
    cut: list[float] = []
    whole: list[float] = []
    for handed, candidate in pairs:
        size = float(candidate @ candidate)
        factor = float(handed @ candidate) / size if size else 1.0
        worst = max(worst, factor - 1, distance(handed, factor * candidate))
        if worst > fits:
            return worst
        (cut if abs(factor - 1) > fits else whole).append(float(np.linalg.norm(handed)))
    if not cut:
        return worst
    if not min(cut):  # nothing is left of it: that is no clip
        return float("inf")
    apart = max(cut + whole) / min(cut)
    return worst if apart <= 1 + max(same, fits) else apart


class Added(NamedTuple):
    """A multiple of the weights, or of their signs, that gradients have besides."""

    factor: float
    are_signs: bool
    apart: float


def added(everything: list[Evidence]) -> Added | None:
    """Return what multiple of the weights is added to the references, perhaps of some variables alone."""
    for of in (np.positive, np.sign):
        if (found := _added(everything, of)) is not None:
            factor, apart = found
            return Added(factor, of is np.sign, apart)
    return None


def _added(everything: list[Evidence], of: Callable) -> tuple[float, float] | None:
    found: list[tuple[float, float]] = []  # of a variable in an update: (factor, squared length)
    floor = [ROUNDED * max(float(np.linalg.norm(e.reference)), e.scale) for e in everything]
    made = []
    for e, least in zip(everything, floor, strict=True):
        weights = e.cut(of(e.meant.replay.flat([*e.update.applied.params])[e.mask]))
        handed, meant = e.cut(e.handed), e.cut(e.reference)
        parts = []
        for name, own in weights.items():
            size = float(own @ own)
            factor = float((handed[name] - meant[name]) @ own) / size if size else 0.0
            factor = factor if abs(factor) * size**0.5 > least else 0.0
            found += [(factor, size)] * (factor != 0)
            parts.append(meant[name] + factor * own)
        made.append(np.concatenate(parts))
    if not found:
        return None
    factors, sizes = np.transpose(found)
    usual = float(np.average(factors, weights=sizes))
    apart = max(e.apart(each) for e, each in zip(everything, made, strict=True))
    roots = sizes**0.5
    is_one = np.all(np.abs(factors - usual) * roots <= max(floor) + SOLVED * np.abs(usual) * roots)
    return (usual, apart) if is_one and apart <= everything[0].meant.replay.tolerance.fits else None


def otherwise(everything: list[Evidence], optimizer: Any) -> Iterator[Finding]:
    """Yield that right gradients are clipped otherwise than by the meant optimizer, or not at all."""
    bounds = clips_of(optimizer)
    if not any(bounds) or not everything or everything[0].meant.replay.is_in_part:
        return
    if not all(e.mask.all() for e in everything):
        return
    clips = [(bounds, e.update.applied.clips) for e in everything]
    pairs = [
        (bounded(e, e.reference, meant), bounded(e, e.handed, own))
        for e, (meant, own) in zip(everything, clips, strict=True)
    ]
    apart = [distance(meant, handed) for meant, handed in pairs]
    replay = everything[0].meant.replay
    differs = _SAME_SPARSE if replay.is_sparse else replay.tolerance.differs
    wrong = [e for far, e in zip(apart, everything, strict=True) if far > differs]
    plain = max(e.without for e in everything)
    is_right = plain <= replay.tolerance.differs
    rest = plain if is_right else clipped(everything)
    if not wrong or rest is None:  # or something else than a clip
        return
    is_bare = is_right and _is_even(everything) and not any(any(own) for _, own in clips)
    fault = Fault.CLIP_FORGOTTEN if is_bare else Fault.CLIPPED_OTHERWISE
    stated = {name: bound for name, bound in zip(CLIPS, bounds, strict=True) if bound}
    change = Change(fault, numbers=tuple(stated.values()), names=tuple(stated))
    where = Where(tuple(e.update.number for e in wrong), line=wrong[0].update.applied.line)
    yield Finding(change, max(apart), rest, where)


def _is_even(everything: list[Evidence]) -> bool:
    """Whether steps by hand have one rate: else something is cut."""
    rates = [e.update.applied.learning_rate for e in everything if not e.update.applied.optimizer]
    return bool(np.ptp(rates or [0.0]) <= FINE.differs * max(map(abs, rates), default=0.0))


def bounded(e: Evidence, gradient: np.ndarray, bounds: tuple[float, float, float]) -> np.ndarray:
    """Return a gradient as an optimizer with these bounds clips it."""
    of_each, of_all, of_numbers = bounds
    if of_each:
        parts = e.meant.replay.parts(gradient).values()
        return np.concatenate([shortened(part, of_each) for part in parts])
    if of_all:
        return shortened(gradient, of_all)
    return np.clip(gradient, -of_numbers, of_numbers) if of_numbers else gradient
