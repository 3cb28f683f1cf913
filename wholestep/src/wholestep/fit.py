"""`fit`: epochs of updates, with callbacks, validation and History as in Keras."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import keras

from wholestep import arguments
from wholestep.callbacks import CallbackRunner, refuse_backup
from wholestep.checkpoints import Checkpoints, Saver, Snapshot, Span, Unsaved
from wholestep.checks import count
from wholestep.context import EVALUATION
from wholestep.data import Batches, BatchSize, classify, replayable, seek_epoch
from wholestep.drive import fit_epoch, run_evaluation
from wholestep.errors import BatchError, message, warn
from wholestep.evaluation import EvalOptions, Pass
from wholestep.executor import Executor
from wholestep.keras_private import initial_epoch
from wholestep.model import check_fits
from wholestep.run import Run
from wholestep.setup import FitData, Setup
from wholestep.tree import Tree


class Validation(NamedTuple):
    """The validation arguments of `fit`."""

    data: Tree = None
    split: float = 0.0
    batch_size: int | None = None
    steps: int | None = None
    freq: Any = 1

    def checked(self) -> "Validation":
        """Return the same with Python integers; refuse invalid values."""
        arguments.check_frequency(self.freq)
        steps = arguments.count_or_none("validation_steps", self.steps)
        return self._replace(
            steps=steps,
            batch_size=arguments.count_or_none("validation_batch_size", self.batch_size),
        )


class Epochs(NamedTuple):
    """The arguments of `fit` about the length of the training."""

    num: int
    begin: int
    steps: int | None

    def checked(self) -> "Epochs":
        """Return the same with Python integers; refuse invalid values."""
        num = count("epochs", self.num, "epochs=1.", least=0)
        begin = count("initial_epoch", self.begin, "leave it out.", least=0)
        return Epochs(num, begin, arguments.count_or_none("steps_per_epoch", self.steps))


class WatchOptions(NamedTuple):
    """The arguments of `fit` about callbacks, output and checkpoints."""

    callbacks: Any = None
    verbose: int | str = "auto"
    checkpoints: Checkpoints | None = None


def fit(
    setup: Setup, given: FitData, epochs: Epochs, validation: Validation, options: WatchOptions
) -> keras.callbacks.History:
    """Train for `epochs`; see `Trainer.fit`."""
    if validation.split and validation.data is None:
        parts, held_out = arguments.split(given.x, given.y, given.sample_weight, validation.split)
        given = given._replace(x=classify(parts[0]), y=parts[1], sample_weight=parts[2])
        validation = validation._replace(data=held_out)
    if options.checkpoints is not None:
        refuse_backup(options.callbacks)
    validate = None if validation.data is None else Validating(setup, validation, given.batch_size)
    batches = setup.batches("fit", given)
    if validate is not None:
        validate.check(batches)
    with setup.saver(options.checkpoints, "fit", batches) as saver:
        setup.settle()
        executor = setup.executor_to_update(batches.example)
        last = arguments.limit_epochs(epochs.num)
        steps = arguments.limit_steps(epochs.steps, batches.num_batches)
        num = steps or batches.num_batches
        verbose = options.verbose
        watch = setup.watch(
            executor, options.callbacks, num, verbose=verbose, epochs=last, history=True
        )
        how = {
            "steps_per_epoch": epochs.steps,
            "class_weight": given.class_weight,
            "shuffle": given.shuffle,
        }
        how |= {} if validate is None else validate.settings
        saver.open(executor, Span(last, epochs.begin), watch, **how)
        also = {"callbacks": watch, **saver.also}
        in_call = setup.run.during_call("fit", batches, are_given=given.x.keeps_position, also=also)
        with executor.notices(options.verbose), executor.shown_by(watch.shown), in_call as resumed:
            limited = Epochs(last, epochs.begin, steps)
            once = epochs.steps is None
            logs = _run_epochs(setup, batches, limited, validate, watch, saver, resumed, once=once)
            watch.callbacks.on_train_end(logs)
    # all processes can now read the files of process 0
    executor.engine.processes.barrier("has ended training")
    return setup.model.history


def _run_epochs(
    setup: Setup,
    batches: Batches,
    epochs: Epochs,
    validate: "Validating | None",
    watch: CallbackRunner,
    saver: Saver | Unsaved,
    resumed: Snapshot | None,
    *,
    once: bool,
) -> dict:
    """Run the epochs, from the run's position on; return the last epoch's logs. `once` as in
    `fit_epoch`.
    """
    run = setup.run
    model = setup.model
    executor = setup.executor
    assert executor is not None
    (last, first, steps), logs = epochs, dict[str, Any]()
    model.stop_training = False
    executor.refresh(run)
    if resumed is not None:
        watch.go_on_from(run, resumed)
    watch.callbacks.on_train_begin()
    saver.check(watch.keeping)
    begin = run.place.epoch if resumed else initial_epoch(model) or first
    if resumed is None and begin:
        seek_epoch(batches, begin, steps, once=once)
    feed = executor.feed(run, batches, singly=watch.needs_state and watch.each == 1)
    is_at_start = not run.place.is_open
    # the epoch has not started, or no epoch is left
    if resumed is not None and (is_at_start or begin >= last):
        run.restore_also(resumed)
        run.has_resumed()
        resumed = None
    for epoch in range(begin, last):
        watch.note_length(steps or batches.num_batches)
        _begin_epoch(executor, run, epoch, batches.position, watch, resumed)
        if run.place.logs is None:
            logs = fit_epoch(executor, run, feed, steps, watch, saver, once=once)
            run.end_updates(logs)
            _check_any(run.place.done, epoch, has_stopped=watch.stops)
            if validate is not None and validate.is_due(epoch):
                saver.poll()
                logs = logs | validate(watch, saver.poll)
            run.end_epoch(logs)
        # `on_train_end` gets no entries that callbacks add at an epoch's end
        logs = dict(run.place.logs or {})
        watch.end_epoch(run)
        run.has_resumed()
        resumed = None
        saver.end_epoch(run.place.logs or {})
        if watch.stops or _ends_early(batches, epoch, last, once=once):
            break
    saver.finish()  # before the weights are replaced by their moving average
    run.end_call()
    setup.finish(last)
    return logs


def _begin_epoch(
    executor: Executor,
    run: Run,
    epoch: int,
    position: tuple[int, int],
    watch: CallbackRunner,
    resumed: Snapshot | None,
) -> None:
    """Begin an epoch, or go on in the one in which the run was saved."""
    if resumed is None:
        run.begin_epoch(epoch, position)
    before = None if resumed is None else replace(resumed, arrays=resumed.arrays | run.arrays())
    watch.begin_epoch(run)
    run.open_epoch()
    if resumed is None or before is None:
        executor.begin_epoch(run)
    else:  # the saved values include this hook's changes, such as another learning rate
        run.assigned.clear()
        executor.restore(run, before)
        run.restore_also(resumed)
    executor.ledger.sync_update_count(run)


class Validating:
    """The validation of one `fit`: opens its data once, and evaluates them after each epoch that is
    due.
    """

    def __init__(self, setup: Setup, asked: Validation, batch_size: BatchSize):
        self._setup = setup
        self._freq = asked.freq
        self._batches = replayable(
            setup.validation_batches(classify(asked.data), asked.batch_size, batch_size)
        )
        self._steps = arguments.limit_steps(asked.steps, self._batches.num_batches)
        self._open: tuple[Executor, Pass] | None = None

    def check(self, training: Batches) -> None:
        """Refuse arrays that the model cannot take, before the first epoch."""
        is_own = self._setup.objective is not None or self._setup.steps.tests
        if is_own or self._batches.arrays is None or training.arrays is None:
            return
        example = self._batches.example()
        check_fits(self._setup.model, example, training.example(), "validation_data")

    @property
    def settings(self) -> dict[str, Any]:
        """The data, steps and frequency of validation, as settings of a run."""
        return {
            "validation_data": self._batches,
            "validation_steps": self._steps,
            "validation_freq": self._freq,
        }

    def is_due(self, epoch: int) -> bool:
        """Whether a validation follows an epoch."""
        return arguments.is_due(epoch, self._freq)

    def __call__(self, watch: CallbackRunner, poll: Callable[[], None]) -> dict:
        """Return the logs of a validation, their names prefixed with `val_`; see `run_evaluation`
        for `poll`.
        """
        executor = self._setup.executor_for(self._batches.example, EVALUATION)
        if self._open is None or self._open[0] is not executor:
            wanted = EvalOptions(one_by_one=watch.has_test_hooks)
            self._open = executor, executor.open_pass(self._batches, wanted, self._steps)
        try:
            logs = run_evaluation(executor, self._open[1], self._steps, watch, poll)
        except BatchError as error:
            raise BatchError(f"In validation_data: {error}") from error
        return {f"val_{name}": value for name, value in logs.items()}


def _check_any(num_updates: int, epoch: int, *, has_stopped: bool) -> None:
    """Refuse an epoch without a batch, unless a callback has stopped the run at the first one,
    which was not finite.

    Updates are counted, as logs may be empty: a custom step may return no numbers.
    """
    if not num_updates and not has_stopped:
        raise BatchError(
            message(
                f"Epoch {epoch + 1} must have at least one batch.",
                "a source with no batches left",
                "pass something that can be iterated over again, or steps_per_epoch.",
            )
        )


def _ends_early(batches: Batches, epoch: int, epochs: int, *, once: bool) -> bool:
    """Return whether the data have ended before the last epoch; warn if so."""
    is_short = not once and batches.has_ended
    if not is_short and (epoch + 1 == epochs or not batches.is_spent()):
        return False
    warn(
        f"The data ended in epoch {epoch + 1} of {epochs}: training ends there. Pass something "
        "that can be iterated "
        "over again, or ask for fewer updates."
    )
    return True
