"""The stage of the gradient: the gradients that the optimizer got, against the meant
ones.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault, Quantity, Stage
from stepcheck.solve.changes import (
    added,
    clipped_apart,
    is_clipped,
    is_in_turn,
    is_skipped,
)
from stepcheck.solve.coefficients import RAW, Explanation
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.explain import NUM_SMALL, by_counts, explain
from stepcheck.solve.outputs import factors_of, narrowed, solved
from stepcheck.solve.places import at_places
from stepcheck.stages.proofs import of_gradient
from stepcheck.trace.windows import Update
from stepcheck.values import (
    Change,
    Detail,
    Finding,
    Known,
    Line,
    Part,
    Reason,
    Setting,
    Unit,
    Unjudged,
    Where,
)

_OF_LOSS = {Quantity.LABELS, Quantity.WEIGHTS, Quantity.LOSS_FORM}
_OF_FORM = {Fault.PADDING_TRAINED_ON, Fault.MASK_IGNORED, Fault.WEIGHTS_AVERAGED_APART}
_OF_PARTS = {
    Known.MICROBATCHES,
    Known.WEIGHT_OF_MICROBATCH,
    Known.MICROBATCHES_OF_FULL_WINDOW,
}
_SECONDS = 45.0  # of the search for changes; what is tried then is tried to its end
_NUM_DIFFERING, _NUM_ALIKE = 6, 3  # updates on which changes are tried


class Judged(NamedTuple):
    """The findings on the gradients of some updates, and the evidence."""

    findings: list[Finding]
    unjudged: list[Unjudged]
    evidence: list[Evidence]


def gradients(meant: Meant, updates: list[Update]) -> Judged:
    """Return the findings on the gradients of these updates."""
    handed = [u for u in updates if any(g is not None for g in u.applied.grads)]
    every = _evidence(meant, handed)
    everything = [e for e in every if np.all(np.isfinite(e.handed + e.reference))]
    judged = _judged(meant, everything) if everything else Judged([], [], [])
    lost = [e for e in every if not np.all(np.isfinite(e.reference))]
    broken = [
        e for e in every if np.all(np.isfinite(e.reference)) and not _is_finite(e)
    ]
    if lost:
        judged.unjudged.append(Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, len(lost)))
    if broken:
        change = Change(Fault.GRADIENT_UNLIKE, Detail.NOT_FINITE)
        where = Where(_numbers(broken), line=broken[0].update.applied.line)
        judged.findings.append(Finding(change, float("inf"), where=where))
    return judged


def _is_finite(e: Evidence) -> bool:
    return bool(np.all(np.isfinite(e.handed)))


def _evidence(meant: Meant, updates: list[Update]) -> list[Evidence]:
    found: list[Evidence] = []
    for update in updates:
        follows = bool(found) and update.follows(found[-1].update)
        found.append(Evidence(meant, update, found[-1] if follows else None))
    return found


def _judged(meant: Meant, everything: list[Evidence]) -> Judged:
    differs = meant.replay.tolerance.differs
    differing = [e for e in everything if e.without > differs]
    for e in differing:
        e.measure()
    differing = [e for e in differing if e.without > differs]
    if not differing:
        return Judged([], [], everything)
    if all(_is_zeroed(e) for e in differing):
        return _by_hand(Reason.CHANGED_BY_HAND, everything, differing)
    if not meant.has_penalty and (plus := added(everything)) is not None:
        return _of_weights(meant, everything, differing, *plus)
    alike = [e for e in everything if all(e is not other for other in differing)]
    chosen = [*_spread(differing, _NUM_DIFFERING), *_spread(alike, _NUM_ALIKE)]
    until = time.monotonic() + _SECONDS
    at_outputs = narrowed(chosen)
    best = _best([at_outputs, chosen], by_counts)
    if (best is None or best.cost >= RAW) and is_clipped(everything):
        return _of_clip(meant, everything, differing)
    faults = {change.fault for change in best.changes} if best is not None else set()
    is_meant = Fault.PASSES_LEFT_OUT in faults and is_skipped(everything)
    if is_meant or (best is None and is_in_turn(everything)):
        return _by_hand(Reason.CHANGED_BY_HAND, everything, differing)
    if best is None or best.cost >= RAW:
        clips = [each for each in clipped_apart(chosen) if each is not None]
        best = clips[0] if clips else best
    if best is None:
        at_outputs = at_outputs or solved(chosen)
        by_gradients = (
            chosen if at_outputs is None or len(chosen[0].handed) <= NUM_SMALL else None
        )
        best = _best([at_outputs, by_gradients], partial(explain, until=until))
    is_ended = time.monotonic() > until and best is None
    ended = [Unjudged(Reason.OUT_OF_TIME, Stage.GRADIENT)] * is_ended
    findings = [_located(differing)] if best is None else [*_found(best, chosen)]
    return Judged(findings, ended, everything)


def _is_zeroed(e: Evidence) -> bool:
    """Whether the gradients of some parameters are made zero by hand, and the others
    are right.
    """
    apart, differs = e.by_parameter(e.reference), e.meant.replay.tolerance.differs
    used = {name for name, own in e.cut(e.handed).items() if np.any(own)}
    return bool(used) and all(apart[name] <= differs for name in used)


def _best(
    views: Sequence[Sequence[Evidence] | None],
    of: Callable[[list[Evidence]], Explanation | None],
) -> Explanation | None:
    """Return the first explanation of updates, seen at their outputs or by their
    gradients.
    """
    for view in views:
        best = of([*view]) if view else None
        if view and best is not None:
            without = max(e.without for e in view)
            if view[0].meant.replay.tolerance.shows(without, best.apart):
                return best
    return None


def _of_clip(
    meant: Meant, everything: list[Evidence], differing: list[Evidence]
) -> Judged:
    """Return that the gradients are clipped, which may be meant unless they are scaled."""
    if meant.clips_scaled:
        found = _finding(Change(Fault.CLIP_BEFORE_UNSCALE), differing, differing, None)
        return Judged([found], [], everything)
    return _by_hand(Reason.CHANGED_BY_HAND, everything, differing)


def _by_hand(
    reason: Reason, everything: list[Evidence], differing: list[Evidence]
) -> Judged:
    """Return that the gradients are changed by hand, which may be meant."""
    return Judged([], [Unjudged(reason, Stage.GRADIENT, len(differing))], everything)


def _of_weights(
    meant: Meant,
    everything: list[Evidence],
    differing: list[Evidence],
    factor: float,
    are_signs: bool,
) -> Judged:
    """Return that the gradients have weights besides, which may be meant unless they
    decay too.
    """
    decay = meant.replay.decay(meant.optimizer)
    is_own = all(e.update.applied.optimizer == id(meant.optimizer) for e in differing)
    if decay and is_own and not are_signs:
        change = Change(Fault.DECAYED_TWICE, Detail.PLUS_WEIGHTS, (factor, decay))
        return Judged([_finding(change, differing, differing, None)], [], everything)
    return _by_hand(Reason.PENALTY_BY_HAND, everything, differing)


def _found(best: Explanation, chosen: list[Evidence]) -> Iterator[Finding]:
    """Yield the findings of an explanation: one for each change."""
    differs = chosen[0].meant.replay.tolerance.differs
    differing = [e for e in chosen if e.without > differs]
    for change in best.changes:
        yield _finding(change, differing, chosen, best)


def _finding(
    change: Change,
    differing: list[Evidence],
    chosen: list[Evidence],
    best: Explanation | None,
) -> Finding:
    most = max(e.without for e in differing)
    # The last update that shows it well: the slots of the first step are still empty.
    e = [each for each in differing if 2 * each.without >= most][-1]
    made = None if best is None else best.made[[id(own) for own in chosen].index(id(e))]
    change = replace(change, setting=_setting(e.meant, differing))
    where = Where(_numbers(differing), outputs=change.outputs, line=_line_of(change, e))
    apart = float("nan") if best is None else best.apart
    return Finding(change, most, apart, where, of_gradient(e, made))


def _setting(meant: Meant, evidence: list[Evidence]) -> Setting:
    """Return the kind of the parts and of the weights, by which a change is put into
    words.
    """
    weights = np.concatenate([own for e in evidence for own in e.weights], axis=1)
    unit = Unit.WEIGHTS if meant.replay.data[2] is None else Unit.SAMPLE_WEIGHTS
    unit = Unit.ROWS if np.isin(weights, (0, 1)).all() else unit
    are_replicas = all(1 < e.num_replicas == len(e.update.pieces) for e in evidence)
    part = Part.REPLICA if are_replicas else Part.MICROBATCH
    if getattr(meant.optimizer, "gradient_accumulation_steps", None):
        part = Part.CALL
    return Setting(part, unit)


def _located(differing: list[Evidence]) -> Finding:
    """Return the place of a difference that nothing known explains."""
    e = differing[0]
    at = narrowed([e]) or solved([e])
    change, rows, numbers = (
        at_places(at[0]) if at else (Change(Fault.LOSS_UNLIKE), (), ())
    )
    parameters: tuple[str, ...] = ()
    if not at and factors_of(e) is None:
        change = Change(Fault.GRADIENT_UNLIKE)
        apart, differs = e.by_parameter(e.reference), e.meant.replay.tolerance.differs
        parameters = tuple(name for name, far in apart.items() if far > differs)
    found = _finding(change, differing, differing, None)
    where = replace(found.where, rows=rows, parameters=parameters)
    assert found.proof is not None
    proof = replace(found.proof, numbers=(*numbers, *found.proof.numbers))
    return replace(found, where=where, proof=proof)


def _line_of(change: Change, e: Evidence) -> Line | None:
    """Return the user's line: of the loss, if that is wrong, or of the optimizer step."""
    update, replay, quantity = e.update, e.meant.replay, change.fault.quantity
    is_of_loss = quantity in _OF_LOSS or change.fault in _OF_FORM
    if not is_of_loss and quantity in (Quantity.ROW_GRADIENTS, Quantity.PENALTY):
        is_of_loss = _is_in_loss(change, e)
    is_penalty = quantity is Quantity.PENALTY
    last = update.pieces[-1].called
    line = replay.line_of_loss(last, is_penalty=is_penalty) if is_of_loss else None
    return line or replay.line_of_step(update)


def _is_in_loss(change: Change, e: Evidence) -> bool:
    """Whether a count is wrong in the loss: the loop hands over the derivatives that it
    took.
    """
    is_of_rows = change.fault.quantity is Quantity.ROW_GRADIENTS
    if is_of_rows and e.is_plain and e.num_replicas == 1:
        return e.apart(sum(e.taken(), e.penalty)) <= e.meant.replay.tolerance.fits
    is_cut = len(e.update.pieces) > e.num_replicas
    return not is_cut or (
        change.count is not None and not {*change.count.below} & _OF_PARTS
    )


def _numbers(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    return tuple(sorted(e.update.number for e in evidence))


def _spread(evidence: list[Evidence], num: int) -> list[Evidence]:
    kinds: dict[tuple[int, ...], list[Evidence]] = {}
    for e in evidence:
        kinds.setdefault(e.update.sizes, []).append(e)
    chosen = [each[0] for each in kinds.values()][:num]
    rest = [e for e in evidence if all(e is not other for other in chosen)]
    return [*chosen, *rest[::-1][: num - len(chosen)]]
