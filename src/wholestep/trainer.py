"""Trainer: `fit`, `evaluate`, `predict`, and the user's own loop. Every argument is checked here."""

import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import keras
import numpy as np

from wholestep import arguments, compiled
from wholestep.batches import Batches, in_sequence
from wholestep.callbacks import Watch
from wholestep.engines import scope
from wholestep.errors import BatchError, SpecificationError, say
from wholestep.evaluate import join
from wholestep.feed import Feed
from wholestep.loop import run_epoch
from wholestep.machine import Machine, Options, Report
from wholestep.objective import Objective, leave_rows_out
from wholestep.plan import explain
from wholestep.source import class_weighted, is_nest_of_arrays, without_none
from wholestep.state import State


class Step:
    """One update that `Trainer.steps` has carried out.

    Args:
        number: the update's number, from 1; the optimizer's `iterations` if nothing was skipped.
        epoch: the epoch of the data, from 0.
        batch: the batch's place in its epoch, from 0.
    """

    def __init__(self, number: int, epoch: int, batch: int, report: Report):
        self.number = number
        self.epoch = epoch
        self.batch = batch
        self._report = report

    @cached_property
    def logs(self) -> dict[str, Any]:
        """The loss and the metrics over the epoch so far, as a callback of `fit` sees them. Waits for the device."""
        return self._report.logs(0)

    @property
    def loss(self) -> float:
        """The loss of this update alone. Waits for the device."""
        return self._report.loss(0)


class Trainer:
    """Trains a Keras model, one whole step at a time.

    Args:
        model: a Keras model; compiled, if `objective` is not given.
        objective: the loss, unreduced; None for what the model was compiled with.
        optimizer: the Keras optimizer; None for what the model was compiled with.
        metrics: further Keras metrics; with an objective of one's own, those that it feeds by name.
        seed: the seed of the order of the rows.
        microbatch_size: rows that are computed at once. Less memory, same update. "auto" takes the largest that fits.
        memory_limit: bytes that "auto" may use; None for half of the device's memory.
        on_nonfinite: "raise" stops before an update whose loss or gradient is not finite; "skip" leaves it out.
        replicas: how many devices share the rows of a batch, or "all"; None for what `keras.distribution` says, else
            one, or with several processes all of theirs. Same update. For TensorFlow, build the model in the scope of
            a `tf.distribute` strategy instead.

    Raises:
        SpecificationError: arguments that cannot mean anything.

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
        optimizer: Any = None,
        metrics: Iterable = (),
        seed: int = 0,
        microbatch_size: int | str = "auto",
        memory_limit: int | None = None,
        on_nonfinite: str = "raise",
        replicas: int | str | None = None,
    ):
        arguments.check_model(model, objective)
        arguments.check_choices(microbatch_size, memory_limit, on_nonfinite, replicas)
        self.model = model
        self.seed = seed
        self._given = objective
        self._metrics = [keras.metrics.get(m) for m in metrics]
        self._options = Options(microbatch_size, memory_limit, on_nonfinite, replicas)
        self._machine: Machine | None = None
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
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Train for `epochs` epochs, with the arguments, callbacks and History of `keras.Model.fit`.

        Returns:
            The History: each epoch's loss and metrics. The loss of an epoch is the sum of all weighted values over the
            sum of all weights, not a mean of its batches' means.

        Raises:
            BatchError: the data cannot make an update.
            NonFiniteError: a loss or gradient was not finite; that update was not applied.
        """
        arguments.check_counts(steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = arguments.split((x, y, sample_weight), validation_split)
        batches = self._batches(x, y, sample_weight, batch_size, shuffle, class_weight)
        machine = self._build(batches)
        steps = steps_per_epoch or batches.num_batches
        watch = self._watch(machine, callbacks, verbose, epochs, steps, history=True)
        self.model.stop_training = False
        logs: dict = {}
        watch.callbacks.on_train_begin()
        begin = getattr(self.model, "_initial_epoch", None) or initial_epoch
        if batches is not x:
            batches.seek(begin or self._epochs)
        feed, state = machine.feed(batches), machine.take()
        for epoch in range(begin, epochs):
            watch.callbacks.on_epoch_begin(epoch)
            state = machine.begin_epoch(machine.take(state))
            first = self._number() + 1
            state, logs = run_epoch(machine, state, feed, steps_per_epoch, first, watch)
            self._ended_early(logs, batches, epoch)
            if validation_data is not None and arguments.is_due(epoch, validation_freq):
                size = validation_batch_size or batch_size
                logs |= self._validate(validation_data, size, validation_steps, watch)
            watch.callbacks.on_epoch_end(epoch, logs)
            self._epochs = max(self._epochs, batches.position[0])
            if watch.stops:
                break
        self._finish()
        watch.callbacks.on_train_end(logs)
        machine.engine.peers.meet("has ended training")  # what the first has written can be read by all
        return self.model.history

    def steps(self, data: Any, epochs: int = 1) -> Iterator[Step]:
        """Carry out one update after the other, for a loop of one's own. The same compiled update as `fit`.

        The model and the optimizer hold the new values whenever a step is yielded, and may be changed then. Reading a
        step's numbers waits for the device; nothing else does. At the end of the last epoch an optimizer with a moving
        average of the weights leaves that in the model, as `fit` does; a loop that is left early keeps the weights.

        Args:
            data: `Batches`, or whatever they take (then in batches of 32).
            epochs: how many epochs of the data, from where they stand.

        Yields:
            A `Step` for every update.
        """
        yield from self._steps(data if isinstance(data, Batches) else Batches(data, seed=self.seed), epochs)
        self._finish()

    def _steps(self, batches: Batches, epochs: int) -> Iterator[Step]:
        machine = self._build(batches)
        self._number()
        feed, state = machine.feed(batches), machine.take()
        for _ in range(epochs):
            state, late, number = machine.begin_epoch(state), None, self._number()
            for block in feed.blocks(None, lambda: 1):
                number += 1
                state, report = machine.dispatch(machine.take(state), feed, block, number)
                self._check_applied(machine, state, feed, late)
                late = report
                yield Step(number, *block.place, report)
            self._check_applied(machine, state, feed, late)
            machine.meet(feed)

    def update(self, batch: Any) -> dict[str, Any]:
        """Carry out one update on a batch in hand, and return its own loss and metrics.

        Args:
            batch: what the objective takes; (x, y) or (x, y, sample_weight) for a compiled model.
        """
        (step,) = self._steps(Batches(iter([batch])), epochs=1)
        return step.logs

    # ---- without an update ----

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics over all rows, as `keras.Model.evaluate` does."""
        arguments.check_counts(steps=steps)
        batches = self._batches(x, y, sample_weight, batch_size, False, None)
        machine = self._build(batches)
        watch = self._watch(machine, callbacks, verbose, 1, steps or batches.num_batches)
        logs = self._evaluate(machine, batches, steps, watch)
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the model's outputs for all rows as numpy arrays, as `keras.Model.predict` does."""
        arguments.check_counts(steps=steps)
        if type(self.model).predict_step is not keras.Model.predict_step:
            raise SpecificationError(
                say(
                    "The model must not override `predict_step`.",
                    type(self.model).__name__,
                    "call model.predict itself.",
                )
            )
        whole = isinstance(x, Batches)
        batches = x.in_order() if isinstance(x, Batches) else in_sequence(x, batch_size)
        arguments.check_row_order(batches)
        if not all(layer.built for layer in compiled.layers(self.model)):
            inputs = batches.example()
            self.model(compiled.unpack(inputs)[0] if whole or batches.is_ready else inputs)
        machine = self._build(batches, for_prediction=True)
        watch = self._watch(machine, callbacks, verbose, 1, steps or batches.num_batches)
        told, outputs = watch.callbacks, []
        told.on_predict_begin()
        state = machine.take()
        for i, block in enumerate(machine.feed(batches, evaluates=True).blocks(steps, lambda: 1)):
            told.on_predict_batch_begin(i)
            outputs.append(machine.evaluation.predict(state, block, whole or batches.is_ready))
            batches.position = block.position
            told.on_predict_batch_end(i, {"outputs": outputs[-1]})
        told.on_predict_end()
        machine.engine.peers.meet(f"predicted {len(outputs)} batches")
        return join(machine.engine.fetch(outputs))

    def explain(self) -> str:
        """Return how updates are carried out, in plain words. Complete once one has been."""
        machine = self._machine
        if machine is None or not machine.planner.programs:
            return "No update has been carried out yet: the plan is made from the first batch."
        return explain(machine.planner, machine.engine.sharded(machine.variables.params))

    @property
    def num_skipped(self) -> int:
        """How many updates were left out because they were not finite."""
        return 0 if self._machine is None else self._machine.num_skipped

    # ---- how ----

    def _batches(self, x, y, sample_weight, batch_size, shuffle, class_weight) -> Batches:
        if isinstance(x, Batches):
            arguments.refuse(batch_size=batch_size, y=y, sample_weight=sample_weight, class_weight=class_weight)
            return x
        arguments.check_data(x, y, sample_weight)
        if class_weight is not None and sample_weight is not None:
            raise SpecificationError(
                say("class_weight and sample_weight cannot both be given.", "both", "multiply them into sample_weight.")
            )
        alone = y is None and sample_weight is None and (self._given is not None or not is_nest_of_arrays(x))
        source = x if alone else without_none((x, y, sample_weight))
        transform = None if class_weight is None else class_weighted(class_weight)
        return Batches(source, batch_size, seed=self.seed, shuffle=bool(shuffle), transform=transform)

    def _build(self, batches: Batches, for_prediction: bool = False) -> Machine:
        """Return the machine for the model as it is now, creating its variables from a batch if need be."""
        self._adopt_optimizer()
        objective = self._given
        if objective is None and not for_prediction:
            with scope(self.model):
                compiled.build(self.model, batches.example())
        elif not all(layer.built for layer in compiled.layers(self.model)):
            raise SpecificationError(
                say(
                    "The model must be built.",
                    "a model without variables",
                    "call it once on a batch, or give it an Input.",
                )
            )
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            with scope(self.model):
                optimizer.build(self.model.trainable_variables)
        made_for = [*compiled.made_of(self.model, self._metrics), keras.distribution.distribution()]
        if self._machine is None or not compiled.are_same(self._made_for, made_for):
            arguments.check_optimizer(optimizer)
            arguments.check_trainable(self.model, optimizer)
            self._machine, self._made_for = self._make(), made_for
        return self._machine

    def _adopt_optimizer(self) -> None:
        """Let the model have this trainer's optimizer: callbacks look for it there, and trainers may share a model."""
        if self._optimizer is not None:
            self.model.optimizer = self._optimizer

    def _make(self) -> Machine:
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        if self._given is not None:
            return Machine(model, self._given, optimizer, self._metrics, leave_rows_out(self._metrics), self._options)
        if model.run_eagerly:
            warnings.warn("run_eagerly has no effect: an update is always compiled.", UserWarning, stacklevel=4)
        objective = compiled.CompiledObjective(model, self._metrics)
        metrics = [*compiled.metrics_of(model), *self._metrics]
        pads = leave_rows_out(compiled.known_metrics(model, self._metrics))
        return Machine(model, objective, optimizer, metrics, pads, self._options)

    def _watch(
        self, machine: Machine, callbacks: Any, verbose: Any, epochs: int, steps: int | None, *, history: bool = False
    ) -> Watch:
        told = {"verbose": verbose, "epochs": epochs, "steps": steps, "history": history}
        return Watch(self.model, callbacks, **told, engine=machine.engine)

    def _number(self) -> int:
        if getattr(self.model, "optimizer", None) is None:
            raise SpecificationError(
                say("Training needs an optimizer.", "none", "pass Trainer(..., optimizer=...), or compile the model.")
            )
        return int(np.asarray(self.model.optimizer.iterations)) + self.num_skipped

    def _check_applied(self, machine: Machine, state: State, feed: Feed, report: Report | None) -> None:
        if report is not None and (failure := machine.note_failures(report)) is not None:
            feed.go_back(report.block, failure)
            raise machine.failure(state, report, failure)

    def _finish(self) -> None:
        """As at the end of `keras.Model.fit`: an optimizer with a moving average of the weights leaves that behind."""
        self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def _ended_early(self, logs: dict, batches: Batches, epoch: int) -> None:
        if not logs:
            raise BatchError(
                say(
                    f"Epoch {epoch + 1} must have at least one batch.",
                    "a source with no batches left",
                    "pass something that can be iterated over again, or steps_per_epoch.",
                )
            )

    def _validate(self, data: Any, batch_size: int | None, steps: int | None, watch: Watch) -> dict:
        data = data if isinstance(data, Batches) else in_sequence(data, batch_size)
        logs = self._evaluate(self._build(data), data, steps, watch)
        return {f"val_{name}": value for name, value in logs.items()}

    def _evaluate(self, machine: Machine, batches: Batches, steps: int | None, watch: Watch) -> dict:
        told, batches, total, report = watch.callbacks, batches.in_order(), None, None
        told.on_test_begin()
        state = machine.begin_epoch(machine.take())
        still = state._replace(metrics=[], sums=[], stopped=[], marks=[])
        for i, block in enumerate(machine.feed(batches, evaluates=True).blocks(steps, lambda: 1)):
            told.on_test_batch_begin(i)
            if total is None:
                machine.check(block)
                total = machine.evaluation.begin(state, block)
            total, report = machine.evaluation.add(total, still, block)
            batches.position = block.position
            told.on_test_batch_end(i, machine.evaluation.logs(report) if watch.has_test_hooks else None)
        if report is None:
            raise BatchError(say("There must be at least one batch.", "none", "pass data that are not spent."))
        logs = machine.evaluation.logs(report)
        machine.engine.peers.meet(f"evaluated {i + 1} batches")
        told.on_test_end(logs)
        return logs
