"""The context of a call: the model as its programs know it, with its engine and its variables."""

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import keras

from wholestep import engines
from wholestep.custom import CustomSteps
from wholestep.model import Objective, are_same, compiled, layers, loss_trackers
from wholestep.program import Options
from wholestep.state import Variables

_HELD = attrgetter("_layers", "_trainable_variables", "_non_trainable_variables", "_metrics")  # of a layer
_COMPILED = "optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker", "run_eagerly"


class Context:
    """The model as the programs of an executor know it, with its engine and its variables.

    A call asks `is_untouched` once. The layers are found when the context is made and after a change, not in each call.

    Args:
        objective: the unreduced loss.
        metrics: the Keras metrics that the objective updates; all of the model's for a custom `train_step`.
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
        slots = steps.slots if steps.trains else [] if self.optimizer is None else self.optimizer.variables
        held = [v for metric in self.metrics for v in metric.variables]
        self.variables = Variables(model.trainable_variables, slots, model.non_trainable_variables, held)
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
        """Return logs as `keras.Model.evaluate` does: by name, a single number, or a list in its order."""
        if return_dict:
            return dict(sorted(logs.items()))
        names = self._order
        values = [logs[name] for name in names if name in logs] + [logs[k] for k in sorted(logs) if k not in names]
        return values[0] if len(values) == 1 else values

    def is_untouched(self) -> bool:
        """Whether the model, its layers and variables have the recorded attributes."""
        now = self._attributes()
        return len(now) == len(self._seen) and all(map(is_, now, self._seen))

    def is_current(self) -> bool:
        """Whether the programs still serve the model, after a walk over its layers."""
        return are_same(self._made_of, self._parts())

    def learn_slots(self) -> None:
        """Add the optimizer's variables to the state, also if other code has built the optimizer."""
        if self.optimizer is not None and not self.steps.trains:
            self.variables.slots[:] = self.optimizer.variables

    def _attributes(self) -> list:
        """Return the attributes by which a change is noticed. No Python function is called for a layer."""
        held = chain.from_iterable(chain.from_iterable(map(_HELD, self._layers)))
        flags = map(attrgetter("_trainable"), self._flagged)
        of_model = [getattr(self.model, name, None) for name in _COMPILED]
        return [*of_model, self._schedule(), keras.distribution.distribution(), *held, *flags, *chain(*self._of_steps)]

    def _parts(self) -> list[Any]:
        """Return the objects for which programs are compiled; if any changes, other programs are needed."""
        also = self.steps.slots if self.steps.trains else []
        distribution = keras.distribution.distribution()
        return [*compiled.made_of(self.model, self._given), self._schedule(), distribution, *also]

    def _schedule(self) -> Any:
        """Return the variable or the schedule of the learning rate: another one is assigned by its name."""
        optimizer = getattr(self.model, "optimizer", None)
        return getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
