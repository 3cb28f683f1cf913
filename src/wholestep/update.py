"""ONE update, written once in terms of the engine: weigh, fold, divide once, guard, apply, report.

`ObjectiveUpdate.whole_update` is the essence. The rest of the module is its parts, and the program of several updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops
from keras.optimizers import LossScaleOptimizer, Optimizer

from wholestep import tree
from wholestep.cut import Cut
from wholestep.dispatch.repeat import begun, several
from wholestep.embeddings.rows import RowPlan, RowPlanner
from wholestep.engines import Engine
from wholestep.microbatches import (
    After,
    Folded,
    Piece,
    Sums,
    Totals,
    add,
    extra_share,
    moved,
    nothing,
    pieces_of,
    row_share,
    section,
    weights_of_rows,
)
from wholestep.model import Forward, Outcome
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.state import State, Values
from wholestep.sums import EpochSums, first_logs
from wholestep.tree import Tensor, Tree

WholeUpdate = Callable[[State, Tree, Tensor, Tensor], tuple[State, Tensor]]
Gradient = Callable[["SumInputs", Tree, Tensor, Tensor], tuple[list[Tensor], Outcome]]
Total = TypeVar("Total", bound=Folded[Any, Any, Any])
Weights = Folded[tuple[()], dict[str, Tensor], tuple[()]]
Microbatch = Callable[[Tree, "SumInputs", Total, Piece], Total]

OWN_LOSS, APPLIED = "+loss", "+applied"  # in a report, after the logs: the loss of the update; 1 if it was applied


class Update(ABC):
    """One update of one model on one engine, and the program of several.

    Args:
        forward: the model's variables, and the properties of the traced functions.
        layout: the layout of an update's report, known once the update is traced.
        optimizer: the optimizer that the update applies; None if a custom step applies its own.
        stops: whether the first non-finite update stops all later ones ("raise"), or is skipped ("skip").

    Attributes:
        suits_xla: whether XLA may compile the program of several updates.
        assigns: whether the update assigns the Keras variables itself, where the engine keeps values in them.
    """

    suits_xla = True
    assigns = False

    def __init__(
        self, engine: Engine, forward: Forward, layout: ReportLayout, optimizer: Optimizer | None, *, stops: bool
    ):
        self.engine = engine
        self.forward = forward
        self.layout = layout
        self.stops = stops
        self.epoch_sums = EpochSums(forward)
        self.row_planner = RowPlanner(engine, forward, optimizer)

    @abstractmethod
    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> "Update":
        """Return this update with the properties found by tracing all user functions that it calls."""

    @abstractmethod
    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return the function (state, data, rows, count) -> (state, report): one whole update."""

    def program(
        self, whole_update: WholeUpdate, length: int, empty: list[np.ndarray], *, loops: bool
    ) -> Callable[..., Any]:
        """Return the program (state, captured, data, rows, counts, span) -> (state, reports), see `several`.

        Args:
            empty: the metrics' values before the first row.
        """

        def each(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor, begins: Tensor
        ) -> tuple[State, Tensor]:
            # Not before the loop: there each choice would be a kernel, here the compiler fuses it into another.
            state = begun(state, begins, self.epoch_sums.empty(), empty)
            return whole_update(state._replace(captured=captured), data, rows, count)

        updates = several(self.engine, each, self.layout.empty() if loops else None, length, unreached=math.nan)
        return updates if self.assigns else self.engine.variables.load_and_store(updates)

    def _reported(self, state: State, logs: dict[str, Tensor], loss: Tensor, ok: Tensor) -> tuple[State, Tensor]:
        """Return the state, stopped by an update that is not `ok`, and all numbers as one vector."""
        stopped = ops.where(ok, state.stopped, ops.ones_like(state.stopped)) if self.stops else state.stopped
        report = self.layout.pack(with_verdict(logs, loss, ops.cast(ok, keras.config.floatx())))
        return state._replace(stopped=stopped), report


class SumInputs(NamedTuple):
    """The arguments of the sums of an update, the same for every microbatch and replica.

    `places` and `weights` are known after the weights of the full batch, see `Forward.sums` and `EpochSums.loss`.
    """

    values: Values
    scale: Tensor
    rows: Tensor
    num_rows: Tensor
    places: Sequence[Tensor] = ()
    weights: dict[str, Tensor] | None = None


class ObjectiveUpdate(Update):
    """An update by the gradient of an objective, computed in any cut, and the model's optimizer."""

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        optimizer: Optimizer | None,
        layout: ReportLayout = NOTHING_TOLD,
        *,
        stops: bool,
    ):
        super().__init__(engine, forward, layout, optimizer, stops=stops)
        self._optimizer: Optimizer = optimizer
        # A dynamic loss scale stops non-finite gradients itself.
        self._guards_gradients = not isinstance(optimizer, LossScaleOptimizer)
        self._scales = not self._guards_gradients or getattr(optimizer, "loss_scale_factor", None) is not None
        self._sums = engine.programs.traced(forward.sums)

    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> "ObjectiveUpdate":
        """Return this update with the properties found by tracing all user functions that it calls.

        These are the objective and the metrics on a microbatch, the regularisers, and the metrics' results.
        """
        layouts = [self.layout]
        values = Values(
            self.engine.variables.params(state), state.buffers, state.metrics, self.forward.captured_in(state)
        )
        few = ops.convert_to_tensor(rows)[: cut.sections[0][1]]

        def trace(forward: Forward, times: int = 1) -> None:
            def microbatch(values: Values, data: Tree, rows: Tensor, count: Tensor) -> Tensor:
                row_weights = weights_of_rows(self.engine, cut, rows.shape[0], count, count)
                logs = first_logs(forward, values, self.engine.replicas.batch(data, rows), row_weights)
                layouts.append(ReportLayout.of(with_verdict(logs, logs["loss"], logs["loss"])))
                return logs["loss"]

            self.engine.programs.shapes(microbatch, values, data, ops.concatenate(times * [few]), count)

        forward = self.forward.learned(trace, partial(trace, times=2))
        if layouts[-1] == self.layout and forward.knows_as(self.forward):
            return self
        return ObjectiveUpdate(self.engine, forward, self._optimizer, layouts[-1], stops=self.stops)

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return the function (state, data, rows, count) -> (state, report): one whole update."""
        engine, look_up = self.engine, self.row_planner.look_up(cut, row_plan)
        gradient = engine.programs.traced(partial(self._gradient, cut, self._sums_with(row_plan)))
        apart = {table.param for table in row_plan.tables}

        def whole_update(state: State, data: Tree, rows: Tensor, count: Tensor) -> tuple[State, Tensor]:
            captured, params = self.forward.captured_in(state), engine.variables.params(state, apart)
            scale = self._loss_scale(state)
            inputs = SumInputs(Values(params, state.buffers, state.metrics, captured), scale, rows, count)
            weights = self._weigh(cut, data, inputs)
            scratch, touched, places = row_plan.deduplicate(state.scratch, look_up(inputs.values, data, rows))
            params = self.row_planner.in_hand(params, touched)
            inputs = inputs._replace(values=inputs.values._replace(params=params), places=places, weights=weights)
            total = self._total(cut, gradient, data, inputs)
            grads, penalty = self._regularise(params, total.sums.grads, scale, captured)
            loss = self.epoch_sums.loss(total.sums.terms, total.sums.extra + penalty)
            ok = self._is_good(state, loss, grads, total.alike.buffers)
            sums = self.epoch_sums.add(state.sums, total.sums.terms, total.sums.extra + penalty, count)
            state = state._replace(scratch=scratch, captured=())
            new = state._replace(buffers=total.alike.buffers, metrics=total.carried, sums=sums)
            assigned = dict(zip(self.forward.facts.assigned, total.alike.assigned, strict=True))
            state = engine.optimizer.apply(state, new, grads, ok, assigned, touched, row_plan.optimizer)
            logs = self.epoch_sums.logs(state.sums, state.metrics, captured)
            state = state._replace(metrics=self.forward.tracking(state.metrics, logs))
            return self._reported(state, logs, loss, ok)

        return engine.programs.traced(whole_update)

    # ---- the two sums of whole_update, over microbatches and replicas ----

    def _weigh(self, cut: Cut, data: Tree, inputs: SumInputs) -> dict[str, Tensor] | None:
        """Return the weight of every mean over the full batch, before the first gradient.

        The weights depend on the batch alone, so the compiler drops the forward pass. One microbatch weighs itself.
        """
        if cut.num_microbatches == 1 and not cut.split:
            return None

        def microbatch(data: Tree, inputs: SumInputs, total: Weights, piece: Piece) -> Weights:
            rows, first, _ = piece
            row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, inputs.num_rows)
            own_first = first + self.engine.replicas.part(rows)[1]
            sums = self._sums(inputs.values, self.engine.replicas.batch(data, rows), row_weights, (), own_first).sums
            return total._replace(carried={k: weight + sums[k][1] for k, weight in total.carried.items()})

        means = [k for k, fact in self.forward.facts.terms.items() if fact.is_mean]
        zeros = {k: ops.zeros((), keras.config.floatx()) for k in means}
        return self._fold(cut, microbatch, Folded((), zeros, ()), data, inputs, syncs=False).carried

    def _total(self, cut: Cut, gradient: Gradient, data: Tree, inputs: SumInputs) -> Totals:
        """Return the sums of gradients, terms and changes over the full batch."""
        is_whole = cut.num_microbatches == 1
        floats = {i: self.forward.variables.floats[i] for i in self.forward.facts.moved}

        def microbatch(data: Tree, inputs: SumInputs, total: Totals, piece: Piece) -> Totals:
            rows, first, number = piece
            values, places = inputs.values, [section(p, number, cut) for p in inputs.places]
            own = inputs._replace(values=values._replace(metrics=total.carried), places=places)
            grads, outcome = gradient(own, data, rows, first)
            if is_whole:
                after = After(outcome.buffers, outcome.assigned)
                return Folded(Sums(grads, outcome.sums, outcome.extra), outcome.metrics, after)
            share = row_share(cut, rows.shape[0], first, inputs.num_rows)
            return add(floats, total, grads, outcome, values.buffers, share)

        total = self._fold(cut, microbatch, nothing(self.forward.facts, inputs.values), data, inputs, syncs=True)
        if is_whole:
            return total
        buffers = list(inputs.values.buffers)
        for i, move in zip(floats, total.alike.buffers, strict=True):
            buffers[i] = moved(buffers[i], move)
        return total._replace(alike=total.alike._replace(buffers=buffers))

    def _fold(
        self, cut: Cut, microbatch: Microbatch[Total], begin: Total, data: Tree, inputs: SumInputs, *, syncs: bool
    ) -> Total:
        """Return the totals over all microbatches of all replicas.

        Args:
            microbatch: (data, inputs, totals before, piece) -> totals. It closes over no array.
            begin: the totals of no microbatch.
        """

        def of_replica(data: Tree, carried: Tree, given: tuple[SumInputs, Total]) -> Total:
            inputs, total = given[0], given[1]._replace(carried=carried)
            params = self.engine.variables.replica_params(inputs.values.params)
            inputs = inputs._replace(values=inputs.values._replace(params=params))
            for pieces, num in pieces_of(cut, inputs.rows):
                total = self.engine.ops.fold(partial(microbatch, data, inputs), total, pieces, num)
            return total

        given = inputs, begin._replace(carried=())
        found = self.engine.replicas.total(of_replica, data, begin.carried, given, split=cut.split, syncs=syncs)
        return type(begin)(*found)

    def _loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales the loss; its slots may stay in their variables."""
        one = ops.ones((), "float32")
        slots = zip(self.forward.variables.slots, state.slots, strict=False)
        with keras.StatelessScope(list(slots)):
            return self._optimizer.scale_loss(one) if self._scales else one

    def _sums_with(self, row_plan: RowPlan) -> Callable[..., Outcome]:
        """Return `Forward.sums` in the form of which the gradient is taken."""
        own = partial(self.forward.sums, lookups=row_plan.lookups) if row_plan.tables else self.forward.sums
        # The gradient repeats random draws in the calling function, which knows the place of the first row.
        if self.forward.facts.draws:
            return own
        return self.engine.programs.inlined(self.engine.programs.traced(own) if row_plan.tables else self._sums)

    def _gradient(
        self, cut: Cut, sums: Callable[..., Outcome], inputs: SumInputs, data: Tree, rows: Tensor, first: Tensor
    ) -> tuple[list[Tensor], Outcome]:
        """Return one microbatch's share of the gradient, and its addition to every sum."""
        batch = self.engine.replicas.batch(data, rows)
        row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, inputs.num_rows)
        own_first, num_rows = first + self.engine.replicas.part(rows)[1], tree.num_rows(batch)

        def share(params: list[Tensor]) -> tuple[Tensor, Outcome]:
            outcome = sums(inputs.values._replace(params=params), batch, row_weights, inputs.places, own_first)
            extra = outcome.extra * extra_share(cut, num_rows) if num_rows else ops.zeros_like(outcome.extra)
            loss = self.epoch_sums.loss(outcome.sums, extra, inputs.weights)
            return loss * ops.cast(inputs.scale, extra.dtype), outcome._replace(extra=extra)

        with self.forward.backwards(num_rows, own_first):
            return self.engine.ops.differentiate(share, inputs.values.params)

    # ---- the rest of whole_update, once for the full batch ----

    def _regularise(
        self, params: list[Tensor], grads: list[Tensor], scale: Tensor, captured: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Add the model's weight regularisation, once."""
        if not self.forward.has_penalty:
            return grads, ops.zeros((), keras.config.floatx())

        def scaled(params: list[Tensor]) -> tuple[Tensor, Tensor]:
            penalty = self.forward.penalty(params, captured)
            return penalty * ops.cast(scale, penalty.dtype), penalty

        more, penalty = self.engine.ops.differentiate(scaled, params)
        return [g + ops.cast(m, g.dtype) for g, m in zip(grads, more, strict=True)], penalty

    def _is_good(self, state: State, loss: Tensor, grads: list[Tensor], buffers: list[Tensor]) -> Tensor:
        good = ops.isfinite(loss) & (state.stopped == 0)
        values = [*(grads if self._guards_gradients else []), *moved_where_finite(self.forward, state.buffers, buffers)]
        return good & self.engine.ops.is_finite(values)


def moved_where_finite(forward: Forward, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
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
