"""The optimizer steps of a log, made again: from the recorded weights, gradients and
slots.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stepcheck.port import Port
from stepcheck.steps import (
    HALF_EPS,
    Epsilon,
    Slots,
    StepRule,
    begun,
    clipped,
    precision,
    stepped,
)
from stepcheck.trace.log import Applied
from stepcheck.trace.measure import COARSE, FINE, are_finite
from stepcheck.trace.windows import Update

Rules = Sequence[StepRule | None]
_ROUNDINGS = 2  # of a weight in a step


class Again(NamedTuple):
    """A step that was made again.

    Attributes:
        params: as the step must leave them.
        apart: of each parameter, the distance of the loop's step from it, in units of
            what rounding allows.
        is_whole: whether all parameters with a gradient are known; of others the loop's
            own values are taken.
    """

    update: Update
    params: list[np.ndarray]
    apart: np.ndarray
    is_whole: bool = True

    @property
    def is_right(self) -> bool:
        """Whether the loop's step is this one."""
        return bool(np.all(self.apart <= 1))


def recorded(step: Applied, *, is_after: bool = False) -> list[Slots]:
    """Return the slots of each parameter as they were recorded; as they begin for those
    without any.
    """
    values = step.slots_after if is_after else step.slots
    known: list[dict[str, Any]] = [{} for _ in step.params]
    for (i, name), value in zip(step.slots_of[is_after], values, strict=True):
        if name:
            known[i][name] = value
    found = []
    for own, rule, weights in zip(known, step.rules, step.params, strict=True):
        count = float(own.pop("num_steps", step.iterations if own else 0.0))
        first = Slots() if rule is None else begun(rule, weights)
        found.append(first._replace(**own, num_steps=count))
    return found


def by_rule(port: Port, update: Update) -> Again | None:
    """Return a step as the rules of its optimizer make it, from the recorded slots; None
    where it cannot be computed.
    """
    step, rules = update.applied, update.applied.rules
    if not _is_computable(port, update, rules):
        return None
    pairs = zip(step.grads, step.params, strict=True)
    grads = clipped([_cast(g, w) for g, w in pairs], _clips(rules))
    params, others = list[np.ndarray](), list[float]()
    slots = zip(recorded(step), recorded(step, is_after=True), strict=True)
    ends = zip(step.params, step.params_after, strict=True)
    for rule, (weights, end), grad, (before, after) in zip(
        rules, ends, grads, slots, strict=True
    ):
        made, apart = weights if grad is None else end, 0.0
        if grad is not None and rule is not None:
            square = after.square if rule.is_of_rows else None
            own = Slots(*map(_wide, before))
            with np.errstate(all="ignore"):
                made, new = stepped(rule, _wide(weights), grad, own, square)
            apart = _of_slots(new, after)
        params.append(made)
        others.append(apart)
    if not are_finite(params):
        return None
    owners = zip(grads, rules, strict=True)
    is_whole = all(g is None or r is not None for g, r in owners)
    apart = np.maximum(distances(step, params, rules), others)
    again = Again(update, params, apart, is_whole)
    has_norms = any(_clips(rules)[:2])
    return (
        again if again.is_right or not (has_norms and port.is_sparse) else None
    )


def _is_computable(port: Port, update: Update, rules: Rules) -> bool:
    """Whether its numbers are finite, and no bound needs the norm of a sample, or the
    gradient of each replica.
    """
    step = update.applied
    grads = [g for g in step.grads if g is not None]
    if len(rules) != len(step.grads) or not are_finite(
        [*step.params, *step.params_after, *grads]
    ):
        return False
    pairs = zip(step.grads, rules, strict=True)
    is_known = any(g is not None and rule is not None for g, rule in pairs)
    if not is_known or any(w.dtype == np.float16 for w in step.params):
        return False
    *norms, number = _clips(rules)
    has_replicas = len({piece.called.replica for piece in update.pieces}) > 1
    return not (any(norms) and port.is_in_part) and not (
        any((*norms, number)) and has_replicas
    )


def _clips(rules: Rules) -> tuple[float, float, float]:
    return next(
        (rule.clips for rule in rules if rule is not None), (0.0, 0.0, 0.0)
    )


def _wide(value: Any) -> Any:
    """Return an array in bfloat16 as one in float32; in float16 the framework makes the
    step.
    """
    return (
        value.astype("float32") if getattr(value, "itemsize", 0) == 2 else value
    )


def _cast(grad: np.ndarray | None, weights: np.ndarray) -> np.ndarray | None:
    if grad is None:
        return None
    return np.asarray(grad).astype(_wide(weights).dtype).reshape(weights.shape)


def distances(
    step: Applied, params: list[np.ndarray], rules: Rules = ()
) -> np.ndarray:
    """Return how far a step's weights are from these, by parameter: 1 is what rounding
    allows.
    """
    rules = rules or [None] * len(params)
    every = zip(step.params, step.params_after, params, rules, strict=True)
    return np.array([_distance(*each) for each in every])


def _distance(
    before: np.ndarray,
    after: np.ndarray,
    made: np.ndarray,
    rule: StepRule | None,
) -> float:
    old, own, wanted = (
        np.asarray(each, "float64") for each in (before, after, made)
    )
    eps = min(precision(before), precision(after))
    differs = COARSE.differs if eps >= HALF_EPS / 8 else FINE.differs
    if rule is not None and rule.place is Epsilon.HAT and rule.is_corrected:
        # of a correction in float32
        differs += eps / (1 - max(rule.beta_2 or 0.0, rule.momentum))
    move = max(np.linalg.norm(own - old), np.linalg.norm(wanted - old))
    allowed = differs * move + _ROUNDINGS * eps * np.linalg.norm(old)
    apart = float(np.linalg.norm(own - wanted))
    return apart / float(allowed) if apart else 0.0


def _of_slots(made: Slots, seen: Slots) -> float:
    """Return how far recorded slots are from these."""
    pairs = [
        (a, b)
        for a, b in zip(made[:4], seen[:4], strict=True)
        if a is not None and b is not None
    ]
    return max((_of_slot(a, b) for a, b in pairs), default=0.0)


def _of_slot(made: np.ndarray, seen: np.ndarray) -> float:
    wanted, own = np.asarray(made, "float64"), np.asarray(seen, "float64")
    differs = (
        COARSE.differs
        if precision(np.asarray(seen)) >= HALF_EPS / 8
        else FINE.differs
    )
    size = max(np.linalg.norm(wanted), np.linalg.norm(own))
    apart = float(np.linalg.norm(wanted - own))
    return apart / float(differs * size) if apart else 0.0


def all_again(port: Port, updates: list[Update]) -> list[Again]:
    """Return the steps that can be made again: by the rule of each, or as the gradient
    times a rate.
    """
    made = (by_rule(port, each) or _by_rate(port, each) for each in updates)
    return [again for again in made if again is not None]


def _by_rate(port: Port, update: Update) -> Again | None:
    """Return a step as the gradient times its rate, which is solved for; None if it is
    none, or another one than the optimizer's, or parameters are known in part.
    """
    step = update.applied
    grad = port.flat([*step.grads])
    values = port.flat([*step.params]), port.flat([*step.params_after])
    is_known = (
        np.any(grad) and are_finite([grad, *values]) and not port.is_in_part
    )
    if not is_known:
        return None
    rate = float((values[0] - values[1]) @ grad / (grad @ grad))
    is_own = abs(rate - step.learning_rate) <= FINE.differs * step.learning_rate
    if not (rate > 0 and (is_own or np.isnan(step.learning_rate))):
        return None
    pairs = zip(step.params, step.grads, strict=True)
    params = [
        w if g is None else (w - rate * g).astype(w.dtype) for w, g in pairs
    ]
    again = Again(update, params, distances(step, params))
    return again if again.is_right else None
