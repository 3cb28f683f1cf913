"""The stages of the optimizer step and of the moves between two: counts, slots, learning rates, written weights."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from wholestep.audit.found import Finding, Likely, found, not_known, of_values, some
from wholestep.audit.log import Applied
from wholestep.audit.measure import FINE, ROUNDED, all_same, distance, farthest, in_part
from wholestep.audit.ratios import least
from wholestep.audit.windows import Update, Windows
from wholestep.errors import SpecificationError, message

Schedule = Callable[[int], float]
INSIDE = "decay by microbatch", "weights moved inside a window"
NUM_KEPT = 20_000  # weights that are compared, drawn once


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
    if not isinstance(learning_rate, int | float):
        must = "learning_rate must be a number or a function of the update."
        raise SpecificationError(message(must, type(learning_rate).__name__, "learning_rate=1e-3, or a schedule."))
    return lambda number: float(learning_rate)


def apply(updates: list[Update], schedule: Schedule | None) -> Iterator[Finding]:
    """Yield the findings on the optimizer steps.

    Args:
        schedule: the learning rate that is meant, by the number of the update from 0; None if it is not known.
    """
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
    moving = [i for i, update in enumerate(known) if update.applied.learning_rate != 0]
    still = known[moving[-1] + 1 :] if moving else []
    if len(still) > 1:
        told = f"The learning rate is 0 from update {still[0].number} on. Does its schedule count updates?"
        yield Likely(told) if 2 * len(still) >= len(known) else told
    is_whole = begun is None or isinstance(begun, str)
    if schedule is not None and is_whole and not twice and len({u.applied.optimizer for u in known}) == 1:
        yield from rates(known, schedule)


def _begun_anew(updates: list[Update]) -> Finding | None:
    """Return the finding on an optimizer whose state begins anew: a new optimizer, or the first state of the same."""
    steps = [u.applied for u in updates]
    pairs = [(a, b) for a, b in pairwise(steps) if a.is_whole and b.is_whole]
    in_turn = [(a, b) for a, b in pairs if b.optimizer != a.optimizer and _overlap(a, b)]
    if _returns(in_turn):
        return _in_turn(in_turn)
    anew = [(a, b) for a, b in pairs if b.optimizer != a.optimizer and b.iterations == 0 and _overlap(a, b)]
    lost = [(a, b) for a, b in pairs if b.optimizer == a.optimizer and _is_first_again(steps[0], a, b)]
    for name, begun in (("optimizer re-created", anew), ("optimizer state thrown away", lost)):
        alike = [(a, b) for a, b in begun if begun is lost or _is_alike(_beginning(steps, a), b)]
        is_often = begun is anew and sum(_goes_on(a, b) for a, b in alike) > 1
        numbers = [u.number for u in updates if any(u.applied is b for _, b in begun)]
        if is_often or 2 * len(alike) > len(pairs) > 0:
            return found(name, 1.0, begun[0][1].line, numbers, f"It begins anew at update {some(numbers)}.")
        if begun:
            return f"The optimizer begins anew at update {', '.join(map(str, numbers))}."
    return None


def _returns(changed: list[tuple[Applied, Applied]]) -> bool:
    """Whether an optimizer makes steps again after another one has made some of the same variables."""
    return any(b.optimizer == left.optimizer for i, (left, _) in enumerate(changed) for _, b in changed[i + 1 :])


def _in_turn(changed: list[tuple[Applied, Applied]]) -> str:
    """Return the note on optimizers that move the same variables in turn."""
    lines = dict.fromkeys(str(step.line) for step in changed[0] if step.line is not None)
    told = f"{len({step.optimizer for pair in changed for step in pair})} optimizers move the same variables in turn"
    told += f" ({', '.join(lines)})" if lines else ""
    return f"{told}. Is that meant?"


def _beginning(steps: list[Applied], step: Applied) -> Applied:
    """Return the first step of the optimizer that made this step."""
    return next(each for each in steps if each.optimizer == step.optimizer)


def _is_alike(one: Applied, two: Applied) -> bool:
    """Whether two optimizers have one class and begin with one rate: another rate is a new stage of the training."""
    return one.kind == two.kind and abs(one.learning_rate - two.learning_rate) <= FINE.differs * abs(one.learning_rate)


def _goes_on(one: Applied, two: Applied) -> bool:
    """Whether another optimizer of the same kind continues with the weights of the optimizer before."""
    is_alike = [v.shape for v in one.slots_after] == [v.shape for v in two.slots_after]
    return is_alike and all_same(in_part(one.params_after), in_part(two.params))


def _overlap(one: Applied, two: Applied) -> bool:
    """Whether two steps move the same parameters, rather than being two optimizers' of one update."""
    return any(a is not None and b is not None for a, b in zip(one.grads, two.grads, strict=True))


def _is_first_again(first: Applied, before: Applied, after: Applied) -> bool:
    if len(first.slots) != len(after.slots):  # not built at first: a count of 0 tells
        return after.iterations == 0
    return all_same(first.slots, after.slots) and not all_same(before.slots_after, after.slots)


def rates(updates: list[Update], schedule: Schedule, fits: float = FINE.fits) -> Iterator[Finding]:
    """Yield the finding on the learning rates: the schedule, read at other numbers than the updates'."""
    used, first = np.array([u.applied.learning_rate for u in updates]), updates[0].applied.iterations
    before = np.concatenate([[0], np.cumsum([max(1, len(u.pieces)) for u in updates])])
    kinds = [tuple(len(piece.rows) for piece in u.pieces) for u in updates]  # a trace is of batches as large

    def at(numbers: np.ndarray) -> np.ndarray:
        return np.array([schedule(int(number)) for number in first + numbers])

    counted = np.arange(len(updates))
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
    yield not_known("apply", "The learning rates are not those of the schedule that was meant.", without, line, shown)


def anew_in_each_pass(seen: Windows) -> Iterator[str]:
    """Yield a note if the learning rate moves within a pass over the data, and begins anew at the next."""
    if seen.is_by_hand and not seen.is_rated:
        return
    passes: dict[int, list[float]] = {}
    for update in seen.updates:
        if update.pieces:
            number, _ = seen.place[update.pieces[0].called.order]
            passes.setdefault(number, []).append(update.applied.learning_rate)
    first, *others = passes.values() if passes else [[]]
    same = FINE.fits * max(first, default=0.0)
    alike = [all(abs(a - b) <= same for a, b in zip(first, other, strict=False)) for other in others]
    if others and all(alike) and min(len(first), len(others[0])) > 2 and np.ptp(first) > FINE.differs * max(first):
        told = f"The learning rate begins anew with each pass over the data: it goes from {first[0]:.4g} to "
        yield f"{told}{first[-1]:.4g} in the first, and so in all. Does its schedule count the batches of a pass?"


def accumulated_twice(seen: Windows, steps: list[Applied]) -> Iterator[Finding]:
    """Yield the finding on sums of microbatches that the optimizer accumulates once more.

    Args:
        steps: all calls of the optimizer.
    """
    num = max((step.accumulates for step in steps), default=1)
    own = [u for u in seen.updates if len({piece.called.replica for piece in u.pieces}) == 1]
    size = min((len(u.pieces) // num for u in own), default=0)
    if num > 1 and size > 1:
        detail = f"The optimizer makes one update of {num} calls, and each call has the sum of {size} microbatches."
        yield found("accumulated twice", 1 - 1 / num, own[0].applied.line, [u.number for u in own], detail)


def idle(seen: Windows) -> Iterator[Finding]:
    """Yield the finding on steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [s.number for s in steps if not all_same(s.applied.params, s.applied.params_after)]
    if moving:
        yield found("steps of zeros", len(steps) / (len(steps) + len(seen.idle)), steps[0].applied.line, moving)


def between(updates: list[Update], decay: float | None) -> Iterator[Finding]:
    """Yield the findings on weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own weight decay, if it has one.
    """
    updates = [u for u in updates if u.applied.is_whole]
    lost: list[tuple] = []
    moved: list[tuple] = []
    for a, b in pairwise(updates):
        first = next(iter([*b.trials, *b.pieces]), None)
        new = in_part(first.called.params if first is not None and first.called.is_whole else b.applied.params)
        made = in_part(a.applied.params_after)
        if b.follows(a) and not all_same(new, made):
            (lost if all_same(new, in_part(a.applied.params)) else moved).append((a, b, made, new))
    if lost and 2 * len(lost) > len(updates) - 1:
        without = max(distance(new, made) for *_, made, new in lost)
        yield found("update thrown away", without, lost[0][0].applied.line, [a.number for a, *_ in lost])
        return
    yield from _inside(updates)
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


def _inside(updates: list[Update]) -> Iterator[Finding]:
    """Find weights that move between the microbatches of one update, or between the last one and the step."""
    moved = [
        (update, one, two)
        for update in updates
        if not update.trials
        for one, two in pairwise(_states(update))
        if not all_same(one, two)
    ]
    apart = max((distance(one, two) for _, one, two in moved), default=0.0)
    if apart > 0:
        first = moved[0][0]
        line = first.pieces[-1].called.line if first.pieces else first.applied.line
        name = INSIDE[0] if all(_shrunk(one, two) for _, one, two in moved) else INSIDE[1]
        yield found(name, apart, line, sorted({u.number for u, *_ in moved}))


def _states(update: Update) -> list[list[np.ndarray]]:
    """Return the weights of an update's forward passes, and those at the beginning of its step."""
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
    """Return what replaced the weights after an update: earlier ones, an average of some, or a cut; "" if none fits.

    Args:
        new: the weights, as `in_part` has them.
    """
    number = [u is before for u in updates].index(True) + 1
    states = [in_part(u.applied.params) for u in updates[:number] if u.applied.is_whole]
    vectors = np.stack([as_vector(state) for state in [*states, in_part(before.applied.params_after)]])
    wanted, last = as_vector(new), vectors[-1]
    for i, vector in enumerate(vectors):
        if distance(vector, wanted) <= ROUNDED:
            return f"they become those before update {updates[i].number} again"
    bound = max(float(np.max(np.abs(leaf), initial=0.0)) for leaf in new)
    if distance(np.clip(last, -bound, bound), wanted) <= ROUNDED:
        return f"all are cut to at most {bound:.6g}"
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
    whole = np.concatenate([np.ravel(leaf).astype("float64") for leaf in state])
    return whole if len(whole) <= NUM_KEPT else whole[np.random.default_rng(0).permutation(len(whole))[:NUM_KEPT]]
