"""Gradients that were clipped by hand before the optimizer saw them: that is no mistake, and has to be recognised."""

import numpy as np

from wholestep.audit.evidence import Evidence
from wholestep.audit.found import FITS, distance

_SAME = 1e-3


def clipped(all_evidence: list[Evidence], candidates: list[np.ndarray]) -> str:
    """Return by which clip the candidates become what was handed over, or "" if by none."""
    pairs = [(e.handed, c) for e, c in zip(all_evidence, candidates, strict=True)]
    if _by_norm(pairs):
        return "by their norm"
    bounds = [float(np.max(np.abs(handed), initial=0.0)) for handed, _ in pairs]
    bound = max(bounds)
    if all(distance(handed, np.clip(c, -bound, bound)) <= FITS for handed, c in pairs):
        return "by value"
    parts = []
    for e, candidate in zip(all_evidence, candidates, strict=True):
        full = [np.zeros(len(e.mask)), np.zeros(len(e.mask))]
        full[0][e.mask], full[1][e.mask] = e.handed, candidate
        parts.append([e.meant.replay.parts(vector) for vector in full])
    names = list(parts[0][0])
    one_by_one = [[(one[name], two[name]) for one, two in parts] for name in names]
    return "variable by variable" if all(map(_by_norm, one_by_one)) else ""


def _by_norm(pairs: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether each is the candidate, or the candidate shortened to one length that no other is longer than."""
    lengths: list[float] = []
    whole: list[float] = []
    for handed, candidate in pairs:
        size = float(candidate @ candidate)
        factor = float(handed @ candidate) / size if size else 1.0
        if factor > 1 + FITS or distance(handed, factor * candidate) > FITS:
            return False
        (lengths if factor < 1 - FITS else whole).append(float(np.linalg.norm(handed)))
    if not lengths:
        return True
    return max(lengths) <= min(lengths) * (1 + _SAME) and max(whole, default=0.0) <= min(lengths) * (1 + _SAME)
