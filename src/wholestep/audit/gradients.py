"""The stage of the gradient: what was handed to the optimizer, against what should have been."""

from dataclasses import replace
from functools import partial

import numpy as np

from wholestep.audit.candidates import PENALTIES, Hypothesis
from wholestep.audit.causes import BY_NAME
from wholestep.audit.causes_of_losses import OTHER_LOSSES
from wholestep.audit.clips import clipped
from wholestep.audit.evidence import Evidence, Meant
from wholestep.audit.found import Found, distance, found, not_known
from wholestep.audit.hypotheses import hypotheses
from wholestep.audit.log import Line
from wholestep.audit.proof_of_gradients import proved
from wholestep.audit.source import line_of_loss
from wholestep.audit.unknown import unknown
from wholestep.audit.windows import Update

IN_THE_LOSS = {
    *(cause.name for cause in OTHER_LOSSES),
    *(
        "padding counted",
        "padding trained on",
        "padded places counted",
        "mean of row means",
        "divided by the weights",
        "divided by the rows",
    ),
}
IN_THE_LOSS_OF_ONE = {"never divided", "divided by the full batch", "penalty forgotten", "penalty added twice"}
NUM_DIFFERING, NUM_ALIKE = 6, 3  # updates on which changes are tried: of those that differ, and of those that do not
Ways = list[list[np.ndarray]]  # by update, the gradients of a hypothesis


def gradients(meant: Meant, updates: list[Update]) -> tuple[list[Found], list[str], list[Evidence]]:
    """Return (causes, notes, evidence) of the gradients of these updates."""
    everything = _evidence(meant, updates)
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
        return [], [], everything
    alike = [e for e in everything if all(e is not other for other in differing)]
    chosen = [*_spread(differing, NUM_DIFFERING), *_spread(alike, NUM_ALIKE)]
    for e in chosen:
        e.measure()
    causes, benign = _explain(meant, chosen, everything)
    if benign:
        return [], [benign], everything
    return causes or [unknown(differing)], [], everything


def _of_finite(meant: Meant, everything: list[Evidence]) -> tuple[list[Found], list[str], list[Evidence]]:
    """Return the same of the updates with finite gradients; a gradient that alone is not finite is no known cause."""
    is_meant = {e.update.number: bool(np.all(np.isfinite(e.reference))) for e in everything}
    is_handed = {e.update.number: bool(np.all(np.isfinite(e.handed))) for e in everything}
    finite = [e.update for e in everything if is_meant[e.update.number] and is_handed[e.update.number]]
    causes, notes, evidence = gradients(meant, finite)
    broken = [e for e in everything if is_meant[e.update.number] and not is_handed[e.update.number]]
    if broken:
        told = f"The gradient of update {broken[0].update.number} is not finite; that of the loss that was meant is."
        line, numbers = broken[0].update.applied.line, [e.update.number for e in broken]
        causes = [*causes, not_known("gradient", told, float("inf"), line, numbers)]
    if lost := [number for number, is_finite in is_meant.items() if not is_finite]:
        some = ", ".join(map(str, lost[:6]))
        notes = [*notes, f"The gradient that was meant is not finite in updates {some}: these are not judged."]
    return causes, notes, evidence


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


def _explain(meant: Meant, chosen: list[Evidence], everything: list[Evidence]) -> tuple[list[Found], str]:
    """Return (causes, what is no cause) that reproduce what was handed over."""
    fitting: list[tuple[Hypothesis, float, Ways]] = []
    tried: list[tuple[Hypothesis, list[np.ndarray]]] = []
    tolerance = meant.replay.tolerance
    without = max(e.without for e in chosen)
    for hypothesis in hypotheses(meant, chosen):
        if fitting and len(hypothesis.causes) > len(fitting[0][0].causes):
            break
        if fitting and hypothesis.is_wide:
            continue
        apart, ways = _tried(hypothesis, chosen, tolerance.fits)
        if tolerance.shows(without, apart):
            fitting.append((hypothesis, apart, ways))
        if len(hypothesis.causes) == 1 and not (hypothesis.is_free or hypothesis.is_wide):
            tried.append((hypothesis, ways[0]))
    if fitting:
        if meant.replay.is_half:  # where more than one may fit by chance
            fitting.sort(key=lambda each: each[1])
        return _told(fitting, chosen), ""
    how, apart = clipped(everything, [e.reference for e in everything])
    if how and meant.is_scaled:
        cause = BY_NAME["clip before unscale"]
        return _told([(Hypothesis((cause,), lambda e: []), apart, [[] for _ in chosen])], chosen), ""
    if how:
        return [], f"Gradients are clipped {how} before the optimizer gets them; but for that they are right."
    for hypothesis, first in tried:
        for i, way in enumerate(first):
            if not clipped(chosen[:1], [way])[0]:
                continue
            same = [way, *(hypothesis.gradients(e)[i] for e in chosen[1:])]
            how, apart = clipped(chosen, same)
            if how:
                return _told([(hypothesis, apart, [[each] for each in same])], chosen), ""
    return [], ""


def _tried(hypothesis: Hypothesis, chosen: list[Evidence], fits: float) -> tuple[float, Ways]:
    """Return (the distance of the worst update from a hypothesis in its best way, its gradients by update).

    After an update from which it is too far in every way, the others are not looked at.
    """
    ways: Ways = []
    worst = np.zeros(0)
    for e in chosen:
        ways.append(hypothesis.gradients(e))
        apart = np.array([_from(e, hypothesis, way) for way in ways[-1]])
        if hypothesis.is_free:
            apart = np.array([np.min(apart, initial=np.inf)])
        num = min(len(apart), len(worst)) if len(ways) > 1 else len(apart)
        worst = np.maximum(worst[:num], apart[:num]) if len(ways) > 1 else apart
        if np.min(worst, initial=np.inf) > fits:
            break
    return float(np.min(worst, initial=np.inf)), ways


def _from(e: Evidence, hypothesis: Hypothesis, way: np.ndarray) -> float:
    return distance(e.handed, way) if hypothesis.is_tiny else e.apart(way)


def _told(fitting: list[tuple[Hypothesis, float, Ways]], chosen: list[Evidence]) -> list[Found]:
    hypothesis, apart, ways = fitting[0]
    twins = sorted({cause.name for other, *_ in fitting[1:] for cause in other.causes} - _names(hypothesis))
    if hypothesis.causes[0].name in PENALTIES:  # others fit as well, where their factors of the rows are the right ones
        twins = [name for name in twins if name in PENALTIES]
    told = [hypothesis.detail] if hypothesis.detail else []
    detail = " ".join([*told, f"These updates cannot tell it from: {', '.join(twins)}."] if twins else told)
    differs = chosen[0].meant.replay.tolerance.differs
    differing = [(e, way) for e, way in zip(chosen, ways, strict=True) if e.without > differs]
    without, numbers = max(e.without for e, _ in differing), sorted(e.update.number for e, _ in differing)
    last, way = differing[-1]  # of the first one's step the slots know nothing yet
    proof = proved(last, min(way, key=partial(_from, last, hypothesis), default=None))
    lines = [line_of(cause.name, last.update) for cause in hypothesis.causes]
    given = [(without, apart, line, numbers, detail, proof, tuple(twins)) for line in lines]
    return [found(cause, *rest) for cause, rest in zip(hypothesis.causes, given, strict=True)]


def line_of(name: str, update: Update) -> Line | None:
    """Return the user's line of a cause: where the loss is computed, if that is wrong, or else the optimizer step."""
    is_of_loss = name in IN_THE_LOSS or (name in IN_THE_LOSS_OF_ONE and len(update.pieces) == 1)
    is_penalty = name.startswith("penalty")
    line = line_of_loss(update.pieces[-1].called.line, is_penalty=is_penalty) if is_of_loss and update.pieces else None
    return line or update.applied.line


def _names(hypothesis: Hypothesis) -> set[str]:
    return {cause.name for cause in hypothesis.causes}


def _spread(evidence: list[Evidence], num: int) -> list[Evidence]:
    """Return so many updates, of as many kinds as there are, the first and the last among them."""
    kinds: dict[tuple[int, ...], list[Evidence]] = {}
    for e in evidence:
        kinds.setdefault(e.kind, []).append(e)
    chosen: list[Evidence] = [each[0] for each in kinds.values()][:num]
    rest = [e for e in evidence if all(e is not other for other in chosen)]
    return [*chosen, *rest[::-1][: num - len(chosen)]]
