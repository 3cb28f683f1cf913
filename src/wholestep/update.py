"""ONE update, written once in terms of the engine: weigh, fold, divide once, guard, apply, report.

`whole_update` is the essence. The rest of the module is its parts, and the program of several updates.
"""

import math
from collections.abc import Callable
from functools import partial

import keras
import numpy as np
from keras import ops

from wholestep import tree
from wholestep.cut import Cut
from wholestep.dispatch.repeat import begun, several
from wholestep.embeddings.planning import RowPlanner
from wholestep.embeddings.rows import RowPlan
from wholestep.engines import Engine
from wholestep.microbatches import (
    Totals,
    add,
    extra_share,
    moved,
    nothing,
    over,
    row_share,
    section,
    weights_of_rows,
)
from wholestep.model.draws import backwards
from wholestep.model.forward import Forward
from wholestep.model.outcome import Outcome
from wholestep.model.terms import Mean
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.state import State
from wholestep.sums import EpochSums, first_logs
from wholestep.tree import Tensor, Tree

OWN_LOSS, APPLIED = "+loss", "+applied"  # in a report, after the logs: the loss of the update; 1 if it was applied


class Update:
    """The functions of an update of one model, objective and optimizer on one engine.

    Args:
        optimizer: the optimizer of the update; None for evaluation alone.
        layout: the layout of an update's report, known once the objective is traced.
        guards_gradients: whether a non-finite gradient stops the update here (a dynamic loss scale does so itself).
        stops: whether the first non-finite update stops all later ones ("raise"), or is skipped ("skip").
    """

    suits_xla = True

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        optimizer: keras.optimizers.Optimizer | None,
        layout: ReportLayout = NOTHING_TOLD,
        *,
        scales: bool,
        guards_gradients: bool,
        stops: bool,
    ):
        self.engine = engine
        self.forward = forward
        self.optimizer: keras.optimizers.Optimizer = optimizer
        self.layout = layout
        self.scales = scales
        self.guards_gradients = guards_gradients
        self.stops = stops
        self.epoch_sums = EpochSums(forward)
        self._sums = engine.programs.traced(forward.sums)
        self.row_planner = RowPlanner(engine, forward, optimizer)

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, data, rows, count) -> (state, report): one whole update."""
        engine = self.engine
        part, look_up = engine.programs.traced(self._part(cut, row_plan)), self.row_planner.look_up(cut, row_plan)
        apart = {table.param for table in row_plan.tables}

        def whole_update(state: State, data: Tree, rows: Tensor, count: Tensor) -> tuple[State, Tensor]:
            params = engine.variables.params(state, apart)
            scale = self._loss_scale(state)
            state = state._replace(captured=self.forward.captured_in(state))
            weights = self._weigh(cut, params, state, data, rows, count)
            scratch, touched, places = row_plan.deduplicate(state.scratch, look_up(params, state, data, rows))
            params, state = self.row_planner.in_hand(params, touched), state._replace(scratch=scratch)

            def fold(data: Tree, metrics: list, given: tuple) -> tuple[tuple, list, tuple]:
                params, state, *others = given
                params, state = engine.variables.replica_params(params), state._replace(metrics=metrics)
                total = self._fold(cut, part, data, params, state, *others)
                return (total.grads, total.sums, total.extra), total.metrics, (total.buffers, total.assigned)

            given = params, state, places, weights, scale, rows, count
            (grads, sums, extra), metrics, alike = engine.replicas.total(
                fold, data, state.metrics, given, split=cut.split, syncs=True
            )
            total = Totals(grads, sums, extra, alike[0], metrics, alike[1])
            grads, penalty = self._regularise(params, total.grads, scale, state.captured)
            loss = self.epoch_sums.loss(total.sums, total.extra + penalty)
            ok = self._is_good(state, loss, grads, total.buffers)
            sums = self.epoch_sums.add(state.sums, total.sums, total.extra + penalty, count)
            captured, state = state.captured, state._replace(captured=())
            state = self._advance(state, total, sums, grads, ok, touched, row_plan.optimizer)
            return self._reported(state, captured, loss, ok)

        return engine.programs.traced(whole_update)

    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> "Update":
        """Return this update with the properties found by tracing all user functions that it calls.

        These are the objective and the metrics on a microbatch, the regularisers, and the metrics' results.
        """
        layout = self.layout

        def trace(forward: Forward, times: int = 1) -> None:
            def microbatch(params, buffers, metrics, captured, data, rows: Tensor, count: Tensor) -> Tensor:
                nonlocal layout
                row_weights = weights_of_rows(self.engine, cut, rows.shape[0], count, count)
                batch = self.engine.replicas.batch(data, rows)
                logs = first_logs(forward, params, buffers, metrics, captured, batch, row_weights)
                layout = ReportLayout.of(with_verdict(logs, logs["loss"], logs["loss"]))
                return logs["loss"]

            values = self.engine.variables.params(state), state.buffers, state.metrics, self.forward.captured_in(state)
            few = ops.convert_to_tensor(rows)[: cut.sections[0][1]]
            self.engine.programs.shapes(microbatch, *values, data, ops.concatenate(times * [few]), count)

        forward = self.forward.learned(trace, partial(trace, times=2))
        if layout == self.layout and forward.knows_as(self.forward):
            return self
        choices = {"scales": self.scales, "guards_gradients": self.guards_gradients, "stops": self.stops}
        return Update(self.engine, forward, self.optimizer, layout, **choices)

    def program(self, whole_update: Callable, length: int, empty: list[np.ndarray], *, loops: bool) -> Callable:
        """Return the program (state, captured, data, rows, counts, span) -> (state, reports), see `several`.

        Args:
            empty: the metrics' values before the first row.
        """
        engine = self.engine

        def each(state: State, captured: list, data: Tree, rows: Tensor, count: Tensor, begins: Tensor) -> tuple:
            # Not before the loop: there each choice would be a kernel, here the compiler fuses it into another.
            state = begun(state, begins, self.epoch_sums.empty(), empty)
            return whole_update(state._replace(captured=captured), data, rows, count)

        report = self.layout.empty() if loops else None
        updates = several(engine, each, report, length, unreached=math.nan)

        return engine.variables.load_and_store(updates)

    # ---- the parts of whole_update ----

    def _part(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function of one microbatch: its share of the gradient, and its addition to every sum."""
        sums, own = self._sums, self.forward.sums
        if row_plan.tables:
            own = partial(self.forward.sums, lookups=row_plan.lookups)
            sums = self.engine.programs.traced(own)
        # The gradient repeats random draws in this function, which knows the place of the first row.
        sums = own if self.forward.facts.draws else self.engine.programs.inlined(sums)

        def part(
            params, buffers, metrics, captured, places, weights, scale, data, rows, first, count
        ) -> tuple[list, Outcome]:
            batch = self.engine.replicas.batch(data, rows)
            row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, count)
            own_first = first + self.engine.replicas.part(rows)[1]

            def share(params: list) -> tuple[Tensor, Outcome]:
                outcome = sums(params, buffers, metrics, captured, batch, row_weights, places, own_first)
                num_rows = tree.num_rows(batch)
                extra = outcome.extra * extra_share(cut, num_rows) if num_rows else ops.zeros_like(outcome.extra)
                outcome = outcome._replace(extra=extra)
                return self.epoch_sums.loss(outcome.sums, extra, weights) * ops.cast(scale, extra.dtype), outcome

            facts = self.forward.facts.draws
            with backwards(self.forward.draws_by, facts, tree.num_rows(batch), own_first):
                return self.engine.ops.differentiate(share, params)

        return part

    def _loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales the loss; its slots may stay in their variables."""
        one = ops.ones((), "float32")
        slots = zip(self.forward.variables.slots, state.slots, strict=False)
        with keras.StatelessScope(list(slots)):
            return self.optimizer.scale_loss(one) if self.scales else one

    def _weigh(self, cut: Cut, params: list, state: State, data: Tree, rows: Tensor, count: Tensor) -> dict | None:
        """Return the weight of every mean over the full batch, before the first gradient.

        The weights depend on the batch alone, so the compiler drops the forward pass. One microbatch weighs itself.
        """
        if cut.num_microbatches == 1 and not cut.split:
            return None

        def weigh(data: Tree, given: tuple, total: dict, piece: tuple) -> dict:
            (params, state, _, count), (rows, first, _) = given, piece
            row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, count)
            values = params, state.buffers, state.metrics, state.captured
            batch, start = self.engine.replicas.batch(data, rows), self.engine.replicas.part(rows)[1]
            sums = self._sums(*values, batch, row_weights, (), first + start).sums
            return {k: total[k] + sums[k][1] for k in total}

        means = [k for k, fact in self.forward.facts.terms.items() if fact.kind is Mean]
        total = {k: ops.zeros((), keras.config.floatx()) for k in means}

        def weigh_all(data: Tree, total: dict, given: tuple) -> tuple[tuple, dict, tuple]:
            return (), over(self.engine, cut, partial(weigh, data, given), total, given[2]), ()

        given = params, state, rows, count
        return self.engine.replicas.total(weigh_all, data, total, given, split=cut.split, syncs=False)[1]

    def _fold(
        self, cut: Cut, part: Callable, data, params, state: State, places: list, weights, scale, rows, count
    ) -> Totals:
        if cut.num_microbatches == 1:
            values = params, state.buffers, state.metrics, state.captured
            grads, outcome = part(*values, places, weights, scale, data, rows, ops.zeros((), "int32"), count)
            return Totals(grads, *outcome)

        floats = self.forward.variables.floats

        def add_one(total: Totals, piece: tuple) -> Totals:
            rows, first, number = piece
            own = [section(p, number, cut) for p in places]
            values = params, state.buffers, total.metrics, state.captured
            grads, outcome = part(*values, own, weights, scale, data, rows, first, count)
            share = row_share(cut, rows.shape[0], first, count)
            return add(floats, total, grads, outcome, state.buffers, share)

        total = over(self.engine, cut, add_one, nothing(self.forward.facts, params, state), rows)
        return total._replace(buffers=[moved(b, move) for b, move in zip(state.buffers, total.buffers, strict=True)])

    def _regularise(self, params: list, grads: list, scale: Tensor, captured: list) -> tuple[list, Tensor]:
        """Add the model's weight regularisation, once."""
        if not self.forward.has_penalty:
            return grads, ops.zeros((), keras.config.floatx())

        def scaled(params: list) -> tuple[Tensor, Tensor]:
            penalty = self.forward.penalty(params, captured)
            return penalty * ops.cast(scale, penalty.dtype), penalty

        more, penalty = self.engine.ops.differentiate(scaled, params)
        return [g + ops.cast(m, g.dtype) for g, m in zip(grads, more, strict=True)], penalty

    def _is_good(self, state: State, loss: Tensor, grads: list, buffers: list) -> Tensor:
        good = ops.isfinite(loss) & (state.stopped == 0)
        values = [*(grads if self.guards_gradients else []), *moved_where_finite(self.forward, state.buffers, buffers)]
        return good & self.engine.ops.is_finite(values)

    def _advance(self, state: State, total: Totals, sums, grads: list, ok: Tensor, touched: list, optimizer) -> State:
        new = state._replace(buffers=total.buffers, metrics=total.metrics, sums=sums)
        assigned = dict(zip(self.forward.facts.assigned, total.assigned, strict=True))
        if touched:
            state = self.engine.optimizer.apply_to_rows(state, new, grads, ok, assigned, touched, optimizer)
        else:
            state = self.engine.optimizer.apply(state, new, grads, ok, assigned)
        stopped = ops.where(ok, state.stopped, ops.ones_like(state.stopped)) if self.stops else state.stopped
        return state._replace(stopped=stopped)

    def _reported(self, state: State, captured: list, loss: Tensor, ok: Tensor) -> tuple[State, Tensor]:
        """Return the state with the epoch's numbers in Keras' loss trackers, and all numbers as one vector."""
        logs = self.epoch_sums.logs(state.sums, state.metrics, captured)
        state = state._replace(metrics=self.forward.tracking(state.metrics, logs))
        return state, self.layout.pack(with_verdict(logs, loss, ops.cast(ok, keras.config.floatx())))


def moved_where_finite(forward: Forward, before: list, after: list) -> list[Tensor]:
    """Return the floating buffers that the forward pass changes, as one vector for each dtype.

    Numbers that were not finite before are 0, as in a mask, or a minimum that begins at infinity.
    """
    vectors: dict[str, list[Tensor]] = {}
    for i in forward.facts.moved:
        if forward.variables.floats[i]:
            own = ops.where(ops.isfinite(before[i]), after[i], ops.zeros_like(after[i]))
            vectors.setdefault(forward.variables.buffers[i].dtype, []).append(ops.reshape(own, (-1,)))
    return [ops.concatenate(parts) if parts[1:] else parts[0] for parts in vectors.values()]


def with_verdict(logs: dict[str, Tensor], loss: Tensor, applied: Tensor) -> dict[str, Tensor]:
    """Return an update's numbers: the epoch's logs so far, the update's loss, and last whether it was applied."""
    return logs | {OWN_LOSS: loss, APPLIED: applied}
