"""The objective as a pure function of values: the only place where a model is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from wholestep import tree
from wholestep.errors import SpecificationError, say
from wholestep.mean import Term, Whole, check
from wholestep.objective import Objective, Reading, read
from wholestep.state import Variables
from wholestep.tables import Lookups

Tensor = Any

NOTHING = Lookups([])


class Outcome(NamedTuple):
    """What one microbatch adds: sums by term as (value, weight), the model's other losses, and the new state."""

    sums: dict[str, tuple[Tensor, Tensor]]
    extra: Tensor
    buffers: list
    metrics: list


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

    `facts` (one Fact a term, in order) `has_extra` (whether `add_loss` or an activity regulariser spoke) and
    `has_whole` (whether a loss or metric came as one number) are valid once a function has been traced.
    """

    def __init__(
        self, model: keras.Model, objective: Objective, metrics: list, variables: Variables, *, training: bool
    ):
        self.model = model
        self.objective = objective
        self.metrics = metrics
        self.variables = variables
        self.training = training
        self.facts: dict[str, Fact] = {}
        self.has_extra = False
        self.has_whole = False

    def sums(self, params, buffers, metrics, batch, row_weights, places=(), *, lookups: Lookups = NOTHING) -> Outcome:
        """Run the objective on one (micro)batch and sum what it returned.

        Args:
            places: by group of `lookups`, where each lookup finds its row; `params` hold these rows for its tables.
        """
        scope = self._scope(params, buffers, metrics, lookups)
        with scope, lookups.answering(params, places):
            # With rows in hand a second look is not possible; there has been one on whole tables before.
            reading = self._read(batch, None if lookups.tables else lambda: self._scope(params, buffers, metrics))
            for score in reading.scores:
                score.update(row_weights)
            terms = reading.terms | reading.reported
            sums = {label: tuple(_wide(s) for s in term.sums(row_weights)) for label, term in terms.items()}
            extra = self._extra(scope)
        return Outcome(sums, extra, *self._after(scope, buffers, metrics))

    def rows(self, params, buffers, metrics, batch, *, lookups: Lookups = NOTHING) -> Rows:
        """Run the objective and keep each row's own values and weights; what the tables of `lookups` lack is NaN."""
        scope = self._scope(params, buffers, metrics)
        with scope, lookups.noting([[] for _ in lookups.tables], params):
            reading = self._read(batch, lambda: self._scope(params, buffers, metrics))
            values = {label: _by_row(term) for label, term in reading.terms.items()}
            extra = self._extra(scope)
        return Rows(values, extra, self._after(scope, buffers, metrics)[0])

    def ids(self, params, buffers, metrics, batch, *, lookups: Lookups) -> list[Tensor]:
        """Return the row numbers that the objective looks up on one (micro)batch, by group of `lookups`.

        They depend on the batch alone, mostly: then the compiler drops the forward pass.
        """
        scope = self._scope(params, buffers, metrics)
        noted: list[list[Tensor]] = [[] for _ in lookups.tables]
        with scope, lookups.noting(noted, params):
            self._call(batch)
        return lookups.ids(noted, scope.read, self.variables)

    def padded(self, params, buffers, metrics, batch, num: int) -> tuple[list, list]:
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

    def predict(self, params, buffers, inputs) -> Any:
        """Return the model's outputs."""
        pairs = zip([*self.variables.params, *self.variables.buffers], [*params, *buffers], strict=True)
        with keras.StatelessScope(list(pairs)):
            has_mode = self.model._call_has_training_arg
            return self.model(inputs, training=False) if has_mode else self.model(inputs)

    def results(self, metrics: list) -> dict[str, Tensor]:
        """Return what the Keras metrics say now, by name."""
        results: dict[str, Tensor] = {}
        with keras.StatelessScope(list(zip(self.variables.metrics, metrics, strict=True))):
            for metric in self.metrics:
                result = metric.result()
                results |= result if isinstance(result, dict) else {metric.name: result}
            return {name: ops.convert_to_tensor(value) for name, value in results.items()}

    def penalty(self, params: list) -> Tensor:
        """Return the weight regularisation, a function of the parameters alone."""
        pairs = zip(self.variables.params, params, strict=True)
        return sum(_wide(v.regularizer(p)) for v, p in pairs if v.regularizer is not None)

    @property
    def cannot_pad(self) -> bool:
        """Whether the objective has a part that cannot leave rows out. Valid once traced."""
        return self.has_extra or self.has_whole

    @property
    def has_penalty(self) -> bool:
        """Whether any trainable variable is regularised."""
        return any(v.regularizer is not None for v in self.variables.params)

    def _scope(self, params, buffers, metrics, lookups: Lookups = NOTHING) -> "_Scope":
        v, apart = self.variables, {table.param for table in lookups.tables}
        pairs = [(v.params, params), (v.buffers, buffers), (v.metrics, metrics)]
        mapping = [pair for known, values in pairs for pair in zip(known, values, strict=True)]
        mapping = [pair for i, pair in enumerate(mapping) if i not in apart]
        return _Scope({id(v.params[i]) for i in apart}, mapping, collect_losses=True)

    def _read(self, batch, fresh_scope: Callable[[], keras.StatelessScope] | None) -> Reading:
        reading, num_rows = self._call(batch), tree.num_rows(batch)
        terms, reported = (_checked(terms, num_rows) for terms in (reading.terms, reading.reported))
        squares = [k for k, t in terms.items() if len(t.values.shape) > 1 and t.values.shape[1] == num_rows > 1]
        if squares and fresh_scope is not None:
            with fresh_scope():
                shorter = self._call(tree.map_leaves(lambda leaf: leaf[:-1], batch))
            _refuse_broadcasts({k: shorter.terms[k] for k in squares}, num_rows)
        self.has_whole = any(isinstance(t, Whole) for t in terms.values()) or any(s.is_whole for s in reading.scores)
        self.facts = _facts(terms, counts=True) | _facts(reported, counts=False)
        return Reading(terms, reported, reading.scores)

    def _call(self, batch) -> Reading:
        return read(self.objective(self.model, batch, self.training), {m.name: m for m in self.metrics})

    def _extra(self, scope: keras.StatelessScope) -> Tensor:
        self.has_extra = bool(scope.losses)
        return sum((_wide(ops.sum(loss)) for loss in scope.losses), ops.zeros((), keras.config.floatx()))

    def _after(self, scope: keras.StatelessScope, buffers: list, metrics: list) -> tuple[list, list]:
        v = self.variables
        return _values(scope, v.buffers, buffers), _values(scope, v.metrics, metrics)


class _Scope(keras.StatelessScope):
    """Notes which variables were read. Those that are `apart` must not be: they have no value here."""

    def __init__(self, apart: set[int], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.apart = apart
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        assert id(variable) not in self.apart, f"{variable.path} is read, but only rows of it are in hand"
        self.read.add(id(variable))
        return super().get_current_value(variable)


def _checked(terms: dict[str, Term], num_rows: int) -> dict[str, Term]:
    return {k: t if isinstance(t, Whole) else check(t, _label(k), num_rows) for k, t in terms.items()}


def _refuse_broadcasts(shorter: dict[str, Term], num_rows: int) -> None:
    """Refuse values whose second axis grows with the rows: labels (rows,) against predictions (rows, 1) make them."""
    for label, term in shorter.items():
        if term.values.shape[1] == num_rows - 1:
            raise SpecificationError(
                say(
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
