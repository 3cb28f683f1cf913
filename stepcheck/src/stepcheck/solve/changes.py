"""Changes of a gradient after it was summed: of single variables, and clips; and other numbers of the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from stepcheck.report.found import Finding, Likely, found
from stepcheck.solve.basis import Basis
from stepcheck.solve.coefficients import SAME
from stepcheck.solve.evidence import Evidence
from stepcheck.solve.forms import Error
from stepcheck.trace.log import clips_of
from stepcheck.trace.measure import FINE, ROUNDED, SOLVED, distance, is_even, shortened
from stepcheck.trace.windows import Rule, Update, Windows

SQUARED = "clipped by the square of their norm"
LONGER = "made longer, up to one norm, where they are shorter"
POSITIVE = "clipped from below at 0"
_OF_MEANS = (  # the factor of a row
    "1 / (the microbatches of a full window x the weight of the own microbatch) instead of 1 / the weight of the update"
)
ADDED_UP = Likely(
    "Each step has the gradients of all updates before it, undiminished: is the gradient not set to zero after a step?"
)
GROWN = (
    "Each update makes the weights grow by the share {:.3g}, beside its step. A decay takes that off them: is its sign "
    "wrong, as after a scaling by minus the rate?"
)
_NAMES = "clipnorm", "global_clipnorm", "clipvalue"
_MOST_STILL = 3  # times the passes of an update, that may follow the last step without one
_SAME_IN_PART = 0.1  # of lengths, where some places represent a large gradient
_SAME_SPARSE = 0.3  # `tf.clip_by_global_norm` takes the norm of sparse gradients before equal rows are added up


Schedule = Callable[[int], float]  # the learning rate by update, from 0
_Gradients = list[np.ndarray]  # of one variable, by update


class _Way(NamedTuple):
    """A change of one gradient: its predicate and number in words, its cost, and the changed gradients."""

    predicate: str
    number: str
    cost: float
    made: _Gradients


def by_variable(bases: list[Basis], fits: float, *, is_bare: bool) -> tuple[list[Error], float, _Gradients] | None:
    """Return (errors of single variables, cost, gradients), if they explain all; `is_bare`: without the penalty."""
    cut = [basis.e.cut(basis.e.handed) for basis in bases]
    of = [basis.e.cut(basis.e.reference - (basis.e.penalty if is_bare else 0)) for basis in bases]
    names = list(cut[0])
    if any(set(own) != set(names) for own in cut):
        return None
    floor = [SOLVED * max(float(np.linalg.norm(basis.e.reference)), basis.e.scale) for basis in bases]
    done: dict[str, _Way] = {}
    for name in names:
        handed, meant = [own[name] for own in cut], [own[name] for own in of]
        if _far(handed, meant, floor) <= fits:
            continue
        others = {other: [own[other] for own in of] for other in names if other != name}
        ways = [way for way in _ways(handed, meant, others) if _far(handed, way.made, floor) <= 10 * fits]
        if not ways:
            return None
        done[name] = min(ways, key=lambda way: way.cost)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, way in done.items():
        kinds.setdefault((way.predicate, way.number if way.predicate == "counts" else ""), []).append(name)
    if not done or (len(done) == len(names) > 1 and [predicate for predicate, _ in kinds] == ["counts"]):
        return None
    errors = [Error("the penalty", "counts not at all instead of once", ("penalty forgotten",))] * is_bare
    for (predicate, _), some in kinds.items():
        whose = "each variable" if len(some) == len(names) > 1 else ", ".join(some)
        numbers = ", ".join(dict.fromkeys(done[name].number for name in some))
        names_of = ("gradients swapped",) * (predicate == "is that of")
        if names_of:  # each variable with its own
            first, *pairs = [f"{name} is that of {done[name].number}" for name in some]
            whose, predicate, numbers = ", that of ".join([first, *pairs]), "", ""
        errors.append(Error(f"the gradient of {whose}", predicate, names_of, numbers))
    cost = is_bare + 0.3 * (len(kinds) - 1) + sum(max(done[n].cost for n in some) for some in kinds.values())
    made = [np.concatenate([done[n].made[i] if n in done else of[i][n] for n in names]) for i in range(len(bases))]
    return errors, cost, made


def _far(one: _Gradients, two: _Gradients, floor: list[float]) -> float:
    return max(distance(a, b, scale) for a, b, scale in zip(one, two, floor, strict=True))


def _ways(handed: _Gradients, meant: _Gradients, others: dict[str, _Gradients]) -> Iterator[_Way]:
    """Yield the possible changes of a variable's gradient, the likeliest first."""
    factors = [float(h @ m) / max(float(m @ m), 1e-30) for h, m in zip(handed, meant, strict=True)]
    factor = float(np.median(factors))
    is_plain = factor == 0 or abs(factor + 1) < SOLVED
    yield _Way("counts", f"{factor:.4g} times what it should", 1.0 if is_plain else 2.0, [factor * m for m in meant])
    for name, gradients in others.items():
        if gradients[0].shape == meant[0].shape and not np.array_equal(gradients[0], meant[0]):
            yield _Way("is that of", name, 0.8, gradients)
    bound = max(float(np.abs(h).max()) for h in handed)
    longest = max(float(np.linalg.norm(h)) for h in handed)
    lengths = [max(float(np.linalg.norm(m)), 1e-30) for m in meant]
    yield _Way("is clipped by value to", f"{bound:.4g}", 1.5, [np.clip(m, -bound, bound) for m in meant])
    short = [m * min(1, longest / length) for m, length in zip(meant, lengths, strict=True)]
    yield _Way("is clipped to the norm", f"{longest:.4g}", 1.5, short)
    yield _Way("has its mean taken off", "", 1.5, [m - m.mean() for m in meant])
    yield _Way("is replaced by its sign times", f"{bound:.4g}", 1.5, [bound * np.sign(m) for m in meant])


def in_sums(bases: list[Basis]) -> Iterator[tuple[list[Error], float, _Gradients]]:
    """Yield that sums of microbatches are shortened to one norm, in several updates.

    The sum so far may be shortened whenever a microbatch is added. A shortened whole sum is a sum of means: else there
    is only a clip, which may be meant.
    """
    lengths = [float(np.linalg.norm(basis.e.handed)) for basis in bases if len(basis.sizes) > 1]
    bound = max(lengths, default=0.0)
    if sum(length >= (1 - SAME) * bound for length in lengths) < 2:
        return
    told = f"to the norm {bound:.4g}"
    in_turn = Error("the gradient", f"is clipped {told} whenever a microbatch is added", ("clip per microbatch",))
    are_even = not any(np.ptp(basis.counts["the weight of the own microbatch"]) for basis in bases)
    name = "divided by a full window" if are_even else "mean of means"
    of_means = Error("each row's gradient", "counts", (name,), _OF_MEANS)
    clipped = replace(of_means, number=f"{_OF_MEANS}, and the gradient is clipped {told}")
    plain, means = [basis.parts() for basis in bases], [_of_means(basis) for basis in bases]
    for errors, parts in (([in_turn], plain), ([clipped], means), ([of_means, in_turn], means)):
        others = plain if errors == [clipped] else parts
        made = [_sum(own, bound, is_in_turn=in_turn in errors) for own in parts]
        at_end = [_sum(own, bound) for own in others]
        if any(distance(one, two) > SOLVED for one, two in zip(made, at_end, strict=True)):
            made = [each + basis.e.penalty for each, basis in zip(made, bases, strict=True)]
            yield errors, 1.2 * len(errors), made


def _of_means(basis: Basis) -> _Gradients:
    """Return the parts of the microbatches in the mean of their means."""
    num = min(len(basis.sizes), basis.e.meant.usual)
    shares = basis.e.whole[0] / (num * basis.counts["the weight of the own microbatch"][basis.starts])
    return [share * part for share, part in zip(shares, basis.parts(), strict=True)]


def _sum(parts: _Gradients, bound: float, *, is_in_turn: bool = False) -> np.ndarray:
    """Return the sum of some gradients, shortened to a norm: at the end, or whenever one is added."""
    if not is_in_turn:
        return shortened(np.sum(parts, axis=0), bound)
    return reduce(lambda one, two: shortened(one + two, bound), parts, 0 * parts[0])


def changed(everything: list[Evidence]) -> tuple[str, float]:
    """Return (the usual change that makes the references the gradients handed over, the distance then); "" if none."""
    replay = everything[0].meant.replay
    fits, same = replay.tolerance.fits, _SAME_IN_PART if replay.is_in_part else SOLVED
    same = _SAME_SPARSE if replay.is_sparse else same
    apart = np.inf
    for told, apart in _usual(everything, fits, same):
        if apart <= fits:
            return told, apart
    return "", apart


def _usual(everything: list[Evidence], fits: float, same: float) -> Iterator[tuple[str, float]]:
    """Yield (a usual change of gradients, the distance of the handed ones from the references with it)."""
    pairs, replay = [(e.handed, e.reference) for e in everything], everything[0].meant.replay
    yield "clipped by their norm", _by_norm(pairs, fits, same)
    yield SQUARED, _by_norm(pairs, fits, same, power=2)
    yield LONGER, _by_norm(pairs, fits, same, goes_up=True)
    bound = max(float(np.max(np.abs(handed), initial=0.0)) for handed, _ in pairs)
    if bound:  # else nothing is left of them: that is no clip
        yield POSITIVE, max(distance(handed, np.clip(meant, 0, bound)) for handed, meant in pairs)
    yield "clipped by value", max(distance(handed, np.clip(meant, -bound, bound)) for handed, meant in pairs)
    parts = [(e.cut(e.handed), e.cut(e.reference)) for e in everything]
    names = list(parts[0][0])
    if all(set(handed) == set(names) for handed, _ in parts):
        one_by_one = ([(handed[name], meant[name]) for handed, meant in parts] for name in names)
        yield "clipped variable by variable", max(_by_norm(each, fits, same) for each in one_by_one)
        if not replay.is_in_part:
            shapes = dict(zip(replay.names, replay.shapes, strict=True))
            lists = [([h[n] for n in names], [_centred(m[n], shapes[n]) for n in names]) for h, m in parts]
            told = "centralised (the mean over the inputs is taken off)"
            yield told, max(distance(handed, made) for handed, made in lists)


def added(everything: list[Evidence]) -> tuple[float, str, float] | None:
    """Return (a factor, of what, the distance then) if the weights or their signs are added to the references, or None.

    They may be added to some of the variables alone, as to the kernels.
    """
    for told, of in (("the weights", np.positive), ("the signs of the weights", np.sign)):
        if (found := _added(everything, of)) is not None:
            return found[0], told, found[1]
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
    is_one = bool(np.all(np.abs(factors - usual) * sizes**0.5 <= max(floor) + SOLVED * np.abs(usual) * sizes**0.5))
    return (usual, apart) if is_one and apart <= everything[0].meant.replay.tolerance.fits else None


def _centred(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a gradient less its mean over all axes but the last, as gradient centralisation has it."""
    if len(shape) < 2:
        return gradient
    columns = gradient.reshape(-1, shape[-1])
    return (columns - columns.mean(axis=0)).ravel()


def _by_norm(
    pairs: list[tuple[np.ndarray, np.ndarray]], fits: float, same: float, power: int = 1, *, goes_up: bool = False
) -> float:
    """Return the largest distance from candidates cut to one length.

    Args:
        power: of the length, by which is divided.
        goes_up: whether shorter ones are made longer instead, up to that length.
    """
    worst = 0.0
    lengths: list[float] = []
    whole: list[float] = []
    for handed, candidate in pairs:
        size = float(candidate @ candidate)
        factor = float(handed @ candidate) / size if size else 1.0
        worst = max(worst, 1 - factor if goes_up else factor - 1, distance(handed, factor * candidate))
        if worst > fits:
            return worst
        length = float(np.linalg.norm(handed)) * size ** ((power - 1) / 2)
        (lengths if abs(factor - 1) > fits else whole).append(length)
    if not lengths:
        return worst
    if not min(lengths):  # nothing is left of it: that is no clip
        return float("inf")
    all_lengths = [*lengths, *whole]
    apart = max(lengths) / min(all_lengths) if goes_up else max(all_lengths) / min(lengths)
    return worst if apart <= 1 + max(same, fits) else apart


def otherwise(everything: list[Evidence], optimizer: Any) -> Iterator[Finding]:
    """Yield the finding on right gradients that are clipped otherwise than by the meant optimizer, or not at all."""
    bounds = clips_of(optimizer)
    if not any(bounds) or not everything or everything[0].meant.replay.is_in_part:
        return
    if not all(e.mask.all() for e in everything):
        return
    pairs = [(bounded(e, e.reference, bounds), bounded(e, e.handed, e.update.applied.clips)) for e in everything]
    apart = [distance(meant, handed) for meant, handed in pairs]
    replay = everything[0].meant.replay
    differs = _SAME_SPARSE if replay.is_sparse else replay.tolerance.differs
    wrong = [e for far, e in zip(apart, everything, strict=True) if far > differs]
    if not wrong:
        return
    plain = max(e.without for e in everything)
    is_right = plain <= replay.tolerance.differs
    how, rest = ("", plain) if is_right else changed(everything)
    if not (is_right or how):  # something else than a clip
        return
    rates = [e.update.applied.learning_rate for e in everything if not e.update.applied.optimizer]  # of steps by hand
    is_even = np.ptp(rates or [0.0]) <= FINE.differs * max(map(abs, rates), default=0.0)  # else something is cut
    is_bare = is_right and is_even and not any(any(e.update.applied.clips) for e in everything)
    told = ", ".join(f"{name}={bound:.4g}" for name, bound in zip(_NAMES, bounds, strict=True) if bound)
    name, numbers = "clip forgotten" if is_bare else "clipped otherwise", [e.update.number for e in wrong]
    line, detail = wrong[0].update.applied.line, f"The optimizer that was meant has {told}."
    yield found(name, max(apart), line, numbers, detail, with_change=rest)


_RATE = "learning_rate"
_BESIDE = *_NAMES, "name", _RATE, "loss_scale_factor", "gradient_accumulation_steps"  # judged elsewhere
_SAME_MOMENTUM = 5e-4  # 0.999 and 0.9999 are two; solved for from steps in float32
_NO_STEP = "use_ema", "ema_momentum", "ema_overwrite_frequency"


def unlike(optimizer: Any, used: list[Any], updates: list[Update], *, is_told: bool) -> Iterator[str]:
    """Yield a note if the loop's one optimizer is another than the stated one, or has other numbers.

    A model may be compiled for its loss and metrics alone: a compiled optimizer of the same kind is compared, no rates.
    """
    if len(used) != 1 or used[0] is optimizer or optimizer is None or not updates:
        return
    meant, own = (_numbers(each, getattr(used[0], "_trainable_variables", [])) for each in (optimizer, used[0]))
    kinds = [type(each).__name__ for each in (used[0], optimizer)]
    others = [key for key in meant if key in own and own[key] != meant[key] and key != _RATE]
    rates, rate = {update.applied.learning_rate for update in updates}, meant.get(_RATE)
    if is_told and rate is not None and len(rates) == 1 and abs(rate - max(rates)) > FINE.differs * rate:
        others, own[_RATE] = [*others, _RATE], max(rates)
    told, those = (", ".join(f"{key}={_told(of[key])}" for key in others) for of in (own, meant))
    if kinds[0] != kinds[1] and {*kinds} != {"Adam", "AdamW"}:  # which differ in their decay alone
        yield from [Likely(f"The optimizer of the loop is {kinds[0]}, and {kinds[1]} was meant.")] * is_told
    elif others and not is_told:
        yield f"The {kinds[0]} of the loop has {told}, and the compiled {kinds[1]} has {those}. Is that meant?"
    elif others:
        differs = f"The {kinds[0]} of the loop has {told}, and {those} was meant."
        may_be_by_hand = others == ["weight_decay"] and not own["weight_decay"]
        yield f"{differs} Does the loop decay the weights itself?" if may_be_by_hand else Likely(differs)


def _numbers(optimizer: Any, variables: list[Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer that change a step of variables, whose values may be deleted."""
    names = [name for name in signature(type(optimizer)).parameters if name not in (*_BESIDE, *_NO_STEP)]
    found = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    if found.get("weight_decay") and hasattr(optimizer, "_use_weight_decay"):  # of Keras
        found["decayed variables"] = sum(map(optimizer._use_weight_decay, variables))
    return found | {_RATE: rate_of(optimizer)}


def rate_of(optimizer: Any) -> float | None:
    """Return the present rate of an optimizer; None if it has a schedule, or if a step of JAX has taken it."""
    rate = getattr(optimizer, "_learning_rate", None)
    with suppress(RuntimeError):
        return None if rate is None or callable(rate) else float(np.asarray(rate))
    return None


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def bounded(e: Evidence, gradient: np.ndarray, bounds: tuple[float, float, float]) -> np.ndarray:
    """Return a gradient as an optimizer with these bounds clips it."""
    of_each, of_all, of_numbers = bounds
    if of_each:
        parts = e.meant.replay.parts(gradient).values()
        return np.concatenate([shortened(part, of_each) for part in parts])
    if of_all:
        return shortened(gradient, of_all)
    return np.clip(gradient, -of_numbers, of_numbers) if of_numbers else gradient


def as_stated(optimizer: Any, schedule: Schedule | None, seen: Windows, updates: list[Update]) -> Windows | None:
    """Return updates by hand with the gradients that steps of the stated SGD would have taken; None for others."""
    if type(optimizer).__name__ != "SGD" or optimizer.nesterov:
        return None
    rates = [schedule(u.number - 1) if schedule else float(np.asarray(optimizer.learning_rate)) for u in updates]
    moves = [[fall for fall in update.applied.grads if fall is not None] for update in updates]
    if min(rates) <= 0 or any(len(own) < len(update.applied.grads) for own, update in zip(moves, updates, strict=True)):
        return None
    found, before = [], [0 * fall for fall in moves[0]]
    for update, falls, rate in zip(updates, moves, rates, strict=True):
        grads = [(fall - optimizer.momentum * last) / rate for fall, last in zip(falls, before, strict=True)]
        found.append(replace(update, applied=replace(update.applied, grads=[*grads], learning_rate=rate)))
        before = falls
    return replace(seen, updates=found, rule=Rule(rates, is_stated=True))


def steps_otherwise(optimizer: Any, rule: Rule) -> Iterator[Likely]:
    """Yield a note if steps by hand have other momenta, or another decay, than the optimizer that is stated."""
    names = {1: ("momentum",), 2: ("beta_1", "beta_2")}.get(len(rule.momenta), ())
    kind = type(optimizer).__name__
    stated: list[Any] = [getattr(optimizer, name, None) for name in names]
    if names and len(rule.rates) > 2 and kind in ("SGD", "Adam", "AdamW"):
        if None in stated:
            yield Likely(f"The steps are those of {'Adam' if len(names) == 2 else 'SGD'}, and {kind} was meant.")
        elif any(abs(a - b) > _SAME_MOMENTUM for a, b in zip(rule.momenta, stated, strict=True)):
            pairs = [zip(names, of, strict=True) for of in (rule.momenta, stated)]
            told, those = (", ".join(f"{name}={number:.4g}" for name, number in each) for each in pairs)
            yield Likely(f"The steps have {told}, and {those} was meant.")
    meant, (own, least) = float(getattr(optimizer, "weight_decay", None) or 0.0), rule.decay
    if abs(own - meant) > max(least, FINE.differs * abs(meant)):
        decays = f"decay by {own:.4g} times the rate" if own else "do not decay"
        yield Likely(f"The weights {decays}, and weight_decay={meant:.4g} was meant.")


def stopped(seen: Windows) -> Iterator[Likely]:
    """Yield a note if the loop goes on taking gradients after its last step by hand."""
    num, most = len(seen.rest), max((len(update.pieces) for update in seen.updates), default=1)
    if seen.is_by_hand and num > _MOST_STILL * most and 4 * num >= len(seen.pieces):
        yield Likely(
            f"No weight moves after update {len(seen.updates)}, though {num} further gradients are taken: does the "
            "learning rate fall to 0? A schedule counts the steps of its optimizer, and not passes over the data."
        )


def stated(optimizer: Any, seen: Windows) -> Schedule | None:
    """Return the constant rate of an optimizer that the user states, for a loop by hand with a constant rate."""
    rate = getattr(optimizer, "learning_rate", None)
    is_constant = seen.is_by_hand and seen.rule is not None and is_even(np.array(seen.rule.rates))
    return (lambda number: float(np.asarray(rate))) if is_constant and rate is not None else None
