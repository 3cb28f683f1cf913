"""What the pictures of a report show, as numbers."""

from dataclasses import dataclass

import numpy as np

from wholestep.audit.by_row import solve
from wholestep.audit.found import FINE, Tolerance
from wholestep.audit.judge import Case, Verdict
from wholestep.audit.proof_of_gradients import by_parameter
from wholestep.audit.windows import PAD, passes


@dataclass(frozen=True)
class Factors:
    """How much each row counts in the gradient of an update, and how much it should; `sizes`: rows by microbatch."""

    update: int
    solved: np.ndarray
    should: np.ndarray
    sizes: list[int]


@dataclass(frozen=True)
class Rates:
    """The learning rate of each update; `meant`: None if nobody said."""

    numbers: list[int]
    used: np.ndarray
    meant: np.ndarray | None


@dataclass(frozen=True)
class Views:
    """What there is to show; None or empty where it was not seen.

    Attributes:
        parameters: (name, distance, distance from it with the fault or NaN) of the gradients of `update`.
        orders: the rows in the order in which the first two passes took them.
        num_rows: of the data.
        tolerance: the distances from which on the gradients differ.
    """

    factors: Factors | None
    update: int
    parameters: list[tuple[str, float, float]]
    orders: list[np.ndarray]
    num_rows: int
    rates: Rates | None
    tolerance: Tolerance = FINE


def views(case: Case, verdict: Verdict) -> Views:
    """Return what the pictures show."""
    tolerance = verdict.evidence[0].meant.replay.tolerance if verdict.evidence else FINE
    differing = [e for e in verdict.evidence if e.without > tolerance.differs] or verdict.evidence
    factors, update, parameters = None, 0, []
    if differing:
        proofs = [c.proof for c in verdict.causes if c.proof and c.proof.parameters]
        shown = [e for e in differing if proofs and proofs[0].where == f"update {e.update.number}"]
        e = (shown or differing)[0]
        update = e.update.number
        parameters = list(proofs[0].parameters) if shown else list(by_parameter(e, None))
        if (found := solve(e)) is not None:
            sizes = [int(np.count_nonzero(w)) for w in e.weights]
            factors = Factors(update, *found, sizes)
    orders, num = [], 0
    if verdict.seen is not None and verdict.seen.pieces:
        known = [piece for piece in verdict.seen.pieces if piece.is_known]
        cut = passes(known)[:2] if known else []
        orders = [np.concatenate([p.rows[p.rows != PAD] for p in each]) for each in cut]
        num = 1 + max((int(each.max()) for each in orders if len(each)), default=0)
    return Views(factors, update, parameters, orders, num, _rates(case, verdict), tolerance)


def _rates(case: Case, verdict: Verdict) -> Rates | None:
    updates = verdict.seen.updates if verdict.seen is not None else []
    if not updates:
        return None
    first = updates[0].applied.iterations
    meant = None
    if case.schedule is not None:
        meant = np.array([case.schedule(first + i) for i in range(len(updates))])
    return Rates([u.number for u in updates], np.array([u.applied.learning_rate for u in updates]), meant)
