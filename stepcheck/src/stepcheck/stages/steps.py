"""The stages of the optimizer step, and of the moves between two."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from numbers import Real
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.report.found import Finding, Found, Likely, found, not_known, of_values, some
from stepcheck.solve.changes import Schedule
from stepcheck.solve.ratios import least
from stepcheck.stages.stated import rate_of, steps_otherwise, unlike
from stepcheck.trace.log import Applied, Log
from stepcheck.trace.measure import FINE, ROUNDED, all_same, distance, farthest, in_part, places, same
from stepcheck.trace.windows import PAD, Update, Windows, passes

INSIDE = "decay by microbatch", "weights moved inside a window", "replicas drift apart"
_HALVES = {"float16": 11, "bfloat16": 8}  # bits of a number
_FEW, _HALF, _SMALL = 5, 0.5, 1e-3  # updates; what a rate may fall to in a pass by steps of one factor, and at all


def repeated(updates: list[Update]) -> list[int]:
    """Return the numbers of the updates that apply the gradient of the update before once more, or a part of it."""
    pairs = pairwise(updates)
    return [b.number for a, b in pairs if not b.pieces and b.applied.is_whole and _are_same(a.applied, b.applied)]


def _are_same(one: Applied, two: Applied) -> bool:
    grads = [(a, b) for a, b in zip(one.grads, two.grads, strict=False) if a is not None and b is not None]
    return any(np.any(a) for a, _ in grads) and distance([a for a, _ in grads], [b for _, b in grads]) <= FINE.fits


def scheduled(learning_rate: Any) -> Schedule:
    """Return the learning rate that is meant, by update.

    Raises:
        SpecificationError: it is no number and no function.
    """
    if callable(learning_rate):
        return lambda number: float(learning_rate(number))
    if not isinstance(learning_rate, Real):
        must = "learning_rate must be a number or a function of the update."
        raise SpecificationError(message(must, type(learning_rate).__name__, "learning_rate=1e-3, or a schedule."))
    return lambda number: float(learning_rate)


def of_steps(
    seen: Windows, updates: list[Update], log: Log, schedule: Schedule | None, optimizer: Any, is_told: bool
) -> Iterator[Finding]:
    """Yield the findings on the steps of the intended optimizer, or on rates by hand."""
    if not seen.is_by_hand:
        yield from unlike(optimizer, [*log.optimizers.values()], updates, is_told=is_told)
        yield from apply(updates, schedule)
        yield from idle(seen)
        yield from accumulated_twice(seen, log.applied)
        if schedule is None:
            yield from _falling(seen)
            yield from _without_effect(updates, optimizer if log.is_stateless else None)
    elif seen.is_rated and seen.rule is not None:
        yield from rates(seen.updates, schedule, FINE.differs) if schedule is not None else ()
        yield from steps_otherwise(optimizer, seen.rule) if is_told else ()


def apply(updates: list[Update], schedule: Schedule | None) -> Iterator[Finding]:
    """Yield the findings on the optimizer steps; `schedule`: the rate that is meant, by update, from 0."""
    twice = repeated(updates)
    by_name: dict[str, list[Update]] = {}
    for a, b in pairwise(updates):
        if b.number in twice:
            name = "applied twice" if a.applied.optimizer == b.applied.optimizer else "variable updated twice"
            by_name.setdefault(name, []).append(b)
    for name, each in by_name.items():
        yield found(name, 1.0, each[0].applied.line, [u.number for u in each])
    known = [u for u in updates if u.number not in twice]
    begun = _begun_anew(known)
    if begun is not None:
        yield begun
    for rate, run in groupby(known, lambda update: update.applied.learning_rate):
        still = [*run]
        is_end = still[-1] is known[-1] and still[0] is not known[0]
        steps = [update.applied for update in still]
        is_at_rest = is_end or all(all_same(step.params, step.params_after) for step in steps)  # else by momentum
        if rate or len(still) < 3 - is_end or not is_at_rest:
            continue  # a warm-up begins with 0, for one update
        told = f"The learning rate is 0 in updates {still[0].number} to {still[-1].number}, which move no weight. Does "
        told += "its schedule divide whole numbers, or count passes over the data?"
        at_end = f"The learning rate is 0 from update {still[0].number} on. Does its schedule count updates?"
        yield Likely(at_end if is_end else told) if not is_end or 2 * len(still) >= len(known) else at_end
    is_whole = begun is None or isinstance(begun, str)
    if schedule is not None and is_whole and not twice and len({u.applied.optimizer for u in known}) == 1:
        yield from rates(known, schedule)


def _begun_anew(updates: list[Update]) -> Finding | None:
    """Return the finding on an optimizer whose state begins anew: a new optimizer, or the first state of the same."""
    steps = [u.applied for u in updates]
    pairs = [(a, b) for a, b in pairwise(steps) if a.is_whole and b.is_whole]
    others = [
        (a, b)
        for a, b in pairs  # of the same parameters: else two optimizers make one update
        if b.optimizer != a.optimizer
        and any(g is not None and h is not None for g, h in zip(a.grads, b.grads, strict=False))
    ]
    if any(b.optimizer == left.optimizer for i, (left, _) in enumerate(others) for _, b in others[i + 1 :]):
        lines = dict.fromkeys(str(step.line) for step in others[0] if step.line is not None)
        told = f"{len({step.optimizer for pair in others for step in pair})} optimizers move the same variables in turn"
        return f"{told} ({', '.join(lines)}). Is that meant?" if lines else f"{told}. Is that meant?"
    begins = {step.optimizer: step for step in reversed(steps)}
    anew = [(a, b) for a, b in others if b.iterations == 0]
    lost = [(a, b) for a, b in pairs if b.optimizer == a.optimizer and _is_first_again(steps[0], a, b)]
    for name, begun in (("optimizer re-created", anew), ("optimizer state thrown away", lost)):
        alike = [(a, b) for a, b in begun if begun is lost or _is_alike(begins[a.optimizer], b)]
        on_the_way = [_goes_on(a, b) for a, b in alike]
        numbers = [u.number for u in updates if any(u.applied is b for _, b in begun)]
        has_state = any(np.ndim(slot) for _, b in begun for slot in b.slots_after)  # more than a count and a rate
        if has_state and (sum(on_the_way) > 1 or 2 * len(alike) > len(pairs) > 0):
            return found(name, 1.0, begun[0][1].line, numbers, f"It begins anew at update {some(numbers)}.")
        if begun:
            told = f"The optimizer begins anew at update {', '.join(map(str, numbers))}"
            is_same = has_state and bool(alike) and all(on_the_way) and all(a.line == b.line for a, b in alike)
            on_one_line = Likely(f"{told}, with the same rate and on the same line: its moments are lost.")
            return on_one_line if is_same else f"{told}."
    return None


def _is_alike(one: Applied, two: Applied) -> bool:
    """Whether two optimizers have one class and begin with one rate: another rate is a new stage of the training."""
    return one.kind == two.kind and abs(one.learning_rate - two.learning_rate) <= FINE.differs * abs(one.learning_rate)


def _goes_on(one: Applied, two: Applied) -> bool:
    is_alike = [v.shape for v in one.slots_after] == [v.shape for v in two.slots_after]
    return is_alike and all_same(in_part(one.params_after), in_part(two.params))


def _is_first_again(first: Applied, before: Applied, after: Applied) -> bool:
    if len(first.slots) != len(after.slots):  # not built at first: a count of 0 tells
        return after.iterations == 0
    return all_same(first.slots, after.slots) and not all_same(before.slots_after, after.slots)


def rates(updates: list[Update], schedule: Schedule, fits: float = FINE.fits) -> Iterator[Finding]:
    """Yield the finding on the learning rates: the schedule, read at other numbers than the updates'."""
    used, first = np.array([u.applied.learning_rate for u in updates]), updates[0].applied.iterations
    before = np.concatenate([[0], np.cumsum([max(1, len(u.pieces)) for u in updates])])
    kinds = [u.sizes for u in updates]  # a trace is of batches as large

    least = ROUNDED * float(np.max(np.abs(used)))  # a rate of 0 that was solved for is as small as rounding

    def at(numbers: np.ndarray) -> np.ndarray:
        return np.maximum([schedule(int(number)) for number in first + numbers], least)

    used, counted = np.maximum(used, least), np.arange(len(updates))
    meant, line = at(counted), updates[0].applied.line
    if (without := farthest(used, meant)) <= FINE.differs:
        return
    shown = [u.number for u, a, b in zip(updates, used, meant, strict=True) if abs(a - b) > FINE.differs * abs(b)]
    for name, numbers in (
        ("schedule frozen", 0 * counted),
        ("rate frozen in a trace", np.array([kinds.index(kind) for kind in kinds])),
        ("schedule one ahead", counted + 1),
        ("schedule by microbatch", before[:-1]),
        ("schedule by microbatch", before[1:] - before[1]),
        ("schedule by microbatch", before[1:] - 1),
        ("schedule by microbatch", before[1:]),
    ):
        if (apart := farthest(used, changed := at(numbers))) <= fits:
            proof = of_values("the learning rate", lambda i: f"of update {updates[i].number}", [used, meant, changed])
            yield found(name, without, line, shown, with_change=apart, proof=proof)
            return
    at_first = [u.number for u in updates].index(shown[0])
    told = f"The learning rate of update {shown[0]} is {used[at_first]:.4g}, and {meant[at_first]:.4g} was meant."
    of_pass = np.repeat(*np.transpose([(i, len(own)) for i, own in enumerate(passes(updates))]))
    if len(of_pass) == len(updates) and farthest(used, at(of_pass)) <= fits:
        told += " It is that of the number of the pass over the data, and not of the update: does the schedule get it?"
    yield not_known("apply", told, without, line, shown)


def _falling(seen: Windows) -> Iterator[Likely]:
    """Yield a note on a rate that falls by one factor in each update, or that is near 0 in most, as in no cosine."""
    used = np.array([update.applied.learning_rate for update in seen.updates])
    is_scheduled = any(update.applied.is_scheduled for update in seen.updates)
    if is_scheduled or len(used) <= _FEW or used.min() <= 0 or np.any(np.diff(used) > 0):
        return
    factors = used[1:] / used[:-1]
    size = int(np.median([len(own) for own in passes([u for u in seen.updates if u.pieces])] or [len(used)]))
    is_by_update = np.ptp(factors) <= FINE.differs and factors[0] ** size <= _HALF
    if is_by_update or np.median(used) <= _SMALL * used[0]:
        told = f"The learning rate falls from {used[0]:.4g} to {used[-1]:.4g} in {len(used)} updates"
        how = f", by the factor {factors[0]:.4g} in each" if is_by_update else ""
        yield Likely(f"{told}{how}: is that meant for each pass over the data?")


def _without_effect(updates: list[Update], optimizer: Any) -> Iterator[Likely]:
    """Yield a note if the learning rate of an optimizer is assigned, and its stateless steps have another one."""
    now, used = rate_of(optimizer), {u.applied.learning_rate for u in updates}
    if now is None or len(used) != 1 or {u.applied.optimizer for u in updates} != {id(optimizer)}:
        return
    (rate,) = used
    if abs(now - rate) > FINE.differs * abs(rate):
        told = f"`optimizer.learning_rate` is {now:.4g} after the loop, and every update has {rate:.4g}: "
        yield Likely(f"{told}stateless steps take the rate from their own variables, `ov`. Put the new one there.")


def anew_in_each_pass(seen: Windows) -> Iterator[str]:
    """Yield a note if the learning rate depends on a batch's size alone, or begins anew at each pass over the data.

    A rate that rises in each pass, and drops where the next begins, is a warm-up that counts the batches of a pass.
    """
    if seen.is_by_hand and not seen.is_rated:
        return
    updates = [update for update in seen.updates if update.pieces]
    by_size = {u.sizes: [each.applied.learning_rate for each in updates if each.sizes == u.sizes] for u in updates}
    values = {sum(sizes): rates[0] for sizes, rates in by_size.items()}
    same = FINE.fits * max(map(abs, values.values()), default=0.0)
    runs = [size for size, _ in groupby(update.sizes for update in updates)]  # stages of the training have one each
    are_alike = len(values) > 1 and all(runs.count(n) > 1 and np.ptp(r) <= same for n, r in by_size.items())
    if are_alike and np.ptp([*values.values()]) > same < np.ptp([rate / num for num, rate in values.items()]):
        told = ", ".join(f"{rate:.4g} for {num} rows" for num, rate in values.items())
        told = f"The learning rate depends on the number of rows of a batch alone: {told}. Is it a number of Python, "
        yield Likely(f"{told}which a compiled function reads once for each shape? Pass it as a tensor.")
        return
    cut = groupby(updates, key=lambda update: seen.place[update.pieces[0].called.order][0])
    first, *others = [[update.applied.learning_rate for update in each] for _, each in cut] or [[]]
    alike = [all(abs(a - b) <= same for a, b in zip(first, other, strict=False)) for other in others]
    is_one = np.ptp(first) <= FINE.differs * np.max(np.abs(first), initial=0.0)
    if others and all(alike) and min(len(first), len(others[0])) > 2 and not is_one:
        told = f"The learning rate begins anew with each pass over the data: it goes from {first[0]:.4g} to "
        told += f"{first[-1]:.4g} in the first, and so in all. Does its schedule count the batches of a pass?"
        is_warm_up = first[0] <= min(first) + same and first[-1] - first[0] > max(first) - first[-1]
        yield Likely(told) if is_warm_up else told


def accumulated_twice(seen: Windows, steps: list[Applied]) -> Iterator[Finding]:
    """Yield the finding on sums of microbatches that the optimizer, in all its calls, accumulates once more."""
    num = max((step.accumulates for step in steps), default=1)
    own = [u for u in seen.updates if len({piece.called.replica for piece in u.pieces}) == 1 and _are_parts(u)]
    size = min((len(u.pieces) // num for u in own), default=0)
    if num > 1 and size > 1:
        detail = f"The optimizer makes one update of {num} calls, and each call has the sum of {size} microbatches."
        yield found("accumulated twice", 1 - 1 / num, own[0].applied.line, [u.number for u in own], detail)


def _are_parts(update: Update) -> bool:
    """Whether the passes of an update are microbatches: on one line, and on different rows; else one loss has them."""
    if not all(piece.is_known for piece in update.pieces):
        return False
    rows = update.rows[update.rows != PAD]
    return len({piece.called.line for piece in update.pieces}) == 1 and len(set(rows.tolist())) == len(rows)


def idle(seen: Windows) -> Iterator[Finding]:
    """Yield the finding on steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [s.number for s in steps if not all_same(s.applied.params, s.applied.params_after)]
    if moving:
        yield found("steps of zeros", len(steps) / (len(steps) + len(seen.idle)), steps[0].applied.line, moving)


def between(
    updates: list[Update], decay: float | None, names: Sequence[str] = (), *, moves_weights: bool = False
) -> Iterator[Finding]:
    """Yield the findings on weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own.
        names: of the weights.
        moves_weights: whether a pass of the model moves them, as SpectralNormalization does.
    """
    updates = [u for u in updates if u.applied.is_whole]
    lost: list[tuple] = []
    moved: list[tuple] = []
    outer = _outer(updates)
    if drifts := [*_replicas_apart(updates, names)]:
        yield from drifts
        return
    for a, b in pairwise(updates):
        first = next(iter([*b.trials, *b.pieces]), None)
        new = in_part(first.called.params if first is not None and first.called.is_whole else b.applied.params)
        made = in_part(a.applied.params_after)
        if b.follows(a) and b.number not in outer and not all_same(new, made):
            (lost if all_same(new, in_part(a.applied.params)) else moved).append((a, b, made, new))
    if lost and 2 * len(lost) > len(updates) - 1:
        without = max(distance(new, made) for *_, made, new in lost)
        yield found("update thrown away", without, lost[0][0].applied.line, [a.number for a, *_ in lost])
        return
    yield from _inside([update for update in updates if update.number not in outer], decay, moves_weights)
    if lost:
        yield f"The weights go back to what they were before update {lost[0][0].number}. Is that meant?"
    if moved:
        a, b, made, new = moved[0]
        shrunk = [_shrunk(made, new) for *_, made, new in moved]
        if decay and all(shrunk) and len(moved) > 1:
            apart = max(distance(new, made) for *_, made, new in moved)
            detail = f"By hand with the factor {shrunk[0]:.6g}; the optimizer's weight_decay is {decay:.6g}."
            yield found("decayed twice", apart, a.applied.line, [each.number for each, *_ in moved], detail)
            return
        how = f"all by one factor, {shrunk[0]:.6g}" if shrunk[0] else written(updates, a, new)
        how = f": {how}" if how else ""
        yield f"Weights move between updates {a.number} and {b.number} by no optimizer step{how}. Is that meant?"


def _replicas_apart(updates: list[Update], names: Sequence[str]) -> Iterator[Found]:
    """Yield the finding on replicas whose weights differ at the beginning of an update."""
    firsts = [{p.called.replica: p for p in u.pieces[::-1] if p.called.is_whole} for u in updates]
    states = [[in_part(piece.called.params) for piece in each.values()] for each in firsts]
    apart = [max((distance(state, own[0]) for state in own), default=0.0) for own in states]
    if max(apart, default=0.0) > FINE.differs:
        i = int(np.argmax(apart))
        differing = [k for k, own in enumerate(zip(*states[i], strict=True)) if any(not same(own[0], v) for v in own)]
        detail = f"These are {some([names[k] for k in differing])}." if names else ""
        yield found(INSIDE[2], apart[i], updates[i].applied.line, [u.number for u in updates], detail)


def _outer(updates: list[Update]) -> set[int]:
    """Return the updates that begin where the steps of another optimizer before them began, as in meta-learning."""
    runs = [next(run) for _, run in groupby(updates, key=lambda update: update.applied.optimizer)]
    same = [(b.number, all_same(in_part(a.applied.params), in_part(b.applied.params))) for a, b in pairwise(runs)]
    return {number for number, is_same in same if is_same}


def _inside(updates: list[Update], decay: float | None, moves_weights: bool) -> Iterator[Finding]:
    """Find weights that move between the microbatches of one update, or between the last one and the step.

    Without microbatches a decay by hand before the step is one per update, and other weights may be earlier ones.
    """
    moved = [
        (update, one, two)
        for update in updates
        if not update.trials
        for one, two in pairwise(_states(update))
        if not all_same(one, two)
    ]
    apart = max((distance(one, two) for _, one, two in moved), default=0.0)
    if apart > 0:
        first, numbers = moved[0][0], sorted({u.number for u, *_ in moved})
        line = first.pieces[-1].called.line if first.pieces else first.applied.line
        shares = [_shrunk(one, two) for _, one, two in moved]
        if all(shares) and all(len(u.pieces) == 1 for u, *_ in moved) and not moves_weights:
            if decay:
                detail = f"By hand with the factor {shares[0]:.6g}; the optimizer's weight_decay is {decay:.6g}."
                yield found("decayed twice", apart, first.applied.line, numbers, detail)
            return
        if all(len(u.pieces) == 1 for u, *_ in moved) and not moves_weights:
            begun = [in_part(update.applied.params) for update in updates]
            are_earlier = all(any(all_same(one, each) for each in begun) for _, one, _ in moved)
            at = "weights with which an earlier update began" if are_earlier else "other weights than the step moves"
            told = f"The gradients of updates {some(numbers, 6)} are taken at {at}."
            yield Likely(f"{told} Take them at the weights that the update before has made.")
            return
        yield found(INSIDE[0] if all(shares) else INSIDE[1], apart, line, numbers)


def _states(update: Update) -> list[list[np.ndarray]]:
    called = [in_part(piece.called.params) for piece in update.pieces if piece.called.is_whole]
    return [*called, in_part(update.applied.params)]


def _shrunk(one: list[np.ndarray], two: list[np.ndarray]) -> float:
    """Return the factor below 1 by which all weights that moved have become smaller, or 0."""
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if not np.array_equal(a, b)]
    if not pairs:
        return 0.0
    old, new = (np.concatenate([np.ravel(p[i]) for p in pairs]).astype("float64") for i in (0, 1))
    factor = float(old @ new / (old @ old)) if old.any() else 0.0
    return factor if 0 < factor < 1 and distance(new, factor * old) <= 1e-6 else 0.0


def written(updates: list[Update], before: Update, new: list[np.ndarray]) -> str:
    """Return what replaced the weights after an update: earlier ones, an average of some, or a cut; "" if none fits."""
    number = [u is before for u in updates].index(True) + 1
    states = [in_part(u.applied.params) for u in updates[:number] if u.applied.is_whole]
    vectors = np.stack([as_vector(state) for state in [*states, before.applied.params_after]])
    wanted, last = as_vector(new), vectors[-1]
    for i, vector in enumerate(vectors):
        if distance(vector, wanted) <= ROUNDED:
            return f"they become those before update {updates[i].number} again"
    bound = max(float(np.max(np.abs(leaf), initial=0.0)) for leaf in new)
    if distance(np.clip(last, -bound, bound), wanted) <= ROUNDED:
        return f"all are cut to at most {bound:.6g}"
    mantissas, exponents = np.frexp(last)
    for kind, num_bits in _HALVES.items():
        if np.array_equal(np.ldexp(np.round(np.ldexp(mantissas, num_bits)), exponents - num_bits), wanted):
            return f"all are rounded to {kind}"
    steps = (vectors[:-1] - last).T  # weights of an average add up to 1
    if steps.shape[0] <= 2 * steps.shape[1]:
        return ""
    shares = least(list(steps.T), wanted - last)[0]
    rest = 1 - float(shares.sum())
    if not distance(wanted - last, steps @ shares) <= FINE.differs or min(shares.min(), rest) < -0.01:
        return ""
    return f"an average of the weights of {len(vectors)} updates takes their place, with {rest:.3g} of the last ones"


def as_vector(state: list[np.ndarray]) -> np.ndarray:
    """Return weights as one vector, of many weights those at some places."""
    whole = np.concatenate([np.ravel(leaf) for leaf in in_part(state)]).astype("float64")
    return whole if (chosen := places(len(whole))) is None else whole[chosen]
