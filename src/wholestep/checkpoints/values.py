"""Assign arrays of a snapshot to Keras variables."""

from collections.abc import MutableMapping

import keras
import numpy as np

from wholestep import engines
from wholestep.checkpoints.pieces import Numbers
from wholestep.checkpoints.snapshot import dtype_of, plain

Assigned = MutableMapping[int, keras.Variable]  # by id


def put(kept: list[Numbers], variables: list[keras.Variable], assigned: Assigned) -> None:
    """Assign arrays to the variables that are not `assigned` yet; further arrays are ignored.

    Engines keep seeds and counters in integers of other sizes; their values fit in all of them.
    """
    for variable, array in zip(variables, kept, strict=False):
        if id(variable) not in assigned:
            own = array.astype(dtype_of(variable)) if isinstance(array, np.ndarray) else array
            variable.assign(engines.placed(variable, own))
            assigned[id(variable)] = variable


def claimed(
    left: list[tuple[str, Numbers]], variables: list[keras.Variable], assigned: Assigned
) -> list[tuple[str, Numbers]]:
    """Assign to each variable the first array of its path and shape, see `put`; return the remaining arrays."""
    for variable in variables:
        like = plain(variable.path), tuple(variable.shape)
        i = next((i for i, (path, array) in enumerate(left) if (plain(path), array.shape) == like), None)
        if i is not None:
            put([left[i][1]], [variable], assigned)
            left = left[:i] + left[i + 1 :]
    return left
