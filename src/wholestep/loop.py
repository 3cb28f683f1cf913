"""The loop: a block of updates goes to the device, and the numbers of the one before are read while it works."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import keras

from wholestep.batches import Batches
from wholestep.callbacks import Watch
from wholestep.errors import BatchError, say
from wholestep.evaluate import join
from wholestep.feed import Feed, Loaded
from wholestep.guards import Guard
from wholestep.machine import Machine
from wholestep.report import Report
from wholestep.state import State
from wholestep.tally import OWN, shown


def run_epoch(
    machine: Machine, state: State, feed: Feed, num: int | None, first: int, watch: Watch, *, once: bool
) -> tuple[State, dict]:
    """Carry out `num` updates (None: to the end of the epoch); return the state and the logs of the last one.

    The Keras variables hold the state after every dispatch, so also when this ends, however it ends.

    Args:
        once: whether fewer than `num` are carried out where the pass over the data ends before.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    run = _run_watched if watch.needs_state else _run
    _, step = feed.batches.position
    blocks = partial(feed.blocks, num, once=once)
    state, logs = run(machine, state, feed, blocks, first, watch)
    if step > 0 and not logs:  # it was left after the last batch of a stream: the epoch is the next one
        state, logs = run(machine, state, feed, blocks, first, watch)
    machine.meet(feed)
    return state, machine.show(logs)


def _run(machine: Machine, state: State, feed: Feed, blocks: Callable, first: int, watch: Watch) -> tuple[State, dict]:
    """Nobody looks at the state: several updates to a dispatch, and numbers one dispatch late."""
    pace, late, done = machine.pace, None, 0
    logs: dict = {}
    pace.start()
    for block in blocks(lambda: pace.size):
        state, report = machine.dispatch(state, feed, block, first + done)
        if late is not None:
            logs, failed = _tell(machine, state, feed, late, first, watch)
            pace.note(len(late.block.counts), late.program.length)
            if failed:
                return state, logs  # what was sent after it was not applied either
        late, done = report, done + len(block.counts)
        if watch.stops:
            break
    if late is not None:
        logs, _ = _tell(machine, state, feed, late, first, watch)
    watch.end()
    return state, logs


def _run_watched(
    machine: Machine, state: State, feed: Feed, blocks: Callable, first: int, watch: Watch
) -> tuple[State, dict]:
    """Somebody looks at the state, or changes it, between any two updates, or as many as are one execution."""
    logs: dict = {}
    done = 0
    for block in blocks(lambda: watch.left):
        if done % watch.each == 0:
            watch.begin(done)
            state = machine.take(state)
        state, report = machine.dispatch(state, feed, block, first + done)
        logs, _ = _tell(machine, state, feed, report, first, watch)
        done += len(block.counts)
        if watch.stops:
            break
    watch.end()
    return machine.take(state), logs


def _tell(machine: Machine, state: State, feed: Feed, report: Report, first: int, watch: Watch) -> tuple[dict, bool]:
    """Tell the watchers of a dispatch's updates; return the last numbers, and whether the run ends: one failed."""
    failure = machine.note_failures(report)
    last = len(report.block.counts) - 1 if failure is None else failure
    for i in range(last + 1 if watch.has_hooks else 0):
        numbers = _numbers(report, i, failure)
        logs = machine.show(numbers) if watch.needs_state else shown(numbers)
        watch.tell(report.first + i - first, logs)
    if failure is not None:
        watch.end()
        feed.go_back(report.block, failure)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and not watch.stops:
        raise machine.failure(state, report, failure)
    return _numbers(report, last, failure), failure is not None


def _numbers(report: Report, i: int, failure: int | None) -> dict:
    """Return the numbers of update i; those of a failed one end with its own loss, which the sums do not hold."""
    numbers = report.numbers(i)
    return numbers | {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers and i == failure}


def check_any(logs: dict, epoch: int) -> None:
    """Refuse an epoch without a batch."""
    if not logs:
        raise BatchError(
            say(
                f"Epoch {epoch + 1} must have at least one batch.",
                "a source with no batches left",
                "pass something that can be iterated over again, or steps_per_epoch.",
            )
        )


def ends_early(batches: Batches, epoch: int, epochs: int, steps_per_epoch: int | None) -> bool:
    """Whether an iterator has ended before the run, which then ends with a warning."""
    is_short = steps_per_epoch is not None and batches.has_ended
    if not is_short and (epoch + 1 == epochs or not batches.is_spent()):
        return False
    warnings.warn(
        f"The data ended in epoch {epoch + 1} of {epochs}: training ends there. Pass something that can be iterated "
        "over again, or ask for fewer updates.",
        UserWarning,
        stacklevel=3,
    )
    return True


# ---- the user's own loop ----


class Step:
    """One update that `Trainer.steps` has carried out.

    Args:
        number: the update's number, from 1: the optimizer's `iterations`, and how many updates were skipped. Updates of
            this trainer are counted, so that nothing waits. What another trainer or Keras does between two steps is
            seen at the next step on JAX, on TensorFlow at the next epoch; and there what a dynamic loss scale leaves
            out, on both.
        epoch: the epoch of the data, from 0.
        batch: the batch's place in its epoch, from 0.
    """

    def __init__(self, number: int, epoch: int, batch: int, report: Report, machine: Machine):
        self.number = number
        self.epoch = epoch
        self.batch = batch
        self._report = report
        self._machine = machine

    @cached_property
    def logs(self) -> dict[str, Any]:
        """The loss and the metrics over the epoch so far, as a callback of `fit` sees them. Waits for the device.

        Once read, the model's `get_metrics_result()` says the same, until the next step.
        """
        _note_read(self._machine, self._report)
        return self._report.logs(0)

    @property
    def loss(self) -> float:
        """The loss of this update alone. Waits for the device."""
        return self._report.loss(0)


def run_steps(machine: Machine, batches: Batches, epochs: int, guard: Guard) -> Iterator[Step]:
    """Carry out one update after the other, for a loop of the user's own.

    The state is taken anew for every update, so `guard` is left in between, and any thread may use the trainer there.
    """
    feed, state = machine.feed(batches), machine.take()
    for _ in range(epochs):
        with guard:
            machine.settle()
            state, late = machine.begin_epoch(state), None
            machine.recount()
        for block in feed.blocks(None, lambda: 1):
            with guard:
                machine.settle()
                if machine.was_moved:
                    _check_applied(machine, machine.take(state), feed, late)
                    late = None
                    machine.recount()
                state, report = machine.dispatch(machine.take(state), feed, block, machine.last + 1)
                _check_applied(machine, state, feed, late)
            late = report
            yield Step(report.first, *block.place, report, machine)
        with guard:
            _check_applied(machine, machine.take(state), feed, late)
            if late is not None:
                machine.track(late)
        machine.meet(feed)


class Logs(Mapping):
    """The loss and the metrics of one update, by name. Reading them waits for the device; nothing else does.

    `dict(logs)` is a plain dict. Once read, the model's `get_metrics_result()` says the same, until the next update.
    """

    def __init__(self, machine: Machine, report: Report):
        self._machine = machine
        self._report: Report | None = report

    @cached_property
    def _values(self) -> dict[str, Any]:
        report = self._report
        assert report is not None
        self._machine.settle(report)
        if report.error is not None:
            raise report.error
        _note_read(self._machine, report)
        self._report = None  # which holds the batch
        return report.logs(0)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


def run_update(machine: Machine, batches: Batches, number: int) -> Logs:
    """Carry out one update, of this number, on a batch in hand."""
    feed = machine.feed(batches)
    assert isinstance(feed, Loaded)
    block = feed.in_hand(machine.rows_to_fill)
    _, report = machine.dispatch(machine.begin_epoch(machine.take()), feed, block, number)
    machine.hand_over(report)
    return Logs(machine, report)


def _note_read(machine: Machine, report: Report) -> None:
    if machine.engine.peers.count == 1:  # of several processes every one would have to read it
        machine.track(report)


def _check_applied(machine: Machine, state: State, feed: Feed, report: Report | None) -> None:
    if report is not None and (failure := machine.note_failures(report)) is not None:
        feed.go_back(report.block, failure)
        raise machine.failure(state, report, failure)


# ---- without an update ----


def run_evaluation(machine: Machine, batches: Batches, steps: int | None, watch: Watch) -> dict:
    """Return the logs over `steps` batches (None: all)."""
    told, batches, report = watch.callbacks, batches.in_order(), None
    machine.model.stop_evaluating = False
    told.on_test_begin()
    state = machine.begin_epoch(machine.take())
    for i, block in enumerate(machine.feed(batches, evaluates=True).blocks(steps, lambda: 1, once=True)):
        watch.test.begin(i)
        if report is None:
            state = machine.evaluation.begin(state, block)
        machine.check(block)
        state, report = machine.evaluation.add(state, block)
        batches.position = block.position
        watch.test.end(i, machine.show_evaluation(state, report) if watch.has_test_hooks else None)
        if machine.model.stop_evaluating:
            break
    else:
        _note_missing(0 if report is None else i + 1, steps)
    watch.test.close()
    if report is None:
        raise BatchError(say("There must be at least one batch.", "none", "pass data that are not spent."))
    logs = machine.show_evaluation(state, report)
    machine.engine.peers.meet(f"evaluated {i + 1} batches")
    told.on_test_end(logs)
    return logs


def run_prediction(machine: Machine, batches: Batches, steps: int | None, watch: Watch, *, is_whole: bool) -> Any:
    """Return the outputs for the rows of `steps` batches (None: all); of whole batches, the first part is the input."""
    told, outputs = watch.callbacks, []
    machine.model.stop_predicting = False
    told.on_predict_begin()
    state = machine.take()
    for i, block in enumerate(machine.feed(batches, evaluates=True).blocks(steps, lambda: 1, once=True)):
        watch.predict.begin(i)
        state, output = machine.evaluation.predict(state, block, is_whole)
        outputs.append(output)
        batches.position = block.position
        several = outputs[i - i % watch.each :]
        watch.predict.end(i, {"outputs": keras.tree.map_structure(_joined, *several)})
        if machine.model.stop_predicting:
            break
    else:
        _note_missing(len(outputs), steps)
    watch.predict.close()
    told.on_predict_end()
    machine.engine.peers.meet(f"predicted {len(outputs)} batches")
    return join(machine.engine.fetch(outputs))


def _joined(*outputs: Any) -> Any:
    return outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs)


def _note_missing(num: int, steps: int | None) -> None:
    if num and steps is not None and num < steps:
        warnings.warn(f"The data ended after {num} of {steps} batches.", UserWarning, stacklevel=4)
