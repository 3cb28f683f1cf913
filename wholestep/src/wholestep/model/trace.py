"""The trace of an objective: the scope in which it runs, and the properties that it finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import keras
from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.model.draws import DrawFact, Draws
from wholestep.model.objective import (
    LabelRange,
    Mean,
    ObjectiveOutput,
    ScalarTerm,
    Term,
    Whole,
)
from wholestep.state import Variables
from wholestep.tree import Tensor


@dataclass(frozen=True)
class TermFact:
    """Properties of one term of the objective.

    Args:
        counts: whether it is part of the loss.
        joins: whether it is a function of all rows together.
    """

    is_mean: bool
    coefficient: float
    counts: bool
    joins: bool = False


@dataclass(frozen=True)
class TraceFacts:
    """Properties of a traced objective; the defaults hold before the first trace.

    Args:
        terms: by label, in order.
        has_extra: whether `add_loss` or an activity regulariser added a loss.
        has_whole: whether a loss or metric is a single number.
        is_complete: whether the terms are the whole loss, see `ObjectiveOutput`.
        moved: the indices of the assigned variables that are not parameters.
        assigned: the indices of the parameters that the forward pass assigns, where the engine
            keeps such assignments.
        captured: variables that the objective reads, but the trainer does not own (of another
            model, or free-standing).
        draws: the random draws, in order.
        label_ranges: the class numbers that the compiled losses have outputs for.
        divisors: the leaves of the sample weights by which a mean is divided.
    """

    terms: Mapping[str, TermFact] = field(default_factory=dict)
    has_extra: bool = False
    has_whole: bool = False
    is_complete: bool = False
    moved: tuple[int, ...] = ()
    assigned: tuple[int, ...] = ()
    captured: tuple[keras.Variable, ...] = ()
    draws: tuple[DrawFact, ...] = ()
    label_ranges: tuple[LabelRange, ...] = ()
    divisors: tuple[int, ...] = ()

    @property
    def moves_buffers(self) -> bool:
        """Whether variables other than parameters are assigned."""
        return bool(self.moved)

    @property
    def cannot_pad(self) -> bool:
        """Whether the objective has a part that cannot leave rows out."""
        return self.has_extra or self.has_whole or self.joins

    @property
    def joins(self) -> bool:
        """Whether a term is a function of all rows together."""
        return any(term.joins for term in self.terms.values())


class Notes:
    """Collects the properties of an objective during a trace, starting from the known ones."""

    def __init__(self, known: TraceFacts):
        self._facts = replace(known, draws=())
        self.written: list[keras.Variable] = []
        self.draws: Draws | None = None  # of the last call

    def note_output(self, output: ObjectiveOutput) -> None:
        """Record the terms and metric updates that the objective returned."""
        counted = _term_facts(output.terms, counts=True)
        has_scalar = any(isinstance(term, ScalarTerm) for term in output.terms.values())
        has_scalar |= any(update.is_whole for update in output.metric_updates)
        self._facts = replace(
            self._facts,
            terms=counted | _term_facts(output.reported, counts=False),
            has_whole=self._facts.has_whole or has_scalar,
            is_complete=output.is_complete,
            label_ranges=output.label_ranges,
            divisors=output.divisors,
        )

    def note_extra(self) -> None:
        """Record that `add_loss` or an activity regulariser added a loss."""
        self._facts = replace(self._facts, has_extra=True)

    def note_read(self, variable: keras.Variable, variables: Variables) -> None:
        """Record the read of a variable without a value; it becomes an input of the program.

        Raises:
            SpecificationError: a metric's result or a regulariser reads the model's own variables.
        """
        of_model = [*variables.params, *variables.buffers, *variables.metrics]
        if _index(variable, of_model) is not None:
            must = "A metric's result and a regulariser must not read other variables of the model."
            attempt = "let the objective report it: return (loss, {name: Mean(...)})."
            raise SpecificationError(message(must, variable.path, attempt))
        captured = self._facts.captured
        if _index(variable, captured) is None:
            self._facts = replace(self._facts, captured=(*captured, variable))

    def note_written(self, variable: keras.Variable, variables: Variables) -> None:
        """Record the assignment of a variable, no parameter; a foreign variable becomes state."""
        if _index(variable, variables.metrics) is not None:
            return
        known = [*variables.buffers, *self.written]
        index = _index(variable, known)
        if index is None:
            self.written.append(variable)
            index = len(known)
        if index not in self._facts.moved:
            self._facts = replace(self._facts, moved=(*self._facts.moved, index))

    def note_assigned(self, index: int) -> None:
        """Record the assignment of a parameter, where it persists."""
        if index not in self._facts.assigned:
            self._facts = replace(self._facts, assigned=(*self._facts.assigned, index))

    def facts(self) -> TraceFacts:
        """Return the properties collected so far. An assigned variable is state, not an input."""
        captured = (v for v in self._facts.captured if _index(v, self.written) is None)
        return replace(self._facts, captured=tuple(captured))


def _term_facts(terms: dict[str, Term], *, counts: bool) -> dict[str, TermFact]:
    facts = {}
    for label, term in terms.items():
        computed = term.term() if isinstance(term, Whole) else term
        is_mean = isinstance(computed, Mean)
        facts[label] = TermFact(is_mean, term.coefficient, counts, joins=computed is not term)
    return facts


NOTHING_KNOWN = TraceFacts()


class Scope(keras.StatelessScope):
    """A pure function's view of variables.

    Args:
        mapping: pairs (variable, value).
        variables: the variables of the state.
        notes: the collector of a trace; None outside of one.
        apart: the ids of parameters that have no value here, and must not be read.
        keeps_assigned: whether an assignment to a parameter persists.
        checks_reads: whether the read of a variable without a value is recorded, or refused outside
            of a trace.
    """

    def __init__(
        self,
        mapping: list,
        variables: Variables,
        notes: Notes | None,
        apart: set[int],
        *,
        keeps_assigned: bool,
        checks_reads: bool,
    ):
        super().__init__(mapping, collect_losses=True)
        self.read: set[int] = set()
        self._variables = variables
        self._notes = notes
        self._apart = apart
        self._keeps_assigned = keeps_assigned
        self._checks_reads = checks_reads

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        """Return the variable's value in this scope; None if it has none.

        Raises:
            SpecificationError: the read is new since the trace, and the program would freeze the
                current value; or a metric's result or a regulariser reads the model's variables.
        """
        assert id(variable) not in self._apart, (
            f"{variable.path} is read, but only some of its rows are here"
        )
        self.read.add(id(variable))
        value = super().get_current_value(variable)
        if value is None and self._checks_reads:
            if self._notes is None:
                must = (
                    "An objective must read the same variables for batches of any number of rows."
                )
                received = f"{variable.path}, which it did not read before"
                attempt = "read them in every call, whatever the batch."
                raise SpecificationError(message(must, received, attempt))
            self._notes.note_read(variable, self._variables)
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        """Assign a variable within this scope.

        Raises:
            SpecificationError: the variable is the optimizer's.
        """
        variable, value = update
        variables = self._variables
        notes = self._notes
        if _index(variable, variables.slots) is not None:
            must = (
                "An objective must not assign the optimizer's variables, which the update computes."
            )
            attempt = "assign it between updates, or in a callback."
            raise SpecificationError(message(must, variable.path, attempt))
        index = _index(variable, variables.params)
        if index is None and notes is not None:
            notes.note_written(variable, variables)
        if index is not None and self._keeps_assigned:
            if notes is not None:
                notes.note_assigned(index)
            # The gradient passes through the assigned value to the parameter, as in Keras on
            # TensorFlow.
            current = self.state_mapping[id(variable)]
            assigned = ops.stop_gradient(ops.cast(value, current.dtype))
            value = assigned + (current - ops.stop_gradient(current))
        super().add_update((variable, value))


def _index(variable: keras.Variable, known: Sequence) -> int | None:
    """Return the index of a variable among others; None if it is none of them."""
    return next((i for i, other in enumerate(known) if other is variable), None)
