"""The stages of the optimizer step, and of the moves between two."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from numbers import Real
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Fault
from stepcheck.port import Port
from stepcheck.solve.changes import Schedule
from stepcheck.stages.proofs import proof_of
from stepcheck.trace.log import Applied, Log
from stepcheck.trace.measure import FINE, ROUNDED, all_same, distance, farthest, in_part, same
from stepcheck.trace.windows import PAD, Rule, Update, Windows
from stepcheck.values import Change, Finding, Line, Proof, Shown, Where

_SAME_MOMENTUM = 5e-4  # 0.999 and 0.9999 are two; solved for from steps in float32


def repeated(updates: list[Update]) -> list[int]:
    """Return the numbers of the updates that apply the gradient of the update before once more, or a part of it."""
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
    return has_one and distance([a for a, _ in grads], [b for _, b in grads]) <= FINE.fits


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
            message(must, type(learning_rate).__name__, "learning_rate=1e-3, or a schedule.")
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
    return Finding(change, apart, with_error, Where(updates=tuple(updates), line=line), proof)


def of_steps(
    seen: Windows,
    updates: list[Update],
    log: Log,
    schedule: Schedule | None,
    stated: Any,
    port: Port,
) -> Iterator[Finding]:
    """Yield the findings on the optimizer steps, or on rates by hand.

    Args:
        schedule: the rate that is meant, by update, from 0; None if it is not known.
        stated: the optimizer that the user states; None if none is.
    """
    if not seen.is_by_hand:
        if stated is not None:
            used = [*log.optimizers.values()]
            yield from another_optimizer(stated, used, updates, port)
        yield from _applied(updates, schedule)
        yield from _idle(seen)
        yield from _accumulated_twice(seen, log.applied)
    elif seen.rule is not None:
        if schedule is not None:
            yield from rates(seen.updates, schedule, FINE.differs)
        if stated is not None:
            kind, numbers = type(stated).__name__, port.numbers_of(stated)
            yield from _rule_otherwise(kind, numbers, seen.rule, seen.updates)


def another_optimizer(
    stated: Any, used: list[Any], updates: list[Update], port: Port
) -> Iterator[Finding]:
    """Yield the finding on the loop's one optimizer, if it has another class than the stated one, or other numbers."""
    if len(used) != 1 or used[0] is stated or not updates:
        return
    kinds = [type(each).__name__ for each in (used[0], stated)]
    is_other = kinds[0] != kinds[1] and {*kinds} != {
        "Adam",
        "AdamW",
    }  # which differ in their decay alone
    differing = {} if is_other else port.differing(used[0], stated)
    if is_other or differing:
        numbers = [float(number or 0) for pair in differing.values() for number in pair]
        where = [u.number for u in updates], updates[0].applied.line
        yield _finding(
            Fault.ANOTHER_OPTIMIZER, 1.0, *where, names=[*kinds, *differing], numbers=numbers
        )


def _rule_otherwise(
    kind: str, stated: dict[str, Any], rule: Rule, updates: list[Update]
) -> Iterator[Finding]:
    """Yield the finding on steps by hand with other momenta, or another decay, than the stated optimizer has."""
    names = {1: ("momentum",), 2: ("beta_1", "beta_2")}.get(len(rule.momenta), ())
    meant: list[Any] = [stated.get(name) for name in names]
    where = [u.number for u in updates], updates[0].applied.line
    if names and len(rule.rates) > 2 and kind in ("SGD", "Adam", "AdamW"):
        own = "Adam" if len(names) == 2 else "SGD"
        if None in meant:
            yield _finding(Fault.ANOTHER_OPTIMIZER, 1.0, *where, names=[own, kind])
        elif any(abs(a - b) > _SAME_MOMENTUM for a, b in zip(rule.momenta, meant, strict=True)):
            numbers = [number for pair in zip(rule.momenta, meant, strict=True) for number in pair]
            yield _finding(
                Fault.ANOTHER_OPTIMIZER, 1.0, *where, names=[kind, kind, *names], numbers=numbers
            )
    decay, (own_decay, least) = float(stated.get("weight_decay") or 0.0), rule.decay
    if abs(own_decay - decay) > max(least, FINE.differs * abs(decay)):
        decays = own_decay, decay
        yield _finding(
            Fault.ANOTHER_OPTIMIZER, 1.0, *where, names=(kind, kind, "weight_decay"), numbers=decays
        )


def _applied(updates: list[Update], schedule: Schedule | None) -> Iterator[Finding]:
    """Yield the findings on steps that are made twice, on states that begin anew, and on rates."""
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
    """Return the finding on an optimizer whose state begins anew: a new optimizer, or the first state of the same."""
    steps = [u.applied for u in updates]
    pairs = [(a, b) for a, b in pairwise(steps) if a.is_whole and b.is_whole]
    others = [(a, b) for a, b in pairs if b.optimizer != a.optimizer and _share_a_parameter(a, b)]
    if any(
        b.optimizer == left.optimizer
        for i, (left, _) in enumerate(others)
        for _, b in others[i + 1 :]
    ):
        return None  # several optimizers in turn
    begins = {step.optimizer: step for step in reversed(steps)}
    anew = [(a, b) for a, b in others if b.iterations == 0]
    lost = [
        (a, b) for a, b in pairs if b.optimizer == a.optimizer and _is_first_again(steps[0], a, b)
    ]
    for fault, begun in (
        (Fault.OPTIMIZER_RE_CREATED, anew),
        (Fault.OPTIMIZER_STATE_THROWN_AWAY, lost),
    ):
        alike = [(a, b) for a, b in begun if begun is lost or _is_alike(begins[a.optimizer], b)]
        on_the_way = [_goes_on(a, b) for a, b in alike]
        has_state = any(
            np.ndim(slot) for _, b in begun for slot in b.slots_after
        )  # more than a count and a rate
        if has_state and (sum(on_the_way) > 1 or 2 * len(alike) > len(pairs) > 0):
            numbers = [u.number for u in updates if any(u.applied is b for _, b in begun)]
            return _finding(fault, 1.0, numbers, begun[0][1].line)
    return None


def _share_a_parameter(one: Applied, two: Applied) -> bool:
    """Whether two steps move one parameter; else two optimizers make one update."""
    return any(g is not None and h is not None for g, h in zip(one.grads, two.grads, strict=False))


def _is_alike(one: Applied, two: Applied) -> bool:
    """Whether two optimizers have one class and begin with one rate: another rate is a new stage of the training."""
    return one.kind == two.kind and abs(
        one.learning_rate - two.learning_rate
    ) <= FINE.differs * abs(one.learning_rate)


def _goes_on(one: Applied, two: Applied) -> bool:
    is_alike = [v.shape for v in one.slots_after] == [v.shape for v in two.slots_after]
    return is_alike and all_same(in_part(one.params_after), in_part(two.params))


def _is_first_again(first: Applied, before: Applied, after: Applied) -> bool:
    if len(first.slots) != len(after.slots):  # not built at first: a count of 0 tells
        return after.iterations == 0
    return all_same(first.slots, after.slots) and not all_same(before.slots_after, after.slots)


def rates(updates: list[Update], schedule: Schedule, fits: float = FINE.fits) -> Iterator[Finding]:
    """Yield the finding on the learning rates: the schedule, read at other numbers than the updates'."""
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
    differing = [i for i in counted if abs(used[i] - meant[i]) > FINE.differs * abs(meant[i])]
    shown = [updates[i].number for i in differing]
    for fault, numbers in _other_counts(updates):
        changed = at(numbers)
        if (with_error := farthest(used, changed)) <= fits:
            values = [used, meant, changed]
            proof = proof_of(shown[0], Shown.RATE, lambda i: str(updates[i].number), values)
            yield _finding(fault, apart, shown, line, with_error=with_error, proof=proof)
            return
    unknown = np.full(len(used), np.nan)
    proof = proof_of(shown[0], Shown.RATE, lambda i: str(updates[i].number), [used, meant, unknown])
    at_first = used[differing[0]], meant[differing[0]]
    yield _finding(
        Fault.RATE_UNLIKE, apart, shown, line, numbers=at_first, with_error=np.nan, proof=proof
    )


def _other_counts(updates: list[Update]) -> Iterator[tuple[Fault, np.ndarray]]:
    """Yield numbers at which a schedule is read by mistake, with the fault."""
    counted = np.arange(len(updates))
    before = np.concatenate([[0], np.cumsum([max(1, len(u.pieces)) for u in updates])])
    kinds = [u.sizes for u in updates]  # a trace is of batches as large
    yield Fault.SCHEDULE_FROZEN, 0 * counted
    yield Fault.RATE_FROZEN_IN_A_TRACE, np.array([kinds.index(kind) for kind in kinds])
    yield Fault.SCHEDULE_ONE_AHEAD, counted + 1
    for by_microbatch in (before[:-1], before[1:] - before[1], before[1:] - 1, before[1:]):
        yield Fault.SCHEDULE_BY_MICROBATCH, by_microbatch


def _accumulated_twice(seen: Windows, steps: list[Applied]) -> Iterator[Finding]:
    """Yield the finding on sums of microbatches that the optimizer, in all its calls, accumulates once more."""
    num = max((step.accumulates for step in steps), default=1)
    own = [
        u
        for u in seen.updates
        if len({piece.called.replica for piece in u.pieces}) == 1 and _are_parts(u)
    ]
    size = min((len(u.pieces) // num for u in own), default=0)
    if num > 1 and size > 1:
        where = [u.number for u in own], own[0].applied.line
        yield _finding(Fault.ACCUMULATED_TWICE, 1 - 1 / num, *where, numbers=(num, size))


def _are_parts(update: Update) -> bool:
    """Whether the passes of an update are microbatches: on one line, and on different rows; else one loss has them."""
    if not all(piece.is_known for piece in update.pieces):
        return False
    rows = update.rows[update.rows != PAD]
    return len({piece.called.line for piece in update.pieces}) == 1 and len(
        set(rows.tolist())
    ) == len(rows)


def _idle(seen: Windows) -> Iterator[Finding]:
    """Yield the finding on steps of zeros that move weights."""
    steps = [step for each in seen.idle.values() for step in each[:-1]]
    moving = [s.number for s in steps if not all_same(s.applied.params, s.applied.params_after)]
    if moving:
        share = len(steps) / (len(steps) + len(seen.idle))
        yield _finding(Fault.STEPS_OF_ZEROS, share, moving, steps[0].applied.line)


def between(
    updates: list[Update],
    decay: float | None,
    names: Sequence[str] = (),
    *,
    moves_weights: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on weights that moved by no optimizer step.

    Args:
        decay: the optimizer's own.
        names: of the weights.
        moves_weights: whether a pass of the model moves them, as SpectralNormalization does.
    """
    updates = [u for u in updates if u.applied.is_whole]
    if drifts := [*_replicas_apart(updates, names)]:
        yield from drifts
        return
    outer = _outer(updates)
    lost: list[tuple] = []
    moved: list[tuple] = []
    for a, b in pairwise(updates):
        first = next(iter([*b.trials, *b.pieces]), None)
        new = in_part(
            first.called.params if first is not None and first.called.is_whole else b.applied.params
        )
        made = in_part(a.applied.params_after)
        if b.follows(a) and b.number not in outer and not all_same(new, made):
            is_first = all_same(new, in_part(a.applied.params))
            (lost if is_first else moved).append((a, made, new))
    if lost and 2 * len(lost) > len(updates) - 1:
        apart = max(distance(new, made) for _, made, new in lost)
        numbers = [a.number for a, *_ in lost]
        yield _finding(Fault.UPDATE_THROWN_AWAY, apart, numbers, lost[0][0].applied.line)
        return
    yield from _inside(
        [u for u in updates if u.number not in outer], decay, moves_weights=moves_weights
    )
    shrunk = [_shrunk(made, new) for _, made, new in moved]
    if decay and len(moved) > 1 and all(shrunk):
        apart = max(distance(new, made) for _, made, new in moved)
        where = [a.number for a, *_ in moved], moved[0][0].applied.line
        yield _finding(Fault.DECAYED_TWICE, apart, *where, numbers=(shrunk[0], decay))


def _replicas_apart(updates: list[Update], names: Sequence[str]) -> Iterator[Finding]:
    """Yield the finding on replicas whose weights differ at the beginning of an update."""
    firsts = [{p.called.replica: p for p in u.pieces[::-1] if p.called.is_whole} for u in updates]
    states = [[in_part(piece.called.params) for piece in each.values()] for each in firsts]
    apart = [max((distance(state, own[0]) for state in own), default=0.0) for own in states]
    if max(apart, default=0.0) > FINE.differs:
        i = int(np.argmax(apart))
        every = enumerate(zip(*states[i], strict=True))
        differing = [
            names[k] for k, own in every if names and any(not same(own[0], v) for v in own)
        ]
        where = [u.number for u in updates], updates[i].applied.line
        yield _finding(Fault.REPLICAS_DRIFT_APART, apart[i], *where, names=differing)


def _outer(updates: list[Update]) -> set[int]:
    """Return the updates that begin where the steps of another optimizer before them began, as in meta-learning."""
    runs = [next(run) for _, run in groupby(updates, key=lambda update: update.applied.optimizer)]
    same = [
        (b.number, all_same(in_part(a.applied.params), in_part(b.applied.params)))
        for a, b in pairwise(runs)
    ]
    return {number for number, is_same in same if is_same}


def _inside(
    updates: list[Update], decay: float | None, *, moves_weights: bool
) -> Iterator[Finding]:
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
    if not apart:
        return
    first = moved[0][0]
    numbers = sorted({u.number for u, *_ in moved})
    line = first.pieces[-1].called.line if first.pieces else first.applied.line
    shrunk = [_shrunk(one, two) for _, one, two in moved]
    are_alone = all(len(u.pieces) == 1 for u, *_ in moved) and not moves_weights
    if not are_alone:
        fault = Fault.DECAY_BY_MICROBATCH if all(shrunk) else Fault.WEIGHTS_MOVED_INSIDE_A_WINDOW
        yield _finding(fault, apart, numbers, line)
    elif decay and all(shrunk):
        where = numbers, first.applied.line
        yield _finding(Fault.DECAYED_TWICE, apart, *where, numbers=(shrunk[0], decay))


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
