"""ONE update, written once in engine verbs: weigh, fold, divide once, guard, apply, report.

`whole_update` is the essence. The rest of the module is what it is made of and how several updates become a program.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.cut import Cut
from wholestep.embeddings.lookups import Lookups
from wholestep.embeddings.rows import RowPlan, find, for_rows, worth_it
from wholestep.embeddings.tables import Table, TableRows
from wholestep.engines.protocol import Engine
from wholestep.model.forward import Forward, Outcome
from wholestep.model.terms import Mean
from wholestep.repeat import begun, several
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree

OWN_LOSS, APPLIED = "+loss", "+applied"  # in a report, beside the logs: the update's own loss; 1 if it was applied


class Totals(NamedTuple):
    """What is carried from microbatch to microbatch; every part is a plain sum."""

    grads: list
    sums: dict
    extra: Tensor
    buffers: list
    metrics: list
    assigned: list


class Update:
    """The functions that make up an update of one model, objective and optimizer on one engine.

    Args:
        guards_gradients: whether a non-finite gradient stops the update here (a dynamic loss scale handles its own).
        stops: whether the first non-finite update stops all later ones ("raise"), or is left out ("skip").
    """

    def __init__(self, engine: Engine, forward: Forward, *, scales: bool, guards_gradients: bool, stops: bool):
        self.engine = engine
        self.forward = forward
        self.scales = scales
        self.guards_gradients = guards_gradients
        self.stops = stops
        self.epoch_sums = EpochSums(forward)
        self.empty_metrics: list[np.ndarray] = []  # what the metrics hold before the first row
        self._sums = engine.traced(forward.sums)
        self.tables, self._wholes = find(forward.model, engine.optimizer, forward.variables, engine.is_split)

    def _captured(self, state: State) -> list:
        """The values of all that the objective reads besides."""
        slots, others = {id(v): i for i, v in enumerate(self.forward.variables.slots)}, iter(state.captured)
        return [state.slots[slots[id(v)]] if id(v) in slots else next(others) for v in self.forward.captured]

    @property
    def num_scratch(self) -> int:
        """How many numbers of scratch the tables need, see `embeddings.rows.RowPlan.deduplicate`."""
        return sum(table.num_rows for table in self.tables)

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, data, rows, count) -> (state, report): one whole update."""
        engine = self.engine
        part, look_up = engine.traced(self._part(cut, row_plan)), self._look_up(cut, row_plan)
        apart = {table.param for table in row_plan.tables}

        def whole_update(state: State, data: Tree, rows: Tensor, count: Tensor) -> tuple[State, Tensor]:
            params = engine.params(state, apart)
            scale = engine.loss_scale(state) if self.scales else ops.ones((), "float32")
            state = state._replace(captured=self._captured(state))
            weights = self._weigh(cut, params, state, data, rows, count)
            scratch, touched, places = row_plan.deduplicate(state.scratch, look_up(params, state, data, rows))
            params, state = self._in_hand(params, touched), state._replace(scratch=scratch)

            def fold(data: Tree, metrics: list, given: tuple) -> tuple[tuple, list, tuple]:
                params, state, *others = given
                params, state = engine.replica_params(params), state._replace(metrics=metrics)
                total = self._fold(cut, part, data, params, state, *others)
                return (total.grads, total.sums, total.extra), total.metrics, (total.buffers, total.assigned)

            given = params, state, places, weights, scale, rows, count
            (grads, sums, extra), metrics, alike = engine.total(
                fold, data, state.metrics, given, split=cut.split, syncs=True
            )
            total = Totals(grads, sums, extra, alike[0], metrics, alike[1])
            grads, penalty = self._regularise(params, total.grads, scale, state.captured)
            loss = self.epoch_sums.loss(total.sums, total.extra + penalty)
            ok = self._is_good(state, loss, grads)
            sums = self.epoch_sums.add(state.sums, total.sums, total.extra + penalty, count)
            captured, state = state.captured, state._replace(captured=())
            state = self._advance(state, total, sums, grads, ok, touched, row_plan.optimizer)
            return self._reported(state, captured, loss, ok)

        return engine.traced(whole_update)

    def row_plan(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> tuple[RowPlan, dict[str, str]]:
        """Find out which tables an update need not touch as a whole; return that, and for the others why not."""
        variables, tables, reasons = self.forward.variables, self.tables, dict(self._wholes)
        rows = ops.convert_to_tensor(rows)[: max(size for _, size in cut.sections)]
        while tables:
            lookups = self._lookups(tables, state, data, rows)
            counts, kept = [cut.num_microbatches * lookups.counts[g] for g in lookups.groups], []
            for table, count, why in zip(tables, counts, lookups.reasons, strict=True):
                path = variables.params[table.param].path
                if why:
                    reasons[path] = why
                elif not worth_it(count, table):
                    reasons[path] = f"an update looks up {count} of its {table.num_rows} rows"
                else:
                    kept.append(table)
            if len(kept) == len(tables):
                twin = for_rows(self.engine.optimizer, tables, counts, variables)
                return RowPlan(lookups, list(lookups.counts), twin), reasons
            tables = kept
        return RowPlan(Lookups([])), reasons

    def _lookups(self, tables: list[Table], state: State, data: Tree, rows: Tensor) -> Lookups:
        lookups = Lookups(tables, self.engine)

        def look_up(params: list, buffers: list, metrics: list, captured: list, data: Tree, rows: Tensor) -> list:
            return self.forward.ids(params, buffers, metrics, captured, self.engine.batch(data, rows), lookups=lookups)

        captured = self._captured(state)
        self.engine.shapes(look_up, self.engine.params(state), state.buffers, state.metrics, captured, data, rows)
        return lookups

    def learn(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> None:
        """Trace all that an update calls of the user's, so that its facts are known before the first program.

        The objective and the metrics on a microbatch, the regularisers, and what the metrics say.
        """

        def microbatch(params, buffers, metrics, captured, data, rows: Tensor, count: Tensor) -> Outcome:
            batch, row_weights = self.engine.batch(data, rows), self._row_weights(cut, rows.shape[0], count, count)
            outcome = self._sums(params, buffers, metrics, captured, batch, row_weights)
            if self.forward.has_penalty:
                self.forward.penalty(params, captured)
            self.epoch_sums.logs(tuple(map(ops.convert_to_tensor, self.epoch_sums.empty())), outcome.metrics, captured)
            return outcome

        rows, captured = ops.convert_to_tensor(rows)[: cut.sections[0][1]], self._captured(state)
        values = self.engine.params(state), state.buffers, state.metrics, captured
        self.engine.shapes(microbatch, *values, data, rows, count)

    def program(self, whole_update: Callable, length: int, example: tuple, *, loops: bool) -> Callable:
        """Return the program (state, captured, data, rows, counts, span) -> (state, reports), see `several`."""
        engine = self.engine

        def each(state: State, captured: list, data: Tree, rows: Tensor, count: Tensor, begins: Tensor) -> tuple:
            # Not before the loop: there each choice would be a kernel, here the compiler adds it to another.
            state = begun(state, begins, self.epoch_sums.empty(), self.empty_metrics)
            return whole_update(state._replace(captured=captured), data, rows, count)

        report = engine.shapes(whole_update, *example)[1] if loops else None
        updates = several(engine, each, report, length, unreached=math.nan)

        def program(state: State, *given: Tree) -> tuple[State, Tensor]:
            state, reports = updates(engine.loaded(state), *given)
            return engine.stored(state), reports

        return program

    # ---- what whole_update is made of ----

    def _part(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """One microbatch: its share of the gradient, and what it adds to every sum."""
        sums = self._sums
        if row_plan.tables:
            sums = self.engine.traced(partial(self.forward.sums, lookups=row_plan.lookups))
        sums = self.engine.inlined(sums)

        def part(
            params, buffers, metrics, captured, places, weights, scale, data, rows, first, count
        ) -> tuple[list, Outcome]:
            batch = self.engine.batch(data, rows)
            row_weights = self._row_weights(cut, rows.shape[0], first, count)

            def share(params: list) -> tuple[Tensor, Outcome]:
                outcome = sums(params, buffers, metrics, captured, batch, row_weights, places)
                num_rows = tree.num_rows(batch)
                extra = outcome.extra * self._extra_share(cut, num_rows) if num_rows else ops.zeros_like(outcome.extra)
                outcome = outcome._replace(extra=extra)
                return self.epoch_sums.loss(outcome.sums, extra, weights) * ops.cast(scale, extra.dtype), outcome

            return self.engine.differentiate(share, params)

        return part

    def _weigh(self, cut: Cut, params: list, state: State, data: Tree, rows: Tensor, count: Tensor) -> dict | None:
        """The weight of every mean over the whole batch, before the first gradient.

        The weights depend on the batch alone, so the compiler drops the forward pass. One microbatch weighs itself.
        """
        if cut.num_microbatches == 1 and not cut.split:
            return None

        def weigh(data: Tree, given: tuple, total: dict, piece: tuple) -> dict:
            (params, state, _, count), (rows, first, _) = given, piece
            row_weights = self._row_weights(cut, rows.shape[0], first, count)
            values, batch = (params, state.buffers, state.metrics, state.captured), self.engine.batch(data, rows)
            sums = self._sums(*values, batch, row_weights).sums
            return {k: total[k] + sums[k][1] for k in total}

        means = [k for k, fact in self.forward.facts.items() if fact.kind is Mean]
        total = {k: ops.zeros((), keras.config.floatx()) for k in means}

        def over(data: Tree, total: dict, given: tuple) -> tuple[tuple, dict, tuple]:
            return (), self._over(cut, partial(weigh, data, given), total, given[2]), ()

        given = params, state, rows, count
        return self.engine.total(over, data, total, given, split=cut.split, syncs=False)[1]

    def _look_up(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """The row numbers that the whole batch looks up in the tables, by group, before the first gradient.

        As with the weights, the compiler drops the forward pass.
        """
        ids_of = self.engine.traced(partial(self.forward.ids, lookups=row_plan.lookups))

        def look_up(params: list, state: State, data: Tree, rows: Tensor) -> list[Tensor]:
            if not row_plan.tables:
                return []
            if cut.num_microbatches == 1:
                values = params, state.buffers, state.metrics, state.captured
                return ids_of(*values, self.engine.batch(data, rows))

            def note(noted: list, piece: tuple) -> list:
                rows, first, number = piece
                buffers, batch = self._buffers_of(state, first), self.engine.batch(data, rows)
                ids = ids_of(params, buffers, state.metrics, state.captured, batch)
                starts = [number * count for count in row_plan.counts]
                return [ops.slice_update(n, [s], i) for n, s, i in zip(noted, starts, ids, strict=True)]

            nothing = [ops.zeros((cut.num_microbatches * count,), "int32") for count in row_plan.counts]
            return self._over(cut, note, nothing, rows)

        return look_up

    def _in_hand(self, params: list, touched: list[TableRows]) -> list:
        """The parameters, with the rows that are touched in place of their tables."""
        rows = {t.table.param: t.rows for t in touched}
        return [self.engine.gather(p, rows[i]) if i in rows else p for i, p in enumerate(params)]

    def _fold(
        self, cut: Cut, part: Callable, data, params, state: State, places: list, weights, scale, rows, count
    ) -> Totals:
        if cut.num_microbatches == 1:
            start, first = self.engine.replica_start(rows.shape[0]), ops.zeros((), "int32")
            buffers = self._buffers_of(state, ops.full((), start, "int32")) if start else state.buffers
            values = params, buffers, state.metrics, state.captured
            grads, outcome = part(*values, places, weights, scale, data, rows, first, count)
            return Totals(grads, *outcome)

        def add(total: Totals, piece: tuple) -> Totals:
            rows, first, number = piece
            buffers = self._buffers_of(state, first + self.engine.replica_start(rows.shape[0]))
            own = [_section(p, number, cut) for p in places]
            values = params, buffers, total.metrics, state.captured
            grads, outcome = part(*values, own, weights, scale, data, rows, first, count)
            share = _row_share(cut, rows.shape[0], first, count)
            return self._add(total, grads, outcome, buffers, share)

        total = self._over(cut, add, self._nothing(params, state), rows)
        return total._replace(buffers=[_moved(b, move) for b, move in zip(state.buffers, total.buffers, strict=True)])

    def _over(self, cut: Cut, function: Callable, carry: Tree, rows: Tensor) -> Tree:
        """Fold a function of (carry, (rows of a microbatch, place of its first row, its number)) over all of them."""
        start = done = 0
        for num, size in cut.sections:
            pieces = ops.reshape(rows[start : start + num * size], (num, size))
            firsts = np.arange(start, start + num * size, size, dtype=np.int32)
            numbers = np.arange(done, done + num, dtype=np.int32)
            places = (ops.convert_to_tensor(firsts), ops.convert_to_tensor(numbers))
            carry = self.engine.fold(function, carry, (pieces, *places), num)
            start, done = start + num * size, done + num
        return carry

    def _nothing(self, params: list, state: State) -> Totals:
        grads = [ops.zeros(p.shape, _accumulator(p.dtype)) for p in params]
        zero = ops.zeros((), keras.config.floatx())
        sums = dict.fromkeys(self.forward.facts, (zero, zero))
        assigned = [ops.zeros_like(params[i]) for i in self.forward.assigned]
        return Totals(grads, sums, zero, [ops.zeros_like(b) for b in state.buffers], state.metrics, assigned)

    def _add(self, total: Totals, grads: list, outcome: Outcome, buffers: list, share: Tensor) -> Totals:
        return Totals(
            [old + ops.cast(new, old.dtype) for old, new in zip(total.grads, grads, strict=True)],
            {k: (total.sums[k][0] + v, total.sums[k][1] + w) for k, (v, w) in outcome.sums.items()},
            total.extra + outcome.extra,
            self._buffer_moves(total.buffers, outcome.buffers, buffers, share),
            outcome.metrics,
            [old + ops.cast(share, old.dtype) * new for old, new in zip(total.assigned, outcome.assigned, strict=True)],
        )

    def _row_weights(self, cut: Cut, size: int, first: Tensor, count: Tensor) -> Tensor | None:
        """The weights of the rows that `engine.batch` returns; None if all weigh 1."""
        if not cut.padded:
            return None
        is_real = first + ops.arange(size, dtype="int32") < count
        return self.engine.replica_slice(ops.cast(is_real, keras.config.floatx()))

    def _extra_share(self, cut: Cut, size: int) -> float:
        """What the other losses on so many rows count for."""
        is_part = cut.num_microbatches > 1 or cut.split
        return size / cut.rows if cut.extra == "mean" and is_part else 1.0

    def _buffers_of(self, state: State, first: Tensor) -> list:
        """Every microbatch starts from the same buffers, but draws from seeds of its own."""
        seeds = self.forward.variables.seeds
        return [
            b + ops.cast(ops.stack([first, ops.zeros_like(first)]), b.dtype) * ops.cast(1000003, b.dtype)
            if is_seed
            else b
            for b, is_seed in zip(state.buffers, seeds, strict=True)
        ]

    def _buffer_moves(self, moves: list, after: list, before: list, share: Tensor) -> list:
        """Moving statistics move by the rows' mean of what each microbatch would; counters and seeds move once."""
        floats = self.forward.variables.floats
        return [
            move + ops.cast(share, move.dtype) * (a - b) if is_float else _apart(a, b)
            for move, a, b, is_float in zip(moves, after, before, floats, strict=True)
        ]

    def _regularise(self, params: list, grads: list, scale: Tensor, captured: list) -> tuple[list, Tensor]:
        """Add the model's weight regularisation, once."""
        if not self.forward.has_penalty:
            return grads, ops.zeros((), keras.config.floatx())

        def scaled(params: list) -> tuple[Tensor, Tensor]:
            penalty = self.forward.penalty(params, captured)
            return penalty * ops.cast(scale, penalty.dtype), penalty

        more, penalty = self.engine.differentiate(scaled, params)
        return [g + ops.cast(m, g.dtype) for g, m in zip(grads, more, strict=True)], penalty

    def _is_good(self, state: State, loss: Tensor, grads: list) -> Tensor:
        good = ops.isfinite(loss) & (state.stopped == 0)
        return good & self.engine.is_finite(grads) if self.guards_gradients else good

    def _advance(self, state: State, total: Totals, sums, grads: list, ok: Tensor, touched: list, optimizer) -> State:
        new = state._replace(buffers=total.buffers, metrics=total.metrics, sums=sums)
        assigned = dict(zip(self.forward.assigned, total.assigned, strict=True))
        if touched:
            state = self.engine.apply_to_rows(state, new, grads, ok, assigned, touched, optimizer)
        else:
            state = self.engine.apply(state, new, grads, ok, assigned)
        stopped = ops.where(ok, state.stopped, ops.ones_like(state.stopped)) if self.stops else state.stopped
        return state._replace(stopped=stopped)

    def _reported(self, state: State, captured: list, loss: Tensor, ok: Tensor) -> tuple[State, Tensor]:
        """The state in which Keras' loss trackers hold the epoch's numbers, and all numbers as one vector."""
        logs = self.epoch_sums.logs(state.sums, state.metrics, captured)
        state = state._replace(metrics=self.forward.tracking(state.metrics, logs))
        verdict = {OWN_LOSS: loss, APPLIED: ops.cast(ok, keras.config.floatx())}
        return state, self.epoch_sums.layout.pack(logs | verdict)


def _apart(after: Tensor, before: Tensor) -> Tensor:
    """How far a buffer has moved; of truth values, whether it has."""
    return ops.logical_xor(after, before) if _is_bool(before) else after - before


def _moved(before: Tensor, move: Tensor) -> Tensor:
    return ops.logical_xor(before, move) if _is_bool(before) else before + move


def _is_bool(value: Tensor) -> bool:
    return keras.backend.standardize_dtype(value.dtype) == "bool"


def _accumulator(dtype: object) -> str:
    """Gradients of microbatches are added in float32 or wider, whatever the parameters are kept in."""
    return "float64" if "float64" in str(dtype) else "float32"


def _row_share(cut: Cut, size: int, first: Tensor, count: Tensor) -> Tensor:
    """The part of the update's rows that lies in this microbatch."""
    if not cut.padded:
        return ops.full((), size / cut.rows, keras.config.floatx())
    inside = ops.clip(count - first, 0, size)
    return ops.cast(inside, keras.config.floatx()) / ops.cast(count, keras.config.floatx())


def _section(values: Tensor, number: Tensor, cut: Cut) -> Tensor:
    """Return what belongs to one microbatch of values that were noted for all of them."""
    size = values.shape[0] // cut.num_microbatches
    return ops.slice(values, [number * size], [size])
