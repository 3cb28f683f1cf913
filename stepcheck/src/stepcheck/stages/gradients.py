"""The stage of the gradient: the gradients that the optimizer got, against the meant ones, and the proof."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stepcheck.port import OneLoss
from stepcheck.report.causes import ACCUMULATING, ADDED_UP_ONCE, OF_ROWS, OF_WEIGHTS, ON_REPLICAS, SUMMED, TWICE
from stepcheck.report.found import Finding, Found, Likely, Number, Proof, found, not_known, of_values, some
from stepcheck.solve.basis import NUM_SOLVED, derivatives, on_a_row, places_of_mask
from stepcheck.solve.changes import LONGER, POSITIVE, SQUARED, added, changed
from stepcheck.solve.coefficients import RAW
from stepcheck.solve.evidence import Evidence, Meant, in_the_loss, narrowed
from stepcheck.solve.explain import Explanation, Search, in_words
from stepcheck.solve.forms import Error
from stepcheck.solve.outputs import differing_outputs
from stepcheck.trace.log import Line
from stepcheck.trace.measure import NUM_PLACES, distance, places
from stepcheck.trace.windows import PAD, Update

_IN_THE_LOSS = (
    *("padding", "padded places", "mean of row", "mean of means"),
    *("divided by the weights", "divided by the rows"),
)
_IN_THE_LOSS_OF_ONE = (  # of a microbatch that is the whole of an update, or of a replica
    *("never divided", "divided by the full batch", "divided by the replicas twice"),
    *("penalty forgotten", "penalty added twice", "penalty once per replica"),
)
_NOT_OF_THE_LOSS = "each row", "the penalty", "the gradient"
_SECONDS = 45.0  # of the search for words; the change that is tried then is tried to its end
_ENDED = f"The search for what makes the gradients differ was ended after {_SECONDS:.0f} seconds: more was not tried."
NUM_DIFFERING, NUM_ALIKE = 6, 3  # updates on which changes are tried: of those that differ, and of those that do not
_FEW = 0.3  # explanations that cost no more than this beyond the best are as likely
_ASKED = {  # of changes that are hardly meant
    SQUARED: "Is a root missing?",
    LONGER: "Is it `min(1, bound / norm)` that is meant?",
    POSITIVE: "So no weight can grow. Is `clip(-bound, bound)` meant?",
}
_COUNTED = (
    "sum up what the rows give, and divide once by all weights; weights that you mean are the third part of `data`."
)
_UNLISTED = {  # by quantity, the name of an error that has none in the field, and the fix
    "each row's gradient": ("rows counted otherwise", _COUNTED),
    "the penalty": ("penalty counted otherwise", "add the model's losses once per update."),
    "the gradient": ("gradient changed", "hand over the gradient as it is taken, each variable's in its place."),
    "the labels": ("other labels", "give the loss the labels of the rows that the model got, as the data have them."),
    "the sample weights": ("other weights", "give the loss the weights of the rows that the model got, once."),
    "the outputs": ("other outputs", "give the loss the outputs as the model returns them."),
    "the loss": ("another loss", "take the loss that was meant, with its arguments."),
}


_TOGETHER = "The numbers are of all faults of the gradient together."
_OF_A_MASK = (
    "The sample weights are 0 and 1, as a mask's. The loss that was meant divides by all rows or places, also by those "
    "of weight 0, as Keras' losses do by default."
)
_BY_MASK = "Judged is a mean over those of weight 1, as `reduction='mean_with_sample_weight'` and `ws.Mean` give."
_BY_ALL = "If a mean over those of weight 1 is meant, so is `reduction='mean_with_sample_weight'`, or `ws.Mean`."


def gradients(meant: Meant, updates: list[Update]) -> tuple[list[Finding], list[Evidence]]:
    """Return (findings, evidence) on the gradients of these updates."""
    everything = _evidence(meant, [u for u in updates if any(g is not None for g in u.applied.grads)])
    if any(not np.all(np.isfinite(e.handed + e.reference)) for e in everything):
        return _of_finite(meant, everything)
    if zeroed := _zeroed(meant, everything):
        everything = _evidence(meant, [_without(update, zeroed) for update in updates])
    differs = meant.replay.tolerance.differs
    differing = [e for e in everything if e.without > differs]
    for e in differing:
        e.measure()
    differing = [e for e in differing if e.without > differs]
    if not differing:
        return [], everything
    alike = [e for e in everything if all(e is not other for other in differing)]
    chosen = [*_spread(differing, NUM_DIFFERING), *_spread(alike, NUM_ALIKE)]
    for e in chosen:
        e.measure()
    if not meant.has_penalty and (plus := added(everything)) is not None:
        return [_of_weights(meant, differing, *plus)], everything
    until = time.monotonic() + _SECONDS
    explanations, how = _explained(meant, chosen, everything, until)
    if how:
        told = f"Gradients are {how} before the optimizer gets them; but for that they are right."
        return [Likely(f"{told} {_ASKED[how]}") if how in _ASKED else told], everything
    findings = list[Finding](_told(explanations, chosen) if explanations else [_located(differing)])
    is_ended = time.monotonic() > until and not any(each.cost < RAW for each in explanations)
    return findings + [_ENDED] * is_ended, everything


def by_weights(meant: Meant, updates: list[Update]) -> tuple[list[Finding], list[Evidence]]:
    """Return the same; of sample weights that are a mask also by the loss that divides by them, if it explains more."""
    findings, evidence = gradients(meant, updates)
    weights = meant.replay.data[2]
    is_mask = isinstance(weights, np.ndarray) and {*np.unique(weights).tolist()} == {0, 1}
    if not is_mask or not isinstance(meant.objective, OneLoss):
        return findings, evidence
    given = np.asarray(weights)
    if not any(e.whole[0] > given[e.update.rows[e.update.rows != PAD]].sum() for e in evidence):
        return findings, evidence
    if causes := [each for each in findings if isinstance(each, Found)]:
        mean = meant.replay.objective(meant.replay.losses.mean_of(meant.objective.loss, by_weight=True))
        others, found_by = gradients(meant.of(mean), updates)
        left = [each for each in others if isinstance(each, Found)]
        is_named, are_named = (all(each.is_listed for each in some) for some in (left, causes))
        if len(left) < len(causes) or (is_named and not are_named):
            return [*others, f"{_OF_A_MASK} {_BY_MASK}"], found_by
    return [*findings, f"{_OF_A_MASK} {_BY_ALL}"], evidence


def _of_weights(meant: Meant, differing: list[Evidence], factor: float, of: str, apart: float) -> Finding:
    """Return the finding on gradients with the weights or their signs, times a factor, added."""
    told = f"The gradients are those of the loss that was meant plus {factor:.4g} times {of}, as a penalty gives"
    decay = meant.replay.decay(meant.optimizer)
    if not decay or "signs" in of:
        return f"{told}. Is that meant?"
    if any(e.update.applied.optimizer != id(meant.optimizer) for e in differing):
        return Likely(
            f"{told}. The optimizer that is meant decays them beside the gradient, by weight_decay={decay:.6g}."
        )
    detail = f"{told}; the optimizer's weight_decay is {decay:.6g}."
    numbers, line = [e.update.number for e in differing], differing[0].update.applied.line
    return found("decayed twice", max(e.without for e in differing), line, numbers, detail, with_change=apart)


def _of_finite(meant: Meant, everything: list[Evidence]) -> tuple[list[Finding], list[Evidence]]:
    """Return the same of the updates with finite gradients; a single gradient that is not finite has no known cause."""
    finite = [(e, bool(np.all(np.isfinite(e.handed))), bool(np.all(np.isfinite(e.reference)))) for e in everything]
    findings, evidence = gradients(meant, [e.update for e, is_handed, is_meant in finite if is_handed and is_meant])
    if broken := [e.update for e, is_handed, is_meant in finite if is_meant and not is_handed]:
        told = f"The gradient of update {broken[0].number} is not finite; that of the loss that was meant is."
        numbers = [update.number for update in broken]
        findings.append(not_known("gradient", told, float("inf"), broken[0].applied.line, numbers))
    if meant_alone := [e.update.number for e, is_handed, is_meant in finite if is_handed and not is_meant]:
        told = f"The gradient that was meant is not finite in updates {some(meant_alone, 6)}"
        findings.append(f"{told}: these are not judged.")
    if lost := [e.update for e, is_handed, is_meant in finite if not is_handed and not is_meant]:
        findings.append(_lost(lost))
    return findings, evidence


def _lost(updates: list[Update]) -> Likely:
    """Return the finding on updates whose gradient is not finite, nor was it meant to be."""
    leaves = [np.asarray(leaf) for piece in updates[0].pieces for leaf in piece.called.inputs]
    if any(leaf.dtype.kind == "f" and not np.all(np.isfinite(leaf)) for leaf in leaves):
        why = "its inputs hold NaN or infinity."
    else:
        why = "is the learning rate too large, or are labels NaN?"
    numbers = some([update.number for update in updates], 6)
    return Likely(
        f"The gradient is not finite from update {updates[0].number} on: {why} Not judged are updates {numbers}."
    )


def _evidence(meant: Meant, updates: list[Update]) -> list[Evidence]:
    found: list[Evidence] = []
    for update in updates:
        follows = bool(found) and found[-1].update.number == update.number - 1
        found.append(Evidence(meant, update, found[-1] if follows else None))
    return found


def _zeroed(meant: Meant, everything: list[Evidence]) -> set[int]:
    """Return the parameters, but not all, whose gradient is made zero by hand in every update, as a mask does."""
    zeros = [{i for i, g in enumerate(e.update.applied.grads) if g is not None and not np.any(g)} for e in everything]
    found = set.intersection(*zeros) if len(zeros) > 1 else set()
    if not found or len(found) == len(meant.replay.names):
        return set()
    names = {meant.replay.names[i] for i in found}
    has_one = {name for e in everything for name, apart in e.by_parameter(e.reference).items() if apart}
    return found if names <= has_one else set()


def _without(update: Update, left_out: set[int]) -> Update:
    grads = [None if i in left_out else g for i, g in enumerate(update.applied.grads)]
    return replace(update, applied=replace(update.applied, grads=grads))


def _explained(
    meant: Meant, chosen: list[Evidence], everything: list[Evidence], until: float
) -> tuple[list[Explanation], str]:
    """Return (explanations, the likeliest first; the usual change by which the gradients differ, if by that alone).

    A fault in the loss is searched for at the outputs; if no words are found there, in a small model's gradients too.
    """
    at_outputs = narrowed(chosen)
    fitting, how = ([], "") if at_outputs is None else _searched(meant, chosen, at_outputs, everything, until)
    is_in_words = how or any(each.cost < RAW for each in fitting)
    if not is_in_words and (at_outputs is None or len(chosen[0].handed) <= NUM_SOLVED):
        more, how = _searched(meant, chosen, chosen, everything, until)
        fitting += more
    if meant.replay.is_half:  # where more than one may fit by chance
        return sorted(fitting, key=lambda each: (round(2 * each.cost) / 2, each.apart)), how
    return sorted(fitting, key=lambda each: round(each.cost, 3)), how


def _searched(
    meant: Meant, chosen: list[Evidence], seen_as: Sequence[Evidence], everything: list[Evidence], until: float
) -> tuple[list[Explanation], str]:
    """Return the same of one search, on updates `seen_as` gradients or as derivatives by the outputs."""
    search, fitting = Search(meant, seen_as, until), list[Explanation]()
    without = max(e.without for e in chosen)
    for i, (attempt, enough) in enumerate(search.stages()):
        attempt()
        fitting = [each for each in search.found if meant.replay.tolerance.shows(without, each.apart)]
        if any(each.cost <= enough for each in fitting) or search.is_over:
            break
        if i == 0 and (change := changed(everything))[0]:
            error = Error("the gradient", f"is {change[0]}, scaled as the loss is", ("clip before unscale",))
            explanation = Explanation((error,), 1.0, change[1], [None for _ in chosen])
            return ([explanation], "") if meant.clips_scaled else ([], change[0])
    return fitting, ""


def _told(fitting: list[Explanation], chosen: list[Evidence]) -> Iterator[Found]:
    best, differs = fitting[0], chosen[0].meant.replay.tolerance.differs
    likely = [error for each in fitting if each.cost <= best.cost + _FEW for error in each.errors]
    alike = {name for error in likely for name in error.causes}
    shared = [_TOGETHER] if len(best.errors) > 1 and not best.rests else []
    for i, error in enumerate(best.errors):
        rests = best.rests[i] if best.rests else [e.reference for e in chosen]
        every = [(e, made, own) for e, made, own in zip(chosen, best.made, rests, strict=True) if own is not None]
        differing = [each for each in every if each[0].apart(each[2]) > differs] or every
        without = max(e.apart(rest) for e, _, rest in differing)
        numbers = sorted(e.update.number for e, *_ in differing)
        # The last update that shows it well: the slots of the first step are still empty.
        last, made, rest = ([each for each in differing if 2 * each[0].apart(each[2]) >= without] or differing)[-1]
        proof, is_beside = proved(last, made, rest), bool(best.rests)
        told, line = str(in_words(error, chosen)), _line_of(error, last)
        sentence = f"{told[0].upper()}{told[1:]}."
        if not error.causes:
            name, fix = next(each for quantity, each in _UNLISTED.items() if error.quantity.startswith(quantity))
            cause = Found(name, "gradient", sentence, fix, without, best.apart, line, tuple(numbers), "", proof)
            yield replace(cause, detail="".join(shared), is_beside=is_beside)
            continue
        own = {each for e in best.errors if e is not error for each in e.causes}
        first, *others = error.causes
        twins = sorted(({*others} | (alike if len(best.errors) == 1 else set())) - own - {first})
        of_twins = [f"These updates cannot tell it from: {', '.join(twins)}."] if twins else []
        more = " ".join([*of_twins, *shared])
        cause = found(first, without, line, numbers, more, with_change=best.apart, proof=proof, twins=tuple(twins))
        fix = cause.fix.partition(ACCUMULATING)[2] if _accumulates(last) else ""
        cause = replace(cause, explanation=sentence, is_beside=is_beside, fix=fix or cause.fix)
        yield _on_replicas(cause, [e for e, *_ in differing]) if first in ON_REPLICAS else cause


def _accumulates(e: Evidence) -> bool:
    """Whether the optimizer itself makes one update of several calls."""
    return bool(getattr(e.meant.optimizer, "gradient_accumulation_steps", None))


def _on_replicas(cause: Found, evidence: list[Evidence]) -> Found:
    """Return a cause with the explanation, the fix and the line for updates whose parts are replicas'."""
    updates = [e.update for e in evidence]
    nums = [(len(u.pieces), e.num_replicas) for u, e in zip(updates, evidence, strict=True)]
    if not all(1 < (num if "its replica" in cause.explanation else each) == num for each, num in nums):
        return cause
    is_weighed = len(np.unique(np.concatenate([w.ravel() for e in evidence for w in e.weights]))) > 1
    engine = evidence[-1].meant.replay.engine()
    of_all = (OF_WEIGHTS if is_weighed else OF_ROWS).get(engine, cause.fix)
    fix, told = of_all, ON_REPLICAS[cause.name].format("weights" if is_weighed else "rows")
    if cause.name == SUMMED and all(map(_is_added_up_twice, evidence)):
        if engine == "torch":
            fix = ADDED_UP_ONCE[engine]
        elif any(map(_has_uneven_replicas, evidence)):
            fix, told = ADDED_UP_ONCE.get(engine, of_all), TWICE.format(evidence[-1].num_replicas)
        elif engine != "jax":  # whose own fix says it
            fix = f"{of_all} If it is divided so, {ADDED_UP_ONCE.get(engine, 'add the gradients up once.')}"
    detail = f"{cause.explanation} {cause.detail}".strip() if told else cause.detail
    line = evidence[-1].meant.replay.line_of_loss(updates[-1].pieces[-1].called) or cause.line
    return replace(cause, fix=fix, explanation=told or cause.explanation, detail=detail, line=line)


def _is_added_up_twice(e: Evidence) -> bool:
    return e.apart(e.num_replicas * e.reference) <= e.meant.replay.tolerance.fits


def _has_uneven_replicas(e: Evidence) -> bool:
    return len({float(weights.sum()) for weights in e.weights}) > 1


def _located(differing: list[Evidence]) -> Found:
    """Return the place of a difference that no error explains: in the loss, or in some variables."""
    e, detail, places, where, is_of_loss = differing[0], "", "", "the loss", True
    at = e
    if len(outputs := differing_outputs(e.meant, [e])) == 1:
        at, where = outputs[0].evidence[0], f"the loss of output {outputs[0].name}"
    if (found := derivatives(at)) is not None:
        solved, should = found
        told, is_of_loss = in_the_loss(at, solved, should, where)
        detail, places = on_a_row(at, solved, should), places_of_mask(at, solved, should)
    else:
        apart, differs = e.by_parameter(e.reference), e.meant.replay.tolerance.differs
        off = ", ".join(f"{name} ({far:.1g})" for name, far in apart.items() if far > differs)
        told = f"the variables that differ: {off}{e.unused}"
    explanation = f"The gradient of update {e.update.number} is not that of the loss that was meant; {told}.{places}"
    numbers, proof = [each.update.number for each in differing], proved(differing[-1], None)
    line = e.meant.replay.line_of_loss(e.update.pieces[-1].called) if is_of_loss else None
    without = max(each.without for each in differing)
    cause = not_known("gradient", explanation, without, line or e.update.applied.line, numbers, proof)
    return replace(cause, detail=detail)


def _line_of(error: Error, e: Evidence) -> Line | None:
    """Return the user's line of an error: where the loss is computed, if that is wrong, or else the optimizer step."""
    update, replay = e.update, e.meant.replay
    is_cut = len(update.pieces) > e.num_replicas
    names = _IN_THE_LOSS if is_cut else (*_IN_THE_LOSS, *_IN_THE_LOSS_OF_ONE)
    is_named = any(name.startswith(names) for name in error.causes[:1])
    is_of_loss = is_named or not error.quantity.startswith(_NOT_OF_THE_LOSS)
    if error.quantity.startswith(_NOT_OF_THE_LOSS) and e.is_plain and e.num_replicas == 1:
        is_of_loss = e.apart(sum(e.taken(), e.penalty)) <= replay.tolerance.fits  # the loop hands over what it takes
    is_penalty = error.quantity == "the penalty"
    is_known = is_of_loss and bool(update.pieces)
    line = replay.line_of_loss(update.pieces[-1].called, is_penalty=is_penalty) if is_known else None
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
    """Return the columns of an update, with another reference if given: the gradient's length, and three weights."""
    reference = e.reference if reference is None else reference
    columns = [e.handed, reference, np.full_like(e.handed, np.nan) if changed is None else changed]
    lines = [Number("length of the gradient", *(float(np.linalg.norm(column)) for column in columns))]
    where, named, step = f"update {e.update.number}", "gradient of {}", float("nan")
    chain = [e]  # the reference's slots hold its own gradients of the updates before; with other faults, theirs
    while chain[0].before is not None and reference is e.reference:
        chain.insert(0, chain[0].before)
    before, after = e.update.applied.params, e.update.applied.params_after
    meant = _weights([*((one, one.reference) for one in chain[:-1]), (e, reference)])
    wrong = _weights([(e, columns[2])])
    again = _weights([(e, e.handed)])  # Keras on TensorFlow squares sparse gradients before it adds up equal rows
    own = _moves(before, after)
    if meant is not None and again is not None and distance(own, _moves(before, again)) < HIDDEN:
        step = distance(own, _moves(before, meant))
        if step >= HIDDEN:
            named, flat = "{} afterwards", e.meant.replay.flat
            columns = [columns[2] * np.nan if each is None else flat([*each])[e.mask] for each in (after, meant, wrong)]
    proof = of_values(where, lambda i: named.format(_name(e, i)), columns)
    return Proof(where, (*lines, *proof.lines), step, tuple(by_parameter(e, changed, reference)))


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
    return meant.replay.stepped(meant.optimizer, [(e.update.applied, _as_grads(e, g)) for e, g in steps])


def _as_grads(e: Evidence, gradient: np.ndarray) -> list[np.ndarray | None]:
    full = np.zeros(len(e.mask))
    full[e.mask] = gradient
    triples = zip(e.meant.replay.parts(full).values(), e.update.applied.params, e.update.applied.grads, strict=True)
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
