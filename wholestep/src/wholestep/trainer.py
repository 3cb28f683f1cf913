"""Trainer: `fit`, `evaluate`, `predict`, and custom loops."""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Never

import keras

from wholestep import arguments
from wholestep.checkpoints import Checkpoints, Span, read_one, save_once
from wholestep.checks import count, takes
from wholestep.context import EVALUATION, PREDICTION
from wholestep.data import Batches, BatchSize, classify
from wholestep.drive import run_evaluation, run_prediction
from wholestep.errors import SpecificationError, message
from wholestep.evaluation import EvalOptions
from wholestep.executor import Executor
from wholestep.fit import Epochs, Validation, WatchOptions, fit
from wholestep.model import Objective
from wholestep.nonfinite import Skip
from wholestep.padding import PaddingReport, check_padding
from wholestep.reports.explanation import explain
from wholestep.run import Run
from wholestep.safety import Guard, check_process
from wholestep.setup import FitData, Setup
from wholestep.steps import OnBatch, Step, closed_at_exit, run_steps, run_update
from wholestep.tree import Tree


class Trainer(OnBatch):
    """Trains a Keras model, one whole step at a time.

    Args:
        model: a Keras model, compiled unless an `objective` is passed or the trainer only predicts.
        objective: the unreduced loss; None for the compiled loss.
        optimizer: a Keras optimizer, its name or its configuration; None for the compiled
            optimizer.
        metrics: further Keras metrics; with an `objective`, the metrics that it updates by name.
        seed: the integer seed of the order of the rows.
        microbatch_size: the number of rows computed at once: fewer rows, less memory, the same
            update, except for the statistics of BatchNormalization. "auto": as many as fit in
            `memory_limit`; on TensorFlow it never cuts.
        memory_limit: the bytes that an update may use in addition to its data and weights (JAX);
            None for three quarters of the device's free memory, or half of the host's. Arrays of up
            to half of that default stay on the device under any limit.
        on_nonfinite: "raise" stops before an update whose loss, gradient or moving statistics are
            not finite; "skip" skips the update, `Skip(in_a_row=5)` up to a bound.
        replicas: the number of devices that share the rows of a batch, or "all"; None for
            `keras.distribution`, if set, else one device, or all devices of several processes. The
            update is the same. For TensorFlow, build the model in the scope of a `tf.distribute`
            strategy instead.
        jit_compile: on TensorFlow, whether XLA compiles the updates. "auto" follows
            `model.compile`, or else tries XLA where several updates go in one dispatch; `explain()`
            names the result. (Without a GPU, `model.compile` turns "auto" into False, so a False
            there has no effect: pass it here.)
        dense_gradients: on TensorFlow, whether the gradients of equal rows of an embedding are
            summed before the optimizer gets them, as on JAX. False hands it the gradient of each
            lookup, as `keras.Model.fit` does there: an optimizer that squares or clips gradients
            makes other steps. On JAX, all gradients are dense.
        log: numbers about each update to add to its logs (those of the last update, in the History
            of an epoch): "gradient_norm" of the batch, with its regularisation, without a loss
            scale; "clipped_gradient_norm", after the optimizer's clips; "update_norm", of the
            change of the trainable weights; "learning_rate"; "loss_scale". Norms are Euclidean,
            over all weights together.

    Raises:
        SpecificationError: an argument has no valid value.

    Attributes:
        model: the model.
        run: the state and position of the training: `run.snapshot()` returns them,
            `run.restore(snapshot)` restores them.

    >>> import keras, numpy as np, wholestep as ws
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 3)), np.zeros((8, 1))
    >>> history = ws.Trainer(model, microbatch_size=3).fit(x, y, batch_size=8, epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss']
    """

    @takes()
    def __init__(
        self,
        model: keras.Model,
        objective: Objective | None = None,
        *,
        optimizer: keras.optimizers.Optimizer | str | dict | None = None,
        metrics: Iterable = (),
        seed: int = 0,
        microbatch_size: int | str = "auto",
        memory_limit: int | None = None,
        on_nonfinite: str | Skip = "raise",
        replicas: int | str | None = None,
        jit_compile: bool | str = "auto",
        dense_gradients: bool = False,
        log: Iterable[str] = (),
    ):
        check_process()
        arguments.check_model(model, objective)
        options = arguments.options(
            microbatch_size, memory_limit, on_nonfinite, replicas, jit_compile, dense_gradients, log
        )
        self.model = model
        self.run = Run()
        self._setup = Setup(model, objective, optimizer, metrics, seed, options, self.run)
        self._guard = Guard.of(model)

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse `copy.deepcopy` and `pickle`: a trainer holds compiled programs and arrays of a
        device.
        """
        must = "A trainer cannot be copied or pickled."
        attempt = (
            "a new Trainer of keras.models.clone_model(model); save(path) and restore(path) "
            "transfer the training."
        )
        raise SpecificationError(message(must, "copy or pickle", attempt))

    def __repr__(self) -> str:
        run = self.run
        return (
            f"<Trainer of {self.model.name}: {run.number} updates, {run.epochs} epochs of data "
            "begun>"
        )

    def __getattr__(self, name: str) -> Any:
        """Say where a method of `keras.Model` is."""
        if hasattr(type(self), name):  # a property has raised this error
            return object.__getattribute__(self, name)
        words = f"A Trainer has no {name!r}."
        if hasattr(keras.Model, name):
            words += f" It is the model's: trainer.model.{name}."
        raise AttributeError(words, name=name, obj=self)

    @property
    def executor(self) -> Executor | None:
        """The compiled programs of the current model; None before the first call that needs
        them.
        """
        return self._setup.executor

    # ---- training ----

    @takes()
    def fit(
        self,
        x: Tree = None,
        y: Tree = None,
        batch_size: BatchSize = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Tree = None,
        shuffle: bool | str = True,
        class_weight: dict | None = None,
        sample_weight: Tree = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        checkpoints: Checkpoints | Path | str | None = None,
    ) -> keras.callbacks.History:
        """Train for `epochs` epochs, with the arguments, callbacks and History of
        `keras.Model.fit`.

        The order of the rows continues from call to call; `initial_epoch` starts with the order of
        that epoch, also for `Batches` at another position. An iterator that ends before the last
        epoch ends the run with a warning; as validation data, its batches are cached on the host
        and reused after every epoch.

        Args:
            x: the inputs, (rows, ...), or a source of batches: `Batches`, or data that Keras takes.
            y: the labels, (rows, ...); None if `x` has them.
            batch_size: rows in an update, 32 if not given; a list or a function for batches that
                grow, as in `Batches`. For data in batches, leave it out.
            epochs: the number of the last epoch: as in Keras, `initial_epoch` counts.
            verbose: 0, 1, 2 or "auto", as in Keras. The bar of a terminal or a notebook also shows
                rows per second and the reasons of waits.
            callbacks: Keras' callbacks. Where one has hooks of a batch, each update is a separate
                dispatch. If these hooks use the logs alone, set its attribute
                `reads_model = False`: they are called for each update, up to 0.1 s later, and
                several updates share a dispatch.
            validation_split: the fraction of the rows, the last ones of the arrays, to validate on.
            validation_data: data to validate on: (x, y), (x, y, sample_weight), or a source of
                batches. Of an iterator, every epoch gets the same batches; Keras reads on.
            shuffle: whether the rows are permuted in each epoch, by the trainer's seed; "batch":
                within their batch. For `Batches`, leave it out.
            class_weight: the weight of a row by its class, {class: weight}; of several outputs
                {output: {class: weight}}. `sample_weight` multiplies it (Keras refuses both).
            sample_weight: the weights of the rows, or of their tokens or pixels, as in Keras.
            initial_epoch: the epoch to begin with, from 0.
            steps_per_epoch: the number of updates in an epoch; the next epoch continues with the
                next batch. In Keras, an epoch ends with the data.
            validation_steps: the number of batches to validate on; None for all.
            validation_batch_size: rows in a batch of the validation; None for `batch_size`, or the
                first of its sizes. For data in batches, leave it out.
            validation_freq: the number of epochs from one validation to the next, or a list of the
                epochs to validate after, counted from 1.
            checkpoints: a folder, or `Checkpoints`, to which the run is saved, and from which it
                resumes. Keras has no such argument.

        Returns:
            The History: each epoch's loss and metrics. The loss of an epoch is the sum of all
            weighted values over the sum of all weights, not a mean of batch means.

        Raises:
            SpecificationError, BatchError: the arguments or the data are not valid.
            NonFiniteError: a loss, gradient or moving statistic was not finite; that update was not
                applied.
            CheckpointError: a checkpoint could not be written, or none could be read.
        """
        given = FitData(classify(x), y, sample_weight, batch_size, shuffle, class_weight)
        asked = Epochs(epochs, initial_epoch, steps_per_epoch).checked()
        validation = Validation(
            validation_data,
            validation_split,
            validation_batch_size,
            validation_steps,
            validation_freq,
        ).checked()
        options = WatchOptions(callbacks, verbose, Checkpoints.of(checkpoints))
        with self._guard:
            return fit(self._setup, given, asked, validation, options)

    @takes(
        "steps takes the data as one argument.", "steps(Batches((x, y), batch_size=32), epochs=1)."
    )
    def steps(
        self, data: Tree, epochs: int = 1, *, checkpoints: Checkpoints | Path | str | None = None
    ) -> Iterator[Step]:
        """Run one update after the other, for a custom loop, with the same compiled update as
        `fit`.

        The model and the optimizer hold the new values whenever a step is yielded, and may be
        changed then. Reading a step's numbers waits for the device. Without reading, at most three
        updates are in flight; the loop waits when an epoch begins and before a checkpoint. Until
        the next step, `model.get_metrics_result()` returns the same as its `logs`. At the end of
        the last epoch the weights are replaced by the optimizer's moving average, if it has one, as
        in `fit`; a loop that is left early keeps the weights.

        Args:
            data: `Batches`, or a source for them (then in batches of 32, in the order of the
                trainer's next epoch).
            epochs: the number of epochs, from the current position of the data.
            checkpoints: as in `fit`. The run is saved before the next update, with the changes made
                by the loop's body; a loop that is left early saves nothing more. `keep_best` needs
                `fit`, and is refused.

        Yields:
            A `Step` for every update.

        Raises:
            SpecificationError, BatchError: at the call or the first step: the arguments or the data
                are not valid.
            NonFiniteError: an update was not applied, nor was any after it. Raised when the device
                has finished the update: up to two more steps may be yielded before, but none if the
                update's numbers were read.
        """
        epochs = count(
            "epochs",
            epochs,
            "epochs=1; labels are part of the data: steps(Batches((x, y))).",
            least=0,
        )
        asked = Checkpoints.of(checkpoints)
        given = classify(data)
        arguments.check_saves_steps(asked)
        running = self._steps(self._setup.ready_batches(given), given.keeps_position, epochs, asked)
        return closed_at_exit(running)

    def _steps(
        self, batches: Batches, are_given: bool, epochs: int, asked: Checkpoints | None
    ) -> Generator[Step, None, None]:
        with self._setup.saver(asked, "steps", batches) as saver:
            with self._guard:
                self._setup.settle()
                executor = self._setup.executor_to_update(batches.example)
                saver.open(executor, Span(epochs))
            with self.run.during_call(
                "steps", batches, are_given=are_given, also=dict(saver.also)
            ) as resumed:
                yield from run_steps(
                    executor, self.run, batches, epochs, self._guard, saver, resumed
                )
        with self._guard:
            self._setup.finish(epochs)

    @takes(
        "update takes one batch, a tuple (x, y) or (x, y, sample_weight); with an objective, any "
        "nested arrays.",
        "update((x, y)), with both parentheses.",
    )
    def update(self, batch: Tree) -> Mapping[str, Any]:
        """Run one update on a single batch, and return its loss and metrics.

        Batches may have any number of rows: where padding is exact, a batch is padded with rows of
        weight 0, so that a few compiled programs serve all sizes.

        Args:
            batch: nested arrays (rows, ...) for the objective; (x, y) or (x, y, sample_weight) for
                a compiled model.

        Returns:
            The numbers by name; `dict(logs)` is a plain dict. Reading them waits for the device,
            and so does the trainer's next call. Until the next update, `model.get_metrics_result()`
            returns the same.

        Raises:
            NonFiniteError: the loss, gradient or a moving statistic was not finite, and the update
                not applied. Raised when its numbers are read, or by the trainer's next call;
                printed to stderr at the script's end if neither happens.
        """
        with self._guard:
            host = self._setup.single_batch(batch, "fit")
            return run_update(self._setup.executor_to_update(lambda: host), self.run, host)

    @takes()
    def check_padding(self, batch: Tree, padding: Tree) -> PaddingReport:
        """Report whether the padding of a batch enters an update.

        The update is computed again with other values at the padded places, from the same weights
        and with the same random draws, and with longer padding; its gradient must stay the same,
        and the moving statistics. Dropout of Keras' layers is off. Afterwards all variables are as
        before. A custom `train_step` uses its own optimizer.

        Args:
            batch: as for `update`.
            padding: the padded places: an array of booleans of shape (rows, places), for all leaves
                with these axes; or such arrays nested as the batch is, for all leaves that are
                padded. A leaf whose padding has one value keeps it, as the model may know
                padding by it; such a batch is made longer only.

        Returns:
            A report: `is_right`, and a line for each leaf when it is printed.

        Raises:
            BatchError: a mask does not fit its leaf; no place of the batch is padded.
            SpecificationError: the update moves no weight.
            NonFiniteError: an update is not finite.

        >>> import keras, numpy as np, wholestep as ws
        >>> words = keras.layers.Embedding(9, 4, mask_zero=True)
        >>> mean = keras.layers.GlobalAveragePooling1D()
        >>> model = keras.Sequential([keras.Input((None,)), words, mean, keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> tokens = np.array([[3, 1, 4, 1], [5, 2, 0, 0], [6, 0, 0, 0]])
        >>> report = ws.Trainer(model).check_padding((tokens, np.ones((3, 1))), tokens == 0)
        >>> report.is_right
        True
        """
        with self._guard:
            return check_padding(self._setup, batch, padding)

    # ---- without an update ----

    @takes()
    def evaluate(
        self,
        x: Tree = None,
        y: Tree = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Tree = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over all rows, with the arguments of
        `keras.Model.evaluate`.

        The loss is the sum of all weighted values over the sum of all weights. Keras averages batch
        means, weighted by their rows, which differs under masks, `ignore_class` and
        `reduction="mean_with_sample_weight"`, unless all rows are in one batch.
        """
        size = arguments.count_or_none("batch_size", batch_size)
        steps = arguments.count_or_none("steps", steps)
        with self._guard:
            batches = self._setup.batches("evaluate", FitData(classify(x), y, sample_weight, size))
            executor = self._setup.executor_for(batches.example, EVALUATION)
            steps = arguments.limit_steps(steps, batches.num_batches)
            watch = self._setup.watch(
                executor, callbacks, steps or batches.num_batches, verbose=verbose
            )
            through = executor.open_pass(
                batches, EvalOptions(one_by_one=watch.has_test_hooks), steps
            )
            with executor.notices(verbose), executor.shown_by(watch.shown):
                logs = run_evaluation(executor, through, steps, watch)
            return executor.context.results(logs, return_dict=return_dict)

    def _evaluate_single(self, batch: Tree) -> dict[str, Any]:
        with self._guard:
            host = self._setup.single_batch(batch, "evaluate")
            executor = self._setup.executor_for(lambda: host, EVALUATION)
            with executor.notices(verbose=0):
                return executor.evaluate_single(host)

    @takes()
    def predict(
        self,
        x: Tree,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the model's outputs for all rows as numpy arrays, as `keras.Model.predict`
        does.
        """
        size = arguments.count_or_none("batch_size", batch_size)
        steps = arguments.count_or_none("steps", steps)
        with self._guard:
            batches, are_whole = self._setup.inputs(classify(x), size)
            call = PREDICTION._replace(are_whole=are_whole)
            executor = self._setup.executor_for(batches.example, call)
            steps = arguments.limit_steps(steps, batches.num_batches)
            watch = self._setup.watch(
                executor, callbacks, steps or batches.num_batches, verbose=verbose
            )
            through = executor.open_pass(
                batches, EvalOptions(True, are_whole, watch.has_predict_hooks), steps
            )
            with executor.notices(verbose), executor.shown_by(watch.shown):
                return run_prediction(executor, through, steps, watch)

    # ---- checkpoints ----

    @takes()
    def save(self, path: str | os.PathLike) -> Path | str:
        """Write and verify a checkpoint of the run in the folder `path`, and return the folder of
        the checkpoint.

        May be called between calls, between two steps, and by callbacks.

        Raises:
            SpecificationError: nothing has been trained yet.
            CheckpointError: the checkpoint could not be written.
        """
        with self._guard:
            return save_once(path, self.run, self.executor)

    @takes()
    def restore(self, path: str | os.PathLike, *, only: str | None = None) -> None:
        """Restore the run from a checkpoint: the model has its values, and the next `fit` or
        `steps` resumes there.

        A line on the error output lists the settings and devices that differ from those of the
        saved run, if any; for a model that is not built yet, at the next call.

        Args:
            path: the folder of a checkpoint, or a folder of several: then the newest good one.
            only: "weights" restores the model's weights, moving statistics and seeds, and nothing
                else.

        Raises:
            CheckpointError: there is no checkpoint, or none is good.
            SpecificationError: the checkpoint is another model's; nothing has been changed.
        """
        arguments.check_restores(only)
        with self._guard:
            setup = self._setup
            if only:
                setup.put_weights(read_one(path, setup.check_weights).snapshot)
            else:
                setup.restore(read_one(path, setup.check_snapshot, self.model))

    def explain(self) -> str:
        """Return a description of how updates run, as text. Complete after the first update."""
        with self._guard:
            self._setup.settle()
            executor = self.executor
            if executor is None or not executor.planner.programs:
                return "No update has run yet: the plan is made from the first batch."
            held = executor.variables
            # frozen weights are buffers
            sharded = executor.engine.variables.sharded([*held.params, *held.buffers])
            return explain(executor.planner, sharded, executor.where_data_are)

    @property
    def num_skipped(self) -> int:
        """The number of updates that were skipped because they were not finite. Waits for the
        device.
        """
        with self._guard:
            return (
                self.run.num_skipped
                if self.executor is None
                else self.executor.ledger.count_skipped(self.run)
            )
