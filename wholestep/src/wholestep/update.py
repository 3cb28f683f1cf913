"""ONE update, written once in terms of the engine: weigh, fold, divide once, guard, apply, report.

`ObjectiveUpdate.whole_update` is the essence. The rest of the module is its parts, and the program
of several updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops
from keras.optimizers import LossScaleOptimizer, Optimizer

from wholestep import tree
from wholestep.cut import Cut
from wholestep.embeddings.rows import RowPlan, RowPlanner, explain_lookups, explain_sums
from wholestep.engines import Engine
from wholestep.joins import (
    Collected,
    JoinedTerms,
    Terms,
    join,
    no_outputs,
    slopes_of,
    with_outputs,
)
from wholestep.logged import AskedLogs, Logged, check_names
from wholestep.model import Forward, MicrobatchSums
from wholestep.nonfinite import Skip
from wholestep.program import loop_updates, with_epoch_start
from wholestep.reports.report import NO_LOGS, UPDATE_LOSS, VERDICT, ReportLayout
from wholestep.slices import Gradient, Slices
from wholestep.state import State, Values
from wholestep.sums import (
    After,
    EpochSums,
    Folded,
    LookupSizes,
    Piece,
    SumInputs,
    Sums,
    Totals,
    Weights,
    add,
    add_gradients,
    add_weights,
    extra_share,
    first_logs,
    lookup_sizes,
    merge_lookups,
    moved_buffers,
    num_shares,
    part_of,
    pieces_of,
    row_share,
    section,
    weights_of_rows,
    zero_totals,
    zero_weights,
)
from wholestep.tree import Tensor, Tree

WholeUpdate = Callable[[State, list[Tensor], Tree, Tensor, Tensor], tuple[State, Tensor]]
Total = TypeVar("Total", bound=Folded[Any, Any, Any])
Microbatch = Callable[[Tree, "SumInputs", Total, Piece], Total]
Differentiated = tuple[list[Gradient], MicrobatchSums]
GradientOf = Callable[["SumInputs", Tree, Tensor, Tensor], Differentiated]


@dataclass(eq=False)
class Update(ABC):
    """One update of one model on one engine, and the program of several.

    Args:
        forward: the model's variables, and the properties of the traced functions.
        optimizer: the optimizer that the update applies; None if a custom step applies its own.
        on_nonfinite: how many non-finite updates are skipped before one stops all later ones.
        layout: the layout of an update's report, known once the update is traced.

    Attributes:
        suits_xla: whether XLA may compile the program of several updates.
        assigns: whether the update assigns the Keras variables itself, where the engine keeps
            values in them.
    """

    engine: Engine
    forward: Forward
    optimizer: Optimizer | None
    _: KW_ONLY
    on_nonfinite: Skip
    layout: ReportLayout = NO_LOGS
    suits_xla: ClassVar[bool] = True
    assigns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.epoch_sums = EpochSums(self.forward)
        self.row_planner = RowPlanner(self.engine, self.forward, self.optimizer)

    @abstractmethod
    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> "Update":
        """Return this update with the properties that a trace of all user functions finds."""

    @abstractmethod
    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return one whole update: (state, captured, data, rows, count) -> (state, report)."""

    def form_of_gradients(self) -> str:
        """Return the form of tables' gradients, as text; "" where it does not matter."""
        return ""

    def program(
        self, whole_update: WholeUpdate, length: int, empty: list[np.ndarray], *, loops: bool
    ) -> Callable[..., Any]:
        """Return the program of several updates, see `loop_updates`.

        Args:
            empty: the metrics' values before the first row.
        """
        begin = partial(with_epoch_start, sums=self.epoch_sums.empty(), metrics=empty)
        reports = self.layout.empty() if loops else None
        updates = loop_updates(
            self.engine, whole_update, reports, length, begin=begin, unreached=math.nan
        )
        return updates if self.assigns else self.engine.variables.load_and_store(updates)

    def _reported(
        self, state: State, logs: dict[str, Tensor], loss: Tensor, ok: Tensor
    ) -> tuple[State, Tensor]:
        """Return the state, with the failures counted, and all numbers as one vector."""
        state, verdict = self.on_nonfinite.counted(state, ok)
        numbers = with_verdict(logs, loss, ops.cast(verdict, keras.config.floatx()))
        return state, self.layout.pack(numbers)


class Proposal(NamedTuple):
    """The result of an update before it is applied.

    Args:
        state: the new state, with the parameters and slots from before.
        is_good: whether it may be applied.
    """

    state: State
    grads: list[Gradient]
    loss: Tensor
    is_good: Tensor


@dataclass(eq=False)
class ObjectiveUpdate(Update):
    """An update by the gradient of an objective, computed in any cut, and the model's optimizer.

    Args:
        dense_gradients: whether all gradients are dense; else those of tables are by lookups, if
            the engine has these.
        log: the numbers about an update that the user asks for.
    """

    _: KW_ONLY
    dense_gradients: bool
    log: tuple[Logged, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        # A dynamic loss scale stops non-finite gradients itself.
        self._has_dynamic_scale = isinstance(self.optimizer, LossScaleOptimizer)
        has_factor = getattr(self.optimizer, "loss_scale_factor", None) is not None
        self._scales = has_factor or self._has_dynamic_scale
        self._sums = self.engine.programs.traced(self.forward.sums)
        variables = self.forward.variables
        self._asked = AskedLogs(self.log, self.engine, self.optimizer, variables)
        # paths of the parameters whose gradient is `Slices`, found by a trace
        self._by_lookups: set[str] = set()

    def form_of_gradients(self) -> str:
        """Return the form of tables' gradients, as text; "" where it does not matter."""
        summed = ""
        if self.dense_gradients and self.optimizer is not None:
            summed = explain_sums(self.forward.model, self.optimizer)
        return summed or explain_lookups(self.optimizer, self._by_lookups)

    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> "ObjectiveUpdate":
        """Return this update with the properties that a trace of all user functions finds.

        These are the objective and the metrics on a microbatch, the regularisers, and the metrics'
        results.
        """
        layout = self.layout
        captured = self.forward.captured_in(state)
        params = self.engine.variables.params(state)
        values = Values(params, state.buffers, state.metrics, captured)
        num_few = cut.sections[0][1]

        def trace(forward: Forward, times: int = 1) -> None:
            def microbatch(values: Values, data: Tree, rows: Tensor) -> Tensor:
                nonlocal layout
                few = ops.concatenate(times * [rows[:num_few]])
                batch = self.engine.replicas.batch(data, few)
                logs = first_logs(forward, values, batch, None)
                check_names(self.log, logs)
                loss = logs["loss"]
                logs |= self._asked.shapes(loss)
                layout = ReportLayout.of(with_verdict(logs, loss, loss))
                return loss

            self.engine.programs.shapes(microbatch, values, data, rows)

        forward = self.forward.learned(trace, partial(trace, times=2))
        if layout == self.layout and forward.knows_as(self.forward):
            return self
        return replace(self, forward=forward, layout=layout)

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return one whole update: (state, captured, data, rows, count) -> (state, report)."""
        engine = self.engine
        facts = self.forward.facts
        look_up = self.row_planner.look_up(cut, row_plan)
        weigh, gradient, add_microbatch = self._microbatch(cut, row_plan)
        sizes: LookupSizes | None = None  # by the first call: an eager update is called again

        def whole_update(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor
        ) -> tuple[State, Tensor]:
            nonlocal sizes
            inputs = self._inputs(state._replace(captured=captured), row_plan, rows, count)
            if cut.has_parts:  # else the only part weighs itself
                # Weights depend on the batch alone, so the compiler drops the forward pass.
                weights = self._fold(cut, weigh, zero_weights(facts), data, inputs, syncs=False)
                inputs = inputs._replace(weights=weights.carried)

            ids = look_up(inputs.values, data, rows)
            scratch, touched, places = row_plan.deduplicate(state.scratch, ids)
            params = self.row_planner.with_rows(inputs.values.params, touched)
            inputs = inputs.with_params(params)._replace(places=places)

            joined = None
            if cut.has_parts and facts.joins:
                joined = self._joined(cut, row_plan, data, inputs)
                inputs = inputs._replace(slopes=joined.slopes)

            if sizes is None:
                sizes = self._lookup_sizes(cut, gradient, data, inputs)
            num_parts = cut.num_microbatches * num_shares(engine, cut)
            begin = zero_totals(facts, inputs.values, sizes, num_parts, count)
            step = partial(add_microbatch, sizes)
            total = self._fold(cut, step, begin, data, inputs, syncs=True)
            if joined is not None:
                total = joined.added_to(total)

            state = state._replace(scratch=scratch)
            new, grads, loss, ok = self._proposal(cut, state, inputs, total, sizes)
            asked = self._asked.before(state, grads, inputs.scale)
            assigned = dict(zip(facts.assigned, total.alike.assigned, strict=True))
            twin = row_plan.optimizer
            state = engine.optimizer.apply(state, new, grads, ok, assigned, touched, twin)
            asked = self._asked.after(asked, inputs.values.params, state, touched)

            logs = self.epoch_sums.logs(state.sums, state.metrics, inputs.values.captured)
            state = state._replace(metrics=self.forward.tracking(state.metrics, logs))
            return self._reported(state, logs | asked, loss, ok)

        return engine.programs.traced(whole_update)

    # ---- before the folds ----

    def _inputs(self, state: State, row_plan: RowPlan, rows: Tensor, count: Tensor) -> SumInputs:
        captured = self.forward.captured_in(state)
        params = self.engine.variables.params(state, {table.param for table in row_plan.tables})
        values = Values(params, state.buffers, state.metrics, captured)
        return SumInputs(values, self._loss_scale(state), rows, count)

    def _loss_scale(self, state: State) -> Tensor:
        """Return the optimizer's factor of the loss; its slots may stay in their variables."""
        one = ops.ones((), "float32")
        if self.optimizer is None or not self._scales:
            return one
        slots = zip(self.forward.variables.slots, state.slots, strict=False)
        with keras.StatelessScope(list(slots)):
            return self.optimizer.scale_loss(one)

    def _lookup_sizes(
        self, cut: Cut, gradient: GradientOf, data: Tree, inputs: SumInputs
    ) -> LookupSizes:
        """Return the sizes of the lookups to add up; empty where one part has all lookups."""
        if not cut.has_parts or self.dense_gradients or not self.engine.ops.has_slices:
            return {}

        def gradients(num_rows: int) -> list[Gradient]:
            rows = inputs.rows[:num_rows]
            first = ops.zeros((), "int32")
            return self.engine.programs.shapes(gradient, inputs, data, rows, first)[0]

        num_few = max(1, cut.sections[0][1] // num_shares(self.engine, cut))
        few = gradients(num_few)
        if not any(isinstance(grad, Slices) for grad in few):
            return {}
        paths = [variable.path for variable in self.forward.variables.params]
        return lookup_sizes(cut, paths, num_few, few, gradients(cut.places))

    def _joined(self, cut: Cut, row_plan: RowPlan, data: Tree, inputs: SumInputs) -> JoinedTerms:
        """Return the terms of all rows together, by a fold that collects the rows' outputs."""
        terms: Terms = {}

        def terms_of(inputs: SumInputs, data: Tree, rows: Tensor, first: Tensor) -> Terms:
            batch, _, first = self._part(cut, inputs, data, rows, first)
            lookups = row_plan.lookups
            return self.forward.outputs(inputs.values, batch, inputs.places, first, lookups=lookups)

        def collect(data: Tree, inputs: SumInputs, total: Collected, piece: Piece) -> Collected:
            rows, first, number = piece
            local = inputs._replace(places=[section(p, number, cut) for p in inputs.places])
            terms.update(terms_of(local, data, rows, first))
            place = first + self.engine.replicas.part(rows)[1]
            return total._replace(sums=with_outputs(total.sums, terms, place))

        room = no_outputs(self.engine, cut, terms_of, inputs, data)
        outputs = self._fold(cut, collect, Folded(room, (), ()), data, inputs, syncs=True).sums
        loss = partial(self.epoch_sums.loss, once=ops.zeros((), keras.config.floatx()))
        return join(self.engine, self.forward, inputs, terms, outputs, loss, row_plan.lookups)

    # ---- the two folds of whole_update, over microbatches and replicas ----

    def _fold(
        self,
        cut: Cut,
        microbatch: Microbatch[Total],
        begin: Total,
        data: Tree,
        inputs: SumInputs,
        *,
        syncs: bool,
    ) -> Total:
        """Return the totals over all microbatches of all replicas.

        Args:
            microbatch: (data, inputs, totals before, piece) -> totals. It closes over no array.
            begin: the totals of no microbatch.
        """

        def of_replica(data: Tree, carried: Tree, given: tuple[SumInputs, Total]) -> Total:
            inputs, total = given
            total = total._replace(carried=carried)
            inputs = inputs.with_params(self.engine.variables.replica_params(inputs.values.params))
            for pieces, num in pieces_of(cut, inputs.rows):
                total = self.engine.ops.fold(partial(microbatch, data, inputs), total, pieces, num)
            return total

        given = inputs, begin._replace(carried=())
        if not cut.split:  # arrays are global, so every sum is a total
            return of_replica(data, begin.carried, given)
        total = self.engine.replicas.total(of_replica, data, begin.carried, given, syncs=syncs)
        return type(begin)(*total)

    def _microbatch(
        self, cut: Cut, row_plan: RowPlan
    ) -> tuple[Microbatch[Weights], GradientOf, Callable[..., Totals]]:
        """Return the functions of a microbatch: weights, gradient, and the totals after it."""
        sums_of = self._sums_with(row_plan)

        def weigh(data: Tree, inputs: SumInputs, total: Weights, piece: Piece) -> Weights:
            batch, row_weights, first = self._part(cut, inputs, data, *piece[:2])
            outcome = self._sums(inputs.values, batch, row_weights, (), first)
            return add_weights(total, outcome)

        def gradient(inputs: SumInputs, data: Tree, rows: Tensor, first: Tensor) -> Differentiated:
            batch, row_weights, first = self._part(cut, inputs, data, rows, first)
            num_rows = tree.num_rows(batch)
            slopes = slopes_of(inputs.slopes, first, num_rows)

            def scaled_loss(params: list[Tensor]) -> tuple[Tensor, MicrobatchSums]:
                values = inputs.values._replace(params=params)
                outcome = sums_of(values, batch, row_weights, inputs.places, first, slopes)
                extra = outcome.extra * extra_share(cut, num_rows)
                if not num_rows:
                    extra = ops.zeros_like(extra)
                loss = self.epoch_sums.loss(outcome.sums, extra, inputs.weights)
                scaled = loss * ops.cast(inputs.scale, extra.dtype) + outcome.joined
                return scaled, outcome._replace(extra=extra)

            by_slices = not self.dense_gradients
            with self.forward.backwards(num_rows, first):
                return self.engine.ops.differentiate(
                    scaled_loss, inputs.values.params, slices=by_slices
                )

        traced = self.engine.programs.traced(gradient)

        def add_microbatch(
            sizes: LookupSizes, data: Tree, inputs: SumInputs, total: Totals, piece: Piece
        ) -> Totals:
            rows, first, number = piece
            values = inputs.values._replace(metrics=total.carried)
            places = [section(p, number, cut) for p in inputs.places]
            local = inputs._replace(values=values, places=places)
            return self._added(cut, sizes, inputs, total, piece, traced(local, data, rows, first))

        return weigh, traced, add_microbatch

    def _sums_with(self, row_plan: RowPlan) -> Callable[..., MicrobatchSums]:
        """Return `Forward.sums` in the form of which the gradient is taken."""
        sums, traced = self.forward.sums, self._sums
        if row_plan.tables:
            sums = partial(sums, lookups=row_plan.lookups)
            traced = self.engine.programs.traced(sums)
        # The gradient repeats random draws in the calling function, which knows the place of the
        # first row.
        return sums if self.forward.facts.draws else self.engine.programs.inlined(traced)

    def _part(
        self, cut: Cut, inputs: SumInputs, data: Tree, rows: Tensor, first: Tensor
    ) -> tuple[Tree, Tensor | None, Tensor]:
        """Return a replica's rows of a microbatch, their weights, and the first row's place."""
        row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, inputs.num_rows)
        batch = self.engine.replicas.batch(data, rows)
        return batch, row_weights, first + self.engine.replicas.part(rows)[1]

    def _added(
        self,
        cut: Cut,
        sizes: LookupSizes,
        inputs: SumInputs,
        total: Totals,
        piece: Piece,
        differentiated: Differentiated,
    ) -> Totals:
        """Return the totals after a microbatch with these gradients and sums."""
        grads, outcome = differentiated
        rows, first, _ = piece
        if sizes or cut.num_microbatches > 1:
            grads = add_gradients(total.sums.grads, grads, sizes, part_of(self.engine, cut, piece))
        if cut.num_microbatches == 1:
            after = After(outcome.buffers, outcome.assigned)
            return Folded(Sums(grads, outcome.sums, outcome.extra), outcome.metrics, after)
        share = row_share(cut, rows.shape[0], first, inputs.num_rows)
        floats = self.forward.moved_floats
        return add(floats, total, grads, outcome, inputs.values.buffers, share)

    # ---- after the folds, once for the full batch ----

    def _proposal(
        self, cut: Cut, state: State, inputs: SumInputs, total: Totals, sizes: LookupSizes
    ) -> Proposal:
        """Return the state to apply: regularised and divided once, and guarded."""
        sums, metrics, after = total
        params, _, _, captured = inputs.values
        grads = merge_lookups(sums.grads, sizes)
        grads, penalty = self._regularise(params, grads, inputs.scale, captured)
        for variable, grad in zip(self.forward.variables.params, grads, strict=True):
            if isinstance(grad, Slices):
                self._by_lookups.add(variable.path)
        extra = sums.extra + penalty
        loss = self.epoch_sums.loss(sums.terms, extra)
        buffers = after.buffers
        if cut.num_microbatches > 1:
            buffers = moved_buffers(self.forward.moved_floats, state.buffers, buffers)
        is_good = self._is_good(state, loss, grads, buffers)
        epoch = self.epoch_sums.add(state.sums, sums.terms, extra, inputs.num_rows)
        new = state._replace(buffers=buffers, metrics=metrics, sums=epoch)
        return Proposal(new, grads, loss, is_good)

    def _regularise(
        self, params: list[Tensor], grads: list[Gradient], scale: Tensor, captured: list[Tensor]
    ) -> tuple[list[Gradient], Tensor]:
        """Add the weight regularisation, once; the gradient of a regularised table is dense."""
        if not self.forward.has_penalty:
            return grads, ops.zeros((), keras.config.floatx())

        def scaled(params: list[Tensor]) -> tuple[Tensor, Tensor]:
            penalty = self.forward.penalty(params, captured)
            return penalty * ops.cast(scale, penalty.dtype), penalty

        slopes, penalty = self.engine.ops.differentiate(scaled, params)
        regularised = []
        triples = zip(self.forward.variables.params, grads, slopes, strict=True)
        for variable, grad, slope in triples:
            if isinstance(grad, Slices) and variable.regularizer is not None:
                grad = grad.dense(slope.shape[0])
            if not isinstance(grad, Slices):
                grad = grad + ops.cast(slope, grad.dtype)
            regularised.append(grad)
        return regularised, penalty

    def _is_good(
        self, state: State, loss: Tensor, grads: list[Gradient], buffers: list[Tensor]
    ) -> Tensor:
        """Whether loss, gradients and moved buffers are finite, and no update has failed before."""
        guarded = self.forward.moved_where_finite(state.buffers, buffers)
        if not self._has_dynamic_scale:
            values = [grad.values if isinstance(grad, Slices) else grad for grad in grads]
            guarded = [*keras.tree.flatten(values), *guarded]
        is_running = ops.isfinite(loss) & (state.stopped == 0)
        return is_running & self.engine.ops.is_finite(guarded)


def with_verdict(logs: dict[str, Tensor], loss: Tensor, verdict: Tensor) -> dict[str, Tensor]:
    """Return the epoch's logs with the update's loss, and whether it was applied."""
    return logs | {UPDATE_LOSS: loss, VERDICT: verdict}
