"""The objective as a pure function of values: the only place where a model is called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import keras
from keras import ops

from wholestep import tree
from wholestep.embeddings.lookups import Lookups
from wholestep.engines import Engine
from wholestep.model.compiled import are_same, outputs_of, own_results, tracked
from wholestep.model.draws import DrawFact, Draws, compare, drawing, drawing_as_keras
from wholestep.model.losses import CompiledObjective
from wholestep.model.misfit import explained
from wholestep.model.objective import (
    Objective,
    ObjectiveOutput,
    Term,
    Whole,
    as_tensor,
    by_row,
    check_closes_over_no_rows,
    checked,
    leaves_of,
    read,
    refuse_broadcasts,
    wide,
)
from wholestep.model.trace import NOTHING_KNOWN, Notes, Scope, TraceFacts
from wholestep.state import State, Values, Variables
from wholestep.tree import Tensor, Tree

NOTHING = Lookups([])


class MicrobatchSums(NamedTuple):
    """The results of one microbatch.

    Args:
        sums: (value, weight) by term, without those that are joined.
        extra: the model's other losses.
        buffers, metrics: the values after it.
        assigned: the new values of the parameters that the forward pass assigned, in the order of
            `facts.assigned`.
        joined: the sum of the outputs times their slopes, for the gradient of joined terms.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list
    joined: Tensor


class RowResults(NamedTuple):
    """The results of each row, for the probe and for naming bad rows.

    Args:
        values: (values, weights) by term, both (rows,).
    """

    values: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list


Trace = Callable[["Forward"], None]


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

    def learned(self, trace: Trace, twice: Trace | None = None) -> "Forward":
        """Return this function with the properties that are found while `trace` calls it.

        Foreign variables that the objective assigns are state from then on. `twice` calls it on
        twice as many rows, to find the axis of rows in every random draw.
        """
        notes = Notes(self.facts)
        trace(replace(self, notes=notes))
        variables = self.variables
        if notes.written:
            variables = replace(variables, buffers=[*variables.buffers, *notes.written])
        facts = replace(notes.facts(), draws=self._draw_facts(notes.draws, twice))
        return replace(self, facts=facts, variables=variables)

    def _draw_facts(self, draws: Draws | None, twice: Trace | None) -> tuple[DrawFact, ...]:
        if twice is None or draws is None or not draws.requests:
            return ()
        notes = Notes(self.facts)
        with suppress(Exception):  # a model may take one number of rows only, and raise any error
            twice(replace(self, notes=notes))
        more = notes.draws.requests if notes.draws is not None else None
        return compare(draws.requests, draws.num_rows, more)

    @cached_property
    def moved_floats(self) -> dict[int, bool]:
        """Whether each buffer that the forward pass moves is floating, by its index."""
        floats = self.variables.floats
        return {i: floats[i] for i in self.facts.moved}

    @property
    def movers(self) -> list[str]:
        """The layers, by path, whose floating state the forward pass moves."""
        places = [i for i, is_float in self.moved_floats.items() if is_float]
        moved = [self.variables.buffers[i] for i in places]
        paths = [variable.path.removeprefix(f"{self.model.name}/") for variable in moved]
        return list(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))

    def moved_where_finite(self, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
        """Return the floating buffers that the forward pass moves, as one vector for each dtype.

        Numbers that were not finite before are 0, as in a mask, or a minimum that begins at
        infinity.
        """
        vectors: dict[str, list[Tensor]] = {}
        for i, is_float in self.moved_floats.items():
            if is_float:
                was_finite = ops.isfinite(before[i])
                value = ops.where(was_finite, after[i], ops.zeros_like(after[i]))
                vector = ops.reshape(value, (-1,))
                dtype = self.variables.buffers[i].dtype
                vectors.setdefault(dtype, []).append(vector)
        groups = vectors.values()
        return [ops.concatenate(parts) if len(parts) > 1 else parts[0] for parts in groups]

    def knows_as(self, other: "Forward") -> bool:
        """Whether both have the same properties and the same variables."""
        has_same = are_same([*self.facts.captured], [*other.facts.captured])
        others = replace(other.facts, captured=self.facts.captured)
        return has_same and self.variables is other.variables and self.facts == others

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
        slopes: Sequence[Tensor] = (),
        *,
        lookups: Lookups = NOTHING,
    ) -> MicrobatchSums:
        """Run the objective on one (micro)batch and return the sums of its terms.

        Args:
            places: by group of `lookups`, the index of each lookup's row among the rows that
                `params` hold of a table.
            first: the first row's place in the update, on which random draws depend.
            slopes: the derivatives of the loss by these rows' outputs, of all joined terms; without
                any, the terms are computed of these rows.
        """
        scope = self._scope(values, lookups)
        with scope, lookups.answering(values.params, places):
            with self._calling(batch, first):
                result = self.objective(self.model, batch, self.training)
            # A second call needs whole tables, and has been made on them before; here are only rows
            # of them.
            output = self._output(result, batch, None if lookups.tables else values)
            for update in output.metric_updates:
                update.run(row_weights)
            terms = output.terms | output.reported
            joined = _joined(terms) if slopes else {}
            sums = {k: term.sums(row_weights) for k, term in terms.items() if k not in joined}
            extra = self._extra(scope, output)
        params = [self.variables.params[i] for i in self.facts.assigned]
        assigned = [scope.get_current_value(variable) for variable in params]
        product = _product(leaves_of(joined), slopes)
        return MicrobatchSums(sums, extra, *self._after(scope, values), assigned, product)

    def outputs(
        self,
        values: Values,
        batch: Tree,
        places: Sequence[Tensor] = (),
        first: Tensor | int = 0,
        *,
        lookups: Lookups = NOTHING,
    ) -> dict[str, Whole]:
        """Return the joined terms of one microbatch, for their outputs; arguments as of `sums`."""
        with self._scope(values, lookups), lookups.answering(values.params, places):
            with self._calling(batch, first):
                result = self.objective(self.model, batch, self.training)
            output = self._output(result, batch, None)
        terms = _joined(output.terms | output.reported)
        for label, term in terms.items():
            check_closes_over_no_rows(term, label)
        return terms

    def joined(
        self, values: Values, terms: dict[str, Whole], *, lookups: Lookups = NOTHING
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], list[int]]:
        """Return the sums of joined terms of all rows, and the parameters that they read."""
        with self._scope(values, lookups) as scope:
            sums = {label: term.sums() for label, term in terms.items()}
        params = enumerate(self.variables.params)
        return sums, [i for i, param in params if id(param) in scope.read]

    def rows(
        self, values: Values, batch: Tree, first: Tensor | int = 0, *, lookups: Lookups = NOTHING
    ) -> RowResults:
        """Return the objective's values and weights by row; NaN for rows missing in a table."""
        with self._scope(values) as scope, lookups.noting(values.params):
            with self._calling(batch, first):
                result = self.objective(self.model, batch, self.training)
            output = self._output(result, batch, values)
            by_term = {label: by_row(term) for label, term in output.terms.items()}
            extra = self._extra(scope, output)
        return RowResults(by_term, extra, self._after(scope, values)[0])

    def ids(
        self, values: Values, batch: Tree, first: Tensor | int, *, lookups: Lookups
    ) -> list[Tensor]:
        """Return the row numbers that the objective looks up, by group of `lookups`.

        They mostly depend on the batch alone: then the compiler drops the forward pass.
        """
        noting = lookups.noting(values.params)
        with self._scope(values), noting as noted, self._calling(batch, first):
            self.objective(self.model, batch, self.training)
        return lookups.ids(noted)

    def lookups(
        self, values: Values, batch: Tree, *, lookups: Lookups
    ) -> tuple[Lookups, list[str]]:
        """Return the objective's lookups, and the reasons to pass tables as a whole."""
        noting = lookups.noting(values.params)
        with self._scope(values) as scope, noting as noted, self._calling(batch, 0):
            self.objective(self.model, batch, self.training)
        return lookups.learned(noted, scope.read, self.variables)

    def padded(self, values: Values, batch: Tree, num: int) -> tuple[list, list]:
        """Return the metrics after `num` rows, and after all rows where the others weigh 0."""
        is_real = ops.arange(tree.num_rows(batch)) < num
        weights = ops.cast(is_real, keras.config.floatx())
        alone = self._metrics_after(values, batch, slice(num), None)
        return alone, self._metrics_after(values, batch, slice(None), weights)

    def _metrics_after(
        self, values: Values, batch: Tree, rows: slice, row_weights: Tensor | None
    ) -> list:
        with self._scope(values) as scope:
            with self._calling(batch, 0):
                result = self.objective(self.model, batch, self.training)
            output = self._output(result, batch, values)
            for update in output.metric_updates:
                update.part(rows).run(row_weights)
        return self._after(scope, values)[1]

    def predict(self, values: Values, inputs: Tree) -> tuple[Tree, list]:
        """Return the model's outputs, and the buffers after them."""
        explaining = explained(self.model, self.objective, inputs, inputs_only=True)
        with self._scope(values) as scope, explaining:
            outputs = outputs_of(self.model, inputs, training=False)
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
        """Return the results of a model's custom `get_metrics_result`, by name; {} without one."""
        if not isinstance(self.objective, CompiledObjective):
            return {}
        with self._scope(Values([], [], metrics, captured)) as scope:
            for v, value in tracked(self.model, numbers):
                scope.state_mapping[id(v)] = ops.convert_to_tensor(value, v.dtype)
            return {name: as_tensor(value) for name, value in own_results(self.model).items()}

    def tracking(self, metrics: list, numbers: dict[str, Tensor]) -> list:
        """Return the metrics' values, with the epoch's numbers in Keras' loss trackers."""
        totals = {id(variable): value for variable, value in tracked(self.model, numbers)}
        values = []
        for variable, value in zip(self.variables.metrics, metrics, strict=True):
            if id(variable) in totals:
                value = ops.cast(totals[id(variable)], value.dtype)
            values.append(value)
        return values

    def penalty(self, params: list, captured: Sequence[Tensor] | None = None) -> Tensor:
        """Return the weight regularisation of the parameters, which may read `captured`."""
        with self._scope(Values([], [], [], captured)) as scope:
            # The params may hold only some rows of an unregularised table, which are no value for
            # its variable.
            pairs = zip(self.variables.params, params, strict=True)
            regularised = [(v, value) for v, value in pairs if v.regularizer is not None]
            for variable, value in regularised:
                scope.state_mapping[id(variable)] = value
            total: Any = 0
            for variable, value in regularised:
                total = total + wide(variable.regularizer(value))
            return total

    @property
    def has_penalty(self) -> bool:
        """Whether any trainable variable is regularised by the update."""
        has_regularizer = any(v.regularizer is not None for v in self.variables.params)
        return has_regularizer and not self.facts.is_complete

    def _scope(self, values: Values, lookups: Lookups = NOTHING) -> Scope:
        """Return a scope of these values; variables of an empty group must not be read."""
        v = self.variables
        apart = {id(v.params[table.param]) for table in lookups.tables}
        groups = v.params, v.buffers, v.metrics, self.facts.captured
        mapping = []
        for variables, group in zip(groups, values, strict=True):
            pairs = zip(variables, group or (), strict=False)
            mapping += [(known, value) for known, value in pairs if id(known) not in apart]
        is_program = self.notes is not None or values.captured is not None
        checks_reads = self.freezes_reads and is_program
        keeps = self.keeps_assigned
        return Scope(mapping, v, self.notes, apart, keeps_assigned=keeps, checks_reads=checks_reads)

    def captured_in(self, state: State) -> list[Tensor]:
        """Return the values of `facts.captured` in a state."""
        slots = {id(v): i for i, v in enumerate(self.variables.slots)}
        others = iter(state.captured)
        values = []
        for variable in self.facts.captured:
            slot = slots.get(id(variable))
            values.append(next(others) if slot is None else state.slots[slot])
        return values

    @property
    def inputs(self) -> list[keras.Variable]:
        """The captured variables that a program takes as inputs; slots of a training are state."""
        if not self.training:
            return list(self.facts.captured)
        slots = {id(v) for v in self.variables.slots}
        return [v for v in self.facts.captured if id(v) not in slots]

    @contextmanager
    def _calling(self, batch: Tree, first: Tensor | int | None) -> Iterator[None]:
        """Context of a call of the objective; `first` is the place of its first row."""
        with explained(self.model, self.objective, batch), self._drawing(batch, first):
            yield

    def _output(self, result: object, batch: Tree, again: Values | None) -> ObjectiveOutput:
        """Check the objective's result; `again`: the values for a second call, None for none."""
        metrics = {m.name: m for m in self.metrics}
        num_rows = tree.num_rows(batch)
        output = read(result, metrics)
        terms = checked(output.terms, num_rows)
        reported = checked(output.reported, num_rows)
        rows = {k: term for k, term in terms.items() if not isinstance(term, Whole)}
        shapes = {k: tuple(term.values.shape) for k, term in rows.items()}
        squares = [k for k, shape in shapes.items() if shape[1:2] == (num_rows,)]
        if squares and num_rows > 1 and again is not None:
            batch = tree.map_leaves(lambda leaf: leaf[:-1], batch)
            with self._scope(again), self._calling(batch, None):
                shorter = read(self.objective(self.model, batch, self.training), metrics)
            refuse_broadcasts({k: shorter.terms[k] for k in squares}, num_rows)
        output = output._replace(terms=terms, reported=reported)
        if self.notes is not None:
            self.notes.note_output(output)
        return output

    def _drawing(self, batch: Tree, first: Tensor | int | None) -> AbstractContextManager:
        """Return a context in which draws belong to rows; None: where draws do not matter."""
        if first is None:
            return drawing_as_keras()
        return self._drawing_rows(tree.num_rows(batch), first)

    def backwards(self, num_rows: int, first: Tensor | int) -> AbstractContextManager:
        """Return a context that repeats the draws of recomputed functions in a gradient's trace."""
        return self._drawing_rows(num_rows, first, is_backward=True)

    def _drawing_rows(
        self, num_rows: int, first: Tensor | int, *, is_backward: bool = False
    ) -> AbstractContextManager:
        engine = self.draws_by
        if engine is None:
            return nullcontext()
        facts = self.facts.draws if self.notes is None else None
        frame = engine.traces.frame()
        draws = Draws(engine, first, num_rows, facts, self.extreme, frame, is_backward)
        if self.notes is not None:
            self.notes.draws = draws
        return drawing(draws)

    def _extra(self, scope: keras.StatelessScope, output: ObjectiveOutput) -> Tensor:
        losses = [] if output.is_complete else scope.losses
        if losses and self.notes is not None:
            self.notes.note_extra()
        total = ops.zeros((), keras.config.floatx())
        for loss in losses:
            total = total + wide(ops.sum(loss))
        return total

    def _after(self, scope: keras.StatelessScope, values: Values) -> tuple[list, list]:
        """Return the buffers and metrics at the end of a scope; unassigned ones keep theirs."""

        def after(variables: list, before: list) -> list:
            values = []
            for variable, old in zip(variables, before, strict=False):
                value = scope.get_current_value(variable)
                values.append(old if value is None else value)
            return values

        buffers = after(self.variables.buffers, values.buffers)
        return buffers, after(self.variables.metrics, values.metrics)


def _joined(terms: dict[str, Term]) -> dict[str, Whole]:
    return {label: term for label, term in terms.items() if isinstance(term, Whole)}


def _product(outputs: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
    """Return the sum of outputs times their slopes."""
    total = ops.zeros((), keras.config.floatx())
    for leaf, slope in zip(outputs, slopes, strict=True):
        total = total + ops.sum(wide(leaf) * wide(ops.stop_gradient(slope)))
    return total
