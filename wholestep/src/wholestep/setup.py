"""The setup of each call from the arguments of a trainer: batches, an executor, callbacks, a
saver.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras

from wholestep import arguments, checkpoints
from wholestep.callbacks import CallbackRunner
from wholestep.checkpoints import (
    Assigned,
    Checkpoints,
    Saver,
    Snapshot,
    Unsaved,
    VerifiedCheckpoint,
    assign_by_path,
    leaves_of,
    put,
)
from wholestep.context import PREDICTION, UPDATE, Builder, Call, Context, Prepare, preparation
from wholestep.custom import CustomSteps, check_choices, check_replicas
from wholestep.data import (
    Batches,
    BatchSize,
    Data,
    class_weighted,
    classify,
    compose,
    copied_batch,
    first_size,
    open_batches,
)
from wholestep.engines import (
    as_function,
    build_optimizer,
    connect,
    makes_variables,
    num_replicas,
    scope,
)
from wholestep.errors import SpecificationError, message, tell, warn
from wholestep.executor import Executor
from wholestep.model import (
    CompiledObjective,
    Coupling,
    Findings,
    Objective,
    compiled,
    leave_rows_out,
    open_columns,
)
from wholestep.nonfinite import RAISE
from wholestep.program import Options
from wholestep.run import Run, groups_of
from wholestep.safety import uninterrupted
from wholestep.state import Variables
from wholestep.tree import Tree, num_rows

# By model: the optimizer that a trainer has assigned, and the model's own, of trainers without one.
_OPTIMIZERS: WeakKeyDictionary[keras.Model, tuple[Any, Any]] = WeakKeyDictionary()


class FitData(NamedTuple):
    """The data arguments of `fit` or `evaluate`."""

    x: Data
    y: Tree = None
    sample_weight: Tree = None
    batch_size: BatchSize = None
    shuffle: bool | str = False
    class_weight: dict | None = None


class Setup:
    """Makes the batches, the executor, the callback runner and the saver of each call of a trainer.

    Args:
        objective: the unreduced loss; None for the compiled loss.
        optimizer: None for the compiled optimizer.
        run: the run that the calls advance.

    Attributes:
        executor: the compiled programs of the current model; None before the first call that needs
            them.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective | None,
        optimizer: keras.optimizers.Optimizer | str | dict | None,
        metrics: Iterable,
        seed: int,
        options: Options,
        run: Run,
    ):
        self.model = model
        self.objective = objective
        self.seed = seed
        self.options = options
        self.run = run
        self.executor: Executor | None = None
        self._metrics = [keras.metrics.get(m) for m in metrics]
        if objective is None:
            size = options.microbatch_size
            replicas = options.replicas
            log = [name.value for name in options.log]
            check_choices(
                model, microbatch_size=size, replicas=replicas, metrics=self._metrics, log=log
            )
        with scope(model):
            self.steps = CustomSteps(model, as_function, has_objective=objective is not None)
        self._is_own = objective is not None or self.steps.trains
        self._builder = Builder(model, objective, self.steps)
        # The checkpoint that was restored by hand, and the learning rates of the script before.
        self._restored: tuple[VerifiedCheckpoint, dict[str, float]] | None = None
        # the calls for which the executor's model has all variables
        self._ready: set[Call] = set()
        given = None if optimizer is None else keras.optimizers.get(optimizer)
        self._optimizer = given and arguments.with_loss_scale(given, model)
        self._adopt_optimizer()
        methods = self._count_exactly, self._apply_restored, self._own_variables
        run.connect(*map(weakref.WeakMethod, methods))  # the run must not keep this alive
        arguments.check_optimizer(None if self.steps.trains else getattr(model, "optimizer", None))

    # ---- batches ----

    def batches(self, method: str, given: FitData) -> Batches:
        """Return the batches of a call of `method`, with the preprocessing of the model's
        method.
        """
        arguments.check_compiled(self.model, self.objective)
        x, y, sample_weight, batch_size, shuffle, class_weight = given
        if x.keeps_position:
            if method == "fit" and shuffle is not True:
                warn(
                    f"shuffle={shuffle!r} has no effect: Batches say in which order their rows "
                    "come."
                )
            arguments.refuse(
                batch_size=batch_size, y=y, sample_weight=sample_weight, class_weight=class_weight
            )
            return open_batches(x, prepare=self._preparation(method))
        prepare = self._preparation(method)
        take = None
        if x.has_columns and not self._is_own:
            x, take = open_columns(x, self.model, is_prepared=prepare is not None)
        arguments.check_data(x, y, sample_weight)
        is_custom = self.steps.trains if method == "fit" else self.steps.tests
        # An objective gets the arrays as they are; a custom step too, unless they are a sequence.
        is_batch = self.objective is not None or not x.are_arrays
        is_batch |= is_custom and not isinstance(x.content, list | tuple)
        is_alone = y is None and sample_weight is None
        data = x if is_alone and is_batch else x.with_labels(y, sample_weight)
        batches = open_batches(
            data,
            batch_size,
            prepare=compose(take, prepare),
            transform=self._weigher(class_weight),
            seed=self.seed,
            shuffle=shuffle if shuffle == "batch" else bool(shuffle),
        )
        if data.are_ready and batch_size is not None:
            warn(f"batch_size={batch_size} has no effect: these batches are ready-made.")
        return batches

    def _weigher(self, class_weight: Mapping[Any, Any] | None) -> Callable[[Tree], Tree] | None:
        if class_weight is None:
            return None
        return class_weighted(class_weight, getattr(self.model, "output_names", ()))

    def ready_batches(self, data: Data) -> Batches:
        """Return the batches for `steps`."""
        arguments.check_compiled(self.model, self.objective)
        data = self._by_columns("fit", data, None, shuffle=True, seed=self.seed)
        return open_batches(data, prepare=self._preparation("fit"), seed=self.seed)

    def single_batch(self, batch: Tree, method: str) -> Tree:
        """Return a user's batch as numpy arrays, with the preprocessing of the model's method.

        Raises:
            BatchError: leaves have no rows, or differ in their number.
        """
        arguments.check_compiled(self.model, self.objective)
        host = copied_batch(batch, self._preparation(method))
        num_rows(host)
        return host

    def validation_batches(self, data: Data, asked: int | None, batch_size: BatchSize) -> Batches:
        """Return the batches of validation data, in sequence, of size `asked` or else of the
        first size of `batch_size`.
        """
        size = asked or first_size(batch_size)
        are_ready = data.are_ready
        prepare = self._preparation("evaluate")
        data = self._by_columns("evaluate", data, size)
        batches = open_batches(data, size, prepare=prepare, shuffle=False)
        if asked is not None and are_ready:
            warn(
                f"validation_batch_size={asked} has no effect: the validation data come in batches "
                "already."
            )
        return batches

    def inputs(self, x: Data, batch_size: int | None) -> tuple[Batches, bool]:
        """Return the batches to predict, and whether each is a tuple (x, ...) with x as the
        input.
        """
        x = self._by_columns("predict", x, batch_size, inputs_only=True)
        # an objective replaces the preprocessing of labels, not of the model's inputs
        prepare = preparation(self.model, "predict")
        is_whole = x.keeps_position or prepare is not None
        x = x.with_labels(None, None) if prepare is not None and x.are_arrays else x
        batches = open_batches(x, batch_size, prepare=prepare, shuffle=False).in_order()
        arguments.check_row_order(batches)
        return batches, is_whole or batches.is_ready

    def _by_columns(
        self,
        method: str,
        data: Data,
        batch_size: int | None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        **how: bool,
    ) -> Data:
        """Return the batches of a Hugging Face dataset by the names of its columns; other data
        unchanged.
        """
        if self._is_own or not data.has_columns:
            return data
        is_prepared = self._preparation(method) is not None
        rows, take = open_columns(data, self.model, is_prepared=is_prepared, **how)
        return classify(Batches(rows, batch_size, shuffle=shuffle, seed=seed, transform=take))

    def _preparation(self, method: str) -> Prepare | None:
        """Return the preprocessing of the model's `method`; None if there is none, or an objective
        replaces it.
        """
        return None if self.objective is not None else preparation(self.model, method)

    @contextmanager
    def trial(self) -> Iterator["Setup"]:
        """Context with a separate run of this model, whose optimizer subtracts the gradient.

        The caller restores the variables.
        """
        self.settle()
        options = self.options._replace(on_nonfinite=RAISE, log=())
        with scope(self.model):
            optimizer = None if self.steps.trains else keras.optimizers.SGD(1.0, name="trial")
        try:
            yield Setup(
                self.model,
                self.objective,
                optimizer,
                self._metrics,
                self.seed,
                options,
                Run(),
            )
        finally:
            self._adopt_optimizer()

    # ---- an executor ----

    def executor_to_update(self, example: Callable[[], Tree]) -> Executor:
        """Return the executor of the current model; the caller checks that the last single update
        was applied.
        """
        executor = self._current_executor(example, UPDATE)
        executor.ledger.check_loop(self.run)
        if not self.steps.trains:
            arguments.check_trains(self.model)
        return executor

    def executor_for(self, example: Callable[[], Tree], call: Call) -> Executor:
        """Return the executor of the current model, to evaluate or predict.

        Args:
            example: returns a batch, from which missing variables are created; it is not called for
                a built model.
        """
        self.settle()
        return self._current_executor(example, call)

    def _current_executor(self, example: Callable[[], Tree], call: Call) -> Executor:
        self._adopt_optimizer()
        executor = self.executor
        is_known = executor is not None and call in self._ready and not self.run.restored
        if executor is None or not is_known or not executor.context.is_untouched():
            self.settle()
            executor = self._executor_anew(example, call)
        return executor

    def _executor_anew(self, example: Callable[[], Tree], call: Call) -> Executor:
        """Return the executor after a look at all parts of the model; the known one, unless a part
        has changed.
        """
        restored = self.run.restored
        trains = call == UPDATE
        if trains and self.steps.trains:
            check_replicas(num_replicas(self.model))
        self._builder.build(example, call)
        if trains or restored is not None:
            self._build_optimizer()
        if self.executor is None or not self.executor.context.is_current():
            self.run.adopt(self.run.findings if restored else Findings())
            self.executor = self._make()
            self._ready.clear()
        executor = self.executor
        executor.context.note()
        if trains and UPDATE not in self._ready:
            self._check_optimizer()
            arguments.warn_of_values(self.model)
        self._ready.add(call)
        is_elsewhere = self.run.variables is not executor.variables and not self.run.is_in_call
        if restored is not None and is_elsewhere:
            self._assign_snapshot(restored)
        self._print_changes()
        return executor

    def _check_optimizer(self) -> None:
        if not self.steps.trains:
            optimizer = getattr(self.model, "optimizer", None)
            arguments.check_optimizer(optimizer)
            arguments.check_trainable(self.model, optimizer, is_given=self._optimizer is not None)
            arguments.warn_if_frozen(self.model)

    def _build_optimizer(self) -> keras.optimizers.Optimizer | None:
        """Create the variables of the model's optimizer, unless a custom step may create them;
        return the optimizer.
        """
        optimizer = getattr(self.model, "optimizer", None)
        is_lazy = self.steps.trains and makes_variables()
        if optimizer is not None and not (optimizer.built or is_lazy):
            with uninterrupted(), scope(self.model):
                build_optimizer(optimizer, self.model.trainable_variables)
        made = self.executor
        if made is not None and UPDATE not in self._ready and made.context.optimizer is optimizer:
            made.context.learn_slots()
        return optimizer

    def _assign_snapshot(self, snapshot: Snapshot) -> None:
        """Assign a snapshot to the existing variables that are not assigned yet; see
        `Run.assigned`.
        """
        # a prediction builds no metrics
        has_metrics = any(call.step != PREDICTION.step for call in self._ready)
        executor = self.executor if has_metrics else None
        is_built = self._is_built()
        optimizer = self._build_optimizer() if is_built else getattr(self.model, "optimizer", None)
        if executor is not None and (
            self.steps.trains or (optimizer is not None and optimizer.built)
        ):
            executor.restore(self.run, snapshot)
        else:
            if is_built:
                _put_all(snapshot, self._groups(), self.run.assigned)
                if executor is not None:  # an executor that only evaluates and predicts
                    self.run.has_resumed()
            slots = [
                (path, snapshot.arrays[f"slots/{i}"])
                for i, path in enumerate(snapshot.facts["paths"]["slots"])
            ]
            variables = [] if optimizer is None else optimizer.variables
            assign_by_path(slots, variables, self.run.assigned)  # such as the learning rate
        checkpoints.put_own(snapshot, self._own_variables(), self.run.assigned)

    def _own_variables(self) -> dict[str, Any]:
        return checkpoints.own_variables(self.model, self.objective)

    def _is_built(self) -> bool:
        """Whether the model has its variables. `build(shape)` marks a model as built whose layers
        may have none yet.
        """
        has_all = self.executor is not None or all(
            layer.built for layer in compiled.layers(self.model)
        )
        return self.model.built and has_all

    def _groups(self) -> dict[str, list[keras.Variable]]:
        """Return the existing variables by group."""
        optimizer = getattr(self.model, "optimizer", None)
        slots = (
            optimizer.variables
            if optimizer is not None and optimizer.built and not self.steps.trains
            else []
        )
        held = Variables(
            self.model.trainable_variables, slots, self.model.non_trainable_variables, []
        )
        return {name: variables for name, variables in groups_of(held).items() if variables}

    def restore(self, found: VerifiedCheckpoint) -> None:
        """Restore the run, and print the differences to this script when the model is built."""
        rates = checkpoints.rates_of(self.model)
        self.run.restore(found.snapshot)
        # not compared: the user may have corrected the data
        self.run.note_last("", self.run.data.state)
        self._restored = found, rates
        self._print_changes()

    def _print_changes(self) -> None:
        """Print the differences to the restored run, once; an unbuilt model lacks some settings."""
        if self._restored is None or not self._is_built():
            return
        (found, rates), self._restored = self._restored, None
        objective = CompiledObjective(self._metrics) if self.objective is None else self.objective
        here = self.model, objective, self.options, self._own_variables(), rates
        if line := checkpoints.changed_since(found, *here):
            tell(line)

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """Refuse another model's snapshot, as far as the model is built.

        Raises:
            SpecificationError: the snapshot is another model's; nothing has been changed.
        """
        if self._is_built():
            leaves_of(snapshot, self._groups())

    def check_weights(self, snapshot: Snapshot) -> None:
        """Refuse the weights of another model.

        Raises:
            SpecificationError: another model's weights, or a model that is not built; nothing has
                been changed.
        """
        if not self.model.built:
            must = "A model must be built before its weights are restored."
            raise SpecificationError(
                message(must, "an unbuilt model", "call it on a batch, or model.build(shape).")
            )
        leaves_of(snapshot, self._weights())

    def put_weights(self, snapshot: Snapshot) -> None:
        """Assign the weights, statistics and seeds of a snapshot to the model, and nothing else."""
        _put_all(snapshot, self._weights(), {})

    def _weights(self) -> dict[str, list[keras.Variable]]:
        return {
            name: held for name, held in self._groups().items() if name in ("params", "buffers")
        }

    def _apply_restored(self) -> None:
        assert self.run.restored is not None
        self._assign_snapshot(self.run.restored)
        if self.executor is not None:
            self.executor.ledger.forget()

    def settle(self) -> None:
        """Check that the last single update was applied; see `UpdateLedger`."""
        if self.executor is not None:
            self.executor.ledger.raise_pending_failure(self.run)

    def _count_exactly(self) -> int:
        if self.executor is None:
            return self.run.num_skipped
        if not self.run.is_in_call and not self.executor.context.is_current():
            must = "A snapshot needs the model as it was trained."
            received = "a model that was compiled, or changed, since the last update"
            raise SpecificationError(
                message(must, received, "take the snapshot before, or after the next update.")
            )
        self.executor.planner.note_no_xla()
        return self.executor.ledger.count_exactly(self.run)

    def _adopt_optimizer(self) -> None:
        """Assign this trainer's optimizer to the model: callbacks read it there, and trainers may
        share a model.
        """
        now = getattr(self.model, "optimizer", None)
        adopted, own = _OPTIMIZERS.get(self.model, (None, None))
        own = own if now is adopted else now  # compiled or assigned since
        adopted = self._optimizer or own or now
        if adopted is not now:
            self.model.optimizer = adopted
        _OPTIMIZERS[self.model] = adopted, own

    def _make(self) -> Executor:
        model = self.model
        if self.objective is not None:
            self._note_padding(leave_rows_out(self._metrics))
            return self._executor(self.objective, self._metrics)
        objective = CompiledObjective(self._metrics)
        if self.steps.trains:
            name = (
                "train_step" if compiled.is_overridden(model, "train_step") else "compute_metrics"
            )
            self.run.adopt(replace(self.run.findings, coupling=Coupling(custom=name), pads=False))
            return self._executor(objective, list(model.metrics))
        metrics = [*compiled.metrics_of(model), *self._metrics]
        self._note_padding(leave_rows_out(compiled.known_metrics(model, self._metrics)))
        return self._executor(objective, metrics)

    def _executor(self, objective: Objective, metrics: list) -> Executor:
        context = Context(self.model, objective, metrics, self._metrics, self.steps, self.options)
        return Executor(context, metrics, self.run.findings)

    def _note_padding(self, pads: bool | None) -> None:
        """Record whether every metric ignores rows of weight 0, unless that has been measured."""
        if self.run.findings.pads is None:
            self.run.adopt(replace(self.run.findings, pads=pads))

    # ---- around ----

    def saver(self, asked: Checkpoints | None, call: str, batches: Batches) -> Saver | Unsaved:
        """Return the saver of a call; `Unsaved` if it has no checkpoints."""
        if asked is None:
            return Unsaved(self.run)
        self._adopt_optimizer()
        return Saver(asked, self.run, call, batches, self.model, self.check_snapshot, connect())

    def watch(
        self,
        executor: Executor,
        callbacks: Any,
        steps: int | None,
        *,
        verbose: int | str,
        epochs: int = 1,
        history: bool = False,
    ) -> CallbackRunner:
        """Return the runner of these callbacks, for `steps` batches an epoch."""
        return CallbackRunner(
            self.model,
            callbacks,
            engine=executor.engine,
            steps=steps,
            verbose=verbose,
            epochs=epochs,
            history=history,
        )

    def finish(self, epochs: int) -> None:
        """Replace the weights by the optimizer's moving average, if it has one, as at the end of
        `keras.Model.fit`.

        Before the first update that average is 0; and a call of 0 epochs does nothing, as in Keras.
        """
        optimizer = self.model.optimizer
        if not epochs or optimizer is None or self.executor is None:
            return
        (num_applied,) = self.executor.engine.variables.values([optimizer.iterations])
        if int(num_applied) > 0:  # on the host: the engine would compile the comparison
            optimizer.finalize_variable_values(self.model.trainable_weights)


def _put_all(
    snapshot: Snapshot, groups: dict[str, list[keras.Variable]], assigned: Assigned
) -> None:
    for name, arrays in leaves_of(snapshot, groups).items():
        put(arrays, groups.get(name, []), assigned)
