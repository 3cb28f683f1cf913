"""The numbers of a proof: those of a vector in which the observed and the meant one
differ most.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepcheck.solve.evidence import Evidence
from stepcheck.values import Number, Proof, Shown

NUM_SHOWN = 3


def proof_of(
    update: int,
    what: Shown,
    of: Callable[[int], str],
    values: Sequence[np.ndarray],
) -> Proof:
    """Return the proof of three vectors: as they were seen, as they were meant, and
    with the error.

    Args:
        of: names an entry of them.

    >>> values = [np.array([1.0, 3.0]), np.ones(2), np.array([1.0, 3.0])]
    >>> proof_of(2, Shown.RATE, str, values).numbers[1][1:]
    ('1', 3.0, 1.0, 3.0)
    """
    columns = [np.ravel(np.asarray(each, "float64")) for each in values]
    far = np.argsort(-np.abs(columns[0] - columns[1]), kind="stable")[
        :NUM_SHOWN
    ]
    numbers = [
        Number(what, of(i), *(float(column[i]) for column in columns))
        for i in sorted(far.tolist())
    ]
    return Proof(update, tuple(numbers))


def of_gradient(e: Evidence, made: np.ndarray | None) -> Proof:
    """Return the proof of a gradient: its length, and three of its numbers.

    Args:
        made: the gradient with an error; None if nothing known makes the handed one.
    """
    places, replay = np.flatnonzero(e.mask), e.meant.replay
    columns = [
        e.handed,
        e.reference,
        e.handed * np.nan if made is None else made,
    ]
    lengths = [float(np.linalg.norm(column)) for column in columns]

    def name(i: int) -> str:
        return replay.name_at(int(places[i]))

    proof = proof_of(e.update.number, Shown.GRADIENT, name, columns)
    numbers = (Number(Shown.GRADIENT_LENGTH, "", *lengths), *proof.numbers)
    return Proof(e.update.number, numbers, tuple(by_parameter(e, made)))


def by_parameter(
    e: Evidence, made: np.ndarray | None
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, distance from the reference, distance from it with the error or
    NaN).
    """
    without = e.by_parameter(e.reference)
    apart = {} if made is None else e.by_parameter(made)
    yield from (
        (name, far, apart.get(name, np.nan)) for name, far in without.items()
    )
