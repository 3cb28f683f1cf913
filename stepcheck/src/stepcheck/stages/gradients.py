"""The stage of the gradient: the gradients that the optimizer got, against the meant
ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from stepcheck.faults import Fault, Quantity, Stage
from stepcheck.solve.changes import (
    added,
    clipped,
    clipped_apart,
    is_in_turn,
    is_skipped,
)
from stepcheck.solve.coefficients import RAW, SCALED, Explanation
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.explain import NUM_SMALL, by_counts, explain
from stepcheck.solve.outputs import factors_of, narrowed, solved
from stepcheck.solve.places import at_places
from stepcheck.stages.proofs import of_gradient
from stepcheck.trace.measure import are_finite
from stepcheck.trace.windows import Update
from stepcheck.values import (
    Change,
    Detail,
    Finding,
    Line,
    Part,
    Reason,
    Setting,
    Unit,
    Unjudged,
    Where,
)

_OF_LOSS = {Quantity.LABELS, Quantity.WEIGHTS, Quantity.LOSS_FORM}
_OF_FORM = {
    Fault.PADDING_TRAINED_ON,
    Fault.MASK_IGNORED,
    Fault.WEIGHTS_AVERAGED_APART,
}
_NUM_DIFFERING, _NUM_ALIKE = 6, 3  # updates on which changes are tried
_Found = Iterator[Finding | Unjudged]


def gradients(
    meant: Meant, updates: list[Update]
) -> tuple[list[Evidence], list[Finding | Unjudged]]:
    """Return the evidence of these updates, and the findings on their gradients."""
    every: list[Evidence] = []
    for update in updates:
        if any(grad is not None for grad in update.applied.grads):
            last = (
                every[-1]
                if every and update.follows(every[-1].update)
                else None
            )
            every.append(Evidence(meant, update, last))
    known = [e for e in every if are_finite([e.reference])]
    finite = [e for e in known if are_finite([e.handed])]
    broken = [e for e in known if e not in finite]
    found = [*_judged(finite)]
    if blurred := [e for e in finite if e.is_blurred]:
        finite = [e for e in finite if e not in blurred]
        found.append(Unjudged(Reason.ROUNDED, Stage.GRADIENT, len(blurred)))
    if len(known) < len(every):
        num_lost = len(every) - len(known)
        found.append(Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, num_lost))
    if broken:
        change = Change(Fault.GRADIENT_UNLIKE, Detail.NOT_FINITE)
        where = Where(_numbers(broken), line=broken[0].update.applied.line)
        found.append(Finding(change, float("inf"), where=where))
    return finite, found


def _judged(everything: list[Evidence]) -> _Found:
    """Yield the errors that make the gradients that differ, or where these do."""
    unlike = [e for e in everything if _differs(e)]
    for e in unlike:
        e.measure()
    differing = [e for e in unlike if _differs(e)]
    if not differing:
        return
    meant = differing[0].meant
    if not meant.has_penalty and (plus := added(everything)) is not None:
        yield _of_weights(differing, *plus)
        return
    alike = [e for e in everything if e not in differing]
    chosen = [*_spread(differing, _NUM_DIFFERING), *_spread(alike, _NUM_ALIKE)]
    at_outputs = narrowed(chosen)
    best = _best(by_counts, at_outputs, chosen)
    # any clip by norm makes a single gradient shorter by some number
    sure = RAW if differing[1:] else SCALED
    is_open = best is None or best.cost >= sure
    made = clipped(everything) if is_open else None
    if made is not None:
        yield _of_clips(everything, differing, made)
        return
    reason = _by_hand(best, everything, differing)
    if reason is not None:
        yield Unjudged(reason, Stage.GRADIENT, len(differing))
        return
    if is_open:
        best = next(filter(None, clipped_apart(chosen)), best)
    if best is None:
        at_outputs = at_outputs or solved(chosen)
        is_small = len(chosen[0].handed) <= NUM_SMALL
        by_gradients = chosen if at_outputs is None or is_small else None
        best = _best(explain, at_outputs, by_gradients)
    if best is None:
        yield _located(differing)
    else:
        yield from _explained(best, chosen)


def _of_clips(
    everything: list[Evidence],
    differing: list[Evidence],
    made: list[np.ndarray],
) -> Finding | Unjudged:
    """Return that gradients are clipped, perhaps while they are scaled as the loss is.

    A clip by hand is not stated: but for its bound, the gradients are proved right.
    """
    if differing[0].meant.clips_scaled:
        return _finding(Change(Fault.CLIP_BEFORE_UNSCALE), differing, differing)
    for e, own in zip(everything, made, strict=True):
        length = np.linalg.norm(e.reference) or 1.0
        share = float(np.linalg.norm(own) / length)
        e.scale, e.rounding = share * e.scale, share * e.rounding
        e.reference = own
    return Unjudged(Reason.CLIPPED_BY_HAND, Stage.GRADIENT, len(differing))


def _explained(best: Explanation, chosen: list[Evidence]) -> Iterator[Finding]:
    shown = [e for e in chosen if _differs(e)]
    # Beside an error with a name, numbers that are no fraction may be a clip's.
    named = [
        each for each in best.changes if not (each.count and each.count.numbers)
    ]
    for change in named or best.changes:
        yield _finding(change, shown, chosen, best)


def _differs(e: Evidence) -> bool:
    return e.without > e.meant.replay.tolerance.differs


def _by_hand(
    best: Explanation | None,
    everything: list[Evidence],
    differing: list[Evidence],
) -> Reason | None:
    """Return why gradients may be meant to differ: they are skipped, or set to zero by
    hand, or those of several losses in turn.
    """
    faults = (
        {change.fault for change in best.changes} if best is not None else set()
    )
    if all(map(_is_zeroed, differing)):
        return Reason.CHANGED_BY_HAND
    if Fault.PASSES_LEFT_OUT in faults and is_skipped(everything):
        return Reason.CHANGED_BY_HAND
    return Reason.IN_TURN if best is None and is_in_turn(everything) else None


def _is_zeroed(e: Evidence) -> bool:
    """Whether the gradients of some parameters are made zero by hand, and the others
    are right.
    """
    apart = e.by_parameter(e.reference)
    differs = e.meant.replay.tolerance.differs
    used = [name for name, own in e.cut(e.handed).items() if np.any(own)]
    return bool(used) and all(apart[name] <= differs for name in used)


def _of_weights(
    differing: list[Evidence], factor: float, are_signs: bool
) -> Finding | Unjudged:
    """Return that the gradients have weights besides, which may be meant unless they
    decay too.
    """
    meant = differing[0].meant
    decay = meant.replay.decay(meant.optimizer)
    is_own = all(
        e.update.applied.optimizer == id(meant.optimizer) for e in differing
    )
    if decay and is_own and not are_signs:
        change = Change(
            Fault.DECAYED_TWICE, Detail.PLUS_WEIGHTS, (factor, decay)
        )
        return _finding(change, differing, differing)
    return Unjudged(Reason.PENALTY_BY_HAND, Stage.GRADIENT, len(differing))


def _best(
    of: Callable[[list[Evidence]], Explanation | None],
    *views: Sequence[Evidence] | None,
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


def _finding(
    change: Change,
    differing: list[Evidence],
    chosen: list[Evidence],
    best: Explanation | None = None,
) -> Finding:
    most = max(e.without for e in differing)
    # The last update that shows it well: the slots of the first step are still empty.
    e = [each for each in differing if 2 * each.without >= most][-1]
    made = None if best is None else best.made[chosen.index(e)]
    change = replace(change, setting=_setting(differing))
    where = Where(
        _numbers(differing), outputs=change.outputs, line=_line_of(change, e)
    )
    apart = float("nan") if best is None else best.apart
    return Finding(change, most, apart, where, of_gradient(e, made))


def _setting(evidence: list[Evidence]) -> Setting:
    """Return the kind of the parts and of the weights, by which a change is put into
    words.
    """
    meant = evidence[0].meant
    weights = np.concatenate(
        [own for e in evidence for own in e.weights], axis=1
    )
    unit = Unit.WEIGHTS if meant.replay.data[2] is None else Unit.SAMPLE_WEIGHTS
    unit = Unit.ROWS if np.isin(weights, (0, 1)).all() else unit
    are_replicas = all(
        1 < e.num_replicas == len(e.update.pieces) for e in evidence
    )
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
        apart = e.by_parameter(e.reference)
        differs = e.meant.replay.tolerance.differs
        parameters = tuple(name for name, far in apart.items() if far > differs)
    found = _finding(change, differing, differing)
    where = replace(found.where, rows=rows, parameters=parameters)
    assert found.proof is not None
    proof = replace(found.proof, numbers=(*numbers, *found.proof.numbers))
    return replace(found, where=where, proof=proof)


def _line_of(change: Change, e: Evidence) -> Line | None:
    """Return the user's line: of the loss, if that is wrong, or of the optimizer step.

    A count is wrong in the loss where the loop hands over the derivatives that it took.
    """
    replay, quantity = e.meant.replay, change.fault.quantity
    is_penalty = quantity is Quantity.PENALTY
    is_of_loss = quantity in _OF_LOSS or change.fault in _OF_FORM
    if not is_of_loss and (is_penalty or quantity is Quantity.ROW_GRADIENTS):
        is_one = len(e.update.pieces) == e.num_replicas
        is_of_loss = is_one if is_penalty or not e.is_plain else _is_handed(e)
    last = e.update.pieces[-1].called
    line = (
        replay.line_of_loss(last, is_penalty=is_penalty) if is_of_loss else None
    )
    return line or e.update.applied.line


def _is_handed(e: Evidence) -> bool:
    return e.apart(sum(e.taken(), e.penalty)) <= e.meant.replay.tolerance.fits


def _numbers(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    return tuple(sorted(e.update.number for e in evidence))


def _spread(evidence: list[Evidence], num: int) -> list[Evidence]:
    """Return some updates: one of each sizes of batches, then the last ones."""
    kinds = {e.update.sizes: e for e in evidence[::-1]}
    chosen = [e for e in evidence if e is kinds[e.update.sizes]][:num]
    rest = [e for e in evidence if e not in chosen]
    return [*chosen, *rest[::-1][: num - len(chosen)]]
