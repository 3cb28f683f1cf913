"""The compiled side of a trainer: variables, forward functions, programs, and one dispatch of them."""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import engines, tree
from wholestep.compilations import Compilations
from wholestep.compiled import CompiledObjective, check_labels, loss_trackers, own_results, tracked
from wholestep.data.batches import Batches, check_weights
from wholestep.data.feed import Block, Feed, open_feed, pad_to, stage
from wholestep.diagnosis import look, unsound
from wholestep.embeddings import Lookups
from wholestep.ending import Ending
from wholestep.errors import NonFiniteError, message
from wholestep.evaluate import Evaluation
from wholestep.forward import Forward
from wholestep.interrupts import uninterrupted
from wholestep.misfit import check_parts, named
from wholestep.objective import Objective
from wholestep.plan import Planner
from wholestep.processes.fingerprint import code_facts, data_facts, value_facts
from wholestep.report import Report
from wholestep.state import State, Variables
from wholestep.sums import shown
from wholestep.terms import Mean
from wholestep.update import Update

_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """How many updates to send in one dispatch: about a tenth of a second's worth. Cannot change a bit of them.

    Several processes send equally many: those that process 0 says, which the others ask for ever more seldom.
    """

    def __init__(self, processes: Any) -> None:
        self.size = 1
        self._processes = processes
        self._notes = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, num: int, most: int) -> None:
        """Take note that `num` updates have just finished, of a program that takes `most` in a dispatch."""
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / num, now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / seconds), 8 * self.size, most))
            self.size = self._processes.broadcast(size)


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
        optimizer: Any,
        metrics: list,
        pads: bool | None,
        options: Options,
    ):
        self.engine = engines.choose(optimizer, model, options.replicas, options.jit_compile)
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.options = options
        self.metrics = metrics
        slots = [] if optimizer is None else optimizer.variables
        metric_variables = [v for metric in metrics for v in metric.variables]
        self.variables = Variables(model.trainable_variables, slots, model.non_trainable_variables, metric_variables)
        engine = self.engine
        reads = {"freezes_reads": engine.freezes_reads}
        assigns = {"keeps_assigned": engine.keeps_assigned}
        self.forward = Forward(model, objective, metrics, self.variables, training=True, **reads, **assigns)
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scales = dynamic or getattr(optimizer, "loss_scale_factor", None) is not None
        self.update = Update(
            self.engine,
            self.forward,
            scales=scales,
            guards_gradients=not dynamic,
            stops=options.on_nonfinite == "raise",
        )
        self.planner = Planner(self.engine, self.update, options.microbatch_size, options.memory_limit, pads)
        watching = Forward(model, objective, metrics, self.variables, training=False, **reads)
        self.evaluation = Evaluation(self.engine.for_evaluation(), watching)
        self.compilations = Compilations()
        self.num_skipped = 0
        self.dispatch_size = DispatchSize(self.engine.processes)
        self._checked: Any = None
        self._sizes: dict[tuple, list[int]] = {}
        self.unread: Report | None = None
        self._ending: Ending | None = None
        self._latest: Callable[[], Report | None] = lambda: None
        self._metrics_are_its = False
        self.last = 0
        self._iterations: Any = None
        self.where_data_are = ""

    def be_quiet(self, is_quiet: bool) -> None:
        """Say nothing of programs that take long to compile, or say it, in the first process."""
        is_quiet = is_quiet or self.engine.processes.index > 0
        self.compilations.is_quiet = self.evaluation.compilations.is_quiet = is_quiet

    # ---- state ----

    def read_state(self, state: State | None = None) -> State:
        """Return the Keras variables' values as a State; the sums of the epoch are those of `state`, or none yet."""
        params, slots, buffers = self.engine.read_variables(self.variables)
        if state is None:
            stopped, scratch = self.engine.place((np.int32(0), np.zeros(self.update.num_scratch, np.int32)))
            return State(params, slots, buffers, self._metrics(), (), stopped, scratch)
        return state._replace(params=params, slots=slots, buffers=buffers)

    def begin_epoch(self, state: State) -> State:
        """Return the state with empty sums and metrics."""
        sums = self.engine.place(self.update.epoch_sums.empty()) if self.forward.is_traced else ()
        stopped = self.engine.place(np.int32(0))
        return state._replace(metrics=self._empty_metrics(), sums=sums, stopped=stopped)

    def show(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Let Keras' loss trackers hold an epoch's numbers, and return them as `keras.Model.fit` does.

        The metrics' own variables hold theirs already.
        """
        self._track(numbers)
        logs = shown(numbers)
        own = own_results(self.model) if logs is not numbers else {}
        # Read again, as Keras does: it may look at what is no part of the program, such as the learning rate.
        fresh = {name: np.asarray(value).copy() for name, value in own.items()}
        same = fresh.keys() == logs.keys()
        return {name: value if value.ndim else float(value) for name, value in fresh.items()} if same else logs

    def _track(self, numbers: dict[str, Any]) -> None:
        for variable, value in tracked(self.model, numbers):
            variable.assign(value)

    def track(self, report: Report) -> None:
        """Let Keras' loss trackers hold an update's numbers, if the metrics do: if none was sent after it."""
        if self._latest() is report and self._metrics_are_its and not self.was_moved:
            self._track(report.numbers(0))

    def show_evaluation(self, state: State, report: Any) -> dict[str, Any]:
        """Do the same of an evaluation, and let the metrics' variables hold theirs."""
        self.evaluation.engine.write_metrics(self.variables, state.metrics)
        return self.show(self.evaluation.logs(report))

    def _empty_metrics(self) -> list:
        self._metrics_are_its = False
        for metric in (*self.metrics, *loss_trackers(self.model).values()):
            metric.reset_state()
        return self._metrics()

    def _metrics(self) -> list:
        # Copies, as the state is spent; by asarray, as np.array asks a variable for a copy, which warns.
        return self.engine.place([np.asarray(v).copy() for v in self.variables.metrics])

    # ---- dispatch ----

    def feed(self, batches: Batches, *, evaluates: bool = False) -> Feed:
        """Return the way of these batches to the device.

        Raises:
            PeerError: the processes of a run do not begin alike.
        """
        if self.engine.processes.count > 1:
            v = self.variables
            code = code_facts(self.model, self.objective, self.optimizer, self.options)
            values = value_facts(self.engine.changed_outside([*v.params, *v.slots, *v.buffers]))
            self.engine.processes.check_equal(code | values | data_facts(batches))
        feed = open_feed(self.evaluation.engine if evaluates else self.engine, batches, self.planner.room_for_data)
        self.where_data_are = self.where_data_are if evaluates else feed.where
        return feed

    def dispatch(self, state: State, feed: Feed, block: Block, first: int) -> tuple[State, Report]:
        """Send one block of updates, the first of this number, to the device. Spends the state; waits for nothing.

        The Keras variables hold the new state, and the batches stand behind the block, or nothing has happened; only
        if the program itself fails, what it spent is lost.
        """
        with named(block):
            return self._dispatch(state, feed, block, first)

    def _dispatch(self, state: State, feed: Feed, block: Block, first: int) -> tuple[State, Report]:
        planner, batches, processes = self.planner, feed.batches, self.engine.processes
        processes.set_status(f"preparing update {first}")
        state = self._caught_up(planner.learn(state, block))
        short, is_short = batches.comes_short, block.rows.shape[1] < block.full
        # The short batch of a bucket may be one row, which tells nothing of others: ask before it comes.
        asks = is_short or (short and batches.shapes)
        if asks and planner.padding_is_exact(state, block) and is_short:
            block = pad_to(self.engine, block, block.full)
        key = block.full, int(block.counts[0])
        if block.own is not None:
            known = planner.known(block, short=short, most=feed.most)
            if (
                known is None or known.cut != feed.cuts[key]
            ):  # a plan, and another cut, want other rows than were loaded
                block = block._replace(host=batches.load(*block.start), own=None)
        is_new = planner.known(block, short=short, most=feed.most) is None
        with self.compilations.watched(block, is_new=is_new, num_shapes=len(batches.shapes)):
            program = planner.program(state, block, short=short, most=feed.most)
        state = self._caught_up(state)
        state = state if state.sums else self.begin_epoch(state)
        self.check(block)
        feed.cuts.setdefault(key, program.cut)
        data, rows = stage(self.engine, block, program.cut)
        rows, counts = _stack(rows, program.length), _stack(block.counts, program.length)
        arguments = self.engine.numbers(rows, counts, np.int32(len(block.counts)))
        captured = self.engine.read_captured(program.captured, state)
        with processes.dispatching(f"computing update {first}"), uninterrupted():
            state, reports = program.call(state._replace(captured=()), captured, data, *arguments)
            self.engine.write_variables(self.variables, state)
            batches.position = block.end
        report = Report(self.engine, self.update.epoch_sums.layout, reports, block, first, program)
        self.last, self._iterations = first + len(block.counts) - 1, self.optimizer.iterations.value
        self._latest, self._metrics_are_its = weakref.ref(report), True  # weakly, not to keep its batch
        processes.set_status(f"at work after update {self.last} (reading data, or in a callback)")
        return state, report

    @property
    def was_moved(self) -> bool:
        """Whether somebody else has moved the optimizer since this executor has, as far as its variable tells.

        On TensorFlow it does not: it is one object for good, and reading its value would wait for the device.
        """
        return self._iterations is not self.optimizer.iterations.value

    def recount(self) -> int:
        """Return the number of the last update: the optimizer's `iterations`, and what was left out. Waits."""
        if (latest := self._latest()) is not None and self.options.on_nonfinite == "skip":
            self.note_failures(latest)
        self.last = int(np.asarray(self.optimizer.iterations)) + self.num_skipped
        self._iterations = self.optimizer.iterations.value
        return self.last

    def _caught_up(self, state: State) -> State:
        """Return the state with what was found to be assigned, and so to be state, since it was taken."""
        return state if len(state.buffers) == len(self.variables.buffers) else self.read_state(state)

    def check(self, block: Block) -> None:
        """Look at weights and labels before they are used: arrays once, loaded batches each. Needs a trace."""
        objective = self.objective
        if not isinstance(objective, CompiledObjective) or (block.is_resident and self._checked is block.host):
            return
        numbers = _names(block)
        with named(block):
            check_parts(self.model, block.host)
            check_weights(block.host, all_zero=block.is_resident, divisors=objective.divisors, numbers=numbers)
            check_labels(objective.label_ranges, block.host, numbers)
        self._checked = block.host if block.is_resident else None

    # ---- several processes ----

    def meet(self, feed: Feed) -> None:
        """Wait until all processes have come to the same place in the data."""
        epoch, step = feed.batches.position
        self.engine.processes.barrier(f"stands at batch {step} of epoch {epoch}")

    # ---- a batch in hand ----

    def rows_to_fill(self, host: Any) -> int:
        """Return to how many rows a batch in hand may be filled up: to those of one before it, or to a power of two.

        So batches of ever other sizes are few programs.
        """
        count = tree.num_rows(host)
        shape = tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in tree.leaves(host))
        known, power = self._sizes.setdefault(shape, []), 1 << (count - 1).bit_length()
        fitting = [size for size in known if count <= size <= 2 * power]
        if not fitting:
            fitting = [power if known else count]
            known.extend(fitting)
        return min(fitting)

    def hand_over(self, report: Report) -> None:
        """Keep the report of an update in hand until somebody asks for it; told at the end, if nobody does."""
        self.unread = report
        if self.engine.processes.count == 1 and self.options.on_nonfinite == "raise":
            self._ending = self._ending or Ending(self)
            self._ending.last = report.first, report.verdict

    def settle(self, report: Report | None = None) -> None:
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
        if self.note_failures(last) is not None:
            last.error = self.failure(self.read_state(), last, 0)
            raise last.error

    # ---- what went wrong ----

    def note_failures(self, report: Report) -> int | None:
        """Count the updates that were left out; return the first failed one if that ends the run."""
        if self.options.on_nonfinite == "raise":
            return report.first_failure
        self.num_skipped += 0 if report.is_noted else report.num_failures
        report.is_noted = True
        return None

    def failure(self, state: State, report: Report, i: int) -> NonFiniteError:
        """Return the error that says why update i of a dispatch was not applied. The state is the one before it."""
        block, number = report.block, report.first + i
        count, cut = int(block.counts[i]), report.program.cut
        names = block.rows[i][:count] if block.ids[i] is None else block.ids[i]
        lookups = Lookups(self.update.tables, self.engine)

        def by_row(state: State, data: Any, rows: Any) -> tuple:
            pieces = [self.engine.batch(data, rows[start : start + size]) for start, size in cut.pieces]
            batch = tree.map_leaves(lambda *leaves: keras.ops.concatenate(leaves)[:count], *pieces)
            params = self.engine.params(state)
            found = self.forward.rows(params, state.buffers, state.metrics, batch, lookups=lookups)
            return found, look(self.engine, self.variables, state)

        data, rows = stage(self.engine, block, cut)
        arguments = (state, data, self.engine.place(rows[i]))
        found, before = self.engine.fetch(self.engine.compile(by_row, arguments, spends=False)(*arguments))
        reasons, bad = [], np.zeros((0,), int)
        for label, (values, weights) in found.values.items():
            rows_of_term = np.flatnonzero(~np.isfinite(values)) if len(values) == count else np.zeros((0,), int)
            bad = np.union1d(bad, rows_of_term)
            name = f"term {label!r}" if label else "the loss"
            if rows_of_term.size:
                reasons.append(f"{name} is not finite in rows {_few(_numbers(names, rows_of_term))}")
            elif self.forward.facts[label].kind is Mean and np.sum(weights) == 0:
                reasons.append(f"the weights of {name} sum to zero")
        reasons = reasons or ["the gradient is not finite, though every row's loss is"]
        attempt = 'look at these rows, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip").'
        if paths := unsound(self.variables, before, are_rows_left=bad.size < count):
            verb = "is" if len(paths) == 1 else "are"
            reasons, bad = [f"{_few(paths)} {verb} not finite, before this update already: no row is to blame"], bad[:0]
            attempt = "look at what set the weights before: a file, an assignment, a learning rate that is too high."
        told = message(
            f"Update {number} must have a finite loss and gradient. It was not applied; the weights are those after "
            f"update {number - 1}.",
            "; ".join(reasons),
            attempt,
        )
        return NonFiniteError(told, number, tuple(_numbers(names, bad.astype(int))))


def _names(block: Block) -> np.ndarray | None:
    """Return what the rows that a block holds are called; None for their places."""
    if block.is_resident or block.ids[0] is None:
        return block.own
    return block.ids[0] if block.own is None else block.ids[0][block.own]


def _stack(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


def _numbers(names: np.ndarray, places: np.ndarray) -> list[int]:
    """Return the numbers of the user's rows at these places of an update; a packed row is several of them."""
    return [int(row) for place in places for row in np.atleast_1d(names[place])]


def _few(names: list) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
