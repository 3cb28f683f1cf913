"""Plan which rows of embedding tables an update touches: by a trace, before the first gradient."""

from collections.abc import Callable
from functools import partial

import numpy as np
from keras import ops
from keras.optimizers import Optimizer

from wholestep.cut import Cut
from wholestep.embeddings.lookups import Lookups
from wholestep.embeddings.rows import RowPlan, find, for_rows, worth_it
from wholestep.embeddings.tables import TableRows
from wholestep.engines import Engine
from wholestep.microbatches import Piece, pieces_of
from wholestep.model import Forward
from wholestep.state import State, Values
from wholestep.tree import Tensor, Tree


class RowPlanner:
    """Plans which rows of the model's embedding tables an update touches.

    Args:
        forward: the model's forward pass with its objective.
        optimizer: the optimizer of the update; None if the update is a custom step, which touches whole tables.
    """

    def __init__(self, engine: Engine, forward: Forward, optimizer: Optimizer | None):
        self._engine = engine
        self._forward = forward
        self._optimizer = optimizer
        self.tables, self._wholes = find(forward.model, optimizer, forward.variables, engine.replicas.is_split)

    def scratch(self) -> np.ndarray | tuple[()]:
        """Return the scratch array of `wholestep.embeddings.rows.RowPlan.deduplicate`."""
        num = sum(table.num_rows for table in self.tables)
        return np.zeros((num,), np.int32) if num else ()

    def plan(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> tuple[RowPlan, dict[str, str]]:
        """Return the plan of tables whose touched rows alone are updated, and the reasons for other tables."""
        variables, tables, reasons = self._forward.variables, self.tables, dict(self._wholes)
        tables = [] if self._engine.programs.is_eager else tables  # no further call of an eager objective for speed
        rows = ops.convert_to_tensor(rows)[: max(size for _, size in cut.sections)]
        while tables:
            lookups, found = self._learned(Lookups(tables, self._engine), state, data, rows)
            counts, kept = [cut.num_microbatches * lookups.counts[g] for g in lookups.groups], []
            for table, count, why in zip(tables, counts, found, strict=True):
                path = variables.params[table.param].path
                if why:
                    reasons[path] = why
                elif not worth_it(count, table):
                    reasons[path] = f"an update looks up {count} of its {table.num_rows} rows"
                else:
                    kept.append(table)
            if len(kept) == len(tables):
                return RowPlan(lookups, for_rows(self._optimizer, tables, counts, variables)), reasons
            tables = kept
        return RowPlan(Lookups([])), reasons

    def _learned(self, lookups: Lookups, state: State, data: Tree, rows: Tensor) -> tuple[Lookups, list[str]]:
        found: list[tuple[Lookups, list[str]]] = []

        def look_up(values: Values, data: Tree, rows: Tensor) -> Tensor:
            found.append(self._forward.lookups(values, self._engine.replicas.batch(data, rows), lookups=lookups))
            return rows

        captured = self._forward.captured_in(state)
        values = Values(self._engine.variables.params(state), state.buffers, state.metrics, captured)
        self._engine.programs.shapes(look_up, values, data, rows)
        return found[-1]

    def look_up(self, cut: Cut, row_plan: RowPlan) -> Callable[[Values, Tree, Tensor], list[Tensor]]:
        """Return the function (values, data, rows) -> the row numbers of the full batch's lookups, by group.

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
                starts = [number * count for count in row_plan.counts]
                return [ops.slice_update(n, [s], i) for n, s, i in zip(noted, starts, ids, strict=True)]

            noted = [ops.zeros((cut.num_microbatches * count,), "int32") for count in row_plan.counts]
            for pieces, num in pieces_of(cut, rows):
                noted = engine.ops.fold(note, noted, pieces, num)
            return noted

        return look_up

    def in_hand(self, params: list, touched: list[TableRows]) -> list:
        """Return the parameters, with the touched rows in place of their tables."""
        rows = {t.table.param: t.rows for t in touched}
        return [self._engine.ops.gather(p, rows[i]) if i in rows else p for i, p in enumerate(params)]
