"""The numbers of a proof: those of a vector in which the observed and the meant one
differ most.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepcheck.solve.evidence import Evidence
from stepcheck.trace.measure import places
from stepcheck.values import Number, Proof, Shown

NUM_SHOWN = 3


def proof_of(
    update: int, what: Shown, of: Callable[[int], str], values: Sequence[np.ndarray]
) -> Proof:
    """Return the proof of three vectors: as they were seen, as they were meant, and
    with the error.

    Args:
        of: names an entry of them.

    >>> values = [np.array([1.0, 3.0]), np.ones(2), np.array([1.0, 3.0])]
    >>> proof_of(2, Shown.RATE, str, values).numbers[1][1:]
    ('1', 3.0, 1.0, 3.0)
    """
    observed, expected, with_error = (
        np.ravel(np.asarray(each, "float64")) for each in values
    )
    far = np.argsort(-np.abs(observed - expected), kind="stable")[:NUM_SHOWN]
    numbers = [
        Number(
            what, of(i), float(observed[i]), float(expected[i]), float(with_error[i])
        )
        for i in sorted(far.tolist())
    ]
    return Proof(update, tuple(numbers))


def of_gradient(e: Evidence, made: np.ndarray | None) -> Proof:
    """Return the proof of a gradient: its length, and three of its numbers.

    Args:
        made: the gradient with an error; None if nothing known makes the handed one.
    """
    unknown = np.full_like(e.handed, np.nan)
    columns = [e.handed, e.reference, unknown if made is None else made]
    lengths = [float(np.linalg.norm(column)) for column in columns]
    proof = proof_of(e.update.number, Shown.GRADIENT, lambda i: _name(e, i), columns)
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
    for name, far in without.items():
        yield name, far, apart.get(name, float("nan"))


def _name(e: Evidence, i: int) -> str:
    """Return the parameter of an entry of a gradient, with its index."""
    replay = e.meant.replay
    ends = np.cumsum([len(part) for part in replay.parts(e.mask).values()])
    at = int(np.flatnonzero(e.mask)[i])
    owner = int(np.searchsorted(ends, at, side="right"))
    inside = at - int(ends[owner - 1] if owner else 0)
    chosen = places(replay.sizes[owner])
    place = inside if chosen is None else int(chosen[inside])
    index = ", ".join(map(str, np.unravel_index(place, replay.shapes[owner])))
    return f"{replay.names[owner]}[{index}]"
