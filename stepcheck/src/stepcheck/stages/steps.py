"""The stage of the optimizer step: its arithmetic, its state and its rate."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Fault, Stage
from stepcheck.port import Port
from stepcheck.solve.changes import Schedule
from stepcheck.solve.replays import all_again
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.log import Applied
from stepcheck.trace.measure import (
    FINE,
    ROUNDED,
    SOLVED,
    all_same,
    distance,
    in_part,
)
from stepcheck.trace.windows import Rule, Update, Windows
from stepcheck.values import (
    Change,
    Finding,
    Proof,
    Reason,
    Shown,
    Unjudged,
    Where,
)

_UNKNOWN = float("nan")


def scheduled(learning_rate: Any) -> Schedule:
    """Return the learning rate that is meant, by update.

    Raises:
        SpecificationError: it is no number and no function.
    """
    if callable(learning_rate):
        return lambda number: float(learning_rate(number))
    if not isinstance(learning_rate, Real):
        must = "learning_rate must be a number or a function of the update."
        given = type(learning_rate).__name__
        raise SpecificationError(
            message(must, given, "learning_rate=1e-3, or a schedule.")
        )
    return lambda number: float(learning_rate)


def repeated(updates: list[Update]) -> list[int]:
    """Return the numbers of the updates that apply the gradient of the update before
    once more, or a part of it.
    """
    return [
        b.number
        for a, b in pairwise(updates)
        if not b.pieces and b.applied.is_whole and _have_one_gradient(a, b)
    ]


def _have_one_gradient(one: Update, two: Update) -> bool:
    pairs = zip(one.applied.grads, two.applied.grads, strict=False)
    both = [(g, h) for g, h in pairs if g is not None and h is not None]
    old, new = [g for g, _ in both], [h for _, h in both]
    return any(map(np.any, old)) and distance(old, new) <= FINE.fits


def of_steps(
    port: Port,
    seen: Windows,
    updates: list[Update],
    optimizers: dict[int, Any],
    schedule: Schedule | None,
    stated: Any,
) -> Iterator[Finding | Unjudged]:
    """Yield the findings on the optimizer steps, or on rates by hand.

    Args:
        optimizers: those that made the steps, by identity.
        schedule: the rate that is meant, by update, from 0; None if it is not known.
        stated: the optimizer that the user states; None if none is.
    """
    if seen.is_by_hand:
        if seen.rule is not None:
            yield from rates(seen.updates, schedule, FINE.differs)
            if stated is not None and not _is_as_stated(seen.rule, stated):
                yield Unjudged(Reason.OWN_STEP, Stage.STEP)
        return
    anew = [*_applied(updates, schedule)]
    yield from anew
    yield from _of_zeros(seen)
    whole = [u for u in updates if u.applied.is_whole]
    found = [*_of_arithmetic(port, whole)]
    yield from found
    if any(isinstance(each, Finding) for each in [*anew, *found]):
        return
    others = [each for each in optimizers.values() if each is not stated]
    if stated is not None and len(optimizers) == 1 and others:
        yield from _of_stated(port, stated, others[0], updates)
    are_several = stated is not None and any(
        type(each) is not type(stated) or port.differing(each, stated)
        for each in others
    )
    if (are_several and len(optimizers) > 1) or (
        schedule is not None and any(map(_has_rates, whole))
    ):
        yield Unjudged(Reason.SEVERAL_STEPS, Stage.STEP)


def _has_rates(update: Update) -> bool:
    return len({rule.rate for rule in update.applied.rules if rule}) > 1


def _is_as_stated(rule: Rule, stated: Any) -> bool:
    """Whether the rule of steps by hand is known to be the stated optimizer's."""
    if getattr(stated, "nesterov", False):
        return False
    names = ("beta_1", "beta_2") if rule.is_adaptive else ("momentum",)
    own = *rule.momenta, rule.decay[0]
    meant = [getattr(stated, name, 0) or 0 for name in (*names, "weight_decay")]
    return len(own) == len(meant) and bool(
        np.allclose(own, meant, SOLVED, SOLVED)
    )


def _finding(
    fault: Fault,
    updates: Sequence[Update],
    numbers: Sequence[float] = (),
    *,
    names: Sequence[str] = (),
    apart: float = 1.0,
    with_error: float = _UNKNOWN,
    proof: Proof | None = None,
) -> Finding:
    change = Change(
        fault, numbers=tuple(map(float, numbers)), names=tuple(names)
    )
    where = Where(
        tuple(u.number for u in updates), line=updates[0].applied.line
    )
    return Finding(change, apart, with_error, where, proof)


# ---- the arithmetic of a step ----


def _of_arithmetic(
    port: Port, updates: list[Update]
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on steps that are not their optimizer's own, from the recorded
    gradients and slots.
    """
    made = all_again(port, updates)
    num_left = len(updates) - sum(again.is_whole for again in made)
    if num_left:
        yield Unjudged(Reason.STEP_UNKNOWN, Stage.STEP, num_left)
    wrong = [again for again in made if not again.is_right]
    if wrong:
        first, step = wrong[0], wrong[0].update.applied
        are_others = np.any([again.apart > 1 for again in wrong], axis=0)
        names = tuple(port.names[i] for i in np.flatnonzero(are_others))
        states = step.params, step.params_after, first.params
        before, own, meant = (port.flat([*in_part(state)]) for state in states)
        values = own, meant, np.full(len(own), _UNKNOWN)
        proof = proof_of(
            first.update.number, Shown.WEIGHT, port.name_at, values
        )
        apart = distance(own - before, meant - before)
        numbers = tuple(again.update.number for again in wrong)
        where = Where(numbers, parameters=names, line=step.line)
        yield Finding(
            Change(Fault.STEP_UNLIKE), apart, where=where, proof=proof
        )


def _of_stated(
    port: Port, stated: Any, used: Any, updates: list[Update]
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on an optimizer of other arguments than the stated one's, or of
    another class.
    """
    is_alike = isinstance(used, type(stated)) or isinstance(stated, type(used))
    pairs = port.differing(used, stated) if is_alike else {}
    every = {
        name: [float(number or 0) for number in pairs[name]] for name in pairs
    }
    differing = {name: own for name, own in every.items() if len({*own}) > 1}
    if differing or not is_alike:
        names = type(used).__name__, type(stated).__name__, *differing
        numbers = [number for own in differing.values() for number in own]
        yield _finding(Fault.ANOTHER_OPTIMIZER, updates, numbers, names=names)
    elif type(used) is not type(stated):
        yield Unjudged(Reason.STEP_UNKNOWN, Stage.STEP)


# ---- the state of an optimizer ----


def _applied(
    updates: list[Update], schedule: Schedule | None
) -> Iterator[Finding]:
    """Yield the findings on steps that are made twice, on states that begin anew, and
    on rates.
    """
    twice = repeated(updates)
    again = [(a, b) for a, b in pairwise(updates) if b.number in twice]
    if again:
        is_one = all(
            a.applied.optimizer == b.applied.optimizer for a, b in again
        )
        fault = Fault.APPLIED_TWICE if is_one else Fault.VARIABLE_UPDATED_TWICE
        yield _finding(fault, [b for _, b in again])
    known = [u for u in updates if u.number not in twice]
    begun = [*_begun_anew(known)]
    yield from begun
    is_one = len({u.applied.optimizer for u in known}) == 1
    if is_one and not begun and not twice:
        yield from rates(known, schedule)


def _begun_anew(updates: list[Update]) -> Iterator[Finding]:
    """Yield the finding on an optimizer whose state begins anew: a new optimizer, or
    the first state of the same.
    """
    whole = [u for u in updates if u.applied.is_whole]
    pairs = [(a, b) for a, b in pairwise(whole) if b.follows(a)]
    changes = [(a, b) for a, b in pairs if _is_another(a.applied, b.applied)]
    owners = [b.applied.optimizer for _, b in changes]
    owners += [a.applied.optimizer for a, _ in changes[:1]]
    if len({*owners}) < len(owners):
        return  # several optimizers in turn
    firsts = {u.applied.optimizer: u.applied for u in reversed(whole)}
    anew = [
        b for a, b in changes if _is_new(firsts[a.applied.optimizer], b.applied)
    ]
    lost = [
        b
        for a, b in pairs
        if _is_first_again(whole[0].applied, a.applied, b.applied)
    ]
    begun = anew or lost
    slots = [slot for b in begun for slot in b.applied.slots_after]
    on_the_way = [
        b for a, b in pairs if b in begun and _goes_on(a.applied, b.applied)
    ]
    is_usual = len(on_the_way) > 1 or 2 * len(begun) > len(pairs)
    if any(map(np.ndim, slots)) and is_usual:  # more than a count and a rate
        fault = Fault.OPTIMIZER_RE_CREATED
        yield _finding(
            fault if anew else Fault.OPTIMIZER_STATE_THROWN_AWAY, begun
        )


def _is_another(one: Applied, two: Applied) -> bool:
    """Whether two optimizers move one parameter in turn; else they make one update."""
    pairs = zip(one.grads, two.grads, strict=False)
    is_shared = any(g is not None and h is not None for g, h in pairs)
    return is_shared and one.optimizer != two.optimizer


def _is_new(one: Applied, two: Applied) -> bool:
    """Whether an optimizer begins as the one before it; another rate is a new stage of
    the training.
    """
    apart = abs(one.learning_rate - two.learning_rate)
    is_rate_alike = apart <= FINE.differs * abs(one.learning_rate)
    return two.iterations == 0 and one.kind == two.kind and is_rate_alike


def _is_first_again(first: Applied, one: Applied, two: Applied) -> bool:
    """Whether an optimizer begins with the slots of its first step, which have moved."""
    if one.optimizer != two.optimizer:
        return False
    if len(first.slots) != len(
        two.slots
    ):  # not built at first: a count of 0 tells
        return two.iterations == 0
    has_moved = not all_same(one.slots_after, two.slots)
    return has_moved and all_same(first.slots, two.slots)


def _goes_on(one: Applied, two: Applied) -> bool:
    return all_same(in_part(one.params_after), in_part(two.params))


def _of_zeros(seen: Windows) -> Iterator[Finding]:
    """Yield the finding on steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [s for s in steps if not _goes_on(s.applied, s.applied)]
    if moving:
        share = len(steps) / (len(steps) + len(seen.idle))
        yield _finding(Fault.STEPS_OF_ZEROS, moving, apart=share)


# ---- the rate ----


def rates(
    updates: list[Update], schedule: Schedule | None, fits: float = FINE.fits
) -> Iterator[Finding]:
    """Yield the finding on the learning rates: the schedule, read at other numbers than
    the updates'.
    """
    if schedule is None or not updates:
        return
    meant_at: Callable[[int], float] = schedule
    first, counted = updates[0].applied.iterations, np.arange(len(updates))
    used = np.array([u.applied.learning_rate for u in updates])
    least = ROUNDED * np.max(np.abs(used))  # a rate of 0 that was solved for

    def at(numbers: np.ndarray) -> np.ndarray:
        return np.maximum([meant_at(int(i)) for i in first + numbers], least)

    used, meant = np.maximum(used, least), at(counted)
    apart = _relative(used, meant)
    differing = np.flatnonzero(apart > FINE.differs)
    if not len(differing):
        return
    i = int(differing[0])
    fault, changed = Fault.RATE_UNLIKE, np.full(len(used), _UNKNOWN)
    numbers: tuple[float, ...] = used[i], meant[i]
    for known, others in _other_counts(updates):
        if np.max(_relative(used, at(others))) <= fits:
            fault, changed, numbers = known, at(others), ()
            break
    shown = [updates[j] for j in differing]
    values = used, meant, changed
    yield _finding(
        fault,
        shown,
        numbers,
        apart=float(np.max(apart)),
        with_error=float(np.max(_relative(used, changed))),
        proof=proof_of(
            shown[0].number,
            Shown.RATE,
            lambda j: str(updates[j].number),
            values,
        ),
    )


def _relative(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.abs(one - two) / np.maximum(
        np.maximum(np.abs(one), np.abs(two)), 1e-12
    )


def _other_counts(updates: list[Update]) -> Iterator[tuple[Fault, np.ndarray]]:
    """Yield numbers at which a schedule is read by mistake, with the fault."""
    counted = np.arange(len(updates))
    kinds = [u.sizes for u in updates]  # a trace is of batches as large
    yield Fault.SCHEDULE_FROZEN, 0 * counted
    yield (
        Fault.RATE_FROZEN_IN_A_TRACE,
        np.array([kinds.index(kind) for kind in kinds]),
    )
    yield Fault.SCHEDULE_ONE_AHEAD, counted + 1
    ends = np.cumsum([max(1, len(u.pieces)) for u in updates])  # by microbatch
    begins = np.concatenate([[0], ends[:-1]])
    for numbers in (begins, ends - ends[0], ends - 1, ends):
        yield Fault.SCHEDULE_BY_MICROBATCH, numbers
