"""Gradients that are clipped, by hand or by the optimizer: that is a mistake only where something else was meant."""

from typing import Any

import numpy as np

from wholestep.audit.causes import BY_NAME
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Found, distance, found
from wholestep.audit.log import clips_of

_NAMES = "clipnorm", "global_clipnorm", "clipvalue"
_SAME, _SAME_IN_PART = 1e-3, 0.1  # lengths; the latter where some places stand for a large gradient
_SAME_SPARSE = 0.3  # `tf.clip_by_global_norm` takes the norm of sparse gradients before equal rows are added up


def clipped(everything: list[Evidence]) -> tuple[str, float]:
    """Return (by which clip the references become what was handed over, the distance then); "" if by none."""
    replay = everything[0].meant.replay
    fits, same = replay.tolerance.fits, _SAME_IN_PART if replay.is_in_part else _SAME
    same = _SAME_SPARSE if replay.is_sparse else same
    pairs = [(e.handed, e.reference) for e in everything]
    if (apart := _by_norm(pairs, fits, same)) <= fits:
        return "by their norm", apart
    bound = max(float(np.max(np.abs(handed), initial=0.0)) for handed, _ in pairs)
    if (apart := max(distance(handed, np.clip(meant, -bound, bound)) for handed, meant in pairs)) <= fits:
        return "by value", apart
    parts = [(e.cut(e.handed), e.cut(e.reference)) for e in everything]
    one_by_one = [[(handed[name], meant[name]) for handed, meant in parts] for name in parts[0][0]]
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


def otherwise(everything: list[Evidence], optimizer: Any) -> list[Found]:
    """Return gradients that are clipped otherwise than the optimizer that was meant clips them, or not at all.

    Args:
        everything: updates whose gradients are right, but for a clip.
    """
    bounds = clips_of(optimizer)
    if not any(bounds) or not everything or everything[0].meant.replay.is_in_part:
        return []
    apart = []
    for e in everything:
        if not e.mask.all():
            return []
        meant, is_now = _bounded(e, e.reference, bounds), _bounded(e, e.handed, e.update.applied.clips)
        apart.append((distance(meant, is_now), e))
    replay = everything[0].meant.replay
    wrong = [e for far, e in apart if far > (_SAME_SPARSE if replay.is_sparse else replay.tolerance.differs)]
    if not wrong:
        return []
    plain = max(e.without for e in everything)
    is_right = plain <= everything[0].meant.replay.tolerance.differs
    is_bare = is_right and not any(any(e.update.applied.clips) for e in everything)
    rest = plain if is_right else clipped(everything)[1]
    told = ", ".join(f"{name}={bound:.4g}" for name, bound in zip(_NAMES, bounds, strict=True) if bound)
    cause = BY_NAME["clip forgotten" if is_bare else "clipped otherwise"]
    numbers, without = [e.update.number for e in wrong], max(far for far, _ in apart)
    return [found(cause, without, rest, wrong[0].update.applied.line, numbers, f"Meant is {told}.")]


def _bounded(e: Evidence, gradient: np.ndarray, bounds: tuple[float, float, float]) -> np.ndarray:
    """Return the gradient as Keras clips it."""
    of_each, of_all, of_numbers = bounds
    if of_each:
        parts = e.meant.replay.parts(gradient).values()
        return np.concatenate([_shortened(part, of_each) for part in parts])
    if of_all:
        return _shortened(gradient, of_all)
    return np.clip(gradient, -of_numbers, of_numbers) if of_numbers else gradient


def _shortened(vector: np.ndarray, bound: float) -> np.ndarray:
    size = float(np.linalg.norm(vector))
    return vector * (bound / size) if size > bound else vector
