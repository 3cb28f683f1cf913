"""The objective as a pure function of values: the only place where a model is called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from wholestep import tree
from wholestep.embeddings.lookups import Lookups
from wholestep.engines.protocol import Engine
from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import own_results, tracked
from wholestep.model.losses import CompiledObjective
from wholestep.model.misfit import explained
from wholestep.model.objective import Objective, Reading, read
from wholestep.model.terms import Term, Whole, as_tensor, check
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree

NOTHING = Lookups([])


class Outcome(NamedTuple):
    """What one microbatch adds: sums by term as (value, weight), the model's other losses, and the new state.

    `assigned` are the new values of the parameters that the forward pass assigned, in the order of `Forward.assigned`.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list


class Rows(NamedTuple):
    """The same, row by row: each term's (values, weights), both (rows,). For the probe and for naming bad rows."""

    values: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list


@dataclass(frozen=True)
class Fact:
    """What tracing the objective told of one term."""

    kind: type
    coefficient: float
    counts: bool


class Forward:
    """The objective as a pure function of values: the only place where a model is called.

    `facts` (one Fact a term, in order) `has_extra` (whether `add_loss` or an activity regulariser spoke), `has_whole`
    (whether a loss or metric came as one number) and `is_complete` (see `Reading`) are valid once a function has been
    traced (`is_traced`). So are

    - `captured`: variables that the objective reads, but the trainer does not own (of another model, or alone);
    - `written`: those that the objective assigns besides; they become state;
    - `assigned`: the places of the parameters that the forward pass assigns, where the engine keeps such assignments.

    Args:
        freezes_reads: whether a variable that a traced function reads would be a constant of the program.
        keeps_assigned: whether an assignment to a parameter stays, as in `keras.Model.fit` on this engine.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        metrics: list,
        variables: Variables,
        *,
        training: bool,
        freezes_reads: bool,
        keeps_assigned: bool = False,
    ):
        self.model = model
        self.objective = objective
        self.metrics = metrics
        self.variables = variables
        self.training = training
        self.facts: dict[str, Fact] = {}
        self.is_traced = False
        self.has_extra = False
        self.has_whole = False
        self.is_complete = False
        self._captured: list[keras.Variable] = []
        self.written: list[keras.Variable] = []
        self.assigned: list[int] = []
        self.moves_buffers = False
        self._freezes_reads = freezes_reads
        self._keeps_assigned = keeps_assigned

    def sums(
        self,
        params: list,
        buffers: list,
        metrics: list,
        captured: Sequence[Tensor],
        batch: Tree,
        row_weights: Tensor | None,
        places: Sequence[Tensor] = (),
        *,
        lookups: Lookups = NOTHING,
    ) -> Outcome:
        """Run the objective on one (micro)batch and sum what it returned.

        Args:
            captured: the values of the variables in `captured`, or of its first ones.
            places: by group of `lookups`, where each lookup finds its row; `params` hold these rows for its tables.
        """
        scope = self._scope(params, buffers, metrics, captured, lookups)
        with scope, lookups.answering(params, places):
            # With rows in hand a second look is not possible; there has been one on whole tables before.
            look_again = None if lookups.tables else lambda: self._scope(params, buffers, metrics, captured)
            reading = self._read(batch, look_again)
            for score in reading.scores:
                score.update(row_weights)
            terms = reading.terms | reading.reported
            sums = {label: tuple(_wide(s) for s in term.sums(row_weights)) for label, term in terms.items()}
            extra = self._extra(scope)
        assigned = [scope.get_current_value(self.variables.params[i]) for i in self.assigned]
        return Outcome(sums, extra, *self._after(scope, buffers, metrics), assigned)

    def rows(self, params: list, buffers: list, metrics: list, batch: Tree, *, lookups: Lookups = NOTHING) -> Rows:
        """Run the objective and keep each row's own values and weights; what the tables of `lookups` lack is NaN."""
        scope = self._scope(params, buffers, metrics)
        with scope, lookups.noting([[] for _ in lookups.tables], params):
            reading = self._read(batch, lambda: self._scope(params, buffers, metrics))
            values = {label: _by_row(term) for label, term in reading.terms.items()}
            extra = self._extra(scope)
        return Rows(values, extra, self._after(scope, buffers, metrics)[0])

    def ids(
        self, params: list, buffers: list, metrics: list, captured: Sequence[Tensor], batch: Tree, *, lookups: Lookups
    ) -> list[Tensor]:
        """Return the row numbers that the objective looks up on one (micro)batch, by group of `lookups`.

        They depend on the batch alone, mostly: then the compiler drops the forward pass.
        """
        scope = self._scope(params, buffers, metrics, captured)
        noted: list[list[Tensor]] = [[] for _ in lookups.tables]
        with scope, lookups.noting(noted, params):
            self._call(batch)
        return lookups.ids(noted, scope.read, self.variables)

    def padded(self, params: list, buffers: list, metrics: list, batch: Tree, num: int) -> tuple[list, list]:
        """Return the metrics' values after the first `num` rows, and after all rows if the others weigh nothing."""
        weights = ops.cast(ops.arange(tree.num_rows(batch)) < num, keras.config.floatx())
        after = []
        for part, row_weights in ((slice(num), None), (slice(None), weights)):
            scope = self._scope(params, buffers, metrics)
            with scope:
                for score in self._read(batch, lambda: self._scope(params, buffers, metrics)).scores:
                    score.part(part).update(row_weights)
            after.append(self._after(scope, buffers, metrics)[1])
        return after[0], after[1]

    def predict(
        self, params: list, buffers: list, metrics: list, captured: Sequence[Tensor], inputs: Tree
    ) -> tuple[Tree, list]:
        """Return the model's outputs, and the buffers after them."""
        scope = self._scope(params, buffers, metrics, captured)
        with scope:
            has_mode = self.model._call_has_training_arg
            with explained(self.model, self.objective, inputs, inputs_only=True):
                outputs = self.model(inputs, training=False) if has_mode else self.model(inputs)
        return outputs, _values(scope, self.variables.buffers, buffers)

    def results(self, metrics: list, captured: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return what the Keras metrics say now, by name."""
        results: dict[str, Tensor] = {}
        with self._scope([], [], metrics, captured):
            for metric in self.metrics:
                result = metric.result()
                results |= result if isinstance(result, dict) else {metric.name: result}
            return {name: as_tensor(value) for name, value in results.items()}

    def own_results(
        self, metrics: list, numbers: dict[str, Tensor], captured: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """Return what a `get_metrics_result` of a compiled model's own says now, by name; nothing, if it has none."""
        if not isinstance(self.objective, CompiledObjective):
            return {}
        with self._scope([], [], metrics, captured) as scope:
            held = tracked(self.model, numbers)
            scope.state_mapping |= {id(v): ops.convert_to_tensor(value, v.dtype) for v, value in held}
            return {name: as_tensor(value) for name, value in own_results(self.model).items()}

    def tracking(self, metrics: list, numbers: dict[str, Tensor]) -> list:
        """Return the metrics' values, those of Keras' loss trackers being the numbers of an epoch."""
        held = {id(variable): value for variable, value in tracked(self.model, numbers)}
        pairs = zip(self.variables.metrics, metrics, strict=True)
        return [ops.cast(held[id(v)], value.dtype) if id(v) in held else value for v, value in pairs]

    def penalty(self, params: list, captured: Sequence[Tensor] = ()) -> Tensor:
        """Return the weight regularisation, a function of the parameters and of what the regularisers read."""
        # Of a table that is not regularised there may be but some rows in hand: no value for its variable.
        pairs = [(v, p) for v, p in zip(self.variables.params, params, strict=True) if v.regularizer is not None]
        with self._scope([], [], [], captured) as scope:
            scope.state_mapping |= {id(v): p for v, p in pairs}
            return sum(_wide(v.regularizer(p)) for v, p in pairs)

    @property
    def cannot_pad(self) -> bool:
        """Whether the objective has a part that cannot leave rows out. Valid once traced."""
        return self.has_extra or self.has_whole

    @property
    def has_penalty(self) -> bool:
        """Whether any trainable variable is regularised by the update. Valid once traced."""
        return not self.is_complete and any(v.regularizer is not None for v in self.variables.params)

    def _scope(
        self,
        params: list,
        buffers: list,
        metrics: list,
        captured: Sequence[Tensor] = (),
        lookups: Lookups = NOTHING,
    ) -> "_Scope":
        """Return the scope in which variables have these values; a group that is left empty is not to be asked."""
        v, apart = self.variables, {table.param for table in lookups.tables}
        pairs = [(v.params, params), (v.buffers, buffers), (v.metrics, metrics), (self.captured, captured)]
        mapping = [pair for known, values in pairs for pair in zip(known, values, strict=False)]
        mapping = [pair for i, pair in enumerate(mapping) if i not in apart]
        return _Scope(self, {id(v.params[i]) for i in apart}, mapping, collect_losses=True)

    def note_read(self, variable: keras.Variable) -> None:
        """Take note of a variable that has no value in hand: another's becomes an input.

        Raises:
            SpecificationError: a metric's result or a regulariser reads the model's own variables.
        """
        if not self._freezes_reads:
            return
        v = self.variables
        if any(variable is known for group in (v.params, v.buffers, v.metrics) for known in group):
            must = "A metric's result and a regulariser must not read other variables of the model."
            attempt = "let the objective report it: return (loss, {name: Mean(...)})."
            raise SpecificationError(message(must, variable.path, attempt))
        if not any(variable is known for known in self._captured):
            self._captured.append(variable)

    def note_written(self, variable: keras.Variable, value: Tensor, current: Tensor | None) -> Tensor:
        """Take note of a variable that is assigned, and return what it holds from then on.

        Raises:
            SpecificationError: it is the optimizer's.
        """
        v = self.variables
        if any(variable is known for known in v.slots):
            must = "An objective must not assign the optimizer's variables: they are what the update computes."
            raise SpecificationError(message(must, variable.path, "assign it between updates, or in a callback."))
        place = next((i for i, known in enumerate(v.params) if known is variable), None)
        if place is not None:
            return self._reassigned(place, value, current) if self._keeps_assigned else value
        if any(variable is known for known in v.buffers):
            self.moves_buffers = True
        elif not any(variable is known for group in (v.metrics, self.written) for known in group):
            self.written.append(variable)
        return value

    @property
    def captured(self) -> list[keras.Variable]:
        """The variables that the objective reads, and that are no state of the trainer's."""
        return [v for v in self._captured if not any(v is known for known in self.variables.buffers)]

    @property
    def inputs(self) -> list[keras.Variable]:
        """Those of `captured` that are inputs of a program; in training the optimizer's own are state."""
        slots = {id(v) for v in self.variables.slots} if self.training else set()
        return [v for v in self.captured if id(v) not in slots]

    def learn(self, engine: Engine, state: State, trace: Callable[[State], object]) -> State:
        """Trace until nothing new is found; return the state with what the objective reads and assigns besides.

        What it assigns is state from then on.
        """
        while True:
            known = len(self.captured)
            state = state._replace(captured=engine.read_captured(self.inputs, state))
            trace(state)
            if self.written:
                self.variables.buffers.extend(self.written)
                self.written = []
                state = state._replace(buffers=engine.read_variables(self.variables)[2])
            elif len(self.captured) == known:
                return state

    def _reassigned(self, place: int, value: Tensor, current: Tensor) -> Tensor:
        """Return the assigned value, of which the gradient is that of the parameter: as Keras has it on TensorFlow."""
        if place not in self.assigned:
            self.assigned.append(place)
        return ops.stop_gradient(ops.cast(value, current.dtype)) + (current - ops.stop_gradient(current))

    def _read(self, batch: Tree, fresh_scope: Callable[[], keras.StatelessScope] | None) -> Reading:
        reading, num_rows = self._call(batch), tree.num_rows(batch)
        terms, reported = (_checked(terms, num_rows) for terms in (reading.terms, reading.reported))
        squares = [k for k, t in terms.items() if len(t.values.shape) > 1 and t.values.shape[1] == num_rows > 1]
        if squares and fresh_scope is not None:
            with fresh_scope():
                shorter = self._call(tree.map_leaves(lambda leaf: leaf[:-1], batch))
            _refuse_broadcasts({k: shorter.terms[k] for k in squares}, num_rows)
        self.has_whole = any(isinstance(t, Whole) for t in terms.values()) or any(s.is_whole for s in reading.scores)
        self.facts = _facts(terms, counts=True) | _facts(reported, counts=False)
        self.is_complete = reading.is_complete
        self.is_traced = True
        return reading._replace(terms=terms, reported=reported)

    def _call(self, batch: Tree) -> Reading:
        with explained(self.model, self.objective, batch):
            return read(self.objective(self.model, batch, self.training), {m.name: m for m in self.metrics})

    def _extra(self, scope: keras.StatelessScope) -> Tensor:
        losses = [] if self.is_complete else scope.losses
        self.has_extra = bool(losses)
        return sum((_wide(ops.sum(loss)) for loss in losses), ops.zeros((), keras.config.floatx()))

    def _after(self, scope: keras.StatelessScope, buffers: list, metrics: list) -> tuple[list, list]:
        v = self.variables
        return _values(scope, v.buffers, buffers), _values(scope, v.metrics, metrics)


class _Scope(keras.StatelessScope):
    """Notes which variables were read and assigned. Those that are `apart` must not be: they have no value here."""

    def __init__(self, forward: Forward, apart: set[int], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.forward = forward
        self.apart = apart
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Tensor | None:
        assert id(variable) not in self.apart, f"{variable.path} is read, but only rows of it are in hand"
        self.read.add(id(variable))
        value = super().get_current_value(variable)
        if value is None:
            self.forward.note_read(variable)
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        current = self.state_mapping.get(id(variable))
        super().add_update((variable, self.forward.note_written(variable, value, current)))


def _checked(terms: dict[str, Term], num_rows: int) -> dict[str, Term]:
    return {k: t if isinstance(t, Whole) else check(t, _label(k), num_rows) for k, t in terms.items()}


def _refuse_broadcasts(shorter: dict[str, Term], num_rows: int) -> None:
    """Refuse values whose second axis grows with the rows: labels (rows,) against predictions (rows, 1) make them."""
    for label, term in shorter.items():
        if term.values.shape[1] == num_rows - 1:
            raise SpecificationError(
                message(
                    f"The values of {_label(label)} must be one per row; shape (rows, rows) is what labels of shape "
                    "(rows,) make against predictions of shape (rows, 1).",
                    f"values of shape {(num_rows, num_rows)}",
                    "give labels and predictions the same rank; for a loss over pairs, sum over the second axis.",
                )
            )


def _facts(terms: dict[str, Term], *, counts: bool) -> dict[str, Fact]:
    return {k: Fact(type(t), t.coefficient, counts) for k, t in terms.items()}


def _values(scope: keras.StatelessScope, variables: list, before: list) -> list:
    return [_or(scope.get_current_value(v), old) for v, old in zip(variables, before, strict=True)]


def _label(name: str) -> str:
    return f"term {name!r}" if name else "the loss"


def _or(value: Tensor, otherwise: Tensor) -> Tensor:
    return otherwise if value is None else value


def _wide(value: Tensor) -> Tensor:
    """Sums are kept in floatx or wider, whatever the model computes in."""
    return value if str(value.dtype).endswith("float64") else ops.cast(value, keras.config.floatx())


def _by_row(term: Term) -> tuple[Tensor, Tensor]:
    if isinstance(term, Whole):
        return term.values[None], ops.ones((1,))
    values, weights = term.values, term.weights
    weights = ops.ones_like(values) if weights is None else weights
    axes = tuple(range(1, len(values.shape)))
    others = tuple(range(1, len(weights.shape)))
    return ops.sum(values, axis=axes), ops.sum(ops.cast(weights, values.dtype), axis=others)
