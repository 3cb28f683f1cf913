"""The proof of a gradient: the numbers of one update that differ, and their effect on the weights."""

from collections.abc import Iterator

import numpy as np

from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Number, Proof, of_values
from wholestep.audit.measure import NUM_PLACES, distance

HIDDEN = 0.05  # a step that is closer to another, relative to its length, hardly differs


def proved(e: Evidence, changed: np.ndarray | None) -> Proof:
    """Return the three columns of an update: the gradient's length, the loss, and three weights after the step.

    Args:
        changed: the gradient of the reference with the fault, as `Evidence` has gradients; None if there is none.
    """
    columns = [e.handed, e.reference, np.full_like(e.handed, np.nan) if changed is None else changed]
    lines = [Number("length of the gradient", *(float(np.linalg.norm(column)) for column in columns))]
    lines.append(Number("loss of the update", np.nan, _loss(e), np.nan))
    where, named, step = f"update {e.update.number}", "gradient of {}", float("nan")
    chain = [e]  # the reference's slots hold its own gradients of the updates before
    while chain[0].before is not None:
        chain.insert(0, chain[0].before)
    before, after = e.update.applied.params, e.update.applied.params_after
    meant, wrong = _weights([(one, one.reference) for one in chain]), _weights([(e, columns[2])])
    if meant is not None:
        own, should = ([b - a for a, b in zip(before, each, strict=True)] for each in (after, meant))
        step = distance(own, should)
        if step >= HIDDEN:
            named, flat = "{} afterwards", e.meant.replay.flat
            columns = [columns[2] * np.nan if each is None else flat([*each])[e.mask] for each in (after, meant, wrong)]
    proof = of_values(where, lambda i: named.format(_name(e, i)), columns)
    return Proof(where, (*lines, *proof.lines), step, tuple(by_parameter(e, changed)))


def by_parameter(e: Evidence, changed: np.ndarray | None) -> Iterator[tuple[str, float, float]]:
    """Yield (name, distance from the reference, distance from it with the fault or NaN) of the handed gradients."""
    without = e.by_parameter(e.reference)
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
    """Return the name of the i-th number of such a vector, as `dense/kernel[2, 0]`."""
    replay = e.meant.replay
    owners = [np.full(size, j) for j, size in enumerate(replay.sizes)]
    places = [np.arange(size) for size in replay.sizes]
    owner, place = (int(replay.flat([*each])[e.mask][i]) for each in (owners, places))
    inside = ", ".join(map(str, np.unravel_index(place, replay.shapes[owner])))
    return f"{replay.names[owner]}[{inside}]"


def _loss(e: Evidence) -> float:
    """Return the loss that was meant, of the rows of the update."""
    values = np.sum([(t.values * (w != 0)).sum(axis=1) for t, w in zip(e.terms, e.weights, strict=True)], axis=0)
    first = e.terms[0]
    penalty = sum(t.penalty for t in e.terms) / len(e.terms)
    with np.errstate(all="ignore"):
        return float(np.sum(first.coefficients * values / np.where(first.divided, e.whole, 1.0))) + penalty
