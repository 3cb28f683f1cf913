"""The verdict of an audit: its findings, and the stages that were judged."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Finding, Found
from wholestep.audit.rows import FEW_PASSES
from wholestep.audit.windows import Windows

_LONGEST = 200  # letters of an error in a report


@dataclass
class Verdict:
    """The findings of an audit.

    Attributes:
        causes: the faults, in the order of the stages.
        notes: observations that are no fault, or may be intended.
        unseen: everything that could not be checked.
        looked_at: the updates that were seen, in words.
        has_loss: whether the loss that is meant is known, or can be supposed.
        unjudged: why no gradient was judged, in words; "" if some were.
        has_backward: whether the gradients are those of the loop's loss, whose form is not known.
        seen: the updates and passes; None before they were looked for.
        evidence: the updates whose gradients could be computed again.
    """

    causes: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    looked_at: str = ""
    has_seen: bool = False
    has_loss: bool = True
    unjudged: str = ""
    has_backward: bool = False
    seen: Windows | None = None
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Add the findings of a stage, and return them."""
        findings = list(findings)
        self.causes += [each for each in findings if isinstance(each, Found)]
        self.notes += [each for each in findings if isinstance(each, str)]
        return findings

    def look(self, name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
        """Return the findings of a check; a check that fails is reported as not done, in one line."""
        try:
            return list(check(*arguments))
        except Exception as error:  # the loop may do anything
            told = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
            self.unseen.append(f"{name}: {told}")
            return []

    def check(self, name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
        """Add the findings of a check, and return them."""
        return self.add(self.look(name, check, *arguments))

    def make_note(self, name: str, note: str) -> None:
        """Replace the causes of a name by a note."""
        others = [cause for cause in self.causes if cause.name != name]
        self.notes += [note] * (len(others) < len(self.causes))
        self.causes = others

    @property
    def judged(self) -> list[str]:
        """The stages that were judged."""
        if not self.has_seen or self.seen is None:
            return []
        stages = ["rows"] * (FEW_PASSES not in self.notes) + ["mode"] + ["gradient"] * (not self.unjudged)
        stages += ["backward pass"] * self.has_backward
        is_own = self.seen.is_by_hand and not self.seen.is_rated
        return [*stages, *["step"] * (not is_own), "state"]

    @property
    def of_gradient(self) -> list[Found]:
        """The causes in the gradient."""
        return [cause for cause in self.causes if cause.stage == "gradient"]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of Keras and the engine: inside, losses and steps are hypotheses, and not the user's."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
