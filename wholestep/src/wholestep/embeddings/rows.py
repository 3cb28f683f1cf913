"""Embedding tables: an update touches only the rows that it looks up.

If an optimizer does not change rows without a gradient, the update of a full table is the update of
the looked-up rows. So these rows are gathered, updated as a small parameter by Keras' optimizer,
and scattered back. Equal rows share a slot, so that their gradients are summed. The cost of an
update does not grow with the table.

Reads private attributes of `keras.layers.Embedding` and of the optimizers in `_ROW_BY_ROW`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.optimizers import Optimizer

from wholestep.cut import Cut
from wholestep.embeddings.lookups import Lookups, first_reason, from_end
from wholestep.engines import Engine
from wholestep.keras_private import (
    embeddings,
    flatten_layers,
    trainable_variables,
    variable_index,
    variable_key,
)
from wholestep.model import Forward
from wholestep.state import EmbeddingTable, State, TableRows, Values, Variables
from wholestep.sums import Piece, pieces_of
from wholestep.tree import Tensor, Tree


class _Adagrad(keras.optimizers.Adagrad):
    """Keras' Adagrad, with an update by lookups that XLA compiles.

    Keras divides lookups by a table in two ways, as it may hold zeros, of which XLA compiles one.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Tensor) -> None:
        """Add the squares of the gradient to the accumulator, and make the step."""
        if not hasattr(gradient, "indices"):
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = ops.cast(gradient, variable.dtype)
        accumulator = self._accumulators[variable_index(self)(variable)]
        self.assign_add(accumulator, ops.square(gradient))
        roots = ops.sqrt(ops.add(accumulator, self.epsilon))
        scaled = ops.multiply(ops.cast(learning_rate, variable.dtype), gradient)
        steps = ops.divide(scaled.values, ops.take(roots, scaled.indices, axis=0))
        self.assign_sub(variable, type(gradient)(steps, scaled.indices, scaled.dense_shape))


class _RowByRow(NamedTuple):
    """An optimizer that does not change a row with a gradient of zero.

    Args:
        of_rows: the class that updates the looked-up rows.
        slots: its attributes with an entry for each row.
    """

    of_rows: type
    slots: tuple[str, ...]


_ROW_BY_ROW = {
    keras.optimizers.SGD: _RowByRow(keras.optimizers.SGD, ()),
    keras.optimizers.Adagrad: _RowByRow(_Adagrad, ("_accumulators",)),
}
_SHARE = 2  # a table needs this many rows for each lookup of an update
_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def find(
    model: keras.Model, optimizer: Optimizer | None, variables: Variables, is_split: bool = False
) -> tuple[list[EmbeddingTable], dict[str, str]]:
    """Return the tables whose touched rows alone may be updated, and by path, why others may not.

    Args:
        is_split: whether each replica sees only its part of the batch.
    """
    tables: list[EmbeddingTable] = []
    reasons: dict[str, str] = {}
    if optimizer is None:
        return tables, reasons
    params = {id(v): i for i, v in enumerate(variables.params)}
    layers = [
        (layer, params[id(embeddings(layer))])
        for layer in flatten_layers(model)()
        if id(embeddings(layer)) in params
    ]
    num_layers = Counter(param for _, param in layers)
    for layer, param in layers:
        if not isinstance(layer, keras.layers.Embedding):
            continue
        why = _why_all_rows(layer, optimizer)
        if is_split:
            why = "each replica knows its own lookups alone"
        elif not why and num_layers[param] > 1:
            why = "two layers share it"
        if why:
            reasons[embeddings(layer).path] = why
        else:
            tables.append(EmbeddingTable(layer, param))
    return tables, reasons


def _with_slots(
    table: EmbeddingTable, optimizer: Optimizer, variables: Variables
) -> EmbeddingTable:
    """Return the table with its optimizer's variables, which exist once training begins."""
    names = _ROW_BY_ROW[type(optimizer)].slots
    known = {id(getattr(optimizer, name)[table.param]) for name in names}
    slots = [i for i, variable in enumerate(variables.slots) if id(variable) in known]
    return replace(table, slots=tuple(slots))


class GradientForm(StrEnum):
    """The form in which an optimizer gets the gradients of embedding tables.

    On TensorFlow, Keras 3.15 squares and clips the gradient of each lookup, then sums those of
    equal rows; on JAX, and in a dense layer of one-hot rows, it sums them first.
    """

    ANY = ""  # all forms give one update
    LOOKUPS = "by lookups"
    SUMMED = "summed"


def form_of_gradients(
    model: keras.Model, optimizer: Optimizer | None, *, are_dense: bool
) -> GradientForm:
    """Return the form of the gradients of a model's embeddings."""
    is_by_lookup = keras.backend.backend() == "tensorflow" and optimizer is not None
    if not is_by_lookup or is_linear(optimizer) or not _trained_tables(model):
        return GradientForm.ANY
    return GradientForm.SUMMED if are_dense else GradientForm.LOOKUPS


def _trained_tables(model: keras.Model) -> list[str]:
    layers = flatten_layers(model)()
    return [
        layer.name
        for layer in layers
        if layer.trainable and isinstance(layer, keras.layers.Embedding)
    ]


def explain_lookups(optimizer: Optimizer, paths: Iterable[str]) -> str:
    """Describe the gradients by lookups that an optimizer gets; "" without any."""
    names = sorted(paths)
    if not names:
        return ""
    return (
        f"{_name(optimizer)} squares or clips the gradient of each lookup in {_some(names)} before "
        "those of equal rows are summed, as in keras.Model.fit on TensorFlow. With "
        "dense_gradients=True they are summed first, as on JAX."
    )


def explain_sums(model: keras.Model, optimizer: Optimizer) -> str:
    """Describe dense gradients where Keras' are not; "" where both give one update."""
    if form_of_gradients(model, optimizer, are_dense=True) is GradientForm.ANY:
        return ""
    return (
        f"The gradients of equal rows of {_some(_trained_tables(model))} are summed before "
        f"{_name(optimizer)} squares or clips them (dense_gradients=True), as in keras.Model.fit "
        "on JAX. On TensorFlow it sums them afterwards, and has other losses, most for small "
        "tables."
    )


def _name(optimizer: Optimizer) -> str:
    return type(_inner(optimizer)).__name__


def _inner(optimizer: Optimizer | None) -> Optimizer | None:
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_linear(optimizer: Optimizer | None) -> bool:
    """Whether gradients are neither squared nor clipped, so that any form gives one update."""
    inner = _inner(optimizer)
    clips = any(getattr(part, name, None) for part in (inner, optimizer) for name in _CLIPS)
    return type(inner) in (keras.optimizers.SGD, keras.optimizers.Lion) and not clips


def _why_all_rows(layer: keras.layers.Embedding, optimizer: Optimizer) -> str:
    """Return the reason to update the full table; "" if there is none."""
    kind = type(optimizer)
    name = kind.__name__
    weights = embeddings(layer)
    is_extended = type(layer) is not keras.layers.Embedding or layer.lora_enabled
    reasons = {
        f"only plain SGD and Adagrad are known to leave other rows alone, not {name}": (
            kind not in _ROW_BY_ROW
        ),
        "momentum moves rows that were not looked up": bool(getattr(optimizer, "momentum", 0)),
        "weight decay moves rows that were not looked up": optimizer.weight_decay is not None,
        "the moving average of the weights moves rows that were not looked up": optimizer.use_ema,
        "it is regularised as a whole": weights.regularizer is not None,
        "it is constrained as a whole": weights.constraint is not None,
        "its layer does more than look up": is_extended or layer.quantization_mode is not None,
    }
    return first_reason(reasons)


@dataclass(frozen=True)
class RowPlan:
    """How the updates of one cut touch the tables.

    Args:
        lookups: the lookups of a microbatch.
        optimizer: the optimizer, with the touched rows in place of the tables.
    """

    lookups: Lookups
    optimizer: Optimizer | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of lookups of a microbatch, at most, by group."""
        return self.lookups.counts

    @property
    def tables(self) -> list[EmbeddingTable]:
        """The tables whose touched rows alone are updated."""
        return self.lookups.tables

    def deduplicate(
        self, scratch: Tensor, ids: list[Tensor]
    ) -> tuple[Tensor, list[TableRows], list[Tensor]]:
        """Find lookups of equal rows, in a time that depends only on the number of lookups.

        Args:
            scratch: int32, as long as one table of each group together; its content does not
                matter.
            ids: by group, the row numbers of the lookups, int32 (lookups,); negative numbers count
                from the end.

        Returns:
            The new scratch, which replaces the spent one; the rows of each table; and by group the
            index of each lookup among its rows, beyond the last for a row that the table does not
            have.
        """
        if not ids:
            return scratch, [], []
        exists = []
        rows = []
        places = []
        first = 0
        for group_ids, size in zip(ids, self.lookups.sizes, strict=True):
            numbers = from_end(group_ids, size)
            exists.append(numbers < size)
            rows.append(ops.where(exists[-1], numbers, ops.zeros_like(numbers)))
            places.append(rows[-1] + first)
            first += size
        # One scatter for all groups: with several, XLA would copy the scratch between them.
        where = ops.concatenate(places)
        counts = [group.shape[0] for group in rows]
        numbers = ops.concatenate([ops.arange(count, dtype="int32") for count in counts])
        scratch = ops.scatter_update(scratch, where[:, None], numbers)
        # Equal rows read the same number, whichever of them wrote last.
        slots = _split_like(rows, ops.take(scratch, where))
        touched = [
            TableRows(table, rows[group], slots[group])
            for table, group in zip(self.tables, self.lookups.groups, strict=True)
        ]
        row_of_lookup = [
            ops.where(exist, slot, ops.full_like(slot, slot.shape[0]))
            for exist, slot in zip(exists, slots, strict=True)
        ]
        return scratch, touched, row_of_lookup


def _split_like(groups: list[Tensor], values: Tensor) -> list[Tensor]:
    """Return consecutive parts of the values, as long as these groups."""
    parts = []
    start = 0
    for group in groups:
        stop = start + group.shape[0]
        parts.append(values[start:stop])
        start = stop
    return parts


def describe(row_plan: RowPlan, whole_tables: dict[str, str], num_microbatches: int) -> list[str]:
    """Describe the updates of tables: a line for each that is updated by rows, and one for others.

    Args:
        whole_tables: by path, why all rows of a table are updated.
    """
    lines = []
    for table, group in zip(row_plan.tables, row_plan.lookups.groups, strict=True):
        num_lookups = num_microbatches * row_plan.counts[group]
        lines.append(
            f"Of the {table.num_rows} rows of {table.layer.name!r}, the {num_lookups} looked up "
            "are updated."
        )
    by_reason: dict[str, list[str]] = {}
    for path, why in whole_tables.items():
        by_reason.setdefault(why, []).append(repr(path))
    parts = [f"All rows of {_some(names)} are updated: {why}." for why, names in by_reason.items()]
    if parts:
        lines.append(" ".join([*parts, "This takes time only if a table is large."]))
    return lines


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def worth_it(num_lookups: int, table: EmbeddingTable) -> bool:
    """Whether the update of touched rows alone is worth its cost."""
    return _SHARE * num_lookups <= table.num_rows


def for_rows(
    optimizer: Optimizer, tables: list[EmbeddingTable], sizes: list[int], variables: Variables
) -> Optimizer:
    """Return an optimizer that shares everything with this one, with `sizes` rows of each table."""
    instead = {}
    for table, size in zip(tables, sizes, strict=True):
        slots = [variables.slots[slot] for slot in table.slots]
        for variable in (variables.params[table.param], *slots):
            rows = ops.zeros((size, *variable.shape[1:]), variable.dtype)
            instead[id(variable)] = keras.Variable(rows, dtype=variable.dtype)

    def replaced(name: str) -> list:
        return [instead.get(id(variable), variable) for variable in getattr(optimizer, name)]

    # Not `copy.copy`: Keras would pickle the optimizer with its variables.
    kind = _ROW_BY_ROW[type(optimizer)]
    twin: Any = object.__new__(kind.of_rows)
    attributes = vars(twin)
    attributes.update(vars(optimizer))
    for name in (*kind.slots, "_variables", "_trainable_variables"):
        attributes[name] = replaced(name)
    indices = {variable_key(twin)(v): i for i, v in enumerate(trainable_variables(twin))}
    attributes["_trainable_variables_indices"] = indices
    return twin


class RowPlanner:
    """Plans which rows of the model's embedding tables an update touches.

    Args:
        forward: the model's forward pass with its objective.
        optimizer: the optimizer of the update; None if the update is a custom step, which touches
            whole tables.
    """

    def __init__(self, engine: Engine, forward: Forward, optimizer: Optimizer | None):
        self._engine = engine
        self._forward = forward
        self._optimizer = optimizer
        self.tables, self._whole_tables = find(
            forward.model, optimizer, forward.variables, engine.replicas.is_split
        )

    def scratch(self) -> np.ndarray | tuple[()]:
        """Return the scratch array of `wholestep.embeddings.rows.RowPlan.deduplicate`."""
        num = sum(table.num_rows for table in self.tables)
        return np.zeros((num,), np.int32) if num else ()

    def plan(
        self, cut: Cut, state: State, data: Tree, rows: Tensor
    ) -> tuple[RowPlan, dict[str, str]]:
        """Return the plan of tables of which touched rows are updated, and why others are not."""
        variables = self._forward.variables
        reasons = dict(self._whole_tables)
        # no further call of an eager objective for speed
        candidates = [] if self._engine.programs.is_eager else self.tables
        tables = [_with_slots(table, self._optimizer, variables) for table in candidates]
        rows = ops.convert_to_tensor(rows)[: max(size for _, size in cut.sections)]
        while tables:
            lookups, whys = self._learned(Lookups(tables, self._engine), state, data, rows)
            counts = [cut.num_microbatches * lookups.counts[group] for group in lookups.groups]
            kept = []
            for table, count, why in zip(tables, counts, whys, strict=True):
                if not why and worth_it(count, table):
                    kept.append(table)
                elif why or count < table.num_rows:
                    path = variables.params[table.param].path
                    few = f"an update looks up {count} of its {table.num_rows} rows"
                    reasons[path] = why or few
            if len(kept) == len(tables):
                twin = for_rows(self._optimizer, tables, counts, variables)
                return RowPlan(lookups, twin), reasons
            tables = kept
        return RowPlan(Lookups([])), reasons

    def _learned(
        self, lookups: Lookups, state: State, data: Tree, rows: Tensor
    ) -> tuple[Lookups, list[str]]:
        learned: list[tuple[Lookups, list[str]]] = []

        def look_up(values: Values, data: Tree, rows: Tensor) -> Tensor:
            batch = self._engine.replicas.batch(data, rows)
            learned.append(self._forward.lookups(values, batch, lookups=lookups))
            return rows

        captured = self._forward.captured_in(state)
        params = self._engine.variables.params(state)
        values = Values(params, state.buffers, state.metrics, captured)
        self._engine.programs.shapes(look_up, values, data, rows)
        return learned[-1]

    def look_up(
        self, cut: Cut, row_plan: RowPlan
    ) -> Callable[[Values, Tree, Tensor], list[Tensor]]:
        """Return a function of (values, data, rows): the row numbers of all lookups, by group.

        The row numbers mostly depend on the batch only: then the compiler drops the forward pass.
        """
        engine = self._engine
        ids_of = engine.programs.traced(partial(self._forward.ids, lookups=row_plan.lookups))

        def look_up(values: Values, data: Tree, rows: Tensor) -> list[Tensor]:
            if not row_plan.tables:
                return []
            if cut.num_microbatches == 1:
                return ids_of(values, engine.replicas.batch(data, rows), ops.zeros((), "int32"))

            def note(noted: list, piece: Piece) -> list:
                rows, first, number = piece
                ids = ids_of(values, engine.replicas.batch(data, rows), first)
                groups = zip(noted, row_plan.counts, ids, strict=True)
                return [ops.slice_update(all_, [number * num], new) for all_, num, new in groups]

            num_parts = cut.num_microbatches
            noted = [ops.zeros((num_parts * num,), "int32") for num in row_plan.counts]
            for pieces, num in pieces_of(cut, rows):
                noted = engine.ops.fold(note, noted, pieces, num)
            return noted

        return look_up

    def with_rows(self, params: list, touched: list[TableRows]) -> list:
        """Return the parameters, with the touched rows in place of their tables."""
        params = list(params)
        for few in touched:
            param = few.table.param
            params[param] = self._engine.ops.gather(params[param], few.rows)
        return params
