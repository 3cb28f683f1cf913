"""What was written to the weights between two updates, in words."""

import numpy as np

from wholestep.audit.found import distance
from wholestep.audit.keeping import in_part
from wholestep.audit.ratios import least
from wholestep.audit.windows import Update

_NEAR = 1e-5
NUM_KEPT = 20_000  # weights that are compared, drawn once


def written(updates: list[Update], before: Update, new: list[np.ndarray]) -> str:
    """Return what the weights became after an update: earlier ones, an average of some, or cut; "" if none of these.

    `new`: them, as `in_part` has them.
    """
    number = [u is before for u in updates].index(True) + 1
    states = [in_part(u.applied.params) for u in updates[:number] if u.applied.is_whole]
    states.append(in_part(before.applied.params_after))
    for i, state in enumerate(states):
        if _far(state, new) <= _NEAR:
            return f"they become those before update {updates[i].number} again"
    bound = max(float(np.max(np.abs(leaf), initial=0.0)) for leaf in new)
    if _far([np.clip(leaf, -bound, bound) for leaf in states[-1]], new) <= _NEAR:
        return f"all are cut to at most {bound:.6g}"
    vectors, wanted = np.stack([some(state) for state in states]), some(new)
    origin = vectors[-1]  # weights of an average add up to 1
    steps = (vectors[:-1] - origin).T
    if steps.shape[0] <= 2 * steps.shape[1]:
        return ""
    shares = least(list(steps.T), wanted - origin)[0]
    if not distance(wanted - origin, steps @ shares) <= 1e-3:
        return ""
    last = 1 - float(shares.sum())
    if min(shares.min(), last) < -0.01:
        return ""
    return f"an average of the weights of {len(states)} updates takes their place, with {last:.3g} of the last ones"


def some(state: list[np.ndarray]) -> np.ndarray:
    """Return weights as one vector, of many the numbers at some places."""
    whole = np.concatenate([np.ravel(leaf).astype("float64") for leaf in state])
    return whole if len(whole) <= NUM_KEPT else whole[np.random.default_rng(0).permutation(len(whole))[:NUM_KEPT]]


def _far(one: list[np.ndarray], two: list[np.ndarray]) -> float:
    return distance(some(one), some(two))
