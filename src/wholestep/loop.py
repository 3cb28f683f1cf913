"""The loop: a block of updates goes to the device, and the numbers of the one before are read while it works."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.data.batches import Batches
from wholestep.data.feed import Feed, Loaded
from wholestep.errors import BatchError, message
from wholestep.evaluate import join
from wholestep.executor import Executor
from wholestep.guards import Guard
from wholestep.report import Report
from wholestep.state import State
from wholestep.sums import OWN, shown


def run_epoch(
    executor: Executor, state: State, feed: Feed, num: int | None, first: int, watch: CallbackRunner, *, once: bool
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
    state, logs = run(executor, state, feed, blocks, first, watch)
    if step > 0 and not logs:  # it was left after the last batch of a stream: the epoch is the next one
        state, logs = run(executor, state, feed, blocks, first, watch)
    executor.meet(feed)
    return state, executor.show(logs)


def _run(
    executor: Executor, state: State, feed: Feed, blocks: Callable, first: int, watch: CallbackRunner
) -> tuple[State, dict]:
    """Nobody looks at the state: several updates to a dispatch, and numbers one dispatch late."""
    dispatch_size, late, done = executor.dispatch_size, None, 0
    logs: dict = {}
    dispatch_size.start()
    for block in blocks(lambda: dispatch_size.size):
        state, report = executor.dispatch(state, feed, block, first + done)
        if late is not None:
            logs, failed = _tell(executor, state, feed, late, first, watch)
            dispatch_size.note(len(late.block.counts), late.program.length)
            if failed:
                return state, logs  # what was sent after it was not applied either
        late, done = report, done + len(block.counts)
        if watch.stops:
            break
    if late is not None:
        logs, _ = _tell(executor, state, feed, late, first, watch)
    watch.end()
    return state, logs


def _run_watched(
    executor: Executor, state: State, feed: Feed, blocks: Callable, first: int, watch: CallbackRunner
) -> tuple[State, dict]:
    """Somebody looks at the state, or changes it, between any two updates, or as many as are one execution."""
    logs: dict = {}
    done = 0
    for block in blocks(lambda: watch.left):
        if done % watch.each == 0:
            watch.begin(done)
            state = executor.read_state(state)
        state, report = executor.dispatch(state, feed, block, first + done)
        logs, _ = _tell(executor, state, feed, report, first, watch)
        done += len(block.counts)
        if watch.stops:
            break
    watch.end()
    return executor.read_state(state), logs


def _tell(
    executor: Executor, state: State, feed: Feed, report: Report, first: int, watch: CallbackRunner
) -> tuple[dict, bool]:
    """Tell the watchers of a dispatch's updates; return the last numbers, and whether the run ends: one failed."""
    failure = executor.note_failures(report)
    last = len(report.block.counts) - 1 if failure is None else failure
    for i in range(last + 1 if watch.has_hooks else 0):
        numbers = _numbers(report, i, failure)
        logs = executor.show(numbers) if watch.needs_state else shown(numbers)
        watch.tell(report.first + i - first, logs)
    if failure is not None:
        watch.end()
        feed.go_back(report.block, failure)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and not watch.stops:
        raise executor.failure(state, report, failure)
    return _numbers(report, last, failure), failure is not None


def _numbers(report: Report, i: int, failure: int | None) -> dict:
    """Return the numbers of update i; those of a failed one end with its own loss, which the sums do not hold."""
    numbers = report.numbers(i)
    return numbers | {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers and i == failure}


def check_any(logs: dict, epoch: int) -> None:
    """Refuse an epoch without a batch."""
    if not logs:
        raise BatchError(
            message(
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

    def __init__(self, number: int, epoch: int, batch: int, report: Report, executor: Executor):
        self.number = number
        self.epoch = epoch
        self.batch = batch
        self._report = report
        self._executor = executor

    @cached_property
    def logs(self) -> dict[str, Any]:
        """The loss and the metrics over the epoch so far, as a callback of `fit` sees them. Waits for the device.

        Once read, the model's `get_metrics_result()` says the same, until the next step.
        """
        _note_read(self._executor, self._report)
        return self._report.logs(0)

    @property
    def loss(self) -> float:
        """The loss of this update alone. Waits for the device."""
        return self._report.loss(0)


def run_steps(executor: Executor, batches: Batches, epochs: int, guard: Guard) -> Iterator[Step]:
    """Carry out one update after the other, for a loop of the user's own.

    The state is taken anew for every update, so `guard` is left in between, and any thread may use the trainer there.
    """
    feed, state = executor.feed(batches), executor.read_state()
    for _ in range(epochs):
        with guard:
            executor.settle()
            state, late = executor.begin_epoch(state), None
            executor.recount()
        for block in feed.blocks(None, lambda: 1):
            with guard:
                executor.settle()
                if executor.was_moved:
                    _check_applied(executor, executor.read_state(state), feed, late)
                    late = None
                    executor.recount()
                state, report = executor.dispatch(executor.read_state(state), feed, block, executor.last + 1)
                _check_applied(executor, state, feed, late)
            late = report
            yield Step(report.first, *block.start, report, executor)
        with guard:
            _check_applied(executor, executor.read_state(state), feed, late)
            if late is not None:
                executor.track(late)
        executor.meet(feed)


class Logs(Mapping):
    """The loss and the metrics of one update, by name. Reading them waits for the device; nothing else does.

    `dict(logs)` is a plain dict. Once read, the model's `get_metrics_result()` says the same, until the next update.
    """

    def __init__(self, executor: Executor, report: Report):
        self._executor = executor
        self._report: Report | None = report

    @cached_property
    def _values(self) -> dict[str, Any]:
        report = self._report
        assert report is not None
        self._executor.settle(report)
        if report.error is not None:
            raise report.error
        _note_read(self._executor, report)
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


def run_update(executor: Executor, batches: Batches, number: int) -> Logs:
    """Carry out one update, of this number, on a batch in hand."""
    feed = executor.feed(batches)
    assert isinstance(feed, Loaded)
    block = feed.in_hand(executor.rows_to_fill)
    _, report = executor.dispatch(executor.begin_epoch(executor.read_state()), feed, block, number)
    executor.hand_over(report)
    return Logs(executor, report)


def _note_read(executor: Executor, report: Report) -> None:
    if executor.engine.processes.count == 1:  # of several processes every one would have to read it
        executor.track(report)


def _check_applied(executor: Executor, state: State, feed: Feed, report: Report | None) -> None:
    if report is not None and (failure := executor.note_failures(report)) is not None:
        feed.go_back(report.block, failure)
        raise executor.failure(state, report, failure)


# ---- without an update ----


def run_evaluation(executor: Executor, batches: Batches, steps: int | None, watch: CallbackRunner) -> dict:
    """Return the logs over `steps` batches (None: all)."""
    told, batches, report = watch.callbacks, batches.in_order(), None
    executor.model.stop_evaluating = False
    told.on_test_begin()
    state = executor.begin_epoch(executor.read_state())
    for i, block in enumerate(executor.feed(batches, evaluates=True).blocks(steps, lambda: 1, once=True)):
        watch.test.begin(i)
        if report is None:
            state = executor.evaluation.begin(state, block)
        executor.check(block)
        state, report = executor.evaluation.add(state, block)
        batches.position = block.end
        watch.test.end(i, executor.show_evaluation(state, report) if watch.has_test_hooks else None)
        if executor.model.stop_evaluating:
            break
    else:
        _note_missing(0 if report is None else i + 1, steps)
    watch.test.close()
    if report is None:
        raise BatchError(message("There must be at least one batch.", "none", "pass data that are not spent."))
    logs = executor.show_evaluation(state, report)
    executor.engine.processes.barrier(f"evaluated {i + 1} batches")
    told.on_test_end(logs)
    return logs


def run_prediction(
    executor: Executor, batches: Batches, steps: int | None, watch: CallbackRunner, *, is_whole: bool
) -> Any:
    """Return the outputs for the rows of `steps` batches (None: all); of whole batches, the first part is the input."""
    told, outputs = watch.callbacks, []
    executor.model.stop_predicting = False
    told.on_predict_begin()
    state = executor.read_state()
    for i, block in enumerate(executor.feed(batches, evaluates=True).blocks(steps, lambda: 1, once=True)):
        watch.predict.begin(i)
        state, output = executor.evaluation.predict(state, block, is_whole)
        outputs.append(output)
        batches.position = block.end
        several = outputs[i - i % watch.each :]
        watch.predict.end(i, {"outputs": keras.tree.map_structure(_joined, *several)})
        if executor.model.stop_predicting:
            break
    else:
        _note_missing(len(outputs), steps)
    watch.predict.close()
    told.on_predict_end()
    executor.engine.processes.barrier(f"predicted {len(outputs)} batches")
    return join(executor.engine.fetch(outputs))


def _joined(*outputs: Any) -> Any:
    return outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs)


def _note_missing(num: int, steps: int | None) -> None:
    if num and steps is not None and num < steps:
        warnings.warn(f"The data ended after {num} of {steps} batches.", UserWarning, stacklevel=4)
