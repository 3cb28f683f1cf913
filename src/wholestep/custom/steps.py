"""The steps that a model has of its own, and the variables that they move."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import are_same, is_overridden, layers
from wholestep.tree import Tensor, Tree

_TRAIN, _TEST, _PREDICT = "train_step", "test_step", "predict_step"


class CustomSteps:
    """The steps of one model that are the user's own, on the contract of the Keras backend.

    A `compute_metrics` of the user's own is what Keras' own steps call, so these are run whole as well.

    Args:
        as_function: returns a step as the engine runs it.
        has_objective: whether an objective stands in the place of the steps that have a loss.

    Attributes:
        trains, tests, predicts: whether an update, an evaluation, a prediction is the model's own step.
        iterations: how many updates have been applied; a step may move any optimizer, or several, or none.
    """

    def __init__(self, model: keras.Model, as_function: Callable[[Callable], Callable], *, has_objective: bool):
        self.model = model
        self._as_function = as_function
        self.trains = not has_objective and any(is_overridden(model, name) for name in (_TRAIN, "compute_metrics"))
        self.tests = self.trains or (not has_objective and is_overridden(model, _TEST))
        self.predicts = is_overridden(model, _PREDICT)
        if self.trains:
            self.iterations = keras.Variable(0, trainable=False, dtype="int", name="updates")
        self._functions: dict[str, Callable] = {}
        self._made_for: list = []

    # ---- the steps ----

    def function(self, name: str) -> Callable:
        """Return a step by the name of its method, as the engine runs it."""
        if name not in self._functions:
            step = {_TRAIN: self._train, _TEST: self._test, _PREDICT: self._predict}[name]
            self._functions[name] = step if self.model.run_eagerly else self._as_function(step)
        return self._functions[name]

    def _train(self, *given: Tree) -> Any:
        found = self.model.train_step(*given)
        self.iterations.assign_add(1)
        return found

    def _test(self, *given: Tree) -> Any:
        return self.model.test_step(*given)

    def _predict(self, *given: Tree) -> Any:
        if len(given) == 1:
            return self.model.predict_step(*given)
        state, data = given
        found, buffers = self.model.predict_step(state, data)
        return found, (state[0], buffers)  # of the state, Keras wants the second part alone

    def forget(self) -> None:
        """Forget the functions, if the model is made of other things than when they were remembered."""
        if not are_same(self._made_for, self._parts()):
            self._functions = {}

    def remember(self) -> None:
        """Take note of what the model is made of."""
        self._made_for = self._parts()

    def _parts(self) -> list:
        names = ("optimizer", "_compile_loss", "_compile_metrics")
        flags = [part for layer in layers(self.model) for part in (layer, layer.trainable)]
        held = (getattr(self.model, name, None) for name in names)
        return [*held, *self._optimizers(), *flags, self.model.run_eagerly]

    # ---- the variables ----

    @property
    def own_slots(self) -> list[keras.Variable]:
        """The variables of the model's optimizer, which Keras hands to a step."""
        optimizer = getattr(self.model, "optimizer", None)
        return [] if optimizer is None else list(optimizer.variables)

    @property
    def slots(self) -> list[keras.Variable]:
        """All variables that an update moves beside weights, seeds and metrics.

        First those of the model's optimizer; then those of other optimizers that are attributes of the model, and of
        metrics that `model.metrics` leaves out; last the number of updates.
        """
        model, own = self.model, self.own_slots
        known = {id(v) for v in (*own, *model.variables, *model.metrics_variables)}
        beside = [v for owner in (*self._optimizers(), *self._metrics()) for v in owner.variables if id(v) not in known]
        return [*own, *{id(v): v for v in beside}.values(), self.iterations]

    @property
    def are_built(self) -> bool:
        """Whether all that a step makes use of has its variables, as far as can be told."""
        parts = (*layers(self.model), *self._optimizers(), *self._metrics())
        loss = getattr(self.model, "_compile_loss", None)
        return all(getattr(part, "built", True) for part in (*parts, getattr(self.model, "optimizer", None), loss))

    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        return [part for part in self._attributes() if isinstance(part, keras.optimizers.Optimizer)]

    def _metrics(self) -> list[keras.metrics.Metric]:
        return [part for part in self._attributes() if isinstance(part, keras.metrics.Metric)]

    def _attributes(self) -> Iterator[Any]:
        for layer in layers(self.model):
            for attribute in list(vars(layer).values()):
                nested = attribute if isinstance(attribute, list | tuple) else [attribute]
                yield from nested.values() if isinstance(nested, dict) else nested

    # ---- what a step returns ----

    def results(self, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of an epoch as `keras.Model.fit` does: the metrics', if a step returned just these."""
        own = self.model.get_metrics_result()
        if own.keys() != numbers.keys():
            return numbers
        fresh = {name: np.asarray(value).copy() for name, value in own.items()}
        return {name: value if value.ndim else float(value) for name, value in fresh.items()}


def logs_of(found: Any, name: str) -> dict[str, Tensor]:
    """Return the numbers that a step has returned, by name, those of nested mappings among the others.

    Raises:
        SpecificationError: they are no mapping.
    """
    if not isinstance(found, dict | None):
        must, attempt = f"{name} must return its numbers by name.", 'return {"loss": loss}.'
        raise SpecificationError(message(must, type(found).__name__, attempt))
    logs: dict[str, Tensor] = {}
    for key, value in (found or {}).items():
        logs |= logs_of(value, name) if isinstance(value, dict) else {key: keras.ops.convert_to_tensor(value)}
    return logs
