"""Properties of an objective, collected while it is traced and frozen afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import keras

from wholestep.errors import SpecificationError, message
from wholestep.model.draw_facts import DrawFact
from wholestep.model.draws import Draws
from wholestep.model.objective import Reading
from wholestep.model.terms import Term, Whole
from wholestep.state import Variables


@dataclass(frozen=True)
class TermFact:
    """Properties of one term of the objective."""

    kind: type
    coefficient: float
    counts: bool


@dataclass(frozen=True)
class TraceFacts:
    """Properties of a traced objective; the defaults hold before the first trace.

    Args:
        terms: by label, in order.
        has_extra: whether `add_loss` or an activity regulariser added a loss.
        has_whole: whether a loss or metric is a single number.
        is_complete: whether the terms are the whole loss, see `Reading`.
        moved: the indices of the assigned variables that are not parameters.
        assigned: the indices of the parameters that the forward pass assigns, where the engine keeps such assignments.
        captured: variables that the objective reads, but the trainer does not own (of another model, or free-standing).
        draws: the random draws, in order.
    """

    terms: Mapping[str, TermFact] = field(default_factory=dict)
    has_extra: bool = False
    has_whole: bool = False
    is_complete: bool = False
    moved: tuple[int, ...] = ()
    assigned: tuple[int, ...] = ()
    captured: tuple[keras.Variable, ...] = ()
    draws: tuple[DrawFact, ...] = ()

    @property
    def moves_buffers(self) -> bool:
        """Whether variables other than parameters are assigned."""
        return bool(self.moved)

    @property
    def cannot_pad(self) -> bool:
        """Whether the objective has a part that cannot leave rows out."""
        return self.has_extra or self.has_whole


class Notes:
    """Collects the properties of an objective during a trace, starting from the known ones."""

    def __init__(self, known: TraceFacts):
        self.terms: dict[str, TermFact] = {}
        self.has_extra, self.has_whole, self.is_complete = known.has_extra, known.has_whole, False
        self.moved = list(known.moved)
        self.assigned = list(known.assigned)
        self.captured = list(known.captured)
        self.written: list[keras.Variable] = []
        self.draws: Draws | None = None  # of the last call

    def note_reading(self, reading: Reading) -> None:
        """Record the terms and metric updates that the objective returned."""
        terms, reported = reading.terms, reading.reported
        self.terms = _term_facts(terms, counts=True) | _term_facts(reported, counts=False)
        self.has_whole |= any(isinstance(t, Whole) for t in terms.values()) or any(s.is_whole for s in reading.scores)
        self.is_complete = reading.is_complete

    def note_read(self, variable: keras.Variable, variables: Variables) -> None:
        """Record the read of a variable that has no value in the scope; it becomes an input of the program.

        Raises:
            SpecificationError: a metric's result or a regulariser reads the model's own variables.
        """
        if any(
            variable is known for group in (variables.params, variables.buffers, variables.metrics) for known in group
        ):
            must = "A metric's result and a regulariser must not read other variables of the model."
            attempt = "let the objective report it: return (loss, {name: Mean(...)})."
            raise SpecificationError(message(must, variable.path, attempt))
        if not any(variable is known for known in self.captured):
            self.captured.append(variable)

    def note_written(self, variable: keras.Variable, variables: Variables) -> None:
        """Record the assignment of a variable that is no parameter; a foreign variable becomes state."""
        if any(variable is known for known in variables.metrics):
            return
        if not any(variable is known for known in (*variables.buffers, *self.written)):
            self.written.append(variable)
        place = next(i for i, known in enumerate((*variables.buffers, *self.written)) if known is variable)
        if place not in self.moved:
            self.moved.append(place)

    def facts(self) -> TraceFacts:
        """Return the properties collected so far. An assigned variable is state, not an input."""
        captured = tuple(v for v in self.captured if not any(v is known for known in self.written))
        found = (self.has_extra, self.has_whole, self.is_complete, tuple(self.moved))
        return TraceFacts(dict(self.terms), *found, tuple(self.assigned), captured)


def _term_facts(terms: dict[str, Term], *, counts: bool) -> dict[str, TermFact]:
    return {k: TermFact(type(t), t.coefficient, counts) for k, t in terms.items()}


NOTHING_KNOWN = TraceFacts()
