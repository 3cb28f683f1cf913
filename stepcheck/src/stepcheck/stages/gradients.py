"""The stage of the gradient: the gradients that the optimizer got, against the meant ones, and the proof."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stepcheck.faults import Fault, Quantity, Stage
from stepcheck.port import OneLoss
from stepcheck.solve.basis import NUM_SOLVED, derivatives
from stepcheck.solve.changes import Added, added, clipped
from stepcheck.solve.coefficients import RAW
from stepcheck.solve.evidence import Evidence, Meant, left_out, narrowed, without_derivative
from stepcheck.solve.explain import Explanation, Search, setting_of
from stepcheck.solve.outputs import differing_outputs
from stepcheck.trace.measure import NUM_PLACES, distance, places
from stepcheck.trace.windows import PAD, Update
from stepcheck.values import (
    Change,
    Detail,
    Finding,
    Line,
    Number,
    Part,
    Proof,
    Reason,
    Shown,
    Unjudged,
    Where,
)

_IN_THE_LOSS = {  # of the faults of the rows' factors
    Fault.PADDING_COUNTED,
    Fault.PADDED_PLACES_COUNTED,
    Fault.MEAN_OF_ROW_MEANS,
    Fault.MEAN_OF_MEANS,
    Fault.DIVIDED_BY_THE_WEIGHTS,
    Fault.DIVIDED_BY_THE_ROWS,
}
_IN_THE_LOSS_OF_ONE = {  # of a microbatch that is the whole of an update, or of a replica
    Fault.NEVER_DIVIDED,
    Fault.DIVIDED_BY_THE_FULL_BATCH,
    Fault.DIVIDED_BY_THE_REPLICAS_TWICE,
    Fault.PENALTY_FORGOTTEN,
    Fault.PENALTY_ADDED_TWICE,
    Fault.PENALTY_ONCE_PER_REPLICA,
}
_OF_FORM = {Fault.PADDING_TRAINED_ON, Fault.MASK_IGNORED, Fault.WEIGHTS_AVERAGED_APART}
_OF_SUMS = {Quantity.ROW_GRADIENTS, Quantity.PENALTY, Quantity.HANDED_GRADIENT}
_ON_REPLICAS = {
    Fault.SUMMED_OVER_REPLICAS,
    Fault.MEAN_OF_MEANS,
    Fault.DIVIDED_BY_THE_FULL_BATCH,
}
_SECONDS = 45.0  # of the search for changes; the one that is tried then is tried to its end
NUM_DIFFERING, NUM_ALIKE = 6, 3  # updates on which changes are tried: that differ, that do not
_NUM_SHOWN = 3  # numbers of a proof
_FEW = 0.3  # explanations that cost no more than this beyond the best are as likely
_NAN, _INFINITE = float("nan"), float("inf")


class Judged(NamedTuple):
    """The findings on the gradients of some updates, and the evidence."""

    findings: list[Finding]
    unjudged: list[Unjudged]
    evidence: list[Evidence]


def gradients(meant: Meant, updates: list[Update]) -> Judged:
    """Return the findings on the gradients of these updates.

    Sample weights may be a mask: the mean over rows of weight 1 is tried too, if that explains more.
    """
    judged = _judged(meant, updates)
    if not judged.findings or not _may_be_by_weight(meant, judged.evidence):
        return judged
    mean = meant.replay.losses.mean_of(meant.objective.loss, by_weight=True)
    other = _judged(meant.of(meant.replay.objective(mean)), updates)
    found = other.findings, judged.findings
    are_named = [all(each.fault.has_name for each in some) for some in found]
    is_better = len(found[0]) < len(found[1]) or are_named == [True, False]
    return other if is_better else judged


def _may_be_by_weight(meant: Meant, evidence: list[Evidence]) -> bool:
    weights = meant.replay.data[2]
    if not isinstance(weights, np.ndarray) or not isinstance(meant.objective, OneLoss):
        return False
    is_mask = {*np.unique(weights).tolist()} == {0, 1}
    used = [weights[e.update.rows[e.update.rows != PAD]] for e in evidence]
    return is_mask and any(e.whole[0] > own.sum() for e, own in zip(evidence, used, strict=True))


def _judged(meant: Meant, updates: list[Update]) -> Judged:
    handed = [u for u in updates if any(g is not None for g in u.applied.grads)]
    everything = _evidence(meant, handed)
    if any(not np.all(np.isfinite(e.handed + e.reference)) for e in everything):
        return _of_finite(meant, everything)
    if zeroed := _zeroed(meant, everything):
        everything = _evidence(meant, [_without(update, zeroed) for update in handed])
    differs = meant.replay.tolerance.differs
    differing = [e for e in everything if e.without > differs]
    for e in differing:
        e.measure()
    differing = [e for e in differing if e.without > differs]
    if not differing:
        return Judged([], [], everything)
    if not meant.has_penalty and (plus := added(everything)) is not None:
        findings = [*_of_weights(meant, differing, plus)]
        by_hand = Unjudged(Reason.PENALTY_BY_HAND, Stage.GRADIENT, len(differing))
        return Judged(findings, [] if findings else [by_hand], everything)
    alike = [e for e in everything if all(e is not other for other in differing)]
    chosen = [*_spread(differing, NUM_DIFFERING), *_spread(alike, NUM_ALIKE)]
    for e in chosen:
        e.measure()
    until = time.monotonic() + _SECONDS
    explanations, is_clipped = _explained(meant, chosen, everything, until)
    if is_clipped:
        return Judged(
            [], [Unjudged(Reason.CHANGED_BY_HAND, Stage.GRADIENT, len(differing))], everything
        )
    findings = [*_found(explanations, chosen)] if explanations else [_located(differing)]
    is_known = any(each.cost < RAW for each in explanations)
    is_ended = time.monotonic() > until and not is_known
    ended = Unjudged(Reason.OUT_OF_TIME, Stage.GRADIENT)
    return Judged(findings, [ended] * is_ended, everything)


def _of_weights(meant: Meant, differing: list[Evidence], plus: Added) -> Iterator[Finding]:
    """Yield that the optimizer decays weights that the gradients have besides: these alone may be meant."""
    decay = meant.replay.decay(meant.optimizer)
    is_own = all(e.update.applied.optimizer == id(meant.optimizer) for e in differing)
    if decay and is_own and not plus.are_signs:
        change = Change(Fault.DECAYED_TWICE, Detail.PLUS_WEIGHTS, (plus.factor, decay))
        where = Where(_numbers(differing), line=differing[0].update.applied.line)
        yield Finding(change, max(e.without for e in differing), plus.apart, where)


def _numbers(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    return tuple(sorted(e.update.number for e in evidence))


def _of_finite(meant: Meant, everything: list[Evidence]) -> Judged:
    """Return the same of the updates with finite gradients, and those whose gradient alone is not."""
    is_handed, is_meant = (
        {e.update.number for e in everything if np.all(np.isfinite(of(e)))}
        for of in (lambda e: e.handed, lambda e: e.reference)
    )
    known = [e.update for e in everything if e.update.number in is_handed & is_meant]
    judged = _judged(meant, known)
    if broken := [e for e in everything if e.update.number in is_meant - is_handed]:
        change = Change(Fault.GRADIENT_UNLIKE, Detail.NOT_FINITE)
        where = Where(_numbers(broken), line=broken[0].update.applied.line)
        judged.findings.append(Finding(change, _INFINITE, _NAN, where))
    if num_lost := sum(e.update.number not in is_meant for e in everything):
        judged.unjudged.append(Unjudged(Reason.NOT_FINITE, Stage.GRADIENT, num_lost))
    return judged


def _evidence(meant: Meant, updates: list[Update]) -> list[Evidence]:
    found: list[Evidence] = []
    for update in updates:
        follows = bool(found) and found[-1].update.number == update.number - 1
        found.append(Evidence(meant, update, found[-1] if follows else None))
    return found


def _zeroed(meant: Meant, everything: list[Evidence]) -> set[int]:
    """Return the parameters, but not all, whose gradient is made zero by hand in every update, as a mask does."""
    zeros = [
        {i for i, g in enumerate(e.update.applied.grads) if g is not None and not np.any(g)}
        for e in everything
    ]
    found = set.intersection(*zeros) if len(zeros) > 1 else set()
    if not found or len(found) == len(meant.replay.names):
        return set()
    names = {meant.replay.names[i] for i in found}
    has_one = {
        name for e in everything for name, apart in e.by_parameter(e.reference).items() if apart
    }
    return found if names <= has_one else set()


def _without(update: Update, left_out: set[int]) -> Update:
    grads = [None if i in left_out else g for i, g in enumerate(update.applied.grads)]
    return replace(update, applied=replace(update.applied, grads=grads))


def _explained(
    meant: Meant, chosen: list[Evidence], everything: list[Evidence], until: float
) -> tuple[list[Explanation], bool]:
    """Return (explanations, the likeliest first; whether the gradients are clipped, and no more).

    A fault in the loss is searched for at the outputs; if nothing known is there, in a small model's gradients too.
    """
    at_outputs = narrowed(chosen)
    fitting, is_clipped = list[Explanation](), False
    if at_outputs is not None:
        fitting, is_clipped = _searched(meant, chosen, at_outputs, everything, until)
    is_known = is_clipped or any(each.cost < RAW for each in fitting)
    if not is_known and (at_outputs is None or len(chosen[0].handed) <= NUM_SOLVED):
        more, is_clipped = _searched(meant, chosen, chosen, everything, until)
        fitting += more
    if meant.replay.is_half:  # where more than one may fit by chance
        return sorted(fitting, key=lambda each: (round(2 * each.cost) / 2, each.apart)), is_clipped
    return sorted(fitting, key=lambda each: round(each.cost, 3)), is_clipped


def _searched(
    meant: Meant,
    chosen: list[Evidence],
    seen_as: Sequence[Evidence],
    everything: list[Evidence],
    until: float,
) -> tuple[list[Explanation], bool]:
    """Return the same of one search, on updates `seen_as` gradients or derivatives by the outputs."""
    search, fitting = Search(meant, seen_as, until), list[Explanation]()
    without, shows = max(e.without for e in chosen), meant.replay.tolerance.shows
    for i, (attempt, enough) in enumerate(search.stages()):
        attempt()
        fitting = [each for each in search.found if shows(without, each.apart)]
        if any(each.cost <= enough for each in fitting) or search.is_over:
            break
        if i == 0 and (apart := clipped(everything)) is not None:
            if not meant.clips_scaled:
                return [], True
            change = Change(Fault.CLIP_BEFORE_UNSCALE)
            return [Explanation((change,), 1.0, apart, [None for _ in chosen])], False
    return fitting, False


def _found(fitting: list[Explanation], chosen: list[Evidence]) -> Iterator[Finding]:
    """Yield the findings of the best explanation: one for each change."""
    best, differs = fitting[0], chosen[0].meant.replay.tolerance.differs
    for i, change in enumerate(best.changes):
        rests = best.rests[i] if best.rests else [e.reference for e in chosen]
        every = zip(chosen, best.made, rests, strict=True)
        known = [(e, made, rest) for e, made, rest in every if rest is not None]
        apart = {id(e): e.apart(rest) for e, _, rest in known}
        differing = [each for each in known if apart[id(each[0])] > differs] or known
        most = max(apart[id(e)] for e, *_ in differing)
        # The last update that shows it well: the slots of the first step are still empty.
        last, made, rest = [each for each in differing if 2 * apart[id(each[0])] >= most][-1]
        evidence = [e for e, *_ in differing]
        told = _told(change, evidence, _twins(change, fitting))
        line = _line_of(told, last)
        is_of_some = told.fault.quantity is Quantity.HANDED_GRADIENT
        parameters = told.names if is_of_some else ()
        where = Where(_numbers(evidence), (), parameters, told.outputs, line)
        proof, is_beside = proved(last, made, rest), bool(best.rests)
        yield Finding(told, most, best.apart, where, proof, is_beside)


def _twins(change: Change, fitting: list[Explanation]) -> tuple[Fault, ...]:
    """Return other faults that make the same numbers: of this change, and of explanations as likely."""
    best = fitting[0]
    likely = [own for each in fitting if each.cost <= best.cost + _FEW for own in each.changes]
    others = [fault for own in likely * (len(best.changes) == 1) for fault in _faults(own)]
    beside = {fault for own in best.changes if own is not change for fault in _faults(own)}
    twins = {*change.twins, *others} - beside - {change.fault}
    is_named = change.fault.has_name
    return tuple(sorted((f for f in twins if is_named and f.has_name), key=lambda fault: fault.id))


def _faults(change: Change) -> tuple[Fault, ...]:
    return change.fault, *change.twins


def _told(change: Change, evidence: list[Evidence], twins: tuple[Fault, ...]) -> Change:
    """Return a change with the setting of its updates, and with its twins."""
    if not change.outputs:
        change = replace(change, setting=setting_of(change, evidence))
    is_summed = change.fault is Fault.SUMMED_OVER_REPLICAS and change.setting.part is Part.REPLICA
    is_uneven = any(map(_has_uneven_replicas, evidence))  # else each may be divided by its own rows
    if is_summed and is_uneven and all(map(_is_added_up_twice, evidence)):
        numbers = (evidence[-1].num_replicas,)
        change = replace(change, detail=Detail.ADDED_UP_TWICE, numbers=numbers)
    return replace(change, twins=twins)


def _is_added_up_twice(e: Evidence) -> bool:
    return e.apart(e.num_replicas * e.reference) <= e.meant.replay.tolerance.fits


def _has_uneven_replicas(e: Evidence) -> bool:
    return len({float(weights.sum()) for weights in e.weights}) > 1


def _located(differing: list[Evidence]) -> Finding:
    """Return the place of a difference that nothing known explains: in the loss, or in some parameters."""
    e = at = differing[0]
    outputs: tuple[str, ...] = ()
    if len(others := differing_outputs(e.meant, [e])) == 1:
        at, outputs = others[0].evidence[0], (others[0].name,)
    line = e.meant.replay.line_of_loss(e.update.pieces[-1].called) or e.update.applied.line
    rows, parameters = tuple[int, ...](), tuple[str, ...]()
    proof = proved(differing[-1], None)
    if (found := derivatives(at)) is None:
        apart, differs = e.by_parameter(e.reference), e.meant.replay.tolerance.differs
        change = Change(Fault.GRADIENT_UNLIKE)
        parameters = tuple(name for name, far in apart.items() if far > differs)
        outputs = without_derivative(e)
    elif passes := left_out(at, *found):
        change = Change(Fault.PASSES_LEFT_OUT, numbers=(*passes, len(e.update.pieces)))
        line = e.update.applied.line
    else:
        change, of_rows = Change(Fault.LOSS_UNLIKE), _on_rows(at, *found)
        rows = tuple(dict.fromkeys(row for row, _ in of_rows))
        numbers = tuple(number for _, number in of_rows)
        proof = replace(proof, numbers=(*numbers, *proof.numbers))
    where = Where(_numbers(differing), rows, parameters, outputs, line)
    return Finding(change, max(each.without for each in differing), _NAN, where, proof)


def _on_rows(e: Evidence, solved: np.ndarray, should: np.ndarray) -> list[tuple[int, Number]]:
    """Return (row of the data, both derivatives by its output) where they differ most."""
    pieces = e.update.pieces
    shapes = [piece.called.outputs[0].shape for piece in pieces]
    starts = np.cumsum([0, *map(int, map(np.prod, shapes))])
    found = []
    for most in np.argsort(-np.abs(solved - should))[:_NUM_SHOWN].tolist():
        which = int(np.searchsorted(starts, most, "right")) - 1
        at, *inner = map(int, np.unravel_index(most - int(starts[which]), shapes[which]))
        row, numbers = int(pieces[which].rows[at]), (float(solved[most]), float(should[most]))
        found.append((row, Number(Shown.DERIVATIVE, f"{row}{inner}", *numbers, _NAN)))
    return found


def _line_of(change: Change, e: Evidence) -> Line | None:
    """Return the user's line: where the loss is computed, if that is wrong, or the optimizer step."""
    update, replay, fault = e.update, e.meant.replay, change.fault
    if not update.pieces:
        return replay.line_of_step(update)
    is_cut = len(update.pieces) > e.num_replicas
    is_of_sum = fault.quantity in _OF_SUMS and fault not in _OF_FORM
    is_of_loss = fault in _IN_THE_LOSS or not is_of_sum
    is_of_loss |= fault in _IN_THE_LOSS_OF_ONE and not is_cut
    if is_of_sum and e.is_plain and e.num_replicas == 1:
        taken = sum(e.taken(), e.penalty)  # what the loop hands over, if it changes nothing after
        is_of_loss = e.apart(taken) <= replay.tolerance.fits
    is_of_loss |= fault in _ON_REPLICAS and change.setting.part is Part.REPLICA
    is_penalty = fault.quantity is Quantity.PENALTY
    last = update.pieces[-1].called
    line = replay.line_of_loss(last, is_penalty=is_penalty) if is_of_loss else None
    return line or replay.line_of_step(update)


def _spread(evidence: list[Evidence], num: int) -> list[Evidence]:
    kinds: dict[tuple[int, ...], list[Evidence]] = {}
    for e in evidence:
        kinds.setdefault(e.update.sizes, []).append(e)
    chosen: list[Evidence] = [each[0] for each in kinds.values()][:num]
    rest = [e for e in evidence if all(e is not other for other in chosen)]
    return [*chosen, *rest[::-1][: num - len(chosen)]]


HIDDEN = 0.05  # a step that is closer to another, relative to its length, hardly differs


def proved(e: Evidence, changed: np.ndarray | None, reference: np.ndarray | None = None) -> Proof:
    """Return the numbers of an update: the gradient's length, and three weights after it or numbers of the gradient.

    Args:
        changed: the gradient with an error; None if nothing known makes the handed one.
        reference: the gradient that was meant, perhaps with other errors.
    """
    reference = e.reference if reference is None else reference
    unknown = np.full_like(e.handed, np.nan)
    columns = [e.handed, reference, unknown if changed is None else changed]
    lengths = [float(np.linalg.norm(column)) for column in columns]
    what, step = Shown.GRADIENT, _NAN
    if (after := _after(e, columns)) is not None:
        weights, step = after
        what, columns = (Shown.WEIGHT_AFTER, weights) if step >= HIDDEN else (what, columns)
    order = np.argsort(-np.abs(columns[0] - columns[1]), kind="stable")[:_NUM_SHOWN]
    shown = ((i, [float(own[i]) for own in columns]) for i in sorted(order.tolist()))
    numbers = (Number(what, _name(e, i), *each) for i, each in shown)
    parameters = tuple(by_parameter(e, changed, reference))
    length = Number(Shown.GRADIENT_LENGTH, "", *lengths)
    return Proof(e.update.number, (length, *numbers), step, parameters)


def _after(e: Evidence, columns: list[np.ndarray]) -> tuple[list[np.ndarray], float] | None:
    """Return (the weights after the step with each gradient, the distance of the first two steps).

    None unless the optimizer's step with the handed gradient is the one that was made.
    """
    _, reference, wrong = columns
    chain = [
        e
    ]  # the reference's slots hold its own gradients of the updates before; with other faults, theirs
    while chain[0].before is not None and reference is e.reference:
        chain.insert(0, chain[0].before)
    before, after = e.update.applied.params, e.update.applied.params_after
    meant = _weights([*((one, one.reference) for one in chain[:-1]), (e, reference)])
    again = _weights(
        [(e, e.handed)]
    )  # Keras on TensorFlow squares sparse gradients before it adds up equal rows
    own = _moves(before, after)
    if meant is None or again is None or distance(own, _moves(before, again)) >= HIDDEN:
        return None
    every = [after, meant, _weights([(e, wrong)])]
    flat = [
        columns[0] * _NAN if each is None else e.meant.replay.flat([*each])[e.mask]
        for each in every
    ]
    return flat, distance(own, _moves(before, meant))


def _moves(before: list[np.ndarray], after: list[np.ndarray]) -> list[np.ndarray]:
    return [b - a for a, b in zip(before, after, strict=True)]


def by_parameter(
    e: Evidence, changed: np.ndarray | None, reference: np.ndarray | None = None
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, distance from the reference, distance from it with the fault or NaN) of the handed gradients."""
    without = e.by_parameter(e.reference if reference is None else reference)
    apart = {} if changed is None else e.by_parameter(changed)
    for name, grad in zip(e.meant.replay.names, e.update.applied.grads, strict=True):
        if grad is not None:
            yield name, without[name], apart.get(name, float("nan"))


def _weights(steps: list[tuple[Evidence, np.ndarray]]) -> list[np.ndarray] | None:
    """Return the weights after the last of these updates with these gradients, where they can be computed."""
    meant, params = steps[0][0].meant, steps[0][0].update.applied.params
    if meant.optimizer is None or any(p.size > NUM_PLACES for p in params):
        return None
    if any(not np.all(np.isfinite(gradient)) for _, gradient in steps):
        return None
    return meant.replay.stepped(
        meant.optimizer, [(e.update.applied, _as_grads(e, g)) for e, g in steps]
    )


def _as_grads(e: Evidence, gradient: np.ndarray) -> list[np.ndarray | None]:
    full = np.zeros(len(e.mask))
    full[e.mask] = gradient
    triples = zip(
        e.meant.replay.parts(full).values(),
        e.update.applied.params,
        e.update.applied.grads,
        strict=True,
    )
    return [None if g is None else part.reshape(p.shape).astype(p.dtype) for part, p, g in triples]


def _name(e: Evidence, i: int) -> str:
    replay = e.meant.replay
    ends = np.cumsum([len(part) for part in replay.parts(e.mask).values()])
    at = int(np.flatnonzero(e.mask)[i])
    owner = int(np.searchsorted(ends, at, side="right"))
    inside, chosen = at - int(ends[owner - 1] if owner else 0), places(replay.sizes[owner])
    place = inside if chosen is None else int(chosen[inside])
    index = ", ".join(map(str, np.unravel_index(place, replay.shapes[owner])))
    return f"{replay.names[owner]}[{index}]"
