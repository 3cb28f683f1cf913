"""Gradients that were clipped by hand before the optimizer saw them: that is no mistake, and has to be recognised."""

import numpy as np

from wholestep.audit.evidence import Evidence
from wholestep.audit.found import distance

_SAME, _SAME_IN_PART = 1e-3, 0.1  # lengths; the latter where some places stand for a large gradient


def clipped(all_evidence: list[Evidence], candidates: list[np.ndarray]) -> tuple[str, float]:
    """Return (by which clip the candidates become what was handed over, the distance then); "" if by none."""
    replay = all_evidence[0].meant.replay
    fits, same = replay.tolerance.fits, _SAME_IN_PART if replay.is_in_part else _SAME
    pairs = [(e.handed, c) for e, c in zip(all_evidence, candidates, strict=True)]
    if (apart := _by_norm(pairs, fits, same)) <= fits:
        return "by their norm", apart
    bounds = [float(np.max(np.abs(handed), initial=0.0)) for handed, _ in pairs]
    bound = max(bounds)
    if (apart := max(distance(handed, np.clip(c, -bound, bound)) for handed, c in pairs)) <= fits:
        return "by value", apart
    parts = []
    for e, candidate in zip(all_evidence, candidates, strict=True):
        full = [np.zeros(len(e.mask)), np.zeros(len(e.mask))]
        full[0][e.mask], full[1][e.mask] = e.handed, candidate
        parts.append([e.meant.replay.parts(vector) for vector in full])
    names = list(parts[0][0])
    one_by_one = [[(one[name], two[name]) for one, two in parts] for name in names]
    apart = max(_by_norm(each, fits, same) for each in one_by_one)
    return ("variable by variable" if apart <= fits else ""), apart


def _by_norm(pairs: list[tuple[np.ndarray, np.ndarray]], fits: float, same: float) -> float:
    """Return how far each is from the candidate, or from the candidate shortened to one length that none exceeds."""
    worst = 0.0
    lengths: list[float] = []
    whole: list[float] = []
    for handed, candidate in pairs:
        size = float(candidate @ candidate)
        factor = float(handed @ candidate) / size if size else 1.0
        worst = max(worst, factor - 1, distance(handed, factor * candidate))
        if worst > fits:
            return worst
        (lengths if factor < 1 - fits else whole).append(float(np.linalg.norm(handed)))
    if not lengths:
        return worst
    if not min(lengths):  # nothing is left of it: that is no clip
        return float("inf")
    longest = max([*lengths, *whole])
    return worst if longest <= min(lengths) * (1 + max(same, fits)) else longest / min(lengths)
