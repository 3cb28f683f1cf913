"""`fit`: epochs of updates, each read while the next computes; callbacks, validation and History as Keras has them."""

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras

from wholestep import arguments
from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints.place import Place
from wholestep.data.batches import Batches, kept
from wholestep.data.epochs import go_to_epoch
from wholestep.data.feed import Feed
from wholestep.errors import BatchError, message
from wholestep.evaluate import Look, Pass
from wholestep.executor import Executor
from wholestep.passes import run_evaluation
from wholestep.reports.report import Report
from wholestep.run import Run, updates
from wholestep.setup import Given, Setup
from wholestep.sums import OWN, shown
from wholestep.tree import Tree


class Validation(NamedTuple):
    """The arguments of `fit` that say how to validate."""

    data: Tree = None
    split: float = 0.0
    batch_size: int | None = None
    steps: int | None = None
    freq: Any = 1

    def check(self) -> None:
        """Refuse what cannot mean anything."""
        arguments.check_counts(validation_steps=self.steps, validation_batch_size=self.batch_size)
        arguments.check_epochs(validation_freq=self.freq)


class Epochs(NamedTuple):
    """The arguments of `fit` that say for how long to train."""

    num: int
    begin: int
    steps: int | None

    def check(self) -> None:
        """Refuse what cannot mean anything."""
        arguments.check_counts(steps_per_epoch=self.steps)
        arguments.check_epochs(epochs=self.num, initial_epoch=self.begin)


def fit(
    setup: Setup, given: Given, epochs: Epochs, validation: Validation, callbacks: Any, verbose: int | str
) -> keras.callbacks.History:
    """Train for `epochs`; see `Trainer.fit`."""
    run, model = setup.run, setup.model
    if validation.split and validation.data is None:
        parts, held_out = arguments.split((given.x, given.y, given.sample_weight), validation.split)
        given = given._replace(x=parts[0], y=parts[1], sample_weight=parts[2])
        validation = validation._replace(data=held_out)
    validate = None if validation.data is None else Validating(setup, validation, given.batch_size)
    batches = setup.batches("fit", given)
    executor = setup.executor_to_train(batches)
    last = arguments.limit_epochs(epochs.num)
    steps, once = arguments.limit_steps(epochs.steps, batches.num_batches), epochs.steps is None
    told = {"verbose": verbose, "epochs": last, "history": True}
    watch = setup.watch(executor, callbacks, steps or batches.num_batches, **told)
    model.stop_training = False
    logs: dict = {}
    are_given = isinstance(given.x, Batches)
    with run.under_way("fit", batches, are_given=are_given, also={"callbacks": watch}) as resumed:
        executor.refresh(run)
        watch.callbacks.on_train_begin()
        begin = run.place.epoch if resumed else getattr(model, "_initial_epoch", None) or epochs.begin
        if resumed is None and begin:
            go_to_epoch(batches, begin, steps, once=once)
        feed = executor.feed(run, batches)
        if resumed is not None and run.place.done == 0 and run.place.logs is None:  # nothing of the epoch was done
            run.put_back_also(resumed)
            run.restored = resumed = None
        for epoch in range(begin, last):
            if resumed is None:
                run.begin_epoch(epoch, batches.position)
            watch.callbacks.on_epoch_begin(epoch)
            if resumed is None:
                executor.begin_epoch(run)
            else:  # what was told above may have changed what was put back already, such as the learning rate
                executor.put_back(run, resumed)
                run.put_back_also(resumed)
            executor.applied.recount(run)
            if run.place.logs is None:
                logs = run.place.latest = run_epoch(executor, run, feed, steps, watch, once=once)
                _check_any(logs, epoch)
                if validate is not None and arguments.is_due(epoch, validation.freq):
                    logs = logs | validate(watch)
                run.place.logs = logs
            logs = run.place.logs
            watch.end_epoch(run.place)
            run.restored = resumed = None
            if watch.stops or _ends_early(batches, epoch, last, epochs.steps):
                break
        run.place = Place()
        setup.finish()
        watch.callbacks.on_train_end(logs)
    executor.engine.processes.barrier("has ended training")  # what the first has written can be read by all
    return model.history


class Validating:
    """The validation of one `fit`: data that are opened once, and gone through after each epoch that wants it."""

    def __init__(self, setup: Setup, asked: Validation, batch_size: int | None):
        self._setup = setup
        self._batches = kept(setup.validation_batches(asked.data, asked.batch_size or batch_size))
        self._steps = arguments.limit_steps(asked.steps, self._batches.num_batches)
        self._open: tuple[Executor, Pass] | None = None

    def __call__(self, watch: CallbackRunner) -> dict:
        """Return what validation says now, each name with `val_` before it."""
        executor = self._setup.executor_for(self._batches)
        if self._open is None or self._open[0] is not executor:
            self._open = executor, executor.open_pass(self._batches, Look(one_by_one=watch.has_test_hooks))
        logs = run_evaluation(executor, self._setup.run, self._open[1], self._steps, watch)
        return {f"val_{name}": value for name, value in logs.items()}


def run_epoch(executor: Executor, run: Run, feed: Feed, num: int | None, watch: CallbackRunner, *, once: bool) -> dict:
    """Carry out `num` updates (None: to the end of the epoch); return the logs of the last one.

    Args:
        once: whether fewer than `num` are carried out where the pass over the data ends before.

    Raises:
        NonFiniteError: an update was not applied, and neither were those after it.
    """
    epoch, step = feed.batches.position
    place, numbers = run.place, {}
    if place.done == 0 or (_is_left(place, epoch, num, once=once) and not watch.stops):
        left = None if num is None else num - place.done
        numbers = _carry_out(executor, run, feed, left, watch, once=once)
        if place.done == 0 and step > 0:  # it was left after the last batch of a stream: the epoch is the next one
            numbers = _carry_out(executor, run, feed, left, watch, once=once)
    executor.meet(feed)
    return executor.show(numbers or place.latest)


def _is_left(place: Place, epoch: int, num: int | None, *, once: bool) -> bool:
    """Whether updates may be left of an epoch in the middle of which the run goes on."""
    is_same_pass = epoch == place.began
    return is_same_pass if num is None else place.done < num and (is_same_pass or not once)


def _carry_out(executor: Executor, run: Run, feed: Feed, num: int | None, watch: CallbackRunner, *, once: bool) -> dict:
    """Carry out the updates of an epoch, and tell the watchers: one dispatch late, unless they look at the state."""
    begin, pace = run.number + 1 - run.place.done, executor.dispatch_size
    logs: Callable[[], dict] = dict
    late = 0 if watch.needs_state else 1
    size = (lambda: watch.left) if watch.needs_state else (lambda: pace.size)

    def before() -> None:
        if watch.needs_state:
            watch.begin(run.number + 1 - begin)

    def tell(report: Report) -> tuple[Callable[[], dict], bool]:
        logs, failed = _tell(executor, run, feed, report, begin, watch)
        if late:
            pace.note(report.block.num)
        return logs, failed

    pace.start()
    untold: deque[Report] = deque()
    try:
        for report in updates(executor, run, feed, num, size, once=once, before=before, looks=watch.needs_state):
            untold.append(report)
            if len(untold) > late:
                logs, failed = tell(untold.popleft())
                if failed:
                    return logs()  # what was sent after it was not applied either
            if watch.stops:
                break
    except BaseException:
        executor.applied.note_skipped(run, untold)
        raise
    finally:
        executor.dispatcher.finish()
    if untold:
        logs, _ = tell(untold.popleft())
    watch.end()
    return logs()


def _tell(
    executor: Executor, run: Run, feed: Feed, report: Report, begin: int, watch: CallbackRunner
) -> tuple[Callable[[], dict], bool]:
    """Tell the watchers of a dispatch's updates; return what tells the last numbers, and whether one failed."""
    failure = executor.applied.note_failures(run, report)
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
        raise executor.applied.failure(run, report, failure)
    return partial(_numbers, report, last, failure), failure is not None


def _numbers(report: Report, i: int, failure: int | None) -> dict:
    """Return the numbers of update i; those of a failed one end with its own loss, which the sums do not hold."""
    numbers = report.numbers(i)
    if i == failure:
        numbers |= {k: report.loss(i) for k in ("loss", OWN + "loss") if k in numbers}
    return numbers


def _check_any(logs: dict, epoch: int) -> None:
    """Refuse an epoch without a batch."""
    if not logs:
        raise BatchError(
            message(
                f"Epoch {epoch + 1} must have at least one batch.",
                "a source with no batches left",
                "pass something that can be iterated over again, or steps_per_epoch.",
            )
        )


def _ends_early(batches: Batches, epoch: int, epochs: int, steps_per_epoch: int | None) -> bool:
    """Whether an iterator has ended before the run, which then ends with a warning."""
    is_short = steps_per_epoch is not None and batches.has_ended
    if not is_short and (epoch + 1 == epochs or not batches.is_spent()):
        return False
    warnings.warn(
        f"The data ended in epoch {epoch + 1} of {epochs}: training ends there. Pass something that can be iterated "
        "over again, or ask for fewer updates.",
        UserWarning,
        stacklevel=4,
    )
    return True
