"""Errors of single variables: a factor, the gradient of another variable, a clip, a function of each number."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from wholestep.audit.basis import Basis
from wholestep.audit.forms import Error
from wholestep.audit.found import distance

_NEAR = 1e-3  # numbers that are solved for; and beside the whole gradient a variable's that is none
_Gradients = list[np.ndarray]  # of one variable, by update


class _Way(NamedTuple):
    """A change of one gradient: its predicate and number in words, its cost, and the changed gradients."""

    predicate: str
    number: str
    cost: float
    made: _Gradients


def by_variable(bases: list[Basis], fits: float, *, is_bare: bool) -> tuple[list[Error], float, _Gradients] | None:
    """Return (errors of single variables, their cost, the gradients that they make), if all is explained by some.

    Args:
        is_bare: whether the model's own losses are left out as well.
    """
    cut = [basis.e.cut(basis.e.handed) for basis in bases]
    of = [basis.e.cut(basis.e.reference - (basis.e.penalty if is_bare else 0)) for basis in bases]
    names = list(cut[0])
    floor = [_NEAR * max(float(np.linalg.norm(basis.e.reference)), basis.e.scale) for basis in bases]
    done: dict[str, _Way] = {}
    for name in names:
        handed, meant = [own[name] for own in cut], [own[name] for own in of]
        if _far(handed, meant, floor) <= fits:
            continue
        others = {other: [own[other] for own in of] for other in names if other != name}
        ways = [way for way in _ways(handed, meant, others) if _far(handed, way.made, floor) <= 10 * fits]
        if not ways:
            return None
        done[name] = min(ways, key=lambda way: way.cost)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, way in done.items():
        kinds.setdefault((way.predicate, way.number if way.predicate == "counts" else ""), []).append(name)
    if not done or (len(done) == len(names) > 1 and [predicate for predicate, _ in kinds] == ["counts"]):
        return None
    errors = [Error("the penalty", "counts not at all instead of once", ("penalty forgotten",))] * is_bare
    for (predicate, _), some in kinds.items():
        whose = "each variable" if len(some) == len(names) > 1 else ", ".join(some)
        numbers = ", ".join(dict.fromkeys(done[name].number for name in some))
        names_of = ("gradients swapped",) * (predicate == "is that of")
        errors.append(Error(f"the gradient of {whose}", predicate, names_of, numbers))
    cost = is_bare + 0.3 * (len(kinds) - 1) + sum(max(done[n].cost for n in some) for some in kinds.values())
    made = [np.concatenate([done[n].made[i] if n in done else of[i][n] for n in names]) for i in range(len(bases))]
    return errors, cost, made


def _far(one: _Gradients, two: _Gradients, floor: list[float]) -> float:
    """Return how far two gradients are apart in the worst update."""
    return max(distance(a, b, scale) for a, b, scale in zip(one, two, floor, strict=True))


def _ways(handed: _Gradients, meant: _Gradients, others: dict[str, _Gradients]) -> Iterator[_Way]:
    """Yield what may have been done to a variable's gradient, the likeliest first."""
    factors = [float(h @ m) / max(float(m @ m), 1e-30) for h, m in zip(handed, meant, strict=True)]
    factor = float(np.median(factors))
    is_plain = factor == 0 or abs(factor + 1) < _NEAR
    yield _Way("counts", f"{factor:.4g} times what it should", 1.0 if is_plain else 2.0, [factor * m for m in meant])
    for name, gradients in others.items():
        if gradients[0].shape == meant[0].shape and not np.array_equal(gradients[0], meant[0]):
            yield _Way("is that of", name, 0.8, gradients)
    bound = max(float(np.abs(h).max()) for h in handed)
    longest = max(float(np.linalg.norm(h)) for h in handed)
    lengths = [max(float(np.linalg.norm(m)), 1e-30) for m in meant]
    yield _Way("is clipped by value to", f"{bound:.4g}", 1.5, [np.clip(m, -bound, bound) for m in meant])
    short = [m * min(1, longest / length) for m, length in zip(meant, lengths, strict=True)]
    yield _Way("is clipped to the norm", f"{longest:.4g}", 1.5, short)
    yield _Way("has its mean taken off", "", 1.5, [m - m.mean() for m in meant])
    yield _Way("is replaced by its sign times", f"{bound:.4g}", 1.5, [bound * np.sign(m) for m in meant])
