"""The weights of rows in a function that returns one number for a batch, measured on two rows at a time."""

from collections.abc import Callable

import numpy as np

from wholestep.audit.measure import SOLVED

NUM_PROBES, NUM_WEIGHED = 3, 512


def shares(value: Callable[[list[int], np.ndarray], float], num: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the weight of each row in a function's number for a batch; None if they are equal, or are not known.

    A masked mean gives a row with more places more weight: the number of two rows lies between the numbers of each
    alone. Weights are measured with random outputs, and are assumed to depend on the labels alone.

    Args:
        value: the number of some rows of the data, with outputs for them.
        num: the number of rows of the data.
        shape: of an output of one row.
    """
    draw = np.random.default_rng(0)
    probes = draw.uniform(0.05, 0.95, (NUM_PROBES, 2, *shape)).astype("float32")

    def weigh(row: int, anchor: int) -> float:
        ratios = []
        for one, two in probes:
            first, other = value([anchor], one[None]), value([row], two[None])
            both = value([anchor, row], np.stack([one, two]))
            ratios.append((first - both, both - other))
        above, below = np.transpose(ratios)
        return float(above @ below / (below @ below)) if np.all(np.isfinite(ratios)) and below.any() else 0.0

    some = range(num) if num <= NUM_WEIGHED else draw.permutation(num)[:NUM_WEIGHED].tolist()
    anchor = next((row for row in some if np.isfinite(value([row], probes[0, :1]))), None)
    if anchor is None:
        return None
    found = np.array([weigh(row, anchor) for row in some])
    if (
        num > NUM_WEIGHED
        or np.all(np.abs(found - 1) < SOLVED)
        or not np.all(np.isfinite(found))
        or found.min() < -SOLVED
    ):
        return None
    return np.where(np.abs(found) < SOLVED, 0.0, found).astype("float32")
