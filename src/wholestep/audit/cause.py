"""One known cause: what is wrong, in the words of the field, and the fix."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One known cause.

    Args:
        source: a public thread in which it was met, if one is known.
        is_note: whether it is often meant so: then it is told in a note.
    """

    stage: str
    name: str
    explanation: str
    fix: str
    source: str = ""
    is_note: bool = False
