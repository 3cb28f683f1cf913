"""Checks of sample weights."""

from collections.abc import Collection

import numpy as np

from wholestep import tree
from wholestep.errors import BatchError, message
from wholestep.tree import Tree


def check_weights(
    batch: Tree, *, all_zero: bool, divisors: Collection[int] | None = None, numbers: np.ndarray | None = None
) -> None:
    """Refuse sample weights that are not finite, that are negative, or (`all_zero`) that weigh no row at all.

    Args:
        divisors: the leaves by which a mean is divided: only these must not be negative; None for all.
        numbers: the row numbers to show in errors; None to show indices.

    Raises:
        BatchError: such weights; names the first row.
    """
    if not isinstance(batch, tuple) or len(batch) < 3:
        return
    for position, (label, weight) in enumerate(tree.named_leaves(batch[2], "sample_weight")):
        divides = divisors is None or position in divisors
        good = np.isfinite(weight) & (weight >= 0) if divides else np.isfinite(weight)
        bad = np.flatnonzero(~good.reshape(len(weight), -1).all(axis=1))
        if bad.size:
            must = f"{label} must be finite and not negative: the loss is divided by it."
            attempt = 'give rows that shall not count the weight 0; reduction="sum_over_batch_size" divides by rows.'
            received = f"{weight[bad[0]]} in row {bad[0] if numbers is None else numbers[bad[0]]}"
            if not divides:
                must, attempt = f"{label} must be finite.", "give rows that shall not count the weight 0."
            raise BatchError(message(must, received, attempt))
        if all_zero and not np.any(weight):
            raise BatchError(
                message(f"{label} must weigh at least one row.", "weights that are all 0", "leave sample_weight out.")
            )
