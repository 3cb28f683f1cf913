"""One known cause: what is wrong, how the reference update has to be changed to be wrong alike, and the fix."""

from dataclasses import dataclass

from wholestep.audit.weightings import Weighting

NOWHERE = ""  # met in no public thread that we know of


@dataclass(frozen=True)
class Cause:
    """One known cause.

    Args:
        change: how the reference is changed, in words.
        weigh: of a cause that gives rows other factors, the functions that do: one for each way to write it.
        source: a public thread in which it was met.
        is_note: whether it is often meant so: then it is told in a note.
    """

    name: str
    stage: str
    change: str
    explanation: str
    fix: str
    source: str
    weigh: tuple[Weighting, ...] = ()
    is_note: bool = False
