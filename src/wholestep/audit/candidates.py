"""What an update hands over if something is wrong: gradients of one `Evidence`, one for each way to be wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from wholestep.audit import weightings
from wholestep.audit.cause import Cause
from wholestep.audit.evidence import Evidence
from wholestep.audit.weightings import Weighting
from wholestep.audit.windows import PAD, Piece
from wholestep.model.objective import Objective
from wholestep.tree import Tree

Candidates = Callable[[Evidence], list[np.ndarray]]


@dataclass(frozen=True)
class Hypothesis:
    """Things that may be wrong together.

    `gradients` gives, for one update, the gradients that would be handed over then: one for each way to be wrong, the
    same way in every update; where `is_free`, each update may have its own. `is_tiny`: they may be so small that a
    distance relative to the reference says nothing. `detail`: what was solved for, in words. `is_wide`: it fits
    what others say more narrowly, and is tried where they do not fit.
    """

    causes: tuple[Cause, ...]
    gradients: Candidates
    is_free: bool = False
    is_tiny: bool = False
    detail: str = ""
    is_wide: bool = False


def shares(evidence: Evidence) -> list[float]:
    """Return how often the model's own losses come, where each piece has added them to its own loss."""
    if not evidence.meant.has_penalty:
        return [1.0]
    k, largest, replicas = len(evidence.update.pieces), evidence.meant.largest, evidence.num_replicas
    rows = float(sum(len(piece.rows) for piece in evidence.update.pieces))  # of a loss that was never reduced
    found = [1.0, float(k), 1 / k, k / largest, 1 / largest, rows]
    return found if replicas in (1, k) else [*found, float(replicas), 1 / replicas]


def weighed(ways: tuple[Weighting, ...]) -> Candidates:
    """Return gradients with other factors of the rows."""

    def gradients(e: Evidence) -> list[np.ndarray]:
        data = [e.weighed(way) for way in ways]
        return [d + share * e.penalty for d in data for share in shares(e)]

    return gradients


def without_penalty(ways: tuple[Weighting, ...]) -> Candidates:
    """Return the same without the model's own losses."""
    return lambda e: [e.weighed(way) for way in ways]


def penalised(way: Weighting, factor: Callable[[Evidence], float]) -> Candidates:
    """Return gradients with the model's own losses so many times."""
    return lambda e: [e.weighed(way) + factor(e) * e.penalty]


def not_reset(ways: tuple[Weighting, ...]) -> Candidates:
    """Return gradients to which all those before are added."""

    def gradients(e: Evidence) -> list[np.ndarray]:
        now = [e.weighed(way) + e.penalty for way in ways]
        if e.before is None or len(e.before.handed) != len(e.handed):
            return now
        # A sum that goes on is divided anew each time: by pieces, by rows, or not at all.
        by_rows = float(np.mean(e.before.window.whole / e.window.whole))
        ratios = 1.0, by_rows, len(e.before.update.pieces) / len(e.update.pieces)
        old = e.before.handed, e.before.handed - e.before.penalty
        return [*now, *(each + ratio * part for each in now for ratio in ratios for part in old)]

    return gradients


def other(objective: Objective | None, weigh: str, ways: tuple[Weighting, ...]) -> Candidates:
    """Return gradients of another loss."""

    def gradients(e: Evidence) -> list[np.ndarray]:
        data = [e.weighed(way, objective, weigh) for way in ways]
        return [d + share * e.penalty for d in data for share in shares(e)]

    return gradients


def broadcast(e: Evidence) -> list[np.ndarray]:
    """The mean over all pairs of labels and outputs of a batch, and their sum, over one axis or both."""
    num = len(e.update.pieces[0].rows)
    rolled = sum((_relabelled(e, shift=shift) for shift in range(num)), np.zeros_like(e.handed))
    ways = (1 / num, 1.0), (1.0, 1.0), (1.0, num), (num, 1.0), (num, num**2)
    return [factor * rolled + share * e.penalty for factor, share in ways]


def shifted(e: Evidence) -> list[np.ndarray]:
    """Labels of the next or last row of the data, of the batch, or of the next or last place of a row."""
    num = e.meant.replay.num_rows

    def moved(by: int) -> Callable[[Piece], np.ndarray]:
        return lambda piece: (piece.rows + by) % num

    ways = [_relabelled(e, shift=1), _relabelled(e, shift=-1), _relabelled(e, along=1), _relabelled(e, along=-1)]
    ways += [_relabelled(e, rows=moved(by)) for by in (1, -1)]
    return [way + e.penalty for way in ways]


def unshuffled(e: Evidence) -> list[np.ndarray]:
    """Labels in the order of the data, where the inputs are in another."""

    def rows(piece: Piece) -> np.ndarray:
        _, before = e.place(piece)
        return (before + np.arange(len(piece.rows))) % e.meant.replay.num_rows

    return [_relabelled(e, rows=rows) + e.penalty]


def filled_up(e: Evidence) -> list[np.ndarray]:
    """What fills up a short batch as rows of it, with labels of 0."""
    if not any(e.pads):
        return [e.reference]
    window = replace(e.window, weights=[terms.weights for terms in e.terms])
    return [e.data(weightings.right(window), window=window) + e.penalty]


def averaged_apart(e: Evidence) -> list[np.ndarray]:
    """The mean gradient of the rows without their weights, times the mean of these: of the update, or of each piece."""
    bare = replace(e.window, weights=e.weights_of("none"))
    num = [np.count_nonzero(piece.rows != PAD) for piece in e.update.pieces]
    own = [float(weights.sum()) for weights in e.window.row_weights]
    mean = sum(own) / sum(num)
    batches = partial(e.meant.replay.batch, weigh="none")
    parts = [part / n for part, n in zip(e.pieces(weightings.right(bare), batches, bare), num, strict=True)]
    by_piece = sum((w * part for w, part in zip(own, parts, strict=True)), np.zeros_like(e.handed))
    whole = sum((mean * n * part for n, part in zip(num, parts, strict=True)), np.zeros_like(e.handed))
    return [whole + e.penalty, by_piece + e.penalty, whole + mean * e.penalty]


def ascending(e: Evidence) -> list[np.ndarray]:
    """The gradient with the other sign, of the whole loss or of all but the model's own losses."""
    return [-e.reference, 2 * e.penalty - e.reference]


def stale(e: Evidence) -> list[np.ndarray]:
    """The gradient of the update before, or of the last batch before; of none at first."""
    if e.before is None:
        return [np.zeros_like(e.handed), e.weighed(weightings.only_first) + e.penalty]
    if len(e.before.handed) != len(e.handed):
        return []
    return [e.before.reference, e.before.weighed(weightings.only_last) + e.before.penalty]


def _relabelled(
    e: Evidence, *, shift: int = 0, along: int = 0, rows: Callable[[Piece], np.ndarray] | None = None
) -> np.ndarray:
    """Return the gradient of the data with the labels of other rows."""

    def batch(piece: Piece) -> Tree:
        labels = None if rows is None else np.where(piece.rows == PAD, 0, rows(piece))
        return e.meant.replay.batch(piece, shift=shift, labels=labels, along=along)

    return e.data(weightings.right(e.window), batch)


PENALTIES: dict[str, Callable[[Evidence], float]] = {
    "penalty forgotten": lambda e: 0.0,
    "penalty once per replica": lambda e: float(e.num_replicas),
    "penalty once per microbatch": lambda e: float(len(e.update.pieces)),
    "penalty added twice": lambda e: 2.0,
    "penalty divided": lambda e: 1 / len(e.update.pieces),
}
