"""ONE update, written once in terms of the engine: weigh, fold, divide once, guard, apply, report.

`ObjectiveUpdate.whole_update` is the essence. The rest of the module is its parts, and the program
of several updates.
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
from wholestep.embeddings.rows import RowPlan, RowPlanner, explain_lookups, explain_sums
from wholestep.engines import Engine
from wholestep.errors import SpecificationError, message
from wholestep.model import Forward, Outcome
from wholestep.program import begun, several
from wholestep.reports.report import APPLIED, NO_LOGS, UPDATE_LOSS, ReportLayout
from wholestep.slices import Gradient, LookupSize, Part, Slices
from wholestep.state import State, Values
from wholestep.sums import (
    After,
    EpochSums,
    Folded,
    LookupSizes,
    Piece,
    Sums,
    Totals,
    Weights,
    add,
    add_gradients,
    extra_share,
    first_logs,
    merge_lookups,
    moved,
    no_weights,
    nothing,
    pieces_of,
    plus,
    row_share,
    section,
    weights_of_rows,
)
from wholestep.tree import Tensor, Tree

WholeUpdate = Callable[[State, list[Tensor], Tree, Tensor, Tensor], tuple[State, Tensor]]
Total = TypeVar("Total", bound=Folded[Any, Any, Any])
Microbatch = Callable[[Tree, "SumInputs", Total, Piece], Total]
GradientOf = Callable[["SumInputs", Tree, Tensor, Tensor], tuple[list[Gradient], Outcome]]


class Update(ABC):
    """One update of one model on one engine, and the program of several.

    Args:
        forward: the model's variables, and the properties of the traced functions.
        layout: the layout of an update's report, known once the update is traced.
        optimizer: the optimizer that the update applies; None if a custom step applies its own.
        stops: whether the first non-finite update stops all later ones ("raise"), or is skipped
            ("skip").

    Attributes:
        suits_xla: whether XLA may compile the program of several updates.
        assigns: whether the update assigns the Keras variables itself, where the engine keeps
            values in them.
    """

    suits_xla = True
    assigns = False

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        layout: ReportLayout,
        optimizer: Optimizer | None,
        *,
        stops: bool,
    ):
        self.engine = engine
        self.forward = forward
        self.layout = layout
        self.stops = stops
        self.epoch_sums = EpochSums(forward)
        self.row_planner = RowPlanner(engine, forward, optimizer)

    @abstractmethod
    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor) -> "Update":
        """Return this update with the properties found by tracing all user functions that it
        calls.
        """

    @abstractmethod
    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return the function (state, captured, data, rows, count) -> (state, report): one whole
        update.
        """

    def form_of_gradients(self) -> str:
        """Return in which form the optimizer gets the gradients of tables, as text; "" where it
        does not matter.
        """
        return ""

    def program(
        self, whole_update: WholeUpdate, length: int, empty: list[np.ndarray], *, loops: bool
    ) -> Callable[..., Any]:
        """Return the program (state, captured, data, rows, counts, span) -> (state, reports), see
        `several`.

        Args:
            empty: the metrics' values before the first row.
        """
        begin = partial(begun, sums=self.epoch_sums.empty(), metrics=empty)
        reports = self.layout.empty() if loops else None
        updates = several(
            self.engine, whole_update, reports, length, begin=begin, unreached=math.nan
        )
        return updates if self.assigns else self.engine.variables.load_and_store(updates)

    def _reported(
        self, state: State, logs: dict[str, Tensor], loss: Tensor, ok: Tensor
    ) -> tuple[State, Tensor]:
        """Return the state, stopped by an update that is not `ok`, and all numbers as one
        vector.
        """
        stopped = (
            ops.where(ok, state.stopped, ops.ones_like(state.stopped))
            if self.stops
            else state.stopped
        )
        report = self.layout.pack(with_verdict(logs, loss, ops.cast(ok, keras.config.floatx())))
        return state._replace(stopped=stopped), report


class SumInputs(NamedTuple):
    """The arguments of the sums of an update, the same for every microbatch and replica.

    `places` and `weights` are known after the weights of the full batch, see `Forward.sums` and
    `EpochSums.loss`.
    """

    values: Values
    scale: Tensor
    rows: Tensor
    num_rows: Tensor
    places: Sequence[Tensor] = ()
    weights: dict[str, Tensor] | None = None


class ObjectiveUpdate(Update):
    """An update by the gradient of an objective, computed in any cut, and the model's optimizer.

    Args:
        dense_gradients: whether all gradients are dense; else those of tables are by lookups, if
            the engine has these.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        optimizer: Optimizer | None,
        layout: ReportLayout = NO_LOGS,
        *,
        stops: bool,
        dense_gradients: bool,
    ):
        super().__init__(engine, forward, layout, optimizer, stops=stops)
        self._optimizer: Optimizer = optimizer
        self._dense_gradients = dense_gradients
        # A dynamic loss scale stops non-finite gradients itself.
        self._guards_gradients = not isinstance(optimizer, LossScaleOptimizer)
        self._scales = (
            not self._guards_gradients or getattr(optimizer, "loss_scale_factor", None) is not None
        )
        self._sums = engine.programs.traced(forward.sums)
        # parameters whose gradient is `Slices`, found by a trace
        self._by_lookups: set[str] = set()

    def form_of_gradients(self) -> str:
        """Return in which form the optimizer gets the gradients of tables, as text; "" where it
        does not matter.
        """
        is_summed = self._dense_gradients and self._optimizer is not None
        summed = explain_sums(self.forward.model, self._optimizer) if is_summed else ""
        return summed or explain_lookups(self._optimizer, self._by_lookups)

    def learned(
        self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor
    ) -> "ObjectiveUpdate":
        """Return this update with the properties found by tracing all user functions that it calls.

        These are the objective and the metrics on a microbatch, the regularisers, and the metrics'
        results.
        """
        layouts = [self.layout]
        values = Values(
            self.engine.variables.params(state),
            state.buffers,
            state.metrics,
            self.forward.captured_in(state),
        )
        few = ops.convert_to_tensor(rows)[: cut.sections[0][1]]

        def trace(forward: Forward, times: int = 1) -> None:
            def microbatch(values: Values, data: Tree, rows: Tensor, count: Tensor) -> Tensor:
                row_weights = weights_of_rows(self.engine, cut, rows.shape[0], count, count)
                logs = first_logs(
                    forward, values, self.engine.replicas.batch(data, rows), row_weights
                )
                layouts.append(ReportLayout.of(with_verdict(logs, logs["loss"], logs["loss"])))
                return logs["loss"]

            self.engine.programs.shapes(
                microbatch, values, data, ops.concatenate(times * [few]), count
            )

        forward = self.forward.learned(trace, partial(trace, times=2))
        if layouts[-1] == self.layout and forward.knows_as(self.forward):
            return self
        how = {"stops": self.stops, "dense_gradients": self._dense_gradients}
        return ObjectiveUpdate(self.engine, forward, self._optimizer, layouts[-1], **how)

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> WholeUpdate:
        """Return the function (state, captured, data, rows, count) -> (state, report): one whole
        update.
        """
        engine = self.engine
        forward = self.forward
        look_up = self.row_planner.look_up(cut, row_plan)
        gradient, microbatch = self._gradient(cut, row_plan)
        apart = {table.param for table in row_plan.tables}
        found: list[LookupSizes] = []  # by the first call: an eager update is called again

        def weigh(data: Tree, inputs: SumInputs, total: Weights, piece: Piece) -> Weights:
            batch, row_weights, first = self._microbatch(cut, data, inputs, *piece[:2])
            sums = self._sums(inputs.values, batch, row_weights, (), first).sums
            return total._replace(
                carried={k: plus(weight, sums[k][1]) for k, weight in total.carried.items()}
            )

        def whole_update(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor
        ) -> tuple[State, Tensor]:
            captured = forward.captured_in(state._replace(captured=captured))
            params = engine.variables.params(state, apart)
            scale = self._loss_scale(state)
            inputs = SumInputs(
                Values(params, state.buffers, state.metrics, captured), scale, rows, count
            )
            weights = None  # one microbatch weighs itself
            if cut.num_microbatches > 1 or cut.split:
                # They depend on the batch alone, so the compiler drops the forward pass.
                weights = self._fold(
                    cut, weigh, no_weights(forward.facts), data, inputs, syncs=False
                ).carried
            scratch, touched, places = row_plan.deduplicate(
                state.scratch, look_up(inputs.values, data, rows)
            )
            params = self.row_planner.with_rows(params, touched)
            inputs = inputs._replace(
                values=inputs.values._replace(params=params), places=places, weights=weights
            )
            if not found:
                found.append(self._lookup_sizes(cut, gradient, data, inputs))
            num_parts = cut.num_microbatches * self._num_shares(cut)
            begin = nothing(forward.facts, inputs.values, found[0], num_parts, count)
            total = self._fold(cut, partial(microbatch, found[0]), begin, data, inputs, syncs=True)
            buffers = self._buffers(cut, state.buffers, total.alike.buffers)
            grads = merge_lookups(total.sums.grads, found[0])
            grads, penalty = self._regularise(params, grads, scale, captured)
            paths = [variable.path for variable in forward.variables.params]
            self._by_lookups.update(
                paths[i] for i, grad in enumerate(grads) if isinstance(grad, Slices)
            )
            loss = self.epoch_sums.loss(total.sums.terms, total.sums.extra + penalty)
            ok = self._is_good(state, loss, grads, buffers)
            sums = self.epoch_sums.add(
                state.sums, total.sums.terms, total.sums.extra + penalty, count
            )
            state = state._replace(scratch=scratch)
            new = state._replace(buffers=buffers, metrics=total.carried, sums=sums)
            assigned = dict(zip(forward.facts.assigned, total.alike.assigned, strict=True))
            state = engine.optimizer.apply(
                state, new, grads, ok, assigned, touched, row_plan.optimizer
            )
            logs = self.epoch_sums.logs(state.sums, state.metrics, captured)
            state = state._replace(metrics=forward.tracking(state.metrics, logs))
            return self._reported(state, logs, loss, ok)

        return engine.programs.traced(whole_update)

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
            inputs = given[0]
            total = given[1]._replace(carried=carried)
            params = self.engine.variables.replica_params(inputs.values.params)
            inputs = inputs._replace(values=inputs.values._replace(params=params))
            for pieces, num in pieces_of(cut, inputs.rows):
                total = self.engine.ops.fold(partial(microbatch, data, inputs), total, pieces, num)
            return total

        given = inputs, begin._replace(carried=())
        if not cut.split:  # arrays are global, so every sum is a total
            return of_replica(data, begin.carried, given)
        return type(begin)(
            *self.engine.replicas.total(of_replica, data, begin.carried, given, syncs=syncs)
        )

    def _loss_scale(self, state: State) -> Tensor:
        """Return the factor by which the optimizer scales the loss; its slots may stay in their
        variables.
        """
        one = ops.ones((), "float32")
        slots = zip(self.forward.variables.slots, state.slots, strict=False)
        with keras.StatelessScope(list(slots)):
            return self._optimizer.scale_loss(one) if self._scales else one

    def _sums_with(self, row_plan: RowPlan) -> Callable[..., Outcome]:
        """Return `Forward.sums` in the form of which the gradient is taken."""
        own = (
            partial(self.forward.sums, lookups=row_plan.lookups)
            if row_plan.tables
            else self.forward.sums
        )
        # The gradient repeats random draws in the calling function, which knows the place of the
        # first row.
        if self.forward.facts.draws:
            return own
        return self.engine.programs.inlined(
            self.engine.programs.traced(own) if row_plan.tables else self._sums
        )

    def _microbatch(
        self, cut: Cut, data: Tree, inputs: SumInputs, rows: Tensor, first: Tensor
    ) -> tuple[Tree, Tensor | None, Tensor]:
        """Return the rows of a microbatch, or a replica's part of them; their weights; the first
        row's place.
        """
        row_weights = weights_of_rows(self.engine, cut, rows.shape[0], first, inputs.num_rows)
        return (
            self.engine.replicas.batch(data, rows),
            row_weights,
            first + self.engine.replicas.part(rows)[1],
        )

    def _gradient(self, cut: Cut, row_plan: RowPlan) -> tuple[GradientOf, Callable[..., Totals]]:
        """Return the function of a microbatch's gradient and sums, and the one that adds them to
        the totals.
        """
        sums = self._sums_with(row_plan)

        def gradient(
            inputs: SumInputs, data: Tree, rows: Tensor, first: Tensor
        ) -> tuple[list[Gradient], Outcome]:
            batch, row_weights, own_first = self._microbatch(cut, data, inputs, rows, first)
            num_rows = tree.num_rows(batch)

            def share(params: list[Tensor]) -> tuple[Tensor, Outcome]:
                outcome = sums(
                    inputs.values._replace(params=params),
                    batch,
                    row_weights,
                    inputs.places,
                    own_first,
                )
                extra = (
                    outcome.extra * extra_share(cut, num_rows)
                    if num_rows
                    else ops.zeros_like(outcome.extra)
                )
                loss = self.epoch_sums.loss(outcome.sums, extra, inputs.weights)
                return loss * ops.cast(inputs.scale, extra.dtype), outcome._replace(extra=extra)

            with self.forward.backwards(num_rows, own_first):
                slices = not self._dense_gradients
                return self.engine.ops.differentiate(share, inputs.values.params, slices=slices)

        traced = self.engine.programs.traced(gradient)
        is_whole = cut.num_microbatches == 1
        floats = {i: self.forward.variables.floats[i] for i in self.forward.facts.moved}

        def microbatch(
            lookups: LookupSizes, data: Tree, inputs: SumInputs, total: Totals, piece: Piece
        ) -> Totals:
            rows, first, number = piece
            values = inputs.values
            places = [section(p, number, cut) for p in inputs.places]
            own = inputs._replace(values=values._replace(metrics=total.carried), places=places)
            grads, outcome = traced(own, data, rows, first)
            if lookups or not is_whole:
                part = self._part(cut, rows, first, number)
                grads = add_gradients(total.sums.grads, grads, lookups, part)
            if is_whole:
                after = After(outcome.buffers, outcome.assigned)
                return Folded(Sums(grads, outcome.sums, outcome.extra), outcome.metrics, after)
            share = row_share(cut, rows.shape[0], first, inputs.num_rows)
            return add(floats, total, grads, outcome, values.buffers, share)

        return traced, microbatch

    def _part(self, cut: Cut, rows: Tensor, first: Tensor, number: Tensor) -> Part | None:
        """Return which part of the batch a replica has of a microbatch; None if it has no row of
        it.
        """
        own_rows, start = self.engine.replicas.part(rows)
        if not own_rows.shape[0]:
            return None
        num_shares = self._num_shares(cut)
        share = start // -(-rows.shape[0] // num_shares)
        return Part(first + start, number * num_shares + share)

    def _num_shares(self, cut: Cut) -> int:
        """Return the number of replicas that fold their rows of each microbatch."""
        return self.engine.devices.num_replicas if cut.split else 1

    def _lookup_sizes(
        self, cut: Cut, gradient: GradientOf, data: Tree, inputs: SumInputs
    ) -> LookupSizes:
        """Return the sizes of lookups that are added up; empty where one microbatch has the
        gradient of the update.
        """
        is_cut = cut.num_microbatches > 1 or cut.split
        if not is_cut or self._dense_gradients or not self.engine.ops.has_slices:
            return {}

        def lookups(num_rows: int) -> dict[int, list[int | None]]:
            first = ops.zeros((), "int32")
            grads, _ = self.engine.programs.shapes(
                gradient, inputs, data, inputs.rows[:num_rows], first
            )
            return {
                i: [v.shape[0] for v in grad.values]
                for i, grad in enumerate(grads)
                if isinstance(grad, Slices)
            }

        num_few = max(1, cut.sections[0][1] // self._num_shares(cut))
        few = lookups(num_few)
        full = lookups(cut.places) if few else {}
        sizes = {}
        for i, reads in few.items():
            path = self.forward.variables.params[i].path
            are_alike = len(reads) == len(full[i])
            # Else each row is looked up by itself, in a loop of Python: all count as one lookup.
            pairs = (
                zip(reads, full[i], strict=True)
                if are_alike
                else [(_total(reads), _total(full[i]))]
            )
            sizes[i] = [
                LookupSize.of(path, (num_few, part), (cut.places, all_)) for part, all_ in pairs
            ]
            if cut.split and LookupSize(None) in sizes[i]:
                must = (
                    f"On several replicas, the number of rows that are looked up in {path!r} "
                    "must be known."
                )
                attempt = "dense_gradients=True, or one device."
                raise SpecificationError(message(must, "a number that depends on values", attempt))
        return sizes

    # ---- the rest of whole_update, once for the full batch ----

    def _buffers(self, cut: Cut, before: list[Tensor], found: list[Tensor]) -> list[Tensor]:
        """Return the buffers after an update: as one microbatch has found them, or moved by the
        changes of several.
        """
        if cut.num_microbatches == 1:
            return found
        buffers = list(before)
        for i, move in zip(self.forward.facts.moved, found, strict=True):
            buffers[i] = moved(buffers[i], move)
        return buffers

    def _regularise(
        self, params: list[Tensor], grads: list[Gradient], scale: Tensor, captured: list[Tensor]
    ) -> tuple[list[Gradient], Tensor]:
        """Add the model's weight regularisation, once; the gradient of a regularised table is
        dense.
        """
        if not self.forward.has_penalty:
            return grads, ops.zeros((), keras.config.floatx())

        def scaled(params: list[Tensor]) -> tuple[Tensor, Tensor]:
            penalty = self.forward.penalty(params, captured)
            return penalty * ops.cast(scale, penalty.dtype), penalty

        more, penalty = self.engine.ops.differentiate(scaled, params)
        regularised = []
        for i, (grad, slope) in enumerate(zip(grads, more, strict=True)):
            if (
                isinstance(grad, Slices)
                and self.forward.variables.params[i].regularizer is not None
            ):
                grad = grad.dense(slope.shape[0])
            regularised.append(
                grad if isinstance(grad, Slices) else grad + ops.cast(slope, grad.dtype)
            )
        return regularised, penalty

    def _is_good(
        self, state: State, loss: Tensor, grads: list[Gradient], buffers: list[Tensor]
    ) -> Tensor:
        good = ops.isfinite(loss) & (state.stopped == 0)
        values = moved_where_finite(self.forward, state.buffers, buffers)
        if self._guards_gradients:
            values = [
                *keras.tree.flatten([g.values if isinstance(g, Slices) else g for g in grads]),
                *values,
            ]
        return good & self.engine.ops.is_finite(values)


def _total(reads: list[int | None]) -> int | None:
    known = [num for num in reads if num is not None]
    return sum(known) if len(known) == len(reads) else None


def moved_where_finite(forward: Forward, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    """Return the floating buffers that the forward pass changes, as one vector for each dtype.

    Numbers that were not finite before are 0, as in a mask, or a minimum that begins at infinity.
    """
    vectors: dict[str, list[Tensor]] = {}
    for i in forward.facts.moved:
        if forward.variables.floats[i]:
            own = ops.where(ops.isfinite(before[i]), after[i], ops.zeros_like(after[i]))
            vectors.setdefault(forward.variables.buffers[i].dtype, []).append(
                ops.reshape(own, (-1,))
            )
    return [ops.concatenate(parts) if parts[1:] else parts[0] for parts in vectors.values()]


def with_verdict(logs: dict[str, Tensor], loss: Tensor, applied: Tensor) -> dict[str, Tensor]:
    """Return an update's numbers: the epoch's logs so far, the update's loss, and last whether it
    was applied.
    """
    return logs | {UPDATE_LOSS: loss, APPLIED: applied}
