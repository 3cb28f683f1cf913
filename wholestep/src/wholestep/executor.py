"""The executor: compiles the programs of one model, objective and optimizer, and keeps the run up
to date.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from wholestep.checkpoints import (
    Numbers,
    Snapshot,
    assign_by_path,
    batch_facts,
    code_facts,
    data_facts,
    leaves_of,
    put,
    renamed,
    value_facts,
)
from wholestep.context import Context
from wholestep.custom import CustomUpdate, undone
from wholestep.data import (
    Batch,
    Batches,
    Block,
    Check,
    Feed,
    FeedCache,
    SingleBatches,
    check_weights,
    open_feed,
)
from wholestep.dispatcher import Dispatcher, DispatchSize
from wholestep.embeddings.rows import is_linear
from wholestep.errors import NonFiniteError
from wholestep.evaluation import CheckKind, EvalOptions, Evaluation, Pass, PassRun
from wholestep.model import (
    CompiledObjective,
    Findings,
    Forward,
    check_labels,
    check_labels_are_numbers,
    check_parts,
    is_overridden,
    named,
    resets_on_the_host,
)
from wholestep.plan import Planner, Sample
from wholestep.program import EPOCH, GOES_ON, FeedSpec, Program, ProgramCache, garbage_kept
from wholestep.reports.compile_notices import Compilations
from wholestep.reports.report import Report, check_same_layout
from wholestep.reports.update_ledger import UpdateLedger, diagnose
from wholestep.run import Run, groups_of
from wholestep.safety import uninterrupted
from wholestep.state import State, Variables
from wholestep.sums import EpochSums, fresh, names_of, read_results
from wholestep.tree import Tensor, Tree
from wholestep.update import ObjectiveUpdate, Update

_NO_METRICS: list[np.ndarray] = []


class Executor:
    """The compiled programs of one model, objective and optimizer.

    Args:
        context: the model, its engine and its variables.
        metrics: the Keras metrics that the objective updates.
        findings: the measurements so far, which the executor completes.
    """

    def __init__(self, context: Context, metrics: list[keras.metrics.Metric], findings: Findings):
        self.context = context
        self.engine = engine = context.engine
        self._access = engine.variables
        self.model = context.model
        self.steps = steps = context.steps
        self.objective = context.objective
        options = context.options
        training, evaluating = _forward_passes(context, metrics)
        update = _update_of(context, training)
        self.planner = Planner(
            engine, update, options.microbatch_size, options.memory_limit, findings
        )
        self.evaluation = evaluation = Evaluation(engine.evaluation or engine, evaluating, steps)
        self.compilations = Compilations()
        for notices in (self.compilations, evaluation.compilations):
            notices.is_quiet = engine.processes.index > 0
        self.dispatch_size = DispatchSize(engine.processes)
        self.where_data_are = ""
        has_custom_reset = is_overridden(self.model, "reset_metrics")
        self._resets_on_the_host = has_custom_reset or any(map(resets_on_the_host, metrics))
        self._checks_batches = isinstance(self.objective, CompiledObjective) and not steps.trains
        # values of a snapshot for variables that are not known yet
        self._unclaimed: list[tuple[str, Numbers]] = []
        self._row_tables = ProgramCache()
        self._single = SingleBatches(engine.devices, self._row_tables)
        self._single_evaluated = SingleBatches(evaluation.engine.devices, evaluation.row_tables)
        why = weakref.WeakMethod(self._why)  # or they would keep each other alive
        counts: Any = steps if steps.trains else context.optimizer
        self.ledger = UpdateLedger(engine, counts, why, options.on_nonfinite)
        self.dispatcher = Dispatcher(engine, self.ledger, weakref.WeakMethod(self._inputs_for))

    @property
    def variables(self) -> Variables:
        """The Keras variables of the state."""
        return self.context.variables

    @contextmanager
    def notices(self, verbose: int | str) -> Iterator[None]:
        """Context in which notices to the user are on or off; they are always off in processes
        other than 0.
        """
        is_quiet = not verbose or self.engine.processes.index > 0
        with self.compilations.quiet(is_quiet), self.evaluation.compilations.quiet(is_quiet):
            yield

    @contextmanager
    def shown_by(self, bar: keras.callbacks.ProgbarLogger | None) -> Iterator[None]:
        """Context in which compilations and other waits are shown in a progress bar, or below
        it.
        """
        with self.compilations.shown_by(bar), self.evaluation.compilations.shown_by(bar):
            yield

    # ---- before an update ----

    def refresh(self, run: Run) -> State:
        """Return the run's state with the current values of the Keras variables, which other code
        may have changed.
        """
        if run.state is None or run.variables is not self.variables:
            update = self.planner.update
            blank = (), np.int32(0), update.row_planner.scratch(), update.on_nonfinite.no_failures
            sums, stopped, scratch, failures = self.engine.devices.place(blank)
            metrics = self._access.values(self.variables.metrics)
            state = State([], [], [], metrics, sums, stopped, scratch, failures=failures)
            run.set_state(self._access.between_programs(self._whole(state)), self.variables)
        elif not self._access.are_current(self.variables, run.state):
            run.set_state(self._whole(run.state))
        assert run.state is not None
        return run.state

    def _whole(self, state: State) -> State:
        params, slots, buffers = self._access.read(self.variables)
        return state._replace(params=params, slots=slots, buffers=buffers)

    def begin_epoch(self, run: Run) -> None:
        """Begin an epoch: reset Keras' metrics now, and the sums in the next update."""
        state = self.refresh(run)
        empty = self.planner.empty
        is_custom = self.steps.trains or self.steps.tests
        if is_custom or self._resets_on_the_host or empty is None:
            self._empty_metrics()
        else:
            self._access.assign(self.variables.metrics, self.engine.devices.place(empty))
        run.set_state(
            state._replace(metrics=self._access.values(self.variables.metrics)), begins=EPOCH
        )

    def _empty_metrics(self) -> list[np.ndarray]:
        """Reset Keras' metrics, and return their values."""
        if self.steps.tests or is_overridden(self.model, "reset_metrics"):
            self.model.reset_metrics()
        for metric in [] if self.steps.trains else self.context.metrics:
            metric.reset_state()
        empty = [np.array(np.asarray(v)) for v in self.variables.metrics]
        if self.planner.empty is None:
            self.planner.empty = empty
        return empty

    def restore(self, run: Run, snapshot: Snapshot) -> None:
        """Restore the run from a snapshot, and the Keras variables that are not in `run.assigned`.

        Raises:
            SpecificationError: the snapshot is another model's or optimizer's; nothing has been
                changed.
        """
        groups = groups_of(self.variables)
        kept = leaves_of(snapshot, groups)
        try:
            self._assign(run, snapshot, groups, kept)
        except BaseException:
            run.drop()
            raise

    def _assign(self, run: Run, snapshot: Snapshot, groups: dict, kept: dict) -> None:
        run.use_renamed(renamed(snapshot, names_of(self.engine, self.planner.update.forward)))
        run.drop()
        self.begin_epoch(run)
        for name, variables in groups.items():
            put(
                *(
                    (kept["running"], variables, {})
                    if name == "metrics"
                    else (kept[name], variables, run.assigned)
                )
            )
        running = self._access.values(self.variables.metrics)
        put(kept["metrics"], groups["metrics"], {})
        num = len(groups["buffers"])
        paths = snapshot.facts["paths"]["buffers"]
        self._unclaimed = list(zip(paths[num:], kept["buffers"][num:], strict=True))
        state = self.refresh(run)._replace(
            metrics=running, sums=self.engine.devices.place(tuple(kept["sums"]))
        )
        if state.failures and kept["failures"]:
            state = state._replace(failures=self.engine.devices.place(tuple(kept["failures"])))
        run.set_state(
            self._access.between_programs(self._whole(state)), begins=snapshot.facts["begins"]
        )
        run.set_counts(snapshot.facts["number"], snapshot.facts["num_skipped"])
        self.planner.adopt(run.findings)
        self.engine.programs.why_no_xla = self.engine.programs.why_no_xla or run.findings.why_no_xla

    def begin_update(self, run: Run) -> None:
        """Begin an epoch of a single update, with empty sums and metrics."""
        if self._resets_on_the_host or self.planner.empty is None:
            self.begin_epoch(run)
        else:
            run.begin_update()

    def feed(self, run: Run, batches: Batches, *, singly: bool) -> Feed:
        """Return the feed of these batches.

        Args:
            singly: see `FeedSpec`.

        Raises:
            PeerError: the processes differ in code, settings, values or data.
        """
        self._check_processes(partial(data_facts, batches))
        plan = partial(self._program, run, self.planner.wanted(batches, singly=singly))
        cache = FeedCache(self._row_tables, run.data.largest)
        feed = open_feed(
            self.engine.devices, batches, self.planner.room_for_data, plan, self.check, cache
        )
        self.where_data_are = feed.where
        return feed

    def single(self, run: Run, host: Tree) -> tuple[SingleBatches, Block]:
        """Return the feed of single batches, and the block of this batch.

        Raises:
            PeerError: as `feed`.
        """
        self._check_processes(partial(batch_facts, host))
        self.where_data_are = self._single.where
        plan = partial(self._program, run, self.planner.wanted(None))  # not kept: a cycle
        return self._single, self._single.block(
            host, plan, self.check, self.planner.findings.rows_to_fill
        )

    def open_pass(self, batches: Batches, options: EvalOptions, steps: int | None) -> Pass:
        """Return a pass over `steps` of these batches (None: all) in evaluation mode."""
        run = PassRun()
        batches = batches.in_order()
        self._check_processes(partial(data_facts, batches))
        checks_kind, check = self._checks_of(options)
        plan = self.evaluation.plan(run, batches, options, steps, checks_kind)
        room = self.planner.room_for_data
        cache = FeedCache(self.evaluation.row_tables, {})
        return Pass(
            run,
            open_feed(self.evaluation.engine.devices, batches, room, plan, check, cache),
            options,
        )

    def _checks_of(self, options: EvalOptions) -> tuple[CheckKind, Check]:
        return (
            (_accept, _accept)
            if options.predicts or self.steps.tests
            else (self.check_kind, self.check)
        )

    def evaluate_single(self, host: Tree) -> dict[str, Any]:
        """Return the numbers of a single batch in evaluation mode."""
        self._check_processes(partial(batch_facts, host))
        evaluation = self.evaluation
        options = EvalOptions()
        run = PassRun()
        feed = self._single_evaluated
        checks_kind, check = self._checks_of(options)
        self.begin_evaluation(run, options)
        try:
            block = feed.block(host, evaluation.plan(run, None, options, 1, checks_kind), check)
            return self.show_evaluation(*evaluation.send(run, feed, block))
        finally:
            run.end()

    def begin_evaluation(self, run: PassRun, options: EvalOptions) -> None:
        """Begin a pass with the current values; reset Keras' metrics if they may be read."""
        metrics = _NO_METRICS if options.predicts else self.planner.empty
        are_reset = options.one_by_one or self.steps.tests or self._resets_on_the_host
        if metrics is None or (are_reset and not options.predicts):
            metrics = self._empty_metrics()
        run.begin(self.evaluation.state(metrics, options))

    def show_evaluation(self, found: Tensor, block: Block) -> dict[str, Any]:
        """Return the numbers of an evaluation as Keras does, once Keras' metrics have their
        values.
        """
        numbers = self.evaluation.logs(found, block)
        return self._shown(numbers, is_custom=self.steps.tests)

    def _check_processes(self, data: Callable[[], dict[str, str]]) -> None:
        if self.engine.processes.count > 1:
            v = self.variables
            code = code_facts(
                self.model, self.objective, self.context.optimizer, self.context.options
            )
            values = value_facts(self._access.changed_outside([*v.params, *v.slots, *v.buffers]))
            self.engine.processes.check_equal(code | values | data())

    def _program(self, run: Run, wanted: FeedSpec, batch: Batch) -> Program:
        """Return the program for updates like this one; plan and compile it if it is new."""
        self.compilations.num_batches += 1
        program = self.planner.known(batch, wanted)
        if program is None:
            # an interrupt would leave the model half traced
            with named(batch), uninterrupted(twice=False), garbage_kept():
                self.check_kind(batch)
                self.compilations.show("tracing the model")
                update = self.planner.learn(self._whole(self.refresh(run)), batch)
                state = self._whole(self._known(run, update))
                filled = self.planner.filled(Sample(update, state, batch), wanted)
                is_new = (
                    self.planner.is_new(filled.batch, wanted) and not self.engine.programs.is_eager
                )
                with (
                    self.compilations.watched(filled.batch, wanted.num_shapes)
                    if is_new
                    else nullcontext()
                ):
                    program = self.planner.program(batch, filled, wanted)
                run.set_state(self._access.between_programs(state))
        return program

    def _known(self, run: Run, update: Update) -> State:
        """Return the run's state for the update's variables; new ones receive their values of a
        snapshot.
        """
        state = run.state
        known = 0 if run.variables is None else len(run.variables.buffers)
        assert state is not None
        self.context.variables = update.forward.variables
        self._unclaimed = assign_by_path(self._unclaimed, self.variables.buffers[known:], {})
        run.set_state(state, self.variables)
        return (
            state
            if state.sums
            else state._replace(sums=self.engine.devices.place(update.epoch_sums.empty()))
        )

    def check_kind(self, batch: Batch) -> None:
        """Check the parts of a batch of a new kind, before a trace."""
        if self._checks_batches:
            check_parts(self.model, batch.host)
            check_labels_are_numbers(self.model, batch.host)

    def check(self, batch: Batch, program: Program) -> None:
        """Check weights and labels before they are used, by the facts of the program's trace."""
        if self._checks_batches:
            facts = program.forward.facts
            numbers = batch.names
            with named(batch):
                check_weights(
                    batch.host, all_zero=batch.is_resident, divisors=facts.divisors, numbers=numbers
                )
                check_labels(facts.label_ranges, batch.host, numbers)

    # ---- an update ----

    def _inputs_for(self, run: Run, program: Program) -> tuple[State, list]:
        """Return the state that the program spends next, and its captured values."""
        state = self.refresh(run)
        if run.layout is not program.layout:
            if run.begins == GOES_ON:
                check_same_layout(run.layout, program.layout)
            state = state._replace(sums=EpochSums(program.forward).fitting(self.engine, state.sums))
        return state, self._access.captured(program.captured, state)

    def _why(self, run: Run, report: Report, i: int) -> NonFiniteError:
        if self.steps.trains:
            return undone(report, i)
        return diagnose(report.block.program.function, self._whole(self.refresh(run)), report, i)

    def show(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return an epoch's numbers as `keras.Model.fit` does."""
        return self._shown(numbers, is_custom=self.steps.trains)

    def _shown(self, numbers: dict[str, Any], *, is_custom: bool) -> dict[str, Any]:
        """Return the numbers; the metrics' results instead if a custom step returns just them."""
        return (
            read_results(self.model.get_metrics_result(), numbers)
            if is_custom
            else fresh(self.model, numbers)
        )

    def show_update(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers up to an update for a callback, once Keras' metrics have their
        values.
        """
        return numbers if self.steps.trains else self.show(numbers)

    def barrier_at_position(self, feed: Feed) -> None:
        """Wait until all processes have reached the same position in the data."""
        epoch, step = feed.batches.position
        self.engine.processes.barrier(f"stands at batch {step} of epoch {epoch}")


def _forward_passes(
    context: Context, metrics: list[keras.metrics.Metric]
) -> tuple[Forward, Forward]:
    """Return the forward pass of an update, and that of an evaluation."""
    engine = context.engine
    evaluating = Forward(
        context.model,
        context.objective,
        metrics,
        replace(context.variables, slots=[]),  # an evaluation needs none
        training=False,
        freezes_reads=engine.traces.freezes_reads,
    )
    training = replace(
        evaluating,
        variables=context.variables,
        training=True,
        keeps_assigned=engine.optimizer.keeps_assigned,
        draws_by=engine,
    )
    return training, evaluating


def _update_of(context: Context, forward: Forward) -> Update:
    """Return an update by the model's custom step, or by the gradient of the objective."""
    options = context.options
    if context.steps.trains:
        return CustomUpdate(context.engine, forward, context.steps, options.on_nonfinite)
    optimizer = context.optimizer
    dense = options.dense_gradients or is_linear(optimizer)
    return ObjectiveUpdate(
        context.engine,
        forward,
        optimizer,
        on_nonfinite=options.on_nonfinite,
        dense_gradients=dense,
        log=options.log,
    )


def _accept(batch: Batch, program: Program | None = None) -> None:
    """Accept any batch."""
