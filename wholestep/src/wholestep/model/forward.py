"""The objective as a pure function of values: the only place where a model is called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import keras
from keras import ops

from wholestep import tree
from wholestep.embeddings.lookups import Lookups
from wholestep.engines import Engine
from wholestep.model.compiled import are_same, own_results, tracked
from wholestep.model.draws import DrawFact, Draws, compare, drawing, drawing_as_keras
from wholestep.model.losses import CompiledObjective
from wholestep.model.misfit import explained
from wholestep.model.objective import (
    Objective,
    Reading,
    as_tensor,
    by_row,
    checked,
    read,
    refuse_broadcasts,
    wide,
)
from wholestep.model.trace import NOTHING_KNOWN, Notes, Scope, TraceFacts
from wholestep.state import State, Values, Variables
from wholestep.tree import Tensor, Tree

NOTHING = Lookups([])


class Outcome(NamedTuple):
    """The results of one microbatch: sums by term as (value, weight), the model's other losses, and
    the new state.

    `assigned` are the new values of the parameters that the forward pass assigned, in the order of
    `facts.assigned`.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list


class Rows(NamedTuple):
    """The results of each row: (values, weights) by term, both (rows,). For the probe and for
    naming bad rows.
    """

    values: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list


@dataclass(frozen=True)
class Forward:
    """The objective as a pure function of values: the only place where a model is called.

    A trace has no side effects: `learned` returns another such function with the properties that
    the trace found.

    Args:
        freezes_reads: whether a variable that a traced function reads would be a constant of the
            program.
        keeps_assigned: whether an assignment to a parameter persists, as in `keras.Model.fit` on
            this engine.
        draws_by: the engine that makes random words, so that draws belong to rows; None: Keras
            draws.
        facts: the properties of the objective.
        notes: the collector of a trace; None outside of one.
        extreme: the extreme draws of a probe, see `wholestep.model.distributions.RandomBits`; None
            elsewhere.
    """

    model: keras.Model
    objective: Objective
    metrics: list
    variables: Variables
    training: bool
    freezes_reads: bool
    keeps_assigned: bool = False
    draws_by: Engine | None = None
    facts: TraceFacts = NOTHING_KNOWN
    notes: Notes | None = None
    extreme: Tensor | None = None

    def learned(
        self, trace: Callable[["Forward"], None], twice: Callable[["Forward"], None] | None = None
    ) -> "Forward":
        """Return this function with the properties that are found while `trace` calls it.

        Foreign variables that the objective assigns are state from then on. `twice` calls it on
        twice as many rows, to find the axis of rows in every random draw.
        """
        notes = Notes(self.facts)
        trace(replace(self, notes=notes))
        variables = self.variables
        written = notes.written
        variables = (
            replace(variables, buffers=[*variables.buffers, *written]) if written else variables
        )
        facts = replace(notes.facts(), draws=self._draw_facts(notes.draws, twice))
        return replace(self, facts=facts, variables=variables)

    @property
    def movers(self) -> list[str]:
        """The layers, by path, whose floating state the forward pass moves."""
        floats = self.variables.floats
        buffers = self.variables.buffers
        paths = [
            buffers[i].path.removeprefix(f"{self.model.name}/")
            for i in self.facts.moved
            if floats[i]
        ]
        return list(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))

    def _draw_facts(
        self, draws: Draws | None, twice: Callable[["Forward"], None] | None
    ) -> tuple[DrawFact, ...]:
        if twice is None or draws is None or not draws.requests:
            return ()
        more = Notes(self.facts)
        with suppress(Exception):  # a model may take one number of rows only, and raise any error
            twice(replace(self, notes=more))
        return compare(
            draws.requests, draws.num_rows, None if more.draws is None else more.draws.requests
        )

    def knows_as(self, other: "Forward") -> bool:
        """Whether both have the same properties and the same variables."""
        mine = self.facts
        theirs = other.facts
        has_same = (
            are_same([*mine.captured], [*theirs.captured]) and self.variables is other.variables
        )
        return has_same and replace(mine, captured=()) == replace(theirs, captured=())

    def so_far(self) -> "Forward":
        """Return this function with the properties that its trace has found so far."""
        assert self.notes is not None
        return replace(self, facts=self.notes.facts())

    def sums(
        self,
        values: Values,
        batch: Tree,
        row_weights: Tensor | None,
        places: Sequence[Tensor] = (),
        first: Tensor | int = 0,
        *,
        lookups: Lookups = NOTHING,
    ) -> Outcome:
        """Run the objective on one (micro)batch and return the sums of its terms.

        Args:
            places: by group of `lookups`, the index of each lookup's row among the rows that
                `params` hold of a table.
            first: the first row's place in the update, on which random draws depend.
        """
        scope = self._scope(values, lookups)
        with scope, lookups.answering(values.params, places):
            with self._calling(batch, first):
                result = self.objective(self.model, batch, self.training)
            # A second call needs whole tables, and has been made on them before; here are only rows
            # of them.
            reading = self._reading(result, batch, None if lookups.tables else values)
            for score in reading.scores:
                score.update(row_weights)
            terms = reading.terms | reading.reported
            sums = {label: term.sums(row_weights) for label, term in terms.items()}
            extra = self._extra(scope, reading)
        assigned = [scope.get_current_value(self.variables.params[i]) for i in self.facts.assigned]
        return Outcome(sums, extra, *self._after(scope, values), assigned)

    def rows(
        self, values: Values, batch: Tree, first: Tensor | int = 0, *, lookups: Lookups = NOTHING
    ) -> Rows:
        """Run the objective and return the values and weights of each row; rows missing from a
        table are NaN.
        """
        scope = self._scope(values)
        with scope, lookups.noting(values.params):
            with self._calling(batch, first):
                result = self.objective(self.model, batch, self.training)
            reading = self._reading(result, batch, values)
            found = {label: by_row(term) for label, term in reading.terms.items()}
            extra = self._extra(scope, reading)
        return Rows(found, extra, self._after(scope, values)[0])

    def ids(
        self, values: Values, batch: Tree, first: Tensor | int, *, lookups: Lookups
    ) -> list[Tensor]:
        """Return the row numbers that the objective looks up on one (micro)batch, by group of
        `lookups`.

        They mostly depend on the batch alone: then the compiler drops the forward pass.
        """
        with (
            self._scope(values),
            lookups.noting(values.params) as noted,
            self._calling(batch, first),
        ):
            self.objective(self.model, batch, self.training)
        return lookups.ids(noted)

    def lookups(
        self, values: Values, batch: Tree, *, lookups: Lookups
    ) -> tuple[Lookups, list[str]]:
        """Return the objective's lookups on one (micro)batch, and the reasons why tables must be
        passed as a whole.
        """
        with (
            self._scope(values) as scope,
            lookups.noting(values.params) as noted,
            self._calling(batch, 0),
        ):
            self.objective(self.model, batch, self.training)
        return lookups.learned(noted, scope.read, self.variables)

    def padded(self, values: Values, batch: Tree, num: int) -> tuple[list, list]:
        """Return the metrics' values after the first `num` rows, and after all rows where the
        others have weight 0.
        """
        weights = ops.cast(ops.arange(tree.num_rows(batch)) < num, keras.config.floatx())
        after = []
        for part, row_weights in ((slice(num), None), (slice(None), weights)):
            with self._scope(values) as scope:
                with self._calling(batch, 0):
                    result = self.objective(self.model, batch, self.training)
                for score in self._reading(result, batch, values).scores:
                    score.part(part).update(row_weights)
            after.append(self._after(scope, values)[1])
        return after[0], after[1]

    def predict(self, values: Values, inputs: Tree) -> tuple[Tree, list]:
        """Return the model's outputs, and the buffers after them."""
        with self._scope(values) as scope:
            has_mode = self.model._call_has_training_arg
            with explained(self.model, self.objective, inputs, inputs_only=True):
                outputs = self.model(inputs, training=False) if has_mode else self.model(inputs)
        return outputs, self._after(scope, values)[0]

    def results(self, metrics: list, captured: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        """Return the current results of the Keras metrics, by name."""
        results: dict[str, Tensor] = {}
        with self._scope(Values([], [], metrics, captured)):
            for metric in self.metrics:
                result = metric.result()
                results |= result if isinstance(result, dict) else {metric.name: result}
            return {name: as_tensor(value) for name, value in results.items()}

    def own_results(
        self, metrics: list, numbers: dict[str, Tensor], captured: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the current results of a compiled model's custom `get_metrics_result`, by name; {}
        without one.
        """
        if not isinstance(self.objective, CompiledObjective):
            return {}
        with self._scope(Values([], [], metrics, captured)) as scope:
            held = tracked(self.model, numbers)
            scope.state_mapping |= {
                id(v): ops.convert_to_tensor(value, v.dtype) for v, value in held
            }
            return {name: as_tensor(value) for name, value in own_results(self.model).items()}

    def tracking(self, metrics: list, numbers: dict[str, Tensor]) -> list:
        """Return the metrics' values, with the epoch's numbers in Keras' loss trackers."""
        held = {id(variable): value for variable, value in tracked(self.model, numbers)}
        pairs = zip(self.variables.metrics, metrics, strict=True)
        return [
            ops.cast(held[id(v)], value.dtype) if id(v) in held else value for v, value in pairs
        ]

    def penalty(self, params: list, captured: Sequence[Tensor] | None = None) -> Tensor:
        """Return the weight regularisation, a function of the parameters and the variables that
        regularisers read.
        """
        # The params may hold only some rows of an unregularised table, which are no value for its
        # variable.
        pairs = [
            (v, p)
            for v, p in zip(self.variables.params, params, strict=True)
            if v.regularizer is not None
        ]
        with self._scope(Values([], [], [], captured)) as scope:
            scope.state_mapping |= {id(v): p for v, p in pairs}
            penalties: Any = [wide(v.regularizer(p)) for v, p in pairs]
            return sum(penalties)

    @property
    def has_penalty(self) -> bool:
        """Whether any trainable variable is regularised by the update."""
        return not self.facts.is_complete and any(
            v.regularizer is not None for v in self.variables.params
        )

    def _scope(self, values: Values, lookups: Lookups = NOTHING) -> Scope:
        """Return the scope in which variables have these values; variables of an empty group must
        not be read.
        """
        v = self.variables
        apart = {table.param for table in lookups.tables}
        groups = v.params, v.buffers, v.metrics, self.facts.captured
        given = values._replace(captured=values.captured or ())
        mapping = [
            pair
            for known, held in zip(groups, given, strict=True)
            for pair in zip(known, held, strict=False)
        ]
        mapping = [pair for i, pair in enumerate(mapping) if i not in apart]
        tells_reads = self.freezes_reads and (self.notes is not None or values.captured is not None)
        keeps = {"keeps_assigned": self.keeps_assigned, "tells_reads": tells_reads}
        return Scope(mapping, v, self.notes, {id(v.params[i]) for i in apart}, **keeps)

    def captured_in(self, state: State) -> list[Tensor]:
        """Return the values of `facts.captured` in a state."""
        slots = {id(v): i for i, v in enumerate(self.variables.slots)}
        others = iter(state.captured)
        return [
            state.slots[slots[id(v)]] if id(v) in slots else next(others)
            for v in self.facts.captured
        ]

    @property
    def inputs(self) -> list[keras.Variable]:
        """The captured variables that a program takes as inputs; in training, the optimizer's
        variables are state.
        """
        slots = {id(v) for v in self.variables.slots} if self.training else set()
        return [v for v in self.facts.captured if id(v) not in slots]

    @contextmanager
    def _calling(self, batch: Tree, first: Tensor | int | None) -> Iterator[None]:
        """Return a context for a call of the objective, whose first row has this place; see
        `_drawing`.
        """
        with explained(self.model, self.objective, batch), self._drawing(batch, first):
            yield

    def _reading(self, result: object, batch: Tree, again: Values | None) -> Reading:
        """Check the objective's result; `again`: the values for a second call, None to make
        none.
        """
        metrics = {m.name: m for m in self.metrics}
        num_rows = tree.num_rows(batch)
        reading = read(result, metrics)
        terms, reported = (checked(terms, num_rows) for terms in (reading.terms, reading.reported))
        squares = [
            k
            for k, t in terms.items()
            if len(t.values.shape) > 1 and t.values.shape[1] == num_rows > 1
        ]
        if squares and again is not None:
            batch = tree.map_leaves(lambda leaf: leaf[:-1], batch)
            with self._scope(again), self._calling(batch, None):
                shorter = read(self.objective(self.model, batch, self.training), metrics)
            refuse_broadcasts({k: shorter.terms[k] for k in squares}, num_rows)
        reading = reading._replace(terms=terms, reported=reported)
        if self.notes is not None:
            self.notes.note_reading(reading)
        return reading

    def _drawing(self, batch: Tree, first: Tensor | int | None) -> AbstractContextManager:
        """Return a context in which draws belong to rows, the first at this place; None where draws
        do not matter.
        """
        if first is None:
            return drawing_as_keras()
        if self.draws_by is None:
            return nullcontext()
        facts = self.facts.draws if self.notes is None else None
        draws = Draws(
            self.draws_by,
            first,
            tree.num_rows(batch),
            facts,
            self.extreme,
            self.draws_by.traces.frame(),
        )
        if self.notes is not None:
            self.notes.draws = draws
        return drawing(draws)

    def backwards(self, num_rows: int, first: Tensor | int) -> AbstractContextManager:
        """Return a context in which a gradient's trace repeats the draws of these rows: recomputed
        functions do.
        """
        if self.draws_by is None:
            return nullcontext()
        facts = self.facts.draws
        frame = self.draws_by.traces.frame()
        return drawing(Draws(self.draws_by, first, num_rows, facts, frame=frame, is_backward=True))

    def _extra(self, scope: keras.StatelessScope, reading: Reading) -> Tensor:
        losses = [] if reading.is_complete else scope.losses
        if self.notes is not None:
            self.notes.has_extra |= bool(losses)
        return sum((wide(ops.sum(loss)) for loss in losses), ops.zeros((), keras.config.floatx()))

    def _after(self, scope: keras.StatelessScope, values: Values) -> tuple[list, list]:
        """Return the values of buffers and metrics at the end of a scope; unassigned variables keep
        theirs.
        """
        pairs = (self.variables.buffers, values.buffers), (self.variables.metrics, values.metrics)
        buffers, metrics = (list(map(partial(_value_after, scope), *pair)) for pair in pairs)
        return buffers, metrics


def _value_after(scope: keras.StatelessScope, variable: keras.Variable, before: Tensor) -> Tensor:
    value = scope.get_current_value(variable)
    return before if value is None else value
