"""The stages of the optimizer step, and of the moves between two."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Fault, Stage
from stepcheck.port import Port
from stepcheck.solve.changes import Schedule
from stepcheck.solve.replays import Again, all_again, by_rule, carried
from stepcheck.stages.proofs import proof_of
from stepcheck.steps import StepRule
from stepcheck.trace.log import Applied, Log
from stepcheck.trace.measure import FINE, ROUNDED, all_same, distance, farthest, in_part
from stepcheck.trace.windows import PAD, Rule, Update, Windows
from stepcheck.values import (
    Change,
    Finding,
    Line,
    Proof,
    Reason,
    Shown,
    Unjudged,
    Where,
)

_SAME_MOMENTUM = 5e-4  # 0.999 and 0.9999 are two; solved for from steps in float32


_Change = Callable[[StepRule], StepRule]


def _set(**settings: Any) -> tuple[tuple[str, ...], _Change]:
    return tuple(settings), lambda rule: replace(rule, **settings)


def _times(name: str, factor: float) -> tuple[tuple[str, ...], _Change]:
    return (name,), lambda rule: replace(rule, **{name: factor * getattr(rule, name)})


def _other(name: str) -> tuple[tuple[str, ...], _Change]:
    return (name,), lambda rule: replace(rule, **{name: not getattr(rule, name)})


_OTHERWISE = (  # settings that a step may have in place of those of its optimizer
    _set(),
    *(_times("weight_decay", factor) for factor in (0.0, 2.0)),
    _other("is_decoupled"),
    _set(momentum=0.0, dampening=0.0),
    *map(_other, ("nesterov", "maximize", "amsgrad", "is_corrected", "centered")),
    *(_set(momentum=each) for each in (0.5, 0.8, 0.9, 0.95, 0.99)),
    *(_set(momentum=each, dampening=each) for each in (0.5, 0.8, 0.9, 0.95, 0.99)),
    *(_set(beta_2=each) for each in (0.9, 0.95, 0.98, 0.99, 0.999)),
    *(_set(epsilon=each) for each in (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3, 1e-2)),
)


def repeated(updates: list[Update]) -> list[int]:
    """Return the numbers of the updates that apply the gradient of the update before
    once more, or a part of it.
    """
    pairs = pairwise(updates)
    return [
        b.number
        for a, b in pairs
        if not b.pieces and b.applied.is_whole and _are_same(a.applied, b.applied)
    ]


def _are_same(one: Applied, two: Applied) -> bool:
    pairs = zip(one.grads, two.grads, strict=False)
    grads = [(a, b) for a, b in pairs if a is not None and b is not None]
    has_one = any(np.any(a) for a, _ in grads)
    return (
        has_one and distance([a for a, _ in grads], [b for _, b in grads]) <= FINE.fits
    )


def scheduled(learning_rate: Any) -> Schedule:
    """Return the learning rate that is meant, by update.

    Raises:
        SpecificationError: it is no number and no function.
    """
    if callable(learning_rate):
        return lambda number: float(learning_rate(number))
    if not isinstance(learning_rate, Real):
        must = "learning_rate must be a number or a function of the update."
        raise SpecificationError(
            message(
                must, type(learning_rate).__name__, "learning_rate=1e-3, or a schedule."
            )
        )
    return lambda number: float(learning_rate)


_NAN = float("nan")


def _finding(
    fault: Fault,
    apart: float,
    updates: Sequence[int],
    line: Line | None,
    *,
    numbers: Sequence[float] = (),
    names: Sequence[str] = (),
    with_error: float = _NAN,
    proof: Proof | None = None,
) -> Finding:
    change = Change(fault, numbers=tuple(map(float, numbers)), names=tuple(names))
    return Finding(
        change, apart, with_error, Where(updates=tuple(updates), line=line), proof
    )


def of_steps(
    port: Port,
    seen: Windows,
    updates: list[Update],
    log: Log,
    schedule: Schedule | None,
    stated: Any,
) -> Iterator[Finding | Unjudged]:
    """Yield the findings on the optimizer steps, or on rates by hand.

    Args:
        schedule: the rate that is meant, by update, from 0; None if it is not known.
        stated: the optimizer that the user states; None if none is.
    """
    if seen.is_by_hand:
        if seen.rule is not None:
            yield from rates(seen.updates, schedule, FINE.differs) if schedule else ()
            if stated is not None:
                kind, numbers = type(stated).__name__, port.numbers_of(stated)
                yield from _rule_otherwise(kind, numbers, seen.rule, seen.updates)
        return
    anew = [*_applied(updates, schedule)]
    yield from anew
    yield from _idle(seen)
    yield from _accumulated_twice(seen, log.applied)
    whole = [u for u in updates if u.applied.is_whole]
    found = [*of_arithmetic(port, log.optimizers, whole)]
    used = [*log.optimizers.values()]
    is_other = stated is not None and len(used) == 1 and used[0] is not stated
    if is_other and not anew and not any(isinstance(each, Finding) for each in found):
        found = [*of_stated(port, stated, used[0], whole)]
    yield from found


def of_arithmetic(
    port: Port, optimizers: dict[int, Any], updates: list[Update]
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on steps that are not their optimizer's own, from the recorded
    gradients and slots.
    """
    made = all_again(port, optimizers, updates)
    num = sum(not again.is_whole for again in made)
    if updates and (num or not made):
        yield Unjudged(Reason.STEP_UNKNOWN, Stage.STEP, num)
    wrong = [again for again in made if not again.is_right]
    if not wrong:
        return
    change, with_error = Change(Fault.STEP_UNLIKE), None
    if all(again.slots for again in wrong):
        change, with_error = _explained(port, wrong) or (change, None)
    yield _of_steps(port, change, wrong, with_error)


def _of_steps(
    port: Port, change: Change, wrong: list[Again], with_error: list[Again] | None
) -> Finding:
    """Return the finding on steps that are others than those that were made again, with
    its proof.
    """
    first, step = wrong[0], wrong[0].update.applied
    names = [
        port.names[i]
        for i in np.flatnonzero(np.any([a.apart > 1 for a in wrong], axis=0))
    ]
    where = Where(
        tuple(a.update.number for a in wrong), parameters=tuple(names), line=step.line
    )
    kept = in_part(step.params), in_part(step.params_after), in_part(first.params)
    before, own, meant = (port.flat([*values]) for values in kept)
    changed = (
        port.flat([*with_error[0].params]) if with_error else np.full(len(own), _NAN)
    )
    values = [own, meant, changed]
    proof = proof_of(first.update.number, Shown.WEIGHT, port.name_at, values)
    apart = distance(own - before, meant - before)
    left = distance(own - before, changed - before) if with_error else _NAN
    return Finding(change, apart, left, where, proof)


def _explained(port: Port, wrong: list[Again]) -> tuple[Change, list[Again]] | None:
    """Return the settings that make the loop's steps, with these steps: solved on half
    of them, held on all.
    """
    for names, change in _OTHERWISE:
        factor = 1.0
        for _ in range(2):  # the second time with a rate that is solved for
            made = [_changed(port, again.update, change, factor) for again in wrong]
            known = [each for each in made if each is not None]
            if len(known) < len(made):
                break
            if all(again.is_right for again in known):
                return _named(wrong[0].update.applied, names, change, factor), known
            factor *= _factor(known[: -(-len(known) // 2)])
    return None


def _moves(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> np.ndarray:
    pairs = zip(before, after, strict=True)
    return np.concatenate([np.ravel(new - old) for old, new in pairs])


def _changed(
    port: Port, update: Update, change: _Change, factor: float
) -> Again | None:
    rules = [
        r and change(replace(r, rate=factor * r.rate)) for r in update.applied.rules
    ]
    return by_rule(port, update, rules)


def _factor(made: list[Again]) -> float:
    """Return how many times the moves are that were made, as a whole."""
    steps = [(a.update.applied, a.params) for a in made]
    own = [_moves(step.params, step.params_after) for step, _ in steps]
    again = [_moves(step.params, params) for step, params in steps]
    one, two = (np.concatenate(each).astype("float64") for each in (own, again))
    return float(one @ two / (two @ two)) if two.any() else 1.0


def _named(
    step: Applied, names: tuple[str, ...], change: _Change, factor: float
) -> Change:
    """Return a change of the settings in numbers: those of the loop's steps, and those
    of its optimizer.
    """
    rule = next(r for r in step.rules if r is not None)
    own = replace(change(rule), rate=factor * rule.rate)
    every = (*names, *["rate"] * (abs(factor - 1) > FINE.differs))
    numbers = [
        float(getattr(each, name) or 0) for name in every for each in (own, rule)
    ]
    shown = [_shown(name, rule) for name in every]
    return Change(
        Fault.ANOTHER_OPTIMIZER,
        numbers=(*numbers,),
        names=(step.kind, step.kind, *shown),
    )


def _shown(name: str, rule: StepRule) -> str:
    return {
        "rate": "learning_rate",
        "momentum": "beta_1" if rule.is_corrected else name,
    }.get(name, name)


def of_stated(
    port: Port, stated: Any, used: Any, updates: list[Update]
) -> Iterator[Finding | Unjudged]:
    """Yield the finding on steps that are not those of the stated optimizer, at the
    loop's rates.

    They are made from the loop's start; of an optimizer without a rule, the arguments
    are compared.
    """
    if not updates:
        return
    first = updates[0].applied
    meant = [r and replace(r, rate=0.0, clips=first.clips) for r in port.rules(stated)]
    own = [r and replace(r, rate=0.0, is_of_rows=False) for r in first.rules]
    if None not in own and own == meant:
        return
    kinds = type(used).__name__, type(stated).__name__
    is_alike = isinstance(used, type(stated)) or isinstance(stated, type(used))
    differing = port.differing(used, stated) if is_alike else {}
    numbers = [float(number or 0) for pair in differing.values() for number in pair]
    change = Change(
        Fault.ANOTHER_OPTIMIZER, numbers=(*numbers,), names=(*kinds, *differing)
    )
    made = carried(port, updates, meant)
    if made is None and (differing or not is_alike):
        where = Where(tuple(u.number for u in updates), line=first.line)
        yield Finding(change, 1.0, where=where)
    elif made is None:
        yield Unjudged(Reason.STEP_UNKNOWN, Stage.STEP)
    elif wrong := [again for again in made if not again.is_right]:
        yield _of_steps(port, change, wrong, None)


def _rule_otherwise(
    kind: str, stated: dict[str, Any], rule: Rule, updates: list[Update]
) -> Iterator[Finding]:
    """Yield the finding on steps by hand with other momenta, or another decay, than the
    stated optimizer has.
    """
    names = {1: ("momentum",), 2: ("beta_1", "beta_2")}.get(len(rule.momenta), ())
    meant: list[Any] = [stated.get(name) for name in names]
    where = [u.number for u in updates], updates[0].applied.line
    if names and len(rule.rates) > 2 and kind in ("SGD", "Adam", "AdamW"):
        own = "Adam" if len(names) == 2 else "SGD"
        if None in meant:
            yield _finding(Fault.ANOTHER_OPTIMIZER, 1.0, *where, names=[own, kind])
        elif any(
            abs(a - b) > _SAME_MOMENTUM
            for a, b in zip(rule.momenta, meant, strict=True)
        ):
            numbers = [
                number
                for pair in zip(rule.momenta, meant, strict=True)
                for number in pair
            ]
            yield _finding(
                Fault.ANOTHER_OPTIMIZER,
                1.0,
                *where,
                names=[kind, kind, *names],
                numbers=numbers,
            )
    decay, (own_decay, least) = float(stated.get("weight_decay") or 0.0), rule.decay
    if abs(own_decay - decay) > max(least, FINE.differs * abs(decay)):
        decays = own_decay, decay
        yield _finding(
            Fault.ANOTHER_OPTIMIZER,
            1.0,
            *where,
            names=(kind, kind, "weight_decay"),
            numbers=decays,
        )


def _applied(updates: list[Update], schedule: Schedule | None) -> Iterator[Finding]:
    """Yield the findings on steps that are made twice, on states that begin anew, and
    on rates.
    """
    twice = repeated(updates)
    by_fault: dict[Fault, list[Update]] = {}
    for a, b in pairwise(updates):
        if b.number in twice:
            is_one = a.applied.optimizer == b.applied.optimizer
            fault = Fault.APPLIED_TWICE if is_one else Fault.VARIABLE_UPDATED_TWICE
            by_fault.setdefault(fault, []).append(b)
    for fault, each in by_fault.items():
        yield _finding(fault, 1.0, [u.number for u in each], each[0].applied.line)
    known = [u for u in updates if u.number not in twice]
    begun = _begun_anew(known)
    if begun is not None:
        yield begun
    is_one = len({u.applied.optimizer for u in known}) == 1
    if schedule is not None and begun is None and not twice and is_one:
        yield from rates(known, schedule)


def _begun_anew(updates: list[Update]) -> Finding | None:
    """Return the finding on an optimizer whose state begins anew: a new optimizer, or
    the first state of the same.
    """
    steps = [u.applied for u in updates]
    pairs = [(a, b) for a, b in pairwise(steps) if a.is_whole and b.is_whole]
    others = [
        (a, b)
        for a, b in pairs
        if b.optimizer != a.optimizer and _share_a_parameter(a, b)
    ]
    if any(
        b.optimizer == left.optimizer
        for i, (left, _) in enumerate(others)
        for _, b in others[i + 1 :]
    ):
        return None  # several optimizers in turn
    begins = {step.optimizer: step for step in reversed(steps)}
    anew = [(a, b) for a, b in others if b.iterations == 0]
    lost = [
        (a, b)
        for a, b in pairs
        if b.optimizer == a.optimizer and _is_first_again(steps[0], a, b)
    ]
    for fault, begun in (
        (Fault.OPTIMIZER_RE_CREATED, anew),
        (Fault.OPTIMIZER_STATE_THROWN_AWAY, lost),
    ):
        alike = [
            (a, b)
            for a, b in begun
            if begun is lost or _is_alike(begins[a.optimizer], b)
        ]
        on_the_way = [_goes_on(a, b) for a, b in alike]
        has_state = any(
            np.ndim(slot) for _, b in begun for slot in b.slots_after
        )  # more than a count and a rate
        if has_state and (sum(on_the_way) > 1 or 2 * len(alike) > len(pairs) > 0):
            numbers = [
                u.number for u in updates if any(u.applied is b for _, b in begun)
            ]
            return _finding(fault, 1.0, numbers, begun[0][1].line)
    return None


def _share_a_parameter(one: Applied, two: Applied) -> bool:
    """Whether two steps move one parameter; else two optimizers make one update."""
    return any(
        g is not None and h is not None
        for g, h in zip(one.grads, two.grads, strict=False)
    )


def _is_alike(one: Applied, two: Applied) -> bool:
    """Whether two optimizers have one class and begin with one rate: another rate is a
    new stage of the training.
    """
    return one.kind == two.kind and abs(
        one.learning_rate - two.learning_rate
    ) <= FINE.differs * abs(one.learning_rate)


def _goes_on(one: Applied, two: Applied) -> bool:
    is_alike = [v.shape for v in one.slots_after] == [v.shape for v in two.slots_after]
    return is_alike and all_same(in_part(one.params_after), in_part(two.params))


def _is_first_again(first: Applied, before: Applied, after: Applied) -> bool:
    if len(first.slots) != len(after.slots):  # not built at first: a count of 0 tells
        return after.iterations == 0
    return all_same(first.slots, after.slots) and not all_same(
        before.slots_after, after.slots
    )


def rates(
    updates: list[Update], schedule: Schedule, fits: float = FINE.fits
) -> Iterator[Finding]:
    """Yield the finding on the learning rates: the schedule, read at other numbers than
    the updates'.
    """
    first = updates[0].applied.iterations
    used = np.array([u.applied.learning_rate for u in updates])
    least = ROUNDED * float(
        np.max(np.abs(used))
    )  # a rate of 0 that was solved for is as small as rounding

    def at(numbers: np.ndarray) -> np.ndarray:
        return np.maximum([schedule(int(number)) for number in first + numbers], least)

    used, counted = np.maximum(used, least), np.arange(len(updates))
    meant, line = at(counted), updates[0].applied.line
    apart = farthest(used, meant)
    if apart <= FINE.differs:
        return
    differing = [
        i for i in counted if abs(used[i] - meant[i]) > FINE.differs * abs(meant[i])
    ]
    shown = [updates[i].number for i in differing]
    for fault, numbers in _other_counts(updates):
        changed = at(numbers)
        if (with_error := farthest(used, changed)) <= fits:
            values = [used, meant, changed]
            proof = proof_of(
                shown[0], Shown.RATE, lambda i: str(updates[i].number), values
            )
            yield _finding(
                fault, apart, shown, line, with_error=with_error, proof=proof
            )
            return
    unknown = np.full(len(used), np.nan)
    proof = proof_of(
        shown[0], Shown.RATE, lambda i: str(updates[i].number), [used, meant, unknown]
    )
    at_first = used[differing[0]], meant[differing[0]]
    yield _finding(
        Fault.RATE_UNLIKE,
        apart,
        shown,
        line,
        numbers=at_first,
        with_error=np.nan,
        proof=proof,
    )


def _other_counts(updates: list[Update]) -> Iterator[tuple[Fault, np.ndarray]]:
    """Yield numbers at which a schedule is read by mistake, with the fault."""
    counted = np.arange(len(updates))
    before = np.concatenate([[0], np.cumsum([max(1, len(u.pieces)) for u in updates])])
    kinds = [u.sizes for u in updates]  # a trace is of batches as large
    yield Fault.SCHEDULE_FROZEN, 0 * counted
    yield Fault.RATE_FROZEN_IN_A_TRACE, np.array([kinds.index(kind) for kind in kinds])
    yield Fault.SCHEDULE_ONE_AHEAD, counted + 1
    for by_microbatch in (
        before[:-1],
        before[1:] - before[1],
        before[1:] - 1,
        before[1:],
    ):
        yield Fault.SCHEDULE_BY_MICROBATCH, by_microbatch


def _accumulated_twice(seen: Windows, steps: list[Applied]) -> Iterator[Finding]:
    """Yield the finding on sums of microbatches that the optimizer, in all its calls,
    accumulates once more.
    """
    num = max((step.accumulates for step in steps), default=1)
    own = [
        u
        for u in seen.updates
        if len({piece.called.replica for piece in u.pieces}) == 1 and _are_parts(u)
    ]
    size = min((len(u.pieces) // num for u in own), default=0)
    if num > 1 and size > 1:
        where = [u.number for u in own], own[0].applied.line
        yield _finding(
            Fault.ACCUMULATED_TWICE, 1 - 1 / num, *where, numbers=(num, size)
        )


def _are_parts(update: Update) -> bool:
    """Whether the passes of an update are microbatches: on one line, and on different
    rows; else one loss has them.
    """
    if not all(piece.is_known for piece in update.pieces):
        return False
    rows = update.rows[update.rows != PAD]
    return len({piece.called.line for piece in update.pieces}) == 1 and len(
        set(rows.tolist())
    ) == len(rows)


def _idle(seen: Windows) -> Iterator[Finding]:
    """Yield the finding on steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [
        s.number
        for s in steps
        if not all_same(s.applied.params, s.applied.params_after)
    ]
    if moving:
        share = len(steps) / (len(steps) + len(seen.idle))
        yield _finding(Fault.STEPS_OF_ZEROS, share, moving, steps[0].applied.line)
