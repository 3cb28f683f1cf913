"""The executor: compiles the programs of one model, objective and optimizer, sends blocks to them, and commits."""

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import engines, tree
from wholestep.compilations import Compilations
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block
from wholestep.data.feed import Feed, open_feed
from wholestep.data.weights import check_weights
from wholestep.diagnosis import diagnose
from wholestep.engines.protocol import Engine
from wholestep.errors import NonFiniteError
from wholestep.evaluate import Evaluation, Look, Pass
from wholestep.model.compiled import loss_trackers, own_results, resets_on_the_host
from wholestep.model.forward import Forward
from wholestep.model.labels import check_labels
from wholestep.model.losses import CompiledObjective
from wholestep.model.misfit import check_parts, named
from wholestep.model.objective import Objective
from wholestep.plan import MOST_STACKED, MOST_UPDATES, Planner, Program, Wanted
from wholestep.processes.fingerprint import code_facts, data_facts, value_facts
from wholestep.processes.protocol import Processes
from wholestep.repeat import ALONE, EPOCH, GOES_ON, span
from wholestep.report import Report
from wholestep.run import Run
from wholestep.safety.ending import Ending
from wholestep.safety.interrupts import uninterrupted
from wholestep.state import State, Variables
from wholestep.sums import shown
from wholestep.tree import Tensor, Tree
from wholestep.update import Update

_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """How many updates to send in one dispatch: about a tenth of a second's worth. Cannot change a bit of them.

    Several processes send equally many: those that process 0 says, which the others ask for ever more seldom.
    """

    def __init__(self, processes: Processes) -> None:
        self.size = 1
        self._processes = processes
        self._notes = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, num: int) -> None:
        """Take note that `num` updates have just finished."""
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / num, now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / seconds), 8 * self.size, MOST_UPDATES))
            self.size = self._processes.broadcast(size)


def _placed_span(engine: Engine, first: int, num: int, begins: int) -> Tensor:
    return engine.place(span(first, num, begins))


class Options(NamedTuple):
    """What a user may say of how updates are carried out."""

    microbatch_size: int | str
    memory_limit: int | None
    on_nonfinite: str
    replicas: int | str | None = None
    jit_compile: bool | str = "auto"


class Executor:
    """Everything that is compiled for one model, objective and optimizer.

    Args:
        metrics: the Keras metrics whose state is carried.
        pads: whether every one of them can be told to leave rows out; None if that must be tried.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        optimizer: keras.optimizers.Optimizer | None,
        metrics: list[keras.metrics.Metric],
        pads: bool | None,
        options: Options,
    ):
        self.engine = engine = engines.choose(optimizer, model, options.replicas, options.jit_compile)
        self.model = model
        self.objective = objective
        self.optimizer: keras.optimizers.Optimizer = optimizer  # there need not be one to evaluate
        self.options = options
        self.metrics = [*metrics, *loss_trackers(model).values()]
        slots = [] if optimizer is None else optimizer.variables
        held = [v for metric in self.metrics for v in metric.variables]
        self.variables = Variables(model.trainable_variables, slots, model.non_trainable_variables, held)
        reads = {"freezes_reads": engine.freezes_reads}
        assigns = {"keeps_assigned": engine.keeps_assigned}
        self.forward = Forward(model, objective, metrics, self.variables, training=True, **reads, **assigns)
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scales = dynamic or getattr(optimizer, "loss_scale_factor", None) is not None
        self.update = Update(
            engine,
            self.forward,
            scales=scales,
            guards_gradients=not dynamic,
            stops=options.on_nonfinite == "raise",
        )
        self.planner = Planner(engine, self.update, options.microbatch_size, options.memory_limit, pads)
        watching = Forward(model, objective, metrics, self.variables, training=False, **reads)
        self.evaluation = Evaluation(engine.for_evaluation(), watching)
        self.compilations = Compilations()
        self.dispatch_size = DispatchSize(engine.processes)
        self.unread: Report | None = None
        self.where_data_are = ""
        self._resets_on_the_host = any(map(resets_on_the_host, metrics))
        self._sizes: dict[tuple, list[int]] = {}
        self._tables: dict = {}
        self._ending: Ending | None = None
        self._latest: Callable[[], Report | None] = lambda: None
        self._iterations: Any = None
        # Kept on the device: a loop of single updates asks for the same ones in every epoch.
        self._span = lru_cache(maxsize=1024)(partial(_placed_span, engine))

    def be_quiet(self, is_quiet: bool) -> None:
        """Say nothing of programs that take long to compile, or say it, in the first process."""
        is_quiet = is_quiet or self.engine.processes.index > 0
        self.compilations.is_quiet = self.evaluation.compilations.is_quiet = is_quiet

    # ---- before an update ----

    def refresh(self, run: Run) -> State:
        """Let the run hold the values of the Keras variables, which anybody may have changed, and return its state."""
        if run.state is None or run.variables is not self.variables:
            scratch = np.zeros(self.update.num_scratch, np.int32) if self.update.num_scratch else ()
            sums = self.update.epoch_sums.empty() if self.forward.is_traced else ()
            sums, stopped, scratch = self.engine.place((sums, np.int32(0), scratch))
            state = State([], [], [], self.engine.read_metrics(self.variables), sums, stopped, scratch)
            run.state, run.variables = self.engine.at_rest(self._whole(state)), self.variables
        elif not self.engine.holds(self.variables, run.state):
            run.state = self._whole(run.state)
        return run.state

    def _whole(self, state: State) -> State:
        params, slots, buffers = self.engine.read_variables(self.variables)
        return state._replace(params=params, slots=slots, buffers=buffers)

    def begin_epoch(self, run: Run) -> None:
        """Let the sums and the metrics be empty from the next update on, and Keras' metrics from now on."""
        self.refresh(run)
        for metric in self.metrics:
            metric.reset_state()
        if not self.update.empty_metrics:
            self.update.empty_metrics = [np.array(np.asarray(v)) for v in self.variables.metrics]
        assert run.state is not None
        run.state = run.state._replace(metrics=self.engine.read_metrics(self.variables))
        run.begins = EPOCH

    def begin_update_in_hand(self, run: Run) -> None:
        """Let the sums and the metrics be empty for the next update, which is an epoch of its own."""
        if self._resets_on_the_host or not self.update.empty_metrics:
            self.begin_epoch(run)
        else:
            run.begins = ALONE

    def feed(self, run: Run, batches: Batches) -> Feed:
        """Return the way of these batches to the device.

        Raises:
            PeerError: the processes of a run do not begin alike.
        """
        self._check_processes(batches)
        is_resident = batches.arrays is not None and not batches.shapes
        stacks = self.engine.loops_once and self.engine.num_replicas == 1
        most = len(batches) if is_resident else MOST_STACKED if stacks else 1
        wanted = Wanted(batches.comes_short, most, len(batches.shapes))
        plan = partial(self._program, run, wanted)
        feed = open_feed(self.engine, batches, self.planner.room_for_data, plan, self.check, self._tables)
        self.where_data_are = feed.where
        return feed

    def open_pass(self, batches: Batches, look: Look) -> Pass:
        """Return a way through these batches in evaluation mode."""
        run, batches = Run(), batches.in_order()
        self._check_processes(batches)
        plan, room = self.evaluation.plan(run, batches, look), self.planner.room_for_data
        check = (lambda batch: None) if look.predicts else self.check
        return Pass(run, open_feed(self.evaluation.engine, batches, room, plan, check, {}), look)

    def begin_evaluation(self, run: Run, through: Pass) -> None:
        """Let a pass begin with the first batch, with the values of the variables as they are, and empty sums."""
        engine, evaluation, state = self.evaluation.engine, self.evaluation, self._whole(self.refresh(run))
        metrics = []
        if not through.look.predicts:
            for metric in self.metrics:
                metric.reset_state()
            metrics = [np.array(np.asarray(v)) for v in self.variables.metrics]
        sums = evaluation.epoch_sums.empty() if evaluation.forward.is_traced and not through.look.predicts else ()
        metrics, sums, stopped = engine.place((metrics, sums, np.int32(0)))
        through.run.state = state._replace(metrics=metrics, sums=sums, stopped=stopped, scratch=[])
        through.run.number = 0
        through.feed.batches.rewind()

    def show_evaluation(self, found: Tree, i: int) -> dict[str, Any]:
        """Return the numbers of an evaluation as Keras does. Its metrics hold theirs already."""
        return self.show(self.evaluation.logs(found, i))

    def _check_processes(self, batches: Batches) -> None:
        if self.engine.processes.count > 1:
            v = self.variables
            code = code_facts(self.model, self.objective, self.optimizer, self.options)
            values = value_facts(self.engine.changed_outside([*v.params, *v.slots, *v.buffers]))
            self.engine.processes.check_equal(code | values | data_facts(batches))

    def _program(self, run: Run, wanted: Wanted, batch: Batch) -> Program:
        """Return the program for updates such as this one; the first one is planned and compiled."""
        self.compilations.num_batches += 1
        program = self.planner.known(batch, wanted)
        if program is None:
            with named(batch):
                state = self._caught_up(self.planner.learn(self._whole(self.refresh(run)), batch))
                filled = self.planner.filled(state, batch, wanted)
                is_new = self.planner.is_new(filled, wanted)
                with self.compilations.watched(filled, wanted.num_shapes) if is_new else nullcontext():
                    program = self.planner.program(state, batch, filled, wanted)
                state = self._caught_up(state)
                sums = state.sums or self.engine.place(self.update.epoch_sums.empty())
                run.state = self.engine.at_rest(state._replace(sums=sums, captured=()))
        return program

    def _caught_up(self, state: State) -> State:
        """Return the state with what was found to be assigned, and so to be state, since it was taken."""
        return state if len(state.buffers) == len(self.variables.buffers) else self._whole(state)

    def check(self, batch: Batch) -> None:
        """Look at weights and labels before they are used. Needs a trace."""
        objective = self.objective
        if isinstance(objective, CompiledObjective):
            with named(batch):
                check_parts(self.model, batch.host)
                check_weights(batch.host, all_zero=batch.is_resident, divisors=objective.divisors, numbers=batch.names)
                check_labels(objective.label_ranges, batch.host, batch.names)

    # ---- an update ----

    def send(self, run: Run, feed: Feed, block: Block) -> Report:
        """Send one block of updates to the device. Spends the run's state; waits for nothing.

        The Keras variables hold the new state, and the run and the batches stand behind the block, or nothing has
        happened; only if the program itself fails, what it spent is lost.
        """
        engine, program, first, last = self.engine, block.program, run.number + 1, run.number + block.num
        state = self.refresh(run)
        captured = engine.read_captured(program.captured, state)
        which = self._span(block.first, block.num, run.begins)
        with engine.processes.dispatching(f"computing update {first}"), uninterrupted():
            state, reports = program.call(state, captured, block.data, *block.table.placed, which)
            engine.write_variables(self.variables, state)
            run.state, run.number, run.begins = state, last, GOES_ON
            feed.batches.position = block.end
        report = Report(engine, self.update.epoch_sums.layout, reports, block, first)
        self._iterations = self.optimizer.iterations.value
        self._latest = weakref.ref(report)  # weakly, not to keep its batch
        engine.processes.set_status(f"at work after update {last} (reading data, or in a callback)")
        return report

    @property
    def was_moved(self) -> bool:
        """Whether somebody else has moved the optimizer since this executor has, as far as its variable tells.

        On TensorFlow it does not: it is one object for good, and reading its value would wait for the device.
        """
        return self._iterations is not self.optimizer.iterations.value

    def recount(self, run: Run) -> None:
        """Let the run's number be the optimizer's `iterations`, and what was left out. Waits."""
        if (latest := self._latest()) is not None and self.options.on_nonfinite == "skip":
            self.note_failures(run, latest)
        run.number = int(np.asarray(self.optimizer.iterations)) + run.num_skipped
        self._iterations = self.optimizer.iterations.value

    def show(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return an epoch's numbers as `keras.Model.fit` does. Keras' metrics hold theirs already."""
        logs = shown(numbers)
        own = own_results(self.model) if logs is not numbers else {}
        # Read again, as Keras does: it may look at what is no part of the program, such as the learning rate.
        fresh = {name: np.asarray(value).copy() for name, value in own.items()}
        same = fresh.keys() == logs.keys()
        return {name: value if value.ndim else float(value) for name, value in fresh.items()} if same else logs

    def meet(self, feed: Feed) -> None:
        """Wait until all processes have come to the same place in the data."""
        epoch, step = feed.batches.position
        self.engine.processes.barrier(f"stands at batch {step} of epoch {epoch}")

    # ---- a batch in hand ----

    def rows_to_fill(self, host: Tree) -> int:
        """Return to how many rows a batch in hand may be filled up: to those of one before it, or to a power of two.

        So batches of ever other sizes are few programs.
        """
        count = tree.num_rows(host)
        shape = tuple((leaf.shape[1:], leaf.dtype) for leaf in tree.leaves(host))
        known, power = self._sizes.setdefault(shape, []), 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if not fitting:
            fitting = [power if known else count]
            known.extend(fitting)
        return min(fitting)

    def hand_over(self, run: Run, report: Report) -> None:
        """Keep the report of an update in hand until somebody asks for it; told at the end, if nobody does."""
        self.unread = report
        if self.engine.processes.count == 1 and self.options.on_nonfinite == "raise":
            self._ending = self._ending or Ending(self, run)
            self._ending.last = report.first, report.verdict

    def settle(self, run: Run, report: Report | None = None) -> None:
        """Make sure that the last update in hand was applied, if nobody has read its numbers yet.

        Args:
            report: of which update; None for whichever was the last.

        Raises:
            NonFiniteError: it was not applied.
        """
        if self.unread is None or report not in (None, self.unread):
            return
        last, self.unread = self.unread, None
        if self._ending is not None:
            self._ending.last = None
        if self.note_failures(run, last) is not None:
            last.error = self.failure(run, last, 0)
            raise last.error

    # ---- what went wrong ----

    def note_failures(self, run: Run, report: Report) -> int | None:
        """Count the updates that were left out; return the first failed one if that ends the run."""
        if self.options.on_nonfinite == "raise":
            if (failed := report.first_failure) is not None:
                run.number = report.first + failed - 1
            return failed
        run.num_skipped += 0 if report.is_noted else report.num_failures
        report.is_noted = True
        return None

    def note_skipped(self, run: Run, reports: Iterable[Report]) -> None:
        """Count what was left out of updates that nobody has looked at, if anything may be. Waits for the last."""
        if self.options.on_nonfinite == "skip":
            for report in reports:
                self.note_failures(run, report)

    def failure(self, run: Run, report: Report, i: int) -> NonFiniteError:
        """Return the error that says why update i of a dispatch was not applied. The run stands before it."""
        return diagnose(self.update, self._whole(self.refresh(run)), report, i)
