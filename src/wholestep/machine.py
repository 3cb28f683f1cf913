"""The compiled side of a trainer: variables, forward functions, programs, and one dispatch of them."""

import time
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep import engines, tree
from wholestep.alike import facts_of_code, facts_of_data, facts_of_values
from wholestep.batches import Batches, check_weights
from wholestep.compiled import CompiledObjective, check_labels
from wholestep.errors import NonFiniteError, say
from wholestep.evaluate import Evaluation
from wholestep.feed import Block, Feed, arrange, fill, open_feed
from wholestep.forward import Forward
from wholestep.interrupts import uninterrupted
from wholestep.mean import Mean
from wholestep.objective import Objective
from wholestep.plan import Planner, Program
from wholestep.state import State, Variables
from wholestep.step import APPLIED, OWN_LOSS, Step
from wholestep.tables import Lookups
from wholestep.tally import Layout

_SECONDS_PER_DISPATCH = 0.1


class Report:
    """The numbers of one dispatch. Reading them waits for the device; nothing else does."""

    def __init__(self, engine: Any, layout: Layout, values: Any, block: Block, first: int, program: Program):
        self.block = block
        self.first = first
        self.program = program
        self._engine = engine
        self._layout = layout
        self._on_device = values

    @cached_property
    def values(self) -> np.ndarray:
        """One row of packed logs for each update that was sent."""
        values = self._engine.fetch(self._on_device)
        self._on_device = None
        return values[: len(self.block.counts)]

    @property
    def first_failure(self) -> int | None:
        """The first of the updates that was not applied, if any."""
        failed = np.flatnonzero(self.values[:, -1] != 1)
        return int(failed[0]) if failed.size else None

    @property
    def num_failures(self) -> int:
        """How many of the updates were not applied."""
        return int(np.sum(self.values[:, -1] != 1))

    def logs(self, i: int) -> dict[str, Any]:
        """Return what callbacks see of update i: the loss and the metrics over the epoch so far."""
        logs = self._layout.unpack(self.values[i])
        return {k: v for k, v in logs.items() if k not in (OWN_LOSS, APPLIED)}

    def loss(self, i: int) -> float:
        """Return the loss of update i alone."""
        return self._layout.unpack(self.values[i])[OWN_LOSS]


class Pace:
    """How many updates to send in one dispatch: about a tenth of a second's worth. Cannot change a bit of them.

    Several processes send equally many: those that process 0 says, which the others ask for ever more seldom.
    """

    def __init__(self, peers: Any) -> None:
        self.size = 1
        self._peers = peers
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
        if self._peers.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / seconds), 8 * self.size, most))
            self.size = self._peers.share(size)


class Options(NamedTuple):
    """What a user may say of how updates are carried out."""

    microbatch_size: int | str
    memory_limit: int | None
    on_nonfinite: str
    replicas: int | str | None = None


class Machine:
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
        self.engine = engines.choose(optimizer, model, options.replicas)
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.options = options
        self.metrics = metrics
        slots = [] if optimizer is None else optimizer.variables
        metric_variables = [v for metric in metrics for v in metric.variables]
        self.variables = Variables(model.trainable_variables, slots, model.non_trainable_variables, metric_variables)
        self.forward = Forward(model, objective, metrics, self.variables, training=True)
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scales = dynamic or getattr(optimizer, "loss_scale_factor", None) is not None
        self.step = Step(
            self.engine,
            self.forward,
            scales=scales,
            guards_gradients=not dynamic,
            stops=options.on_nonfinite == "raise",
        )
        self.planner = Planner(self.engine, self.step, options.microbatch_size, options.memory_limit, pads)
        watching = Forward(model, objective, metrics, self.variables, training=False)
        self.evaluation = Evaluation(self.engine.alone(), watching)
        self.num_skipped = 0
        self.pace = Pace(self.engine.peers)
        self._checked: Any = None

    # ---- state ----

    def take(self, state: State | None = None) -> State:
        """Return the Keras variables' values as a State; the sums of the epoch are those of `state`, or none yet."""
        params, slots, buffers = self.engine.take(self.variables)
        if state is None:
            stopped, marks = self.engine.place((np.int32(0), np.zeros(self.step.num_marks, np.int32)))
            return State(params, slots, buffers, self._empty_metrics(), (), stopped, marks)
        return state._replace(params=params, slots=slots, buffers=buffers)

    def begin_epoch(self, state: State) -> State:
        """Return the state with empty sums and metrics."""
        sums = self.engine.place(self.step.tally.empty()) if self.forward.facts else ()
        stopped = self.engine.place(np.int32(0))
        return state._replace(metrics=self._empty_metrics(), sums=sums, stopped=stopped)

    def _empty_metrics(self) -> list:
        for metric in self.metrics:
            metric.reset_state()
        return self.engine.place([keras.ops.convert_to_numpy(v) for v in self.variables.metrics])

    # ---- dispatch ----

    def feed(self, batches: Batches, *, evaluates: bool = False) -> Feed:
        """Return the way of these batches to the device.

        Raises:
            PeerError: the processes of a run do not begin alike.
        """
        if self.engine.peers.count > 1:
            v = self.variables
            code = facts_of_code(self.model, self.objective, self.optimizer, self.options)
            values = facts_of_values(self.engine.foreign([*v.params, *v.slots, *v.buffers]))
            self.engine.peers.agree(code | values | facts_of_data(batches))
        return open_feed(self.evaluation.engine if evaluates else self.engine, batches, self.planner.limit // 2)

    def dispatch(self, state: State, feed: Feed, block: Block, first: int) -> tuple[State, Report]:
        """Send one block of updates, the first of this number, to the device. Spends the state; waits for nothing.

        The Keras variables hold the new state, and the batches stand behind the block, or nothing has happened; only
        if the program itself fails, what it spent is lost.
        """
        planner, batches, peers = self.planner, feed.batches, self.engine.peers
        peers.at(f"preparing update {first}")
        short, is_short = batches.comes_short, block.rows.shape[1] < block.full
        # The short batch of a bucket may be one row, which tells nothing of others: ask before it comes.
        asks = is_short or (short and batches.shapes)
        if asks and planner.may_pad(state, block) and is_short:
            block = fill(self.engine, block, block.full)
        key = block.full, int(block.counts[0])
        if block.own is not None:
            known = planner.known(block, short=short, most=feed.most)
            if (
                known is None or known.cut != feed.cuts[key]
            ):  # a plan, and another cut, want other rows than were loaded
                block = block._replace(host=batches.load(*block.place), own=None)
        program = planner.program(state, block, short=short, most=feed.most)
        state = state if state.sums else self.begin_epoch(state)
        self.check(block)
        feed.cuts.setdefault(key, program.cut)
        data, rows = arrange(self.engine, block, program.cut)
        rows, counts = _stack(rows, program.length), _stack(block.counts, program.length)
        arguments = self.engine.place((rows, counts, np.int32(len(block.counts))))
        with peers.dispatching(f"computing update {first}"), uninterrupted():
            state, reports = program.call(state, data, *arguments)
            self.engine.give(self.variables, state)
            batches.position = block.position
        last = first + len(block.counts) - 1
        peers.at(f"at work after update {last} (reading data, or in a callback)")
        return state, Report(self.engine, self.step.tally.layout, reports, block, first, program)

    def check(self, block: Block) -> None:
        """Look at weights and labels before they are used: arrays once, loaded batches each."""
        if block.is_resident and self._checked is block.host:
            return
        check_weights(block.host, all_zero=block.is_resident, numbers=block.own)
        if isinstance(self.objective, CompiledObjective):
            check_labels(self.objective.label_ranges, block.host)
        self._checked = block.host if block.is_resident else None

    # ---- several processes ----

    def meet(self, feed: Feed) -> None:
        """Wait until all processes have come to the same place in the data."""
        epoch, step = feed.batches.position
        self.engine.peers.meet(f"stands at batch {step} of epoch {epoch}")

    # ---- what went wrong ----

    def note_failures(self, report: Report) -> int | None:
        """Count the updates that were left out; return the first failed one if that ends the run."""
        if self.options.on_nonfinite == "raise":
            return report.first_failure
        self.num_skipped += report.num_failures
        return None

    def failure(self, state: State, report: Report, i: int) -> NonFiniteError:
        """Return the error that says why update i of a dispatch was not applied. The state is the one before it."""
        block, number = report.block, report.first + i
        count, cut = int(block.counts[i]), report.program.cut
        names = block.rows[i][:count] if block.ids[i] is None else block.ids[i]
        lookups = Lookups(self.step.tables, self.engine)

        def by_row(state: State, data: Any, rows: Any) -> Any:
            pieces = [self.engine.batch(data, rows[start : start + size]) for start, size in cut.pieces]
            batch = tree.map_leaves(lambda *leaves: keras.ops.concatenate(leaves)[:count], *pieces)
            params = self.engine.params(state)
            return self.forward.rows(params, state.buffers, state.metrics, batch, lookups=lookups)

        data, rows = arrange(self.engine, block, cut)
        arguments = (state, data, self.engine.place(rows[i]))
        found = self.engine.fetch(self.engine.compile(by_row, arguments, spends=False)(*arguments))
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
        message = say(
            f"Update {number} must have a finite loss and gradient. It was not applied; the weights are those after "
            f"update {number - 1}.",
            "; ".join(reasons),
            'look at these rows, lower the learning rate, clip gradients, or pass Trainer(on_nonfinite="skip").',
        )
        return NonFiniteError(message, number, tuple(_numbers(names, bad.astype(int))))


def _stack(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


def _numbers(names: np.ndarray, places: np.ndarray) -> list[int]:
    """Return the numbers of the user's rows at these places of an update; a packed row is several of them."""
    return [int(row) for place in places for row in np.atleast_1d(names[place])]


def _few(rows: list[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
