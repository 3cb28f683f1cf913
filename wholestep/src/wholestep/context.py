"""The context of a call: the model as its programs know it, with its engine and its variables,
which are made here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import keras
from keras import ops

from wholestep import engines, tree
from wholestep.custom import CustomSteps
from wholestep.data import to_numpy, without_none
from wholestep.engines import scope
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.keras_private import (
    COMPILED,
    HELD_BY_LAYER,
    IS_TRAINABLE,
    compile_loss,
    compile_metrics,
    compute_loss,
    compute_output_spec,
    learning_rate,
    symbolic_build,
    takes_training,
)
from wholestep.model import (
    Objective,
    are_same,
    check_labels_are_numbers,
    compiled,
    explained,
    is_overridden,
    layers,
    loss_trackers,
    unpack,
    without_labels,
)
from wholestep.patches import replaced
from wholestep.program import Options
from wholestep.safety import uninterrupted
from wholestep.state import Variables
from wholestep.tree import Tensor, Tree


class Context:
    """The model as the programs of an executor know it, with its engine and its variables.

    A call asks `is_untouched` once. The layers are found when the context is made and after a
    change, not in each call.

    Args:
        objective: the unreduced loss.
        metrics: the Keras metrics that the objective updates; all of the model's for a custom
            `train_step`.
        given: the ones passed to the trainer.
        steps: the model's custom steps.

    Attributes:
        optimizer: the model's optimizer; None is allowed for evaluation.
        metrics: the Keras metrics whose variables are part of the state.
        variables: the variables of the state. A trace may find more.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Objective,
        metrics: list[keras.metrics.Metric],
        given: list[keras.metrics.Metric],
        steps: CustomSteps,
        options: Options,
    ):
        self.model = model
        self.objective = objective
        self.steps = steps
        self.options = options
        self.optimizer: keras.optimizers.Optimizer = getattr(model, "optimizer", None)
        self.engine = engines.choose(self.optimizer, model, options.replicas, options.jit_compile)
        self.metrics = metrics if steps.trains else [*metrics, *loss_trackers(model).values()]
        slots = (
            steps.slots
            if steps.trains
            else []
            if self.optimizer is None
            else self.optimizer.variables
        )
        held = [v for metric in self.metrics for v in metric.variables]
        self.variables = Variables(
            model.trainable_variables, slots, model.non_trainable_variables, held
        )
        self._given = given
        self._made_of = self._parts()
        self.note()

    def note(self) -> None:
        """Record the attributes of the model and its layers that `is_untouched` compares."""
        self._layers = layers(self.model)
        self._of_steps = self.steps.watched() if self.steps.trains else []
        self._flagged = [*self._layers, *self.model.variables]
        self._seen = self._attributes()
        vars(self).pop("_order", None)

    @cached_property
    def _order(self) -> list[str]:
        return compiled.order_of(self.model)

    def results(self, logs: Mapping[str, Any], *, return_dict: bool) -> Any:
        """Return logs as `keras.Model.evaluate` does: by name, a single number, or a list in its
        order.
        """
        if return_dict:
            return dict(sorted(logs.items()))
        names = self._order
        values = [logs[name] for name in names if name in logs] + [
            logs[k] for k in sorted(logs) if k not in names
        ]
        return values[0] if len(values) == 1 else values

    def is_untouched(self) -> bool:
        """Whether the model, its layers and variables have the recorded attributes."""
        now = self._attributes()
        return len(now) == len(self._seen) and all(map(is_, now, self._seen))

    def is_current(self) -> bool:
        """Whether the programs still serve the model, after a walk over its layers."""
        return are_same(self._made_of, self._parts())

    def learn_slots(self) -> None:
        """Add the optimizer's variables to the state, also if other code has built the
        optimizer.
        """
        if self.optimizer is not None and not self.steps.trains:
            self.variables.slots[:] = self.optimizer.variables

    def _attributes(self) -> list:
        """Return the attributes by which a change is noticed. No Python function is called for a
        layer.
        """
        held = chain.from_iterable(chain.from_iterable(map(HELD_BY_LAYER, self._layers)))
        flags = map(IS_TRAINABLE, self._flagged)
        of_model = [getattr(self.model, name, None) for name in COMPILED]
        return [
            *of_model,
            self._schedule(),
            keras.distribution.distribution(),
            *held,
            *flags,
            *chain(*self._of_steps),
        ]

    def _parts(self) -> list[Any]:
        """Return the objects for which programs are compiled; if any changes, other programs are
        needed.
        """
        also = self.steps.slots if self.steps.trains else []
        distribution = keras.distribution.distribution()
        return [*compiled.made_of(self.model, self._given), self._schedule(), distribution, *also]

    def _schedule(self) -> Any:
        """Return the variable or the schedule of the learning rate: another one is assigned by its
        name.
        """
        optimizer = getattr(self.model, "optimizer", None)
        return learning_rate(getattr(optimizer, "inner_optimizer", optimizer))


Function = Callable[[keras.Model, Tree, bool], object]
_OF_A_PART = "predict with the sub-model itself, as in model.decoder.predict(x)."
_OBJECTIVE = (
    "write the loss as a wholestep.Objective, and pass Trainer(model, MyObjective(), "
    "optimizer=...)."
)


class Call(NamedTuple):
    """The use of the model by a call.

    Args:
        step: the method of `keras.Model` of the same use.
        are_whole: whether batches to predict also hold labels or other arguments of an objective.
    """

    step: str
    are_whole: bool = False


UPDATE = Call("train_step")
EVALUATION = Call("test_step")
PREDICTION = Call("predict_step")


class Builder:
    """Creates the missing variables of a model, its losses and its metrics; interrupts are deferred
    meanwhile.

    Args:
        given: the objective that will call the model, or parts of it; None for a compiled model.
        steps: the model's custom steps; None if there are none.
    """

    def __init__(
        self, model: keras.Model, given: Objective | None, steps: CustomSteps | None = None
    ):
        self.model = model
        self.given = given
        self.steps = steps
        self._unused: list = []

    def build(self, example: Callable[[], Tree], call: Call) -> None:
        """Create all variables that a call on such batches needs.

        Args:
            example: returns a batch; it is not called if no variable is missing.

        Raises:
            SpecificationError: the model must be called and has no `call`.
        """
        if self._is_custom(call) and self._build_custom(call.step, example):
            return
        predicts = call.step == PREDICTION.step
        if (predicts or self.given is None) and not _has_call(self.model):
            received = f"{type(self.model).__name__}, which has none"
            attempt = _OF_A_PART if predicts else _OBJECTIVE
            raise SpecificationError(message("The model must have a `call`.", received, attempt))
        with scope(self.model):
            if self.given is None and not predicts:
                if not _is_built(self.model):
                    batch = example()
                    with uninterrupted(), explained(self.model, None, batch):
                        check_labels_are_numbers(self.model, batch)
                        if any(map(tree.is_ragged, tree.leaves(batch))):
                            _build(_compute_compiled, self.model, batch)
                        else:
                            build_compiled(self.model, batch)
            elif unbuilt := self._unbuilt():
                batch = unpack(example())[0] if call.are_whole else example()
                with (
                    uninterrupted(),
                    explained(self.model, self.given, batch, inputs_only=predicts),
                ):
                    _build(
                        _call if predicts or self.given is None else self.given, self.model, batch
                    )
                self._unused = [layer for layer in unbuilt if not layer.built]

    def _is_custom(self, call: Call) -> bool:
        """Whether a custom step of the model will run."""
        steps = self.steps
        if steps is None:
            return False
        custom = {UPDATE: steps.trains, EVALUATION: steps.tests}
        return custom.get(call, steps.predicts)

    def _build_custom(self, name: str, example: Callable[[], Tree]) -> bool:
        """Create the variables that a custom step needs, as Keras does; return whether they are
        complete.
        """
        steps = self.steps
        assert steps is not None
        steps.forget()
        if engines.makes_variables():
            if not steps.are_built:
                batch = example()
                with uninterrupted(), scope(self.model):
                    self._make_variables(steps, name, batch)
            steps.remember()
            return True
        steps.remember()
        inner = layers(self.model)[1:]
        has_call = _has_call(self.model)
        if not has_call and not all(layer.built for layer in inner):
            must = "On JAX a model without a `call` must have parts that are built."
            received = f"not built: {', '.join(layer.name for layer in inner if not layer.built)}"
            raise SpecificationError(
                message(must, received, "call each on a batch, or part.build(shape).")
            )
        if has_call and _is_built(self.model):
            return True
        x, y, _ = unpack(example())
        if has_call and y is None and not self.model.built:
            with uninterrupted():
                _build(_call, self.model, x)
        return not has_call or y is None  # a custom step may need no labels

    def _make_variables(self, steps: CustomSteps, name: str, example: Tree) -> None:
        """Create the variables that a step needs on TensorFlow. An eager step is traced only as a
        last resort.
        """
        x, y, _ = unpack(example)
        if self.model.run_eagerly and _has_call(self.model):
            if y is None:
                _build(_call, self.model, x)
            else:
                build_compiled(self.model, example, with_optimizer=True)
        if not steps.are_built:
            engines.make_variables(steps.function(name), example)

    def _unbuilt(self) -> list:
        """Return the unbuilt layers; an empty list if they are the same layers that the last build
        left unused.
        """
        unbuilt = [layer for layer in layers(self.model) if not layer.built]
        return [] if are_same(unbuilt, self._unused) else unbuilt


def _build(function: Function, model: keras.Model, batch: Tree) -> None:
    """Create the variables that a function needs, from the shapes of one batch. No variable is
    changed.

    Nothing is computed, unless the model runs eagerly: then its layers may read the batch's values.
    Ragged rows are traced, as their shapes do not suffice.
    """

    def call(batch: Tree, training: bool) -> Tensor:
        function(model, batch, training)
        return ops.zeros(())

    for training in (True, False):  # a model may have parts that only one mode calls
        in_mode = partial(call, training=training)
        if any(map(tree.is_ragged, tree.leaves(batch))):
            # or a strategy could not copy variables that a graph initialises
            with keras.StatelessScope():
                engines.make_variables(in_mode, batch)
        elif model.run_eagerly:
            with keras.StatelessScope():
                in_mode(tree.map_leaves(ops.convert_to_tensor, batch))
        else:
            compute_output_spec(in_mode, tree.map_leaves(_symbolic, batch))


def build_compiled(model: keras.Model, batch: Tree, *, with_optimizer: bool = False) -> None:
    """Create the variables of the model, its losses and its metrics from the shapes of one batch.

    Args:
        with_optimizer: whether the optimizer's slots are created too.

    Raises:
        BatchError: the model was compiled with a loss, and the batch has no labels.
    """
    x, y, weight = unpack(batch)
    if missing := without_labels(model, batch):
        raise BatchError(missing)
    if model.run_eagerly:
        _build_eagerly(model, x, y, weight)
    # an evaluation needs no slots, and Keras must not make them
    unused = [] if with_optimizer or model.optimizer is None else [model.optimizer]
    with replaced(*unused, built=True):
        symbolic_build(model)(data_batch=tree.map_leaves(_symbolic, (x, y, weight)))


def _build_eagerly(model: keras.Model, x: Tree, y: Tree, weight: Tree) -> None:
    """Do the work of `_symbolic_build` on the batch's values: an eager model may read them."""
    if _is_built(model):
        return
    x, y, weight = (tree.map_leaves(ops.convert_to_tensor, part) for part in (x, y, weight))
    with keras.StatelessScope():  # nothing is moved
        outputs = _call(model, x, training=False)
    # where Keras looks for regularised variables
    with keras.StatelessScope([(v, v.value) for v in model.variables]):
        if not getattr(compile_metrics(model), "built", True):
            model.compute_metrics(x, y, outputs, sample_weight=weight)
        if not getattr(compile_loss(model), "built", True):
            compute_loss(model)(x, y, outputs, sample_weight=weight, training=False)


def _is_built(model: keras.Model) -> bool:
    """Whether a compiled model, its losses and its metrics have all their variables, so that no
    batch is loaded.
    """
    parts = (*layers(model), compile_loss(model), compile_metrics(model))
    return all(getattr(part, "built", True) for part in parts)


def _symbolic(leaf: Tensor) -> keras.KerasTensor:
    """Return the symbolic tensor of an array, for computing shapes alone."""
    if leaf.dtype == object:
        return keras.KerasTensor(leaf.shape, "string")
    return keras.KerasTensor(
        leaf.shape, engines.held_dtype(keras.backend.standardize_dtype(leaf.dtype))
    )


def _compute_compiled(model: keras.Model, batch: Tree, training: bool) -> None:
    x, y, weight = unpack(batch)
    outputs = _call(model, x, training)
    model.compute_metrics(x, y, outputs, sample_weight=weight)
    compute_loss(model)(x, y, outputs, sample_weight=weight, training=training)


def _call(model: keras.Model, inputs: Tree, training: bool) -> Tree:
    return model(inputs, training=False) if takes_training(model) else model(inputs)


def _has_call(model: keras.Model) -> bool:
    return type(model).call is not keras.Model.call


Prepare = Callable[[Tree], Tree]


def preparation(model: keras.Model, method: str) -> Prepare | None:
    """Return the preprocessing that the model's `method` applies to every batch; None if the method
    is Keras'.

    Raises:
        SpecificationError: the method is overridden, and the model has no preprocessor.
    """
    if not is_overridden(model, method):
        return None
    samples = getattr(model, "preprocess_samples", None)
    if samples is None and not hasattr(model, "preprocessor"):
        must = f"The model must not override `{method}`, which the trainer replaces."
        attempt = "preprocess the data beforehand, or in `model.preprocessor(x, y, sample_weight)`"
        attempt += "; then delete the method."
        raise SpecificationError(message(must, f"`{method}` of {type(model).__name__}", attempt))

    def prepare(batch: Tree) -> Tree:
        preprocess = samples or model.preprocessor
        found = unpack(batch)
        if preprocess is not None:
            takes_all = "y" in inspect.signature(getattr(preprocess, "call", preprocess)).parameters
            # or keras-hub warns at every call that the data are not preprocessed
            with replaced(model, _in_pipeline_execution=True):
                found = preprocess(*found) if takes_all else (preprocess(found[0]), *found[1:])
            found = keras.utils.unpack_x_y_sample_weight(found)
        return tree.map_leaves(to_numpy, without_none(tuple(found)))

    return prepare
