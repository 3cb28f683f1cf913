"""What an audit finds: a cause with its proof, and the numbers that prove it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wholestep.audit.cause import Cause
from wholestep.audit.causes import BY_NAME
from wholestep.audit.log import Line
from wholestep.audit.proof import Proof

FITS, DIFFERS = 1e-4, 1e-3  # relative distances: what reproduces, and what is not the reference
UNKNOWN = "not known"


class Tolerance(NamedTuple):
    """Relative distances: up to which numbers are reproduced, and from which on they are others."""

    fits: float
    differs: float

    def shows(self, without: float, with_change: float) -> bool:
        """Whether a change explains numbers that are so far from the reference without it."""
        return with_change <= self.fits and 3 * with_change <= without


FINE = Tolerance(FITS, DIFFERS)
COARSE = Tolerance(4e-2, 4e-2)  # of float16 and bfloat16: two orders of the same sum differ by a percent


class Likely(str):
    """A note that is very likely the fault: a report without a cause begins with it."""


@dataclass(frozen=True)
class Found:
    """One thing that is wrong with a loop.

    Attributes:
        name: of the cause; "not known" for a difference that none reproduces.
        stage: where the loop first differs from the update that was meant.
        explanation: what is wrong, in a sentence.
        fix: what to write instead.
        without: the relative distance of the loop's numbers from the reference's.
        with_change: their distance from the reference with this fault; NaN for what is not known.
        line: the user's line where it happens.
        updates: the numbers of the updates that show it.
        detail: more of what was measured.
        proof: the numbers of one update, three times; None where there are none to show.
        twins: other causes that reproduce the same numbers.
    """

    name: str
    stage: str
    explanation: str
    fix: str
    without: float
    with_change: float
    line: Line | None
    updates: tuple[int, ...]
    detail: str = ""
    proof: Proof | None = None
    twins: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether a change of the reference reproduces the loop's numbers."""
        return self.name != UNKNOWN

    @property
    def is_listed(self) -> bool:
        """Whether the field has a name for it."""
        return self.name in BY_NAME


def found(
    cause: Cause,
    without: float,
    with_change: float,
    line: Line | None,
    updates: list[int],
    detail: str = "",
    proof: Proof | None = None,
    twins: tuple[str, ...] = (),
) -> Found:
    """Return what was found of a known cause."""
    told = (
        cause.explanation,
        cause.fix,
        float(without),
        float(with_change),
        line,
        tuple(updates),
        detail,
        proof,
        twins,
    )
    return Found(cause.name, cause.stage, *told)


def not_known(
    stage: str, explanation: str, without: float, line: Line | None, updates: list[int], proof: Proof | None = None
) -> Found:
    """Return what was found of a difference that nothing known reproduces."""
    fix = "nothing is proposed: no known cause reproduces these numbers."
    return Found(UNKNOWN, stage, explanation, fix, float(without), float("nan"), line, tuple(updates), "", proof)


def numbers_of(values: np.ndarray, most: int = 4) -> str:
    """Return the first numbers of an array in words.

    >>> numbers_of(np.array([0.5])), numbers_of(np.arange(6.0))
    ('0.5', '(0, 1, 2, 3, ...)')
    """
    flat = np.ravel(values)
    shown = ", ".join(f"{value:.4g}" for value in flat[:most].tolist())
    return shown if flat.size == 1 else f"({shown}{', ...' if flat.size > most else ''})"


def distance(one: np.ndarray, two: np.ndarray, scale: float = 0.0) -> float:
    """Return how far two vectors are apart, relative to the longer one, or to a scale that is larger still.

    >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.0]))
    0.0
    """
    one, two = np.ravel(one).astype("float64"), np.ravel(two).astype("float64")
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(two)), scale)
    return float(np.linalg.norm(one - two)) / size if size else 0.0


def far(one: list[np.ndarray], two: list[np.ndarray]) -> float:
    """Return the distance of two lists of arrays, each taken as one vector."""
    if not one:
        return 0.0
    lengths = [np.array([_length(leaf) for leaf in leaves]) for leaves in (one, two)]
    apart = np.array([_length(np.asarray(a, "float64") - b) for a, b in zip(one, two, strict=True)])
    size = max(map(_length, lengths))
    return _length(apart) / size if size else 0.0


def _length(leaf: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(leaf, "float64")))
