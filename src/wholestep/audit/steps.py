"""The stages of the optimizer step and of what happens between two: counts, slots, learning rates, written weights."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.found import DIFFERS, FITS, Found, distance, far, found, not_known
from wholestep.audit.keeping import all_same, in_part
from wholestep.audit.log import Applied
from wholestep.audit.proof import of_values
from wholestep.audit.windows import Update, Windows
from wholestep.audit.written import written

Schedule = Callable[[int], float]
INSIDE = "decay by microbatch", "weights moved inside a window"
ROUNDED = 1e-3  # of a move there and back


def repeated(updates: list[Update]) -> list[int]:
    """Return the numbers of the updates that apply the gradient of the one before once more, or a part of it."""
    pairs = pairwise(updates)
    return [b.number for a, b in pairs if not b.pieces and b.applied.is_whole and _are_same(a.applied, b.applied)]


def _are_same(one: Applied, two: Applied) -> bool:
    grads = [(a, b) for a, b in zip(one.grads, two.grads, strict=False) if a is not None and b is not None]
    return any(np.any(a) for a, _ in grads) and far(*map(list, zip(*grads, strict=True))) <= FITS


def _again(updates: list[Update], numbers: list[int]) -> list[Found]:
    """Return the causes of these updates, which are repeated: by the same optimizer, or by another one."""
    by_name: dict[str, list[int]] = {}
    for a, b in pairwise(updates):
        if b.number in numbers:
            name = "applied twice" if a.applied.optimizer == b.applied.optimizer else "variable updated twice"
            by_name.setdefault(name, []).append(b.number)
    line = {u.number: u.applied.line for u in updates}
    return [found(BY_NAME[name], 1.0, 0.0, line[each[0]], each) for name, each in by_name.items()]


def apply(updates: list[Update], schedule: Schedule | None) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of the optimizer steps.

    Args:
        schedule: the learning rate that is meant, by the number of the update from 0; None if it is not known.
    """
    causes: list[Found] = []
    notes: list[str] = []
    twice = repeated(updates)
    causes += _again(updates, twice)
    known = [u for u in updates if u.number not in twice]
    state, told = _state([u.applied for u in known], known)
    causes, notes = [*causes, *state], [*notes, *told, *_at_rest(known)]
    if schedule is not None and not state and not twice and len({u.applied.optimizer for u in known}) == 1:
        changed, told = rates(known, schedule)
        causes, notes = [*causes, *changed], [*notes, *told]
    return causes, notes


def _at_rest(updates: list[Update]) -> list[str]:
    """Return a note if the learning rate has come to zero, and stays there."""
    moving = [i for i, update in enumerate(updates) if update.applied.learning_rate != 0]
    still = updates[moving[-1] + 1 :] if moving else []
    if len(still) < 2:
        return []
    return [f"The learning rate is 0 from update {still[0].number} on. Does its schedule count updates?"]


def _state(steps: list[Applied], updates: list[Update]) -> tuple[list[Found], list[str]]:
    pairs = [(a, b) for a, b in pairwise(steps) if a.is_whole and b.is_whole]
    if not pairs:
        return [], []
    anew = [b for a, b in pairs if b.optimizer != a.optimizer and b.iterations == 0 and _overlap(a, b)]
    lost = [b for a, b in pairs if b.optimizer == a.optimizer and _is_first_again(steps[0], a, b)]
    for name, some in (("optimizer re-created", anew), ("optimizer state thrown away", lost)):
        numbers = [u.number for u in updates if _is_one(u.applied, some)]
        alike = [b for b in some if name != "optimizer re-created" or _is_alike(_beginning(steps, b), b)]
        is_often = name == "optimizer re-created" and sum(_goes_on(a, b) for a, b in pairs if _is_one(b, alike)) > 1
        if is_often or 2 * len(alike) > len(pairs):
            told = f"It begins anew at update {', '.join(map(str, numbers[:8]))}{', ...' if numbers[8:] else ''}."
            return [found(BY_NAME[name], 1.0, 0.0, some[0].line, numbers, told)], []
        if some:
            return [], [f"The optimizer begins anew at update {', '.join(map(str, numbers))}."]
    return [], []


def _is_one(step: Applied, some: list[Applied]) -> bool:
    return any(step is each for each in some)


def _beginning(steps: list[Applied], step: Applied) -> Applied:
    """Return the first step of the optimizer that made the step before this one."""
    place = next(i for i, each in enumerate(steps) if each is step)
    return next(each for each in steps if each.optimizer == steps[place - 1].optimizer)


def _is_alike(one: Applied, two: Applied) -> bool:
    """Whether two optimizers have one class and begin with one rate: another rate is a new stage of the training."""
    return one.kind == two.kind and abs(one.learning_rate - two.learning_rate) <= DIFFERS * abs(one.learning_rate)


def _goes_on(one: Applied, two: Applied) -> bool:
    """Whether another optimizer of the same kind goes on with the weights of the one before."""
    is_alike = [v.shape for v in one.slots_after] == [v.shape for v in two.slots_after]
    return is_alike and all_same(in_part(one.params_after), in_part(two.params))


def _overlap(one: Applied, two: Applied) -> bool:
    """Whether two steps move the same parameters, rather than being two optimizers' of one update."""
    return any(a is not None and b is not None for a, b in zip(one.grads, two.grads, strict=True))


def _is_first_again(first: Applied, before: Applied, after: Applied) -> bool:
    if len(first.slots) != len(after.slots):  # not built at first: a count of 0 tells
        return after.iterations == 0
    return all_same(first.slots, after.slots) and not all_same(before.slots_after, after.slots)


class _Told(NamedTuple):
    name: str
    rates: np.ndarray


def rates(updates: list[Update], schedule: Schedule, fits: float = FITS) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of the learning rates."""
    found_rates = np.array([u.applied.learning_rate for u in updates])
    first = updates[0].applied.iterations
    before = np.concatenate([[0], np.cumsum([max(1, len(u.pieces)) for u in updates])])

    def at(numbers: np.ndarray) -> np.ndarray:
        return np.array([schedule(int(number)) for number in numbers])

    numbers = first + np.arange(len(updates))
    without = _worst(found_rates, at(numbers))
    if without <= DIFFERS:
        return [], []
    changed = [
        _Told("schedule frozen", at(np.full(len(updates), first))),
        _Told("rate frozen in a trace", at(first + _first_alike(updates))),
        _Told("schedule one ahead", at(numbers + 1)),
        _Told("schedule by microbatch", at(first + before[:-1])),
        _Told("schedule by microbatch", at(first - before[1] + before[1:])),
        _Told("schedule by microbatch", at(first + before[1:] - 1)),
    ]
    shown = [
        u.number for u, a, b in zip(updates, found_rates, at(numbers), strict=True) if abs(a - b) > DIFFERS * abs(b)
    ]
    line = updates[0].applied.line
    for told in changed:
        if (apart := _worst(found_rates, told.rates)) <= fits:
            columns = [found_rates, at(numbers), told.rates]
            proof = of_values("the learning rate", lambda i: f"of update {updates[i].number}", columns)
            return [found(BY_NAME[told.name], without, apart, line, shown, proof=proof)], []
    return [
        not_known("apply", "The learning rates are not those of the schedule that was meant.", without, line, shown)
    ], []


def _first_alike(updates: list[Update]) -> np.ndarray:
    """Return, for each update, which was the first with batches as large as its own."""
    kinds = [tuple(len(piece.rows) for piece in u.pieces) for u in updates]
    return np.array([kinds.index(kind) for kind in kinds])


def _worst(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.max(np.abs(one - two) / np.maximum(np.abs(two), 1e-30)))


def accumulated_twice(seen: Windows, steps: list[Applied]) -> list[Found]:
    """Return sums of several microbatches of which the optimizer itself makes a sum.

    Args:
        steps: all calls of the optimizer.
    """
    num = max((step.accumulates for step in steps), default=1)
    own = [u for u in seen.updates if len({piece.called.replica for piece in u.pieces}) == 1]
    sizes = {len(u.pieces) // num for u in own} if num > 1 else set()
    if not own or not sizes or min(sizes) < 2:
        return []
    detail = f"The optimizer makes one update of {num} calls, and each call has the sum of {min(sizes)} microbatches."
    without, line = 1 - 1 / num, own[0].applied.line
    return [found(BY_NAME["accumulated twice"], without, 0.0, line, [u.number for u in own], detail)]


def idle(seen: Windows) -> list[Found]:
    """Return steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [s.number for s in steps if not all_same(s.applied.params, s.applied.params_after)]
    if not moving:
        return []
    line = steps[0].applied.line
    share = len(steps) / (len(steps) + len(seen.idle))
    return [found(BY_NAME["steps of zeros"], share, 0.0, line, moving)]


def between(updates: list[Update], decay: float | None) -> tuple[list[Found], list[str]]:
    """Return (causes, notes) of weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own weight decay, if it has one.
    """
    updates = [u for u in updates if u.applied.is_whole]
    lost: list[tuple] = []
    moved: list[tuple] = []
    for a, b in pairwise(updates):
        if b.number != a.number + 1:
            continue
        new = in_part(b.pieces[0].called.params if b.pieces and b.pieces[0].called.is_whole else b.applied.params)
        if all_same(new, in_part(a.applied.params_after)):
            continue
        (lost if all_same(new, in_part(a.applied.params)) else moved).append((a, b, new))
    if 2 * len(lost) > len(updates) - 1:
        without = max(far(new, in_part(a.applied.params_after)) for a, _, new in lost)
        line, numbers = lost[0][0].applied.line, [a.number for a, *_ in lost]
        return [found(BY_NAME["update thrown away"], without, 0.0, line, numbers)], []
    causes, notes = _inside(updates), []
    if lost:
        notes.append(f"The weights go back to what they were before update {lost[0][0].number}. Is that meant?")
    if moved:
        a, b, new = moved[0]
        shrunk = [_shrunk(in_part(a.applied.params_after), new) for a, _, new in moved]
        if decay and all(shrunk) and len(moved) > 1:
            apart, numbers = (
                max(far(new, in_part(a.applied.params_after)) for a, _, new in moved),
                [a.number for a, *_ in moved],
            )
            detail = f"By hand with the factor {shrunk[0]:.6g}; the optimizer's weight_decay is {decay:.6g}."
            return [*causes, found(BY_NAME["decayed twice"], apart, 0.0, a.applied.line, numbers, detail)], notes
        how = f"all by one factor, {shrunk[0]:.6g}" if shrunk[0] else written(updates, a, new)
        how = f": {how}" if how else ""
        notes.append(
            f"Weights move between updates {a.number} and {b.number} by no optimizer step{how}. Is that meant?"
        )
    return causes, notes


def _inside(updates: list[Update]) -> list[Found]:
    """Find weights that move between the microbatches of one update, or between the last one and the step."""
    found_in, factors, apart = [], [], []
    for update in updates:
        states = [] if _comes_back(update) else _states(update)
        for one, two in pairwise(states):
            if not all_same(one, two):
                found_in.append(update)
                factors.append(_shrunk(one, two))
                apart.append(far(one, two))
    if not found_in:
        return []
    numbers = sorted({u.number for u in found_in})
    line = found_in[0].pieces[-1].called.line if found_in[0].pieces else found_in[0].applied.line
    name = INSIDE[0] if all(factors) else INSIDE[1]
    return [found(BY_NAME[name], max(apart), 0.0, line, numbers)] if max(apart) > 0 else []


def away(updates: list[Update]) -> list[int]:
    """Return the numbers of updates with a forward pass at other weights, which come back before the step.

    So does sharpness-aware minimisation, on TensorFlow but for rounding.
    """
    return [update.number for update in updates if update.applied.is_whole and _comes_back(update)]


def _comes_back(update: Update) -> bool:
    states = _states(update)
    most = max((far(states[0], state) for state in states[1:-1]), default=0.0)
    return most > 0 and far(states[0], states[-1]) <= ROUNDED * most


def _states(update: Update) -> list[list[np.ndarray]]:
    """Return the weights of an update's forward passes, and those that its step begins with."""
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
