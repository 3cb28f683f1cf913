"""Numbers of a snapshot that are put back into Keras variables, each in its own place."""

import keras
import numpy as np

from wholestep import engines
from wholestep.checkpoints.pieces import Numbers
from wholestep.checkpoints.snapshot import dtype_of, plain


def put(kept: list[Numbers], variables: list[keras.Variable]) -> None:
    """Let variables hold these arrays, of which there may be more than variables.

    Engines keep seeds and counters in integers of other sizes; their values fit in all of them.
    """
    for variable, array in zip(variables, kept, strict=False):
        own = array.astype(dtype_of(variable)) if isinstance(array, np.ndarray) else array
        variable.assign(engines.placed(variable, own))


def claimed(left: list[tuple[str, Numbers]], variables: list[keras.Variable]) -> list[tuple[str, Numbers]]:
    """Let each of these variables hold the first array of its path and shape; return the arrays that nobody takes."""
    for variable in variables:
        like = plain(variable.path), tuple(variable.shape)
        i = next((i for i, (path, array) in enumerate(left) if (plain(path), array.shape) == like), None)
        if i is not None:
            put([left[i][1]], [variable])
            left = left[:i] + left[i + 1 :]
    return left
