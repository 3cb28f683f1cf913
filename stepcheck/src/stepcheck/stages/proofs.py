"""The numbers of a proof: those of a vector in which the observed and the meant one differ most."""

from collections.abc import Callable, Sequence

import numpy as np

from stepcheck.values import Number, Proof, Shown

NUM_SHOWN = 3


def proof_of(
    update: int, what: Shown, of: Callable[[int], str], values: Sequence[np.ndarray]
) -> Proof:
    """Return the proof of three vectors: as they were seen, as they were meant, and with the error.

    Args:
        of: names an entry of them.

    >>> proof_of(2, Shown.RATE, str, [np.array([1.0, 3.0]), np.ones(2), np.array([1.0, 3.0])]).numbers[1][1:]
    ('1', 3.0, 1.0, 3.0)
    """
    observed, expected, with_error = (np.ravel(np.asarray(each, "float64")) for each in values)
    far = np.argsort(-np.abs(observed - expected), kind="stable")[:NUM_SHOWN]
    numbers = [
        Number(what, of(i), float(observed[i]), float(expected[i]), float(with_error[i]))
        for i in sorted(far.tolist())
    ]
    return Proof(update, tuple(numbers))
