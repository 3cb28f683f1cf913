"""Changes of the reference that hold a number which is solved for: the same in all updates."""

from collections.abc import Iterable, Iterator
from itertools import permutations

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.candidates import Hypothesis
from wholestep.audit.causes import BY_NAME
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import distance, least_squares

_LEAST_SCALE = 24.0  # a factor that no count of a small loop is: loss scales are larger
_ALIKE = 0.02
_NEAR = 1e-3
_LEAST_CLIP = 1e-3  # what shortens by less shortens nothing: it is the mean of means


def scales(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """The scale of a loss: left in the gradient, or taken out of one that never had it."""
    factors = [_factor(e) for e in chosen]
    median = float(np.median(factors))
    if chosen[0].meant.is_scaled and 1 / _LEAST_SCALE < median < _LEAST_SCALE:
        power = float(2.0 ** np.round(np.log2(median)))
        detail = f"The loss is scaled {power:.4g} times as much as the optimizer then takes out of the gradient."
        if power != 1:
            yield Hypothesis((BY_NAME["loss scale frozen in a trace"],), lambda e: [power * e.reference], detail=detail)
    if median >= _LEAST_SCALE:
        detail = f"The gradient is {median:.5g} times as large."
        yield Hypothesis((BY_NAME["loss scale left in"],), lambda e: [median * e.reference], detail=detail)
    if 0 < median <= 1 / _LEAST_SCALE:
        detail = f"The gradient is {1 / median:.5g} times as small."

        def shrunk(e: Evidence) -> list[np.ndarray]:
            factor = _factor(e)
            power = 2.0 ** np.round(np.log2(factor)) if factor > 0 else median  # which may move from step to step
            return [power * e.reference, median * e.reference]

        yield Hypothesis((BY_NAME["loss not scaled"],), shrunk, is_free=True, is_tiny=True, detail=detail)


def _factor(e: Evidence) -> float:
    size = float(e.reference @ e.reference)
    return float(e.handed @ e.reference) / size if size else 1.0


def momentum(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """A part of what was handed over before is added, with or without a smaller part of the new."""
    pairs = [_parts(e, e.before) for e in chosen if e.before is not None and len(e.before.handed) == len(e.handed)]
    if not pairs:
        return
    share, kept = (float(number) for number in np.median(pairs, axis=0))
    if not 0.02 < kept < 0.999:
        return

    def gradients(e: Evidence) -> list[np.ndarray]:
        if e.before is None or len(e.before.handed) != len(e.handed):
            return [e.reference, share * e.reference]
        return [share * e.reference + kept * e.before.handed, e.reference + kept * e.before.handed]

    detail = f"{kept:.4g} of the gradient before is added to {share:.4g} of the update's own."
    yield Hypothesis((BY_NAME["momentum by hand"],), gradients, is_free=True, detail=detail)


def _parts(e: Evidence, before: Evidence) -> np.ndarray:
    """Return how much of its own and of the gradient before what was handed over is made of."""
    basis = np.stack([e.reference, before.handed], axis=1)
    return least_squares(basis, e.handed)


def of_outputs(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """The loss of each output counts for another number than was meant, the same in all updates."""
    meant = chosen[0].window.coefficients
    if len(meant) < 2 or any(len(e.window.coefficients) != len(meant) for e in chosen):
        return
    parts = np.concatenate([np.stack(e.by_term(), axis=1) for e in chosen])
    counted = least_squares(parts, np.concatenate([e.handed - e.penalty for e in chosen]))
    counted = np.where(parts.any(axis=0), counted, meant)
    counted = _rounded(counted, [np.zeros(len(meant)), np.ones(len(meant)), meant])
    if np.array_equal(counted, meant) or not np.any(counted):
        return
    is_bare = np.array_equal(counted, np.ones(len(meant)))
    name = "output left out" if np.any(counted == 0) else "loss weights ignored" if is_bare else "other loss weights"

    def gradients(e: Evidence) -> list[np.ndarray]:
        return [sum((n * part for n, part in zip(counted, e.by_term(), strict=True)), e.penalty)]

    told, wanted = (", ".join(f"{number:.4g}" for number in each) for each in (counted, meant))
    detail = f"The losses of {', '.join(chosen[0].terms[0].names)} count {told}, and not {wanted}."
    yield Hypothesis((BY_NAME[name],), gradients, detail=detail)


def _rounded(numbers: np.ndarray, near: list[np.ndarray]) -> np.ndarray:
    """Return numbers, each as one of those that it is nearly, if it is."""
    found = numbers.copy()
    for each in near:
        found = np.where(np.abs(numbers - each) <= _NEAR * np.maximum(np.abs(each), np.abs(numbers).max()), each, found)
    return found


def clip_of_each(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """Each microbatch's own gradient is shortened to one norm, which is solved for."""
    if all(len(e.update.pieces) == 1 for e in chosen):
        return
    for is_inside in (True, False):
        for is_by_rows in (False, True):
            norm = _norm(chosen, is_inside, is_by_rows)
            if norm is None:
                continue

            def gradients(
                e: Evidence, norm: float = norm, is_inside: bool = is_inside, is_by_rows: bool = is_by_rows
            ) -> list[np.ndarray]:
                parts, weights = _means(e, is_inside, is_by_rows)
                return [_clipped(parts, weights, norm) + (0.0 if is_inside else e.penalty)]

            yield Hypothesis((BY_NAME["clip per microbatch"],), gradients, detail=f"To the norm {norm:.5g}.")


def _means(e: Evidence, is_inside: bool, is_by_rows: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (the mean gradient of each piece, what each counts)."""
    window = e.window
    parts = e.pieces(weightings.summed(window))
    parts = [part + e.penalty for part in parts] if is_inside else parts
    own = np.array([float(each.sum()) for each in window.own])
    return parts, own / own.sum() if is_by_rows else np.full(len(parts), 1 / len(parts))


def _clipped(parts: list[np.ndarray], weights: np.ndarray, norm: float) -> np.ndarray:
    sizes = [float(np.linalg.norm(part)) for part in parts]
    factors = [min(1.0, norm / size) if size else 1.0 for size in sizes]
    return sum((w * f * part for w, f, part in zip(weights, factors, parts, strict=True)), np.zeros_like(parts[0]))


def _norm(chosen: list[Evidence], is_inside: bool, is_by_rows: bool) -> float | None:
    """Return the norm that explains an update best: the pieces are clipped from the longest one on."""
    best: tuple[float, float] | None = None
    for e in chosen:
        parts, weights = _means(e, is_inside, is_by_rows)
        handed = e.handed - (0.0 if is_inside else e.penalty)
        sizes = np.array([float(np.linalg.norm(part)) for part in parts])
        order = np.argsort(-sizes)
        for num in range(1, len(parts) + 1):
            short = order[:num]
            whole = sum((weights[i] * parts[i] for i in order[num:]), np.zeros_like(handed))
            along = sum((weights[i] / sizes[i] * parts[i] for i in short if sizes[i]), np.zeros_like(handed))
            size = float(along @ along)
            norm = float((handed - whole) @ along) / size if size else 0.0
            if not 0 < norm < (1 - _LEAST_CLIP) * sizes[short].min():
                continue
            apart = distance(handed, whole + norm * along)
            if best is None or apart < best[0]:
                best = apart, norm
    return best[1] if best is not None and best[0] <= _ALIKE else None


def swap(chosen: list[Evidence]) -> Iterator[Hypothesis]:
    """Gradients come to other variables of their shape."""
    shapes = [v.shape for v in chosen[0].meant.replay.model.trainable_variables]
    groups = [[i for i, shape in enumerate(shapes) if shape == each] for each in dict.fromkeys(shapes)]
    places = {i: i for i in range(len(shapes))}
    first = chosen[0]
    full = [np.zeros(len(first.mask)), np.zeros(len(first.mask))]
    full[0][first.mask], full[1][first.mask] = first.handed, first.reference
    handed, right = (list(first.meant.replay.parts(vector).values()) for vector in full)

    def apart(pairs: Iterable[tuple[int, int]]) -> float:
        return sum(distance(handed[i], right[j]) for i, j in pairs)

    for group in groups:
        if 1 < len(group) <= 6:
            best = min((list(zip(group, order, strict=True)) for order in permutations(group)), key=apart)
            places |= dict(best)
    if all(i == j for i, j in places.items()):
        return

    def gradients(e: Evidence) -> list[np.ndarray]:
        vector = np.zeros(len(e.mask))
        vector[e.mask] = e.reference
        parts = list(e.meant.replay.parts(vector).values())
        return [np.concatenate([parts[places[i]] for i in range(len(parts))])[e.mask]]

    names = [name for i, name in enumerate(first.meant.replay.names) if places[i] != i]
    yield Hypothesis((BY_NAME["gradients swapped"],), gradients, detail=f"It is so with {', '.join(names)}.")
