"""The stage of the gradient: what was handed to the optimizer, against what should have been."""

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.candidates import Hypothesis
from wholestep.audit.causes import BY_NAME
from wholestep.audit.clips import clipped
from wholestep.audit.evidence import Evidence, Meant
from wholestep.audit.found import Found, distance, found, not_known
from wholestep.audit.hypotheses import hypotheses
from wholestep.audit.windows import Update

NUM_DIFFERING, NUM_ALIKE = 6, 3  # updates on which changes are tried: of those that differ, and of those that do not
NUM_FREE = 64  # rows whose factors are solved for


def gradients(meant: Meant, updates: list[Update]) -> tuple[list[Found], list[str], list[Evidence]]:
    """Return (causes, notes, evidence) of the gradients of these updates."""
    everything: list[Evidence] = []
    for update in updates:
        follows = bool(everything) and everything[-1].update.number == update.number - 1
        everything.append(Evidence(meant, update, everything[-1] if follows else None))
    notes = _never_handed(meant, everything)
    differs = meant.replay.tolerance.differs
    differing = [e for e in everything if e.without > differs]
    for e in differing:
        e.measure()
    differing = [e for e in differing if e.without > differs]
    if not differing:
        return [], notes, everything
    alike = [e for e in everything if all(e is not other for other in differing)]
    chosen = [*_spread(differing, NUM_DIFFERING), *_spread(alike, NUM_ALIKE)]
    for e in chosen:
        e.measure()
    causes, benign = _explain(meant, chosen, everything)
    if benign:
        return [], [*notes, benign], everything
    return causes or [_unknown(differing)], notes, everything


def _explain(meant: Meant, chosen: list[Evidence], everything: list[Evidence]) -> tuple[list[Found], str]:
    """Return (causes, what is no cause) that reproduce what was handed over."""
    fitting: list[tuple[Hypothesis, float]] = []
    tried = []
    without = max(e.without for e in chosen)
    for hypothesis in hypotheses(meant, chosen):
        if fitting and len(hypothesis.causes) > len(fitting[0][0].causes):
            break
        ways = [hypothesis.gradients(e) for e in chosen]
        if meant.replay.tolerance.shows(without, apart := _apart(hypothesis, chosen, ways)):
            fitting.append((hypothesis, apart))
        tried.append((hypothesis, ways))
    if fitting:
        if meant.replay.is_half:  # where more than one may fit by chance
            fitting.sort(key=lambda each: each[1])
        return _told(fitting, chosen), ""
    how, apart = clipped(everything, [e.reference for e in everything])
    if how and meant.is_scaled:
        return _told([(Hypothesis((BY_NAME["clip before unscale"],), lambda e: []), apart)], chosen), ""
    if how:
        return [], f"Gradients are clipped {how} before the optimizer gets them; but for that they are right."
    for hypothesis, ways in tried:
        if len(hypothesis.causes) > 1 or hypothesis.is_free:
            continue
        for way in zip(*ways, strict=True):
            how, apart = clipped(chosen, list(way))
            if how:
                return _told([(hypothesis, apart)], chosen), ""
    return [], ""


def _apart(hypothesis: Hypothesis, chosen: list[Evidence], ways: list[list[np.ndarray]]) -> float:
    """Return the distance of the worst update from a hypothesis, where it is wrong in its best way."""
    if not all(ways):
        return float("inf")
    distances = [
        [distance(e.handed, way) if hypothesis.is_tiny else e.apart(way) for way in each]
        for e, each in zip(chosen, ways, strict=True)
    ]
    if hypothesis.is_free:
        return max(min(each) for each in distances)
    return min(max(each) for each in zip(*distances, strict=True))


def _told(fitting: list[tuple[Hypothesis, float]], chosen: list[Evidence]) -> list[Found]:
    hypothesis, apart = fitting[0]
    twins = sorted({cause.name for other, _ in fitting[1:] for cause in other.causes} - {hypothesis.causes[0].name})
    told = [hypothesis.detail] if hypothesis.detail else []
    detail = " ".join([*told, f"These updates cannot tell it from: {', '.join(twins)}."] if twins else told)
    differing = [e for e in chosen if e.without > e.meant.replay.tolerance.differs]
    without, numbers = max(e.without for e in differing), sorted(e.update.number for e in differing)
    line = differing[0].update.applied.line
    return [found(cause, without, apart, line, numbers, detail) for cause in hypothesis.causes]


def _spread(evidence: list[Evidence], num: int) -> list[Evidence]:
    """Return so many updates, of as many kinds as there are, the first and the last among them."""
    kinds: dict[tuple[int, ...], list[Evidence]] = {}
    for e in evidence:
        kinds.setdefault(e.kind, []).append(e)
    chosen: list[Evidence] = [each[0] for each in kinds.values()][:num]
    rest = [e for e in evidence if all(e is not other for other in chosen)]
    return [*chosen, *rest[::-1][: num - len(chosen)]]


def _unknown(differing: list[Evidence]) -> Found:
    """Tell what can be told of a difference that nothing known reproduces: the rows' factors, or the parameters."""
    e = differing[0]
    told = _solved(e) or _penalised(e)
    if not told:
        differs = e.meant.replay.tolerance.differs
        off = {name: apart for name, apart in e.by_parameter(e.reference).items() if apart > differs}
        told = f"the variables that differ: {', '.join(f'{name} ({apart:.1g})' for name, apart in off.items())}"
    explanation = f"The gradient of update {e.update.number} is not that of the loss that was meant; {told}."
    numbers = [each.update.number for each in differing]
    return not_known("gradient", explanation, max(each.without for each in differing), e.update.applied.line, numbers)


def _solved(e: Evidence) -> str:
    """Return the factors of the rows that would make the gradient, in words; "" if none would."""
    rows = np.concatenate(e.rows())
    used = np.flatnonzero(np.concatenate([w.reshape(-1) for w in e.weights]))
    if not 0 < len(used) <= min(NUM_FREE, rows.shape[1] // 2):
        return ""
    solved, *_ = np.linalg.lstsq(rows[used].T, e.handed - e.penalty, rcond=1e-6)
    if e.apart(solved @ rows[used] + e.penalty) > e.meant.replay.tolerance.fits:
        return ""
    should = np.concatenate([f.reshape(-1) for f in weightings.factors(e.window, weightings.right(e.window))])[used]
    return f"its rows count {_counted(solved)} instead of {_counted(should)}"


def _penalised(e: Evidence) -> str:
    """Return how often the model's own losses would have to count, in words; "" if that does not make the gradient."""
    size, rest = float(e.penalty @ e.penalty), e.handed - e.reference
    share = 1 + float(rest @ e.penalty) / size if size else 1.0
    fits = e.apart(e.reference + (share - 1) * e.penalty) <= e.meant.replay.tolerance.fits
    return f"the model's own losses count {share:.4g} times instead of once" if fits else ""


def _counted(factors: np.ndarray) -> str:
    values, counts = np.unique(np.round(factors, 4), return_counts=True)
    return ", ".join(f"{v:.4g} x {n}" for v, n in list(zip(values, counts, strict=True))[:6])


def _never_handed(meant: Meant, everything: list[Evidence]) -> list[str]:
    handed = np.zeros(len(meant.replay.names), bool)
    for e in everything:
        handed |= [grad is not None for grad in e.update.applied.grads]
    missing = [name for name, is_one in zip(meant.replay.names, handed, strict=True) if not is_one]
    told = f"{BY_NAME['variable left out'].explanation} It is so with {', '.join(missing)}."
    return [told] if missing and everything else []
