"""The loop: blocks go to the device one after the other, and the numbers of one are read while the next computes."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import keras

from wholestep.callbacks import CallbackRunner
from wholestep.data.batches import Batches
from wholestep.data.feed import Feed, Loaded
from wholestep.errors import BatchError, message
from wholestep.evaluate import Pass, join
from wholestep.executor import Executor
from wholestep.guards import Guard
from wholestep.plan import MOST_UPDATES
from wholestep.report import Report
from wholestep.run import Run, updates
from wholestep.sums import OWN, shown
from wholestep.tree import Tensor

# ---- fit ----


def run_epoch(executor: Executor, run: Run, feed: Feed, num: int | None, watch: CallbackRunner, *, once: bool) -> dict:
    """Carry out `num` updates (None: to the end of the epoch); return the logs of the last one.

    Args:
        once: whether fewer than `num` are carried out where the pass over the data ends before.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    _, step = feed.batches.position
    logs = _carry_out(executor, run, feed, num, watch, once=once)
    if step > 0 and not logs:  # it was left after the last batch of a stream: the epoch is the next one
        logs = _carry_out(executor, run, feed, num, watch, once=once)
    executor.meet(feed)
    return executor.show(logs)


def _carry_out(executor: Executor, run: Run, feed: Feed, num: int | None, watch: CallbackRunner, *, once: bool) -> dict:
    """Carry out the updates of an epoch, and tell the watchers: one dispatch late, unless they look at the state."""
    begin, pace = run.number + 1, executor.dispatch_size
    logs: dict = {}
    late = 0 if watch.needs_state else 1
    size = (lambda: watch.left) if watch.needs_state else (lambda: pace.size)

    def before() -> None:
        if watch.needs_state:
            watch.begin(run.number + 1 - begin)

    def tell(report: Report) -> tuple[dict, bool]:
        logs, failed = _tell(executor, run, feed, report, begin, watch)
        if late:
            pace.note(report.block.num, report.block.program.length)
        return logs, failed

    pace.start()
    untold: deque[Report] = deque()
    try:
        for report in updates(executor, run, feed, num, size, once=once, before=before):
            untold.append(report)
            if len(untold) > late:
                logs, failed = tell(untold.popleft())
                if failed:
                    return logs  # what was sent after it was not applied either
            if watch.stops:
                break
    except BaseException:
        executor.note_skipped(run, untold)
        raise
    if untold:
        logs, _ = tell(untold.popleft())
    watch.end()
    return logs


def _tell(
    executor: Executor, run: Run, feed: Feed, report: Report, begin: int, watch: CallbackRunner
) -> tuple[dict, bool]:
    """Tell the watchers of a dispatch's updates; return the last numbers, and whether the run ends: one failed."""
    failure = executor.note_failures(run, report)
    last = report.block.num - 1 if failure is None else failure
    for i in range(last + 1 if watch.has_hooks else 0):
        numbers = _numbers(report, i, failure)
        logs = executor.show(numbers) if watch.needs_state else shown(numbers)
        watch.tell(report.first + i - begin, logs)
    if failure is not None:
        watch.end()
        feed.go_back(report.block, failure)
    # TerminateOnNaN and its like end the run in their own way.
    if failure is not None and not watch.stops:
        raise executor.failure(run, report, failure)
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


_MOST_UNREAD = 2  # updates that may be under way beside the newest: to wait for one leaves the device idle


class Step:
    """One update that `Trainer.steps` has carried out.

    Args:
        number: the update's number, from 1: the optimizer's `iterations`, and how many updates were skipped. Updates of
            this trainer are counted, so that nothing waits. What another trainer or Keras does between two steps is
            seen at the next step on JAX, on TensorFlow at the next epoch; and there what a dynamic loss scale leaves
            out, on both.
        epoch: the epoch of the data, from 0.
        batch: the batch's place in its epoch, from 0.

    >>> import keras, numpy as np, wholestep as ws
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> data = ws.Batches((np.ones((8, 3)), np.zeros((8, 1))), batch_size=4)
    >>> [(step.number, step.epoch, step.batch) for step in ws.Trainer(model).steps(data, epochs=2)]
    [(1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1)]
    """

    def __init__(self, number: int, epoch: int, batch: int, report: Report):
        self.number = number
        self.epoch = epoch
        self.batch = batch
        self._report = report

    @cached_property
    def logs(self) -> dict[str, Any]:
        """The loss and the metrics over the epoch so far, as a callback of `fit` sees them. Waits for the device.

        Until the next step, the model's `get_metrics_result()` says the same.
        """
        return self._report.logs(0)

    @property
    def loss(self) -> float:
        """The loss of this update alone. Waits for the device."""
        return self._report.loss(0)


def run_steps(executor: Executor, run: Run, batches: Batches, epochs: int, guard: Guard) -> Iterator[Step]:
    """Carry out one update after the other, for a loop of the user's own.

    The run takes the variables' values anew for every update, so `guard` is left in between, and any thread may use
    the trainer there.
    """
    feed = executor.feed(run, batches)
    for _ in range(epochs):
        with guard:
            executor.settle(run)
            executor.begin_epoch(run)
            executor.recount(run)
        unread: deque[Report] = deque()
        with closing(updates(executor, run, feed, None, lambda: 1)) as sent:
            try:
                while True:
                    with guard:
                        executor.settle(run)
                        if executor.was_moved:
                            _check_applied(executor, run, feed, unread, 0)
                            executor.recount(run)
                        report = next(sent, None)
                        _check_applied(executor, run, feed, unread, 0 if report is None else _MOST_UNREAD)
                    if report is None:
                        break
                    unread.append(report)
                    yield Step(report.first, *report.block.start, report)
            finally:
                executor.note_skipped(run, unread)
        executor.meet(feed)


class Logs(Mapping):
    """The loss and the metrics of one update, by name. Reading them waits for the device; nothing else does.

    `dict(logs)` is a plain dict. Until the next update, the model's `get_metrics_result()` says the same.
    """

    def __init__(self, executor: Executor, run: Run, report: Report):
        self._executor = executor
        self._run = run
        self._report: Report | None = report

    @cached_property
    def _values(self) -> dict[str, Any]:
        report = self._report
        assert report is not None
        self._executor.settle(self._run, report)
        if report.error is not None:
            raise report.error
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


def run_update(executor: Executor, run: Run, batches: Batches) -> Logs:
    """Carry out one update on a batch in hand."""
    executor.begin_update_in_hand(run)
    feed = executor.feed(run, batches)
    assert isinstance(feed, Loaded)
    report = executor.send(run, feed, feed.in_hand(executor.rows_to_fill))
    executor.hand_over(run, report)
    return Logs(executor, run, report)


def _check_applied(executor: Executor, run: Run, feed: Feed, unread: deque[Report], most: int) -> None:
    """Look whether updates were applied: those that are done, and all but the last `most` of the others."""
    while unread and (len(unread) > most or unread[0].is_ready):
        report = unread.popleft()
        if (failure := executor.note_failures(run, report)) is not None:
            feed.go_back(report.block, failure)
            raise executor.failure(run, report, failure)


# ---- without an update ----


def run_evaluation(executor: Executor, run: Run, through: Pass, steps: int | None, watch: CallbackRunner) -> dict:
    """Return the logs over `steps` batches (None: all)."""
    told, at, logs = watch.callbacks, through.run, None
    executor.model.stop_evaluating = False
    told.on_test_begin()
    executor.begin_evaluation(run, through)
    size = (lambda: 1) if through.look.one_by_one else (lambda: MOST_UPDATES)
    for found, block in through.updates(executor.evaluation, steps, size, lambda: watch.test.begin(at.number)):
        logs = partial(executor.show_evaluation, found, block.num - 1)
        watch.test.end(at.number - 1, logs() if watch.has_test_hooks else None)
        if executor.model.stop_evaluating:
            break
    else:
        _note_missing(at.number, steps)
    watch.test.close()
    if logs is None:
        raise BatchError(message("There must be at least one batch.", "none", "pass data that are not spent."))
    shown = logs()
    executor.engine.processes.barrier(f"evaluated {at.number} batches")
    told.on_test_end(shown)
    return shown


def run_prediction(executor: Executor, run: Run, through: Pass, steps: int | None, watch: CallbackRunner) -> Any:
    """Return the outputs for the rows of `steps` batches (None: all)."""
    told, at = watch.callbacks, through.run
    outputs: list = []
    executor.model.stop_predicting = False
    told.on_predict_begin()
    executor.begin_evaluation(run, through)
    size = (lambda: 1) if through.look.one_by_one else (lambda: MOST_UPDATES)
    for found, block in through.updates(executor.evaluation, steps, size, lambda: watch.predict.begin(at.number)):
        outputs.append(keras.tree.map_structure(lambda leaf, num=block.num: _rows(leaf, num), found))
        several = outputs[len(outputs) - 1 - (at.number - 1) % watch.each :] if watch.has_predict_hooks else []
        watch.predict.end(at.number - 1, {"outputs": keras.tree.map_structure(_joined, *several)} if several else None)
        if executor.model.stop_predicting:
            break
    else:
        _note_missing(at.number, steps)
    watch.predict.close()
    told.on_predict_end()
    executor.engine.processes.barrier(f"predicted {at.number} batches")
    return join(executor.engine.fetch(outputs))


def _rows(found: Tensor, num: int) -> Tensor:
    """Return what was found of the first `num` batches, row after row."""
    return keras.ops.reshape(found[:num], (num * found.shape[1], *found.shape[2:]))


def _joined(*outputs: Tensor) -> Tensor:
    return outputs[0] if len(outputs) == 1 else keras.ops.concatenate(outputs)


def _note_missing(num: int, steps: int | None) -> None:
    if num and steps is not None and num < steps:
        warnings.warn(f"The data ended after {num} of {steps} batches.", UserWarning, stacklevel=4)
