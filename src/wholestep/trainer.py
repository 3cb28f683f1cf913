"""Trainer: `fit`, `evaluate`, `predict`, and the user's own loop. Every argument is checked here."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from wholestep import arguments, compiled
from wholestep.building import Builder
from wholestep.callbacks import CallbackRunner
from wholestep.data.batches import Batches, go_to_epoch, kept
from wholestep.data.class_weight import class_weighted
from wholestep.data.source import is_nest_of_arrays, without_none
from wholestep.engines import scope
from wholestep.evaluate import Look, Pass
from wholestep.executor import Executor, Options
from wholestep.guards import Guard, check_process
from wholestep.loop import (
    Step,
    check_any,
    ends_early,
    run_epoch,
    run_evaluation,
    run_prediction,
    run_steps,
    run_update,
)
from wholestep.objective import Objective, leave_rows_out
from wholestep.plan import explain
from wholestep.preprocess import Prepare, as_input, open_in_sequence, open_prepared, preparation, strings_as_arrays
from wholestep.run import Run
from wholestep.tree import Tree


class Trainer:
    """Trains a Keras model, one whole step at a time.

    Args:
        model: a Keras model; compiled, if `objective` is not given.
        objective: the loss, unreduced; None for what the model was compiled with.
        optimizer: the Keras optimizer; None for what the model was compiled with.
        metrics: further Keras metrics; with an objective of one's own, those that it feeds by name.
        seed: the seed of the order of the rows.
        microbatch_size: rows that are computed at once. Less memory, same update. "auto" takes the largest that fits.
        memory_limit: bytes that "auto" may use beside the data and the weights; None for the device's memory, half of
            the host's. (Arrays stay on the device as long as they take at most half of that memory, whatever is said.)
        on_nonfinite: "raise" stops before an update whose loss or gradient is not finite; "skip" leaves it out.
        replicas: how many devices share the rows of a batch, or "all"; None for what `keras.distribution` says, else
            one, or with several processes all of theirs. Same update. For TensorFlow, build the model in the scope of
            a `tf.distribute` strategy instead.
        jit_compile: on TensorFlow, whether XLA compiles the updates. "auto" is what `compile` said, or else tries it
            where several updates go in one dispatch; what it was is in `explain()`. (Without a GPU, Keras turns "auto"
            into False when it compiles a model: there False must be said here.)

    Raises:
        SpecificationError: arguments that cannot mean anything.

    Attributes:
        model: the model.
        run: where the training stands, see `wholestep.run.Run`.
        executor: what has been compiled for the model as it is; None before the first call.

    >>> import keras, numpy as np, wholestep as ws
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 3)), np.zeros((8, 1))
    >>> history = ws.Trainer(model, microbatch_size=3).fit(x, y, batch_size=8, epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss']
    """

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
        on_nonfinite: str = "raise",
        replicas: int | str | None = None,
        jit_compile: bool | str = "auto",
    ):
        check_process()
        arguments.check_model(model, objective)
        arguments.check_choices(microbatch_size, memory_limit, on_nonfinite, replicas, jit_compile)
        self.model = model
        self.seed = seed
        self._given = objective
        self._metrics = [keras.metrics.get(m) for m in metrics]
        self._options = Options(microbatch_size, memory_limit, on_nonfinite, replicas, jit_compile)
        self._builder = Builder(model, objective)
        self._guard = Guard()
        self.executor: Executor | None = None
        self.run = Run()
        self._made_for: list = []
        self._epochs = 0
        self._optimizer = (
            None if optimizer is None else arguments.with_loss_scale(keras.optimizers.get(optimizer), model)
        )
        self._adopt_optimizer()
        arguments.check_optimizer(getattr(model, "optimizer", None))

    # ---- training ----

    def fit(
        self,
        x: Tree = None,
        y: Tree = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Tree = None,
        shuffle: bool = True,
        class_weight: dict | None = None,
        sample_weight: Tree = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Train for `epochs` epochs, with the arguments, callbacks and History of `keras.Model.fit`.

        The order of the rows goes on from call to call; `initial_epoch` begins with the rows of that epoch, also of
        `Batches` that stand elsewhere. An iterator that ends before the last epoch ends the run with a warning; as
        validation data its batches are kept on the host, and are the same after every epoch.

        Returns:
            The History: each epoch's loss and metrics. The loss of an epoch is the sum of all weighted values over the
            sum of all weights, not a mean of its batches' means.

        Raises:
            BatchError: the data cannot make an update.
            NonFiniteError: a loss or gradient was not finite; that update was not applied.
        """
        arguments.check_counts(steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        arguments.check_counts(validation_batch_size=validation_batch_size)
        arguments.check_epochs(epochs=epochs, initial_epoch=initial_epoch, validation_freq=validation_freq)
        with self._guard:
            if validation_split and validation_data is None:
                (x, y, sample_weight), validation_data = arguments.split((x, y, sample_weight), validation_split)
            size = validation_batch_size or batch_size
            to_validate = None
            if validation_data is not None:
                to_validate = kept(open_in_sequence(validation_data, size, self._preparation("evaluate")))
            batches = self._batches("fit", x, y, sample_weight, batch_size, shuffle, class_weight)
            executor = self._build(batches)
            arguments.check_trains(self.model)
            epochs = arguments.limit_epochs(epochs)
            steps, once = arguments.limit_steps(steps_per_epoch, batches.num_batches), steps_per_epoch is None
            watch = self._watch(
                executor, callbacks, verbose=verbose, epochs=epochs, steps=steps or batches.num_batches, history=True
            )
            self.model.stop_training = False
            logs: dict = {}
            watch.callbacks.on_train_begin()
            begin = getattr(self.model, "_initial_epoch", None) or initial_epoch
            if begin:
                go_to_epoch(batches, begin, steps, once=once)
            elif not isinstance(x, Batches):
                batches.seek(self._epochs)
            if to_validate is not None:
                validation_steps = arguments.limit_steps(validation_steps, to_validate.num_batches)
            run, validation, feed = self.run, None, executor.feed(self.run, batches)
            with self._counting(batches):
                for epoch in range(begin, epochs):
                    watch.callbacks.on_epoch_begin(epoch)
                    executor.begin_epoch(run)
                    executor.recount(run)
                    logs = run_epoch(executor, run, feed, steps, watch, once=once)
                    check_any(logs, epoch)
                    if to_validate is not None and arguments.is_due(epoch, validation_freq):
                        if validation is None or self._build(to_validate) is not executor:
                            look = Look(one_by_one=watch.has_test_hooks)
                            validation = self._build(to_validate).open_pass(to_validate, look)
                        logs |= self._validate(validation, validation_steps, watch)
                    watch.callbacks.on_epoch_end(epoch, logs)
                    if watch.stops or ends_early(batches, epoch, epochs, steps_per_epoch):
                        break
            self._finish()
            watch.callbacks.on_train_end(logs)
            executor.engine.processes.barrier("has ended training")  # what the first has written can be read by all
            return self.model.history

    def steps(self, data: Tree, epochs: int = 1) -> Iterator[Step]:
        """Carry out one update after the other, for a loop of one's own. The same compiled update as `fit`.

        The model and the optimizer hold the new values whenever a step is yielded, and may be changed then. Reading a
        step's numbers waits for the device; nothing else does. Until the next step, `model.get_metrics_result()` says
        the same as its `logs`. At the end of the last epoch an optimizer with a moving average of the weights leaves
        that in the model, as `fit` does; a loop that is left early keeps the weights.

        Args:
            data: `Batches`, or whatever they take (then in batches of 32, in the order of the trainer's next epoch).
            epochs: how many epochs of the data, from where they stand.

        Yields:
            A `Step` for every update.

        Raises:
            NonFiniteError: an update was not applied, and neither were those after it. Found when the device is done
                with the update, so up to two steps later than it was yielded, unless its numbers were read.
        """
        arguments.check_epochs(epochs=epochs)
        batches = open_prepared(data, None, self._preparation("fit"), seed=self.seed)
        if not isinstance(data, Batches):
            batches.seek(self._epochs)
        with self._counting(batches):
            yield from self._steps(batches, epochs)
        self._finish()

    @contextmanager
    def _counting(self, batches: Batches) -> Iterator[None]:
        """Count the epochs that are begun in here: the next call takes the order of another one."""
        try:
            yield
        finally:
            epoch, step = batches.position
            self._epochs = max(self._epochs, epoch + (step > 0))

    def _steps(self, batches: Batches, epochs: int) -> Iterator[Step]:
        with self._guard:
            executor = self._build(batches)
            arguments.check_trains(self.model)
            executor.be_quiet(False)
            return run_steps(executor, self.run, batches, epochs, self._guard)

    def update(self, batch: Tree) -> Mapping[str, Any]:
        """Carry out one update on a batch in hand, and return its own loss and metrics.

        Batches may have any number of rows: a smaller one is filled up with rows of weight 0 to a size that has been
        compiled already, wherever rows may be padded.

        Args:
            batch: what the objective takes; (x, y) or (x, y, sample_weight) for a compiled model.

        Returns:
            The numbers by name; `dict(logs)` is a plain dict. They wait for the device when they are read, and so does
            the trainer's next call. Until the next update, `model.get_metrics_result()` says the same.

        Raises:
            NonFiniteError: the loss or gradient was not finite, and the update not applied. Raised where its numbers
                are read, or by whatever this trainer is asked to do next; told on stderr if nobody asks to the end.
        """
        with self._guard:
            batches = open_prepared(iter([batch]), None, self._preparation("fit"))
            executor = self._build(batches)
            arguments.check_trains(self.model)
            executor.recount(self.run)
            return run_update(executor, self.run, batches)

    # ---- without an update ----

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
        """Return the loss and the metrics over all rows, with the arguments of `keras.Model.evaluate`.

        The loss is the sum of all weighted values over the sum of all weights. Keras means the batches' means by their
        rows, which differs under masks, `ignore_class` and `reduction="mean_with_sample_weight"`, unless all rows come
        in one batch.
        """
        arguments.check_counts(steps=steps)
        with self._guard:
            batches = self._batches("evaluate", x, y, sample_weight, batch_size, False, None)
            executor = self._build(batches)
            steps = arguments.limit_steps(steps, batches.num_batches)
            told = {"verbose": verbose, "epochs": 1, "steps": steps or batches.num_batches, "history": False}
            watch = self._watch(executor, callbacks, **told)
            through = executor.open_pass(batches, Look(one_by_one=watch.has_test_hooks))
            logs = run_evaluation(executor, self.run, through, steps, watch)
            return logs if return_dict else compiled.in_order(self.model, logs)

    def predict(
        self,
        x: Tree,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the model's outputs for all rows as numpy arrays, as `keras.Model.predict` does."""
        arguments.check_counts(steps=steps)
        arguments.check_predicts(self.model)
        with self._guard:
            prepare = preparation(self.model, "predict")
            whole = isinstance(x, Batches) or prepare is not None
            batches = open_in_sequence(x if prepare is None else as_input(x), batch_size, prepare).in_order()
            arguments.check_row_order(batches)
            executor = self._build(batches, predicts=True, are_whole=whole or batches.is_ready)
            steps = arguments.limit_steps(steps, batches.num_batches)
            told = {"verbose": verbose, "epochs": 1, "steps": steps or batches.num_batches, "history": False}
            watch = self._watch(executor, callbacks, **told)
            look = Look(True, whole or batches.is_ready, watch.has_predict_hooks)
            through = executor.open_pass(batches, look)
            return run_prediction(executor, self.run, through, steps, watch)

    def explain(self) -> str:
        """Return how updates are carried out, in plain words. Complete once one has been."""
        self._settle()
        executor = self.executor
        if executor is None or not executor.planner.programs:
            return "No update has been carried out yet: the plan is made from the first batch."
        return explain(executor.planner, executor.engine.sharded(executor.variables.params), executor.where_data_are)

    @property
    def num_skipped(self) -> int:
        """How many updates were left out because they were not finite."""
        self._settle()
        return self.run.num_skipped

    # ---- how ----

    def _preparation(self, method: str) -> Prepare | None:
        """Return what the model's own `method` does to every batch first, unless an objective takes its place."""
        return None if self._given is not None else preparation(self.model, method)

    def _batches(self, method, x, y, sample_weight, batch_size, shuffle, class_weight) -> Batches:
        if isinstance(x, Batches):
            arguments.refuse(batch_size=batch_size, y=y, sample_weight=sample_weight, class_weight=class_weight)
            return open_prepared(x, None, self._preparation(method))
        prepare = self._preparation(method)
        if prepare is not None:  # which may take strings
            x, y = strings_as_arrays(x), strings_as_arrays(y)
        arguments.check_data(x, y, sample_weight)
        arguments.check_weighting(class_weight, sample_weight)
        alone = y is None and sample_weight is None and (self._given is not None or not is_nest_of_arrays(x))
        source = x if alone else without_none((x, y, sample_weight))
        transform = None if class_weight is None else class_weighted(class_weight)
        how = {"seed": self.seed, "shuffle": bool(shuffle), "transform": transform}
        batches = open_prepared(source, batch_size, prepare, **how)
        if batches.is_ready and batch_size is not None:
            told = f"batch_size={batch_size} has no effect: these batches are ready-made."
            warnings.warn(told, UserWarning, stacklevel=3)
        return batches

    def _build(self, batches: Batches, **how: bool) -> Executor:
        """Return the executor for the model as it is now, creating its variables from a batch if need be."""
        self._settle()
        self._adopt_optimizer()
        self._builder.build(batches, **how)
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            with scope(self.model):
                optimizer.build(self.model.trainable_variables)
        made_for = [*compiled.made_of(self.model, self._metrics), keras.distribution.distribution()]
        if self.executor is None or not compiled.are_same(self._made_for, made_for):
            arguments.check_optimizer(optimizer)
            arguments.check_trainable(self.model, optimizer)
            self.executor, self._made_for = self._make(), made_for
        return self.executor

    def _settle(self) -> None:
        if self.executor is not None:
            self.executor.settle(self.run)

    def _adopt_optimizer(self) -> None:
        """Let the model have this trainer's optimizer: callbacks look for it there, and trainers may share a model."""
        if self._optimizer is not None:
            self.model.optimizer = self._optimizer

    def _make(self) -> Executor:
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        if self._given is not None:
            return Executor(model, self._given, optimizer, self._metrics, leave_rows_out(self._metrics), self._options)
        if model.run_eagerly:
            warnings.warn("run_eagerly has no effect: an update is always compiled.", UserWarning, stacklevel=4)
        objective = compiled.CompiledObjective(model, self._metrics)
        metrics = [*compiled.metrics_of(model), *self._metrics]
        pads = leave_rows_out(compiled.known_metrics(model, self._metrics))
        return Executor(model, objective, optimizer, metrics, pads, self._options)

    def _watch(self, executor: Executor, callbacks: Any, **told: Any) -> CallbackRunner:
        executor.be_quiet(not told["verbose"])
        return CallbackRunner(self.model, callbacks, engine=executor.engine, **told)

    def _finish(self) -> None:
        """As at the end of `keras.Model.fit`: an optimizer with a moving average of the weights leaves that behind."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def _validate(self, through: Pass, steps: int | None, watch: CallbackRunner) -> dict:
        assert self.executor is not None
        logs = run_evaluation(self.executor, self.run, through, steps, watch)
        return {f"val_{name}": value for name, value in logs.items()}
