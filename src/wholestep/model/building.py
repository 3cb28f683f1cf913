"""Create the variables of an unbuilt model from the shapes of the first batch, as `keras.Model.fit` does."""

from collections.abc import Callable
from functools import partial

import keras

from wholestep import engines, tree
from wholestep.custom.steps import CustomSteps
from wholestep.data import Batches
from wholestep.engines import scope
from wholestep.errors import SpecificationError, message
from wholestep.model import compiled, objective
from wholestep.model.misfit import check_labels_are_numbers, explained
from wholestep.model.objective import Objective
from wholestep.safety import uninterrupted
from wholestep.tree import Tensor, Tree

_OF_A_PART = "predict with the sub-model itself, as in model.decoder.predict(x)."
_OBJECTIVE = "write the loss as a wholestep.Objective, and pass Trainer(model, MyObjective(), optimizer=...)."


class Builder:
    """Creates the missing variables of a model, its losses and its metrics; interrupts are deferred meanwhile.

    Args:
        given: the objective that will call the model, or parts of it; None for a compiled model.
        steps: the model's custom steps; None if there are none.
    """

    def __init__(self, model: keras.Model, given: Objective | None, steps: CustomSteps | None = None):
        self.model = model
        self.given = given
        self.steps = steps
        self._unused: list = []

    def build(self, batches: Batches, *, trains: bool = False, predicts: bool = False, are_whole: bool = False) -> None:
        """Create all variables that training, evaluation or (`predicts`) prediction on such batches needs.

        Args:
            are_whole: whether the batches to predict also hold labels or other arguments of an objective.

        Raises:
            SpecificationError: the model must be called and has no `call`.
        """
        name = self._custom(trains=trains, predicts=predicts)
        if name and self._build_custom(name, batches):
            return
        if (predicts or self.given is None) and not _has_call(self.model):
            raise SpecificationError(
                message(
                    "The model must have a `call`.",
                    f"{type(self.model).__name__}, which has none",
                    _OF_A_PART if predicts else _OBJECTIVE,
                )
            )
        with scope(self.model):
            if self.given is None and not predicts:
                if not self._compiled_is_built():
                    example = batches.example()
                    with uninterrupted(), explained(self.model, None, example):
                        self._build_compiled(example)
            elif unbuilt := self._unbuilt():
                example = batches.example()
                example = compiled.unpack(example)[0] if predicts and are_whole else example
                with uninterrupted(), explained(self.model, self.given, example, inputs_only=predicts):
                    _build(_call if predicts or self.given is None else self.given, self.model, example)
                self._unused = [layer for layer in unbuilt if not layer.built]

    def _build_compiled(self, example: Tree) -> None:
        """Create the variables of a compiled model, of its losses and of its metrics."""
        model = self.model
        check_labels_are_numbers(model, example)
        if _has_ragged(example):
            _build(_compute_compiled, model, example)
        else:
            compiled.build(model, example)

    def _compiled_is_built(self) -> bool:
        """Whether a compiled model, its losses and its metrics have all their variables, so that no batch is loaded."""
        model = self.model
        parts = [*compiled.layers(model), model._compile_loss, model._compile_metrics]
        return all(part is None or part.built for part in parts)

    def _custom(self, *, trains: bool, predicts: bool) -> str:
        """Return the name of the custom step that will run; "" if there is none."""
        steps = self.steps
        if steps is None or not (steps.trains if trains else steps.predicts if predicts else steps.tests):
            return ""
        return "train_step" if trains else "predict_step" if predicts else "test_step"

    def _build_custom(self, name: str, batches: Batches) -> bool:
        """Create the variables that a custom step needs, as Keras does; return whether they are complete."""
        steps = self.steps
        assert steps is not None
        steps.forget()
        if engines.makes_variables():
            if not steps.are_built:
                example = batches.example()
                with uninterrupted(), scope(self.model):
                    self._make_variables(steps, name, example)
            steps.remember()
            return True
        steps.remember()
        inner, has_call = compiled.layers(self.model)[1:], _has_call(self.model)
        if not has_call and not all(layer.built for layer in inner):
            must = "On JAX a model without a `call` must have parts that are built."
            received = f"not built: {', '.join(layer.name for layer in inner if not layer.built)}"
            raise SpecificationError(message(must, received, "call each on a batch, or part.build(shape)."))
        if has_call and self._compiled_is_built():
            return True
        x, y, _ = compiled.unpack(batches.example())
        if has_call and y is None and not self.model.built:
            with uninterrupted():
                objective.build(_call, self.model, x)
        return not has_call or y is None  # a custom step may need no labels

    def _make_variables(self, steps: CustomSteps, name: str, example: Tree) -> None:
        """Create the variables that a step needs on TensorFlow. An eager step is traced only as a last resort."""
        x, y, _ = compiled.unpack(example)
        if self.model.run_eagerly and _has_call(self.model):
            if y is None:
                objective.build(_call, self.model, x)
            else:
                compiled.build(self.model, example, with_optimizer=True)
        if not steps.are_built:
            engines.make_variables(steps.function(name), example)

    def _unbuilt(self) -> list:
        """Return the unbuilt layers; an empty list if they are the same layers that the last build left unused."""
        unbuilt = [layer for layer in compiled.layers(self.model) if not layer.built]
        return [] if compiled.are_same(unbuilt, self._unused) else unbuilt


def _build(function: Callable[[keras.Model, Tree, bool], object], model: keras.Model, batch: Tree) -> None:
    """Create the variables that `function` needs; ragged rows are traced, as their shapes do not suffice."""
    if _has_ragged(batch):
        for training in (True, False):  # a model may have layers that only one mode calls
            with keras.StatelessScope():  # or a strategy could not copy variables that a graph initialises
                engines.make_variables(partial(_traced, function, model, training), batch)
    else:
        objective.build(function, model, batch)


def _traced(
    function: Callable[[keras.Model, Tree, bool], object], model: keras.Model, training: bool, batch: Tree
) -> Tensor:
    """Call the function, and return a scalar that every program can return."""
    function(model, batch, training)
    return keras.ops.zeros(())


def _has_ragged(batch: Tree) -> bool:
    return any(map(tree.is_ragged, tree.leaves(batch)))


def _compute_compiled(model: keras.Model, batch: Tree, training: bool) -> None:
    x, y, weight = compiled.unpack(batch)
    outputs = _call(model, x, training)
    model.compute_metrics(x, y, outputs, sample_weight=weight)
    model._compute_loss(x, y, outputs, sample_weight=weight, training=training)


def _call(model: keras.Model, inputs: Tree, training: bool) -> Tree:
    return model(inputs, training=False) if model._call_has_training_arg else model(inputs)


def _has_call(model: keras.Model) -> bool:
    return type(model).call is not keras.Model.call
