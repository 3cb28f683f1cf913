"""The variables of a model that nobody has called yet: made from the shapes of the first batch, as `fit` makes them."""

import keras

from wholestep import engines
from wholestep.custom.steps import CustomSteps
from wholestep.data.batches import Batches
from wholestep.engines import scope
from wholestep.errors import SpecificationError, message
from wholestep.model import compiled, objective
from wholestep.model.misfit import explained
from wholestep.model.objective import Objective
from wholestep.tree import Tree

_OF_A_PART = "predict with the sub-model itself, as in model.decoder.predict(x)."
_OBJECTIVE = "write the loss as a wholestep.Objective, and pass Trainer(model, MyObjective(), optimizer=...)."


class Builder:
    """Creates what one model lacks: its variables, and those of what it was compiled with.

    Args:
        given: the objective that will call the model, or parts of it; None for a compiled model.
        steps: those that are the model's own; None if there are none.
    """

    def __init__(self, model: keras.Model, given: Objective | None, steps: CustomSteps | None = None):
        self.model = model
        self.given = given
        self.steps = steps
        self._unused: list = []

    def build(self, batches: Batches, *, trains: bool = False, predicts: bool = False, are_whole: bool = False) -> None:
        """Create all variables that training, evaluating or (`predicts`) predicting such batches asks for.

        Args:
            are_whole: whether a batch to be predicted holds labels, or what else an objective takes, beside the inputs.

        Raises:
            SpecificationError: the model has no `call`, and is to be called.
        """
        name = self._custom(trains=trains, predicts=predicts)
        if name and self._build_custom(name, batches):
            return
        if (predicts or self.given is None) and not _has_call(self.model):
            raise SpecificationError(
                message(
                    "The model must have a `call`: that is what it was asked for.",
                    f"{type(self.model).__name__}, which has none",
                    _OF_A_PART if predicts else _OBJECTIVE,
                )
            )
        with scope(self.model):
            if self.given is None and not predicts:
                example = batches.example()
                with explained(self.model, None, example):
                    compiled.build(self.model, example)
            elif unbuilt := self._unbuilt():
                example = batches.example()
                example = compiled.unpack(example)[0] if predicts and are_whole else example
                with explained(self.model, self.given, example, inputs_only=predicts):
                    objective.build(_call if predicts or self.given is None else self.given, self.model, example)
                self._unused = [layer for layer in unbuilt if not layer.built]

    def _custom(self, *, trains: bool, predicts: bool) -> str:
        """Return which of the model's own steps will be run; nothing if it is none."""
        steps = self.steps
        if steps is None or not (steps.trains if trains else steps.predicts if predicts else steps.tests):
            return ""
        return "train_step" if trains else "predict_step" if predicts else "test_step"

    def _build_custom(self, name: str, batches: Batches) -> bool:
        """Create what a model's own step asks for, as Keras does; return whether that is done."""
        steps = self.steps
        assert steps is not None
        steps.forget()
        if engines.makes_variables():
            if not steps.are_built:
                with scope(self.model):
                    engines.make_variables(steps.function(name), batches.example())
            steps.remember()
            return True
        steps.remember()
        inner, has_call = compiled.layers(self.model)[1:], _has_call(self.model)
        if not has_call and not all(layer.built for layer in inner):
            must = "On JAX a model without a `call` must have parts that are built."
            received = f"not built: {', '.join(layer.name for layer in inner if not layer.built)}"
            raise SpecificationError(message(must, received, "call each on a batch, or part.build(shape)."))
        x, y, _ = compiled.unpack(batches.example())
        if has_call and y is None and not self.model.built:
            objective.build(_call, self.model, x)
        return not has_call or y is None  # its own step may need no labels

    def _unbuilt(self) -> list:
        """Return the layers without variables yet; none if they are those that the last build made no use of."""
        unbuilt = [layer for layer in compiled.layers(self.model) if not layer.built]
        return [] if compiled.are_same(unbuilt, self._unused) else unbuilt


def _call(model: keras.Model, inputs: Tree, training: bool) -> Tree:
    return model(inputs, training=False) if model._call_has_training_arg else model(inputs)


def _has_call(model: keras.Model) -> bool:
    return type(model).call is not keras.Model.call
