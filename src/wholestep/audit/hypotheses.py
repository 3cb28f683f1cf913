"""The changes of the reference gradient that an audit tries, those with the fewest things wrong first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.cause import Cause
from wholestep.audit.causes import BY_NAME, WEIGHTED
from wholestep.audit.evidence import Evidence
from wholestep.audit.meaning import mistaken
from wholestep.audit.weightings import Weighting
from wholestep.model.objective import Objective

Candidates = Callable[[Evidence], list[np.ndarray]]


@dataclass(frozen=True)
class Hypothesis:
    """Things that may be wrong together.

    `gradients` gives, for one update, the gradients that would be handed over then: one for each way to be wrong, the
    same way in every update; where `is_free`, each update may have its own.
    """

    causes: tuple[Cause, ...]
    gradients: Candidates
    is_free: bool = False


def hypotheses(objective: Objective, has_weights: bool) -> Iterator[Hypothesis]:
    """Yield all hypotheses, the simple ones first."""
    for name, factors in _PENALTIES.items():
        yield Hypothesis((BY_NAME[name],), _penalised(weightings.right, factors))
    others = _other_losses(objective, has_weights)
    for name, (other, weigh) in others.items():
        yield Hypothesis((BY_NAME[name],), _other(other, weigh, (weightings.right,)))
    for cause in WEIGHTED:
        yield Hypothesis((cause,), _weighed(cause.weigh))
    yield Hypothesis((BY_NAME["not reset"],), _not_reset((weightings.right,)), is_free=True)
    yield Hypothesis((BY_NAME["broadcast"],), _broadcast)
    for cause in WEIGHTED:
        yield Hypothesis((cause, BY_NAME["penalty forgotten"]), _without_penalty(cause.weigh))
        yield Hypothesis((cause, BY_NAME["not reset"]), _not_reset(cause.weigh), is_free=True)
        for name, (other, weigh) in others.items():
            yield Hypothesis((BY_NAME[name], cause), _other(other, weigh, cause.weigh))


def _other_losses(objective: Objective, has_weights: bool) -> dict[str, tuple[Objective | None, str]]:
    """Return the losses that stand in for the one meant, and how their batches are weighed."""
    found: dict[str, tuple[Objective | None, str]] = {name: (other, "") for name, other in mistaken(objective).items()}
    if has_weights:
        found |= {"weights ignored": (None, "none"), "weights squared": (None, "squared")}
    return found


def _shares(evidence: Evidence) -> list[float]:
    """Return how often the model's own losses come, where each piece has added them to its own loss."""
    if not evidence.meant.has_penalty:
        return [1.0]
    k, largest = len(evidence.update.pieces), evidence.meant.largest
    rows = float(sum(len(piece.rows) for piece in evidence.update.pieces))  # of a loss that was never reduced
    return [1.0, float(k), 1 / k, k / largest, 1 / largest, rows]


def _weighed(ways: tuple[Weighting, ...]) -> Candidates:
    def gradients(e: Evidence) -> list[np.ndarray]:
        data = [e.weighed(way) for way in ways]
        return [d + share * e.penalty for d in data for share in _shares(e)]

    return gradients


def _without_penalty(ways: tuple[Weighting, ...]) -> Candidates:
    return lambda e: [e.weighed(way) for way in ways]


def _penalised(way: Weighting, factor: Callable[[Evidence], float]) -> Candidates:
    return lambda e: [e.weighed(way) + factor(e) * e.penalty]


def _not_reset(ways: tuple[Weighting, ...]) -> Candidates:
    def gradients(e: Evidence) -> list[np.ndarray]:
        now = [e.weighed(way) + e.penalty for way in ways]
        if e.before is None or len(e.before.handed) != len(e.handed):
            return now
        # A sum that goes on is divided anew each time: by pieces, by rows, or not at all.
        by_rows = float(np.mean(e.before.window.whole / e.window.whole))
        shares = 1.0, by_rows, len(e.before.update.pieces) / len(e.update.pieces)
        old = e.before.handed, e.before.handed - e.before.penalty
        return [*now, *(each + share * part for each in now for share in shares for part in old)]

    return gradients


def _other(objective: Objective | None, weigh: str, ways: tuple[Weighting, ...]) -> Candidates:
    def gradients(e: Evidence) -> list[np.ndarray]:
        data = [e.weighed(way, objective, weigh) for way in ways]
        return [d + share * e.penalty for d in data for share in _shares(e)]

    return gradients


def _broadcast(e: Evidence) -> list[np.ndarray]:
    """The mean over all pairs of labels and outputs of a batch, and their sum, over one axis or both."""
    divisors, num = weightings.right(e.window), len(e.update.pieces[0].rows)
    rolled = sum((e.data(divisors, shift=shift) for shift in range(num)), np.zeros_like(e.handed))
    ways = (1 / num, 1.0), (1.0, 1.0), (1.0, num), (num, 1.0), (num, num**2)
    return [factor * rolled + share * e.penalty for factor, share in ways]


_PENALTIES: dict[str, Callable[[Evidence], float]] = {
    "penalty forgotten": lambda e: 0.0,
    "penalty once per microbatch": lambda e: float(len(e.update.pieces)),
    "penalty divided": lambda e: 1 / len(e.update.pieces),
}
