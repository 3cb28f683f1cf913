"""A function of a model and a batch as an objective, and the other models that it
calls.
"""

from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from stepcheck import objective
from stepcheck.port import ByPass
from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Called, Log
from stepcheck.trace.measure import once
from stepcheck.trace.rows import keys
from stepcheck.tree import Tree
from wholestep.model import Mean, Objective, ObjectiveOutput, ScalarTerm, Term

# As `stateless_call` takes them.
VARIABLES = "trainable_variables", "non_trainable_variables"


class Setting(NamedTuple):
    """The number of calls of a pass, and the values of other models.

    `calls`: how often the model is called. `beside`: the values of `Beside.variables`.
    """

    calls: int
    beside: list[np.ndarray]


class Beside:
    """The models that a loop calls beside the watched one, with their values at these
    calls.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._models: list[keras.Model] = []
        self._kept: list[
            list[tuple[int, list[np.ndarray]]]
        ] = []  # (order, values)

    def place(self, model: keras.Model) -> int | None:
        """Return the number of another model; None for a model with the watched one, or
        a part.
        """
        if model not in self._models:
            around = self._model, *self._models
            parts = [part for each in around for part in each._flatten_layers()]
            if model in parts or self._model in model._flatten_layers():
                return None
            self._models.append(model)
            self._kept.append([])
        return self._models.index(model)

    def keep(self, order: int, place: int, values: list[np.ndarray]) -> None:
        """Keep the values of a model, of those that have not moved the arrays of
        before.
        """
        kept = self._kept[place]
        before = kept[-1][1] if kept else []
        kept.append((order, once([*map(np.array, values)], before)))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of all these models that were called once they were built."""
        pairs = zip(self._models, self._kept, strict=True)
        models = [model for model, kept in pairs if kept]
        return [
            v for m in models for name in VARIABLES for v in getattr(m, name)
        ]

    def before(self, order: float) -> list[np.ndarray]:
        """Return the values of `variables` at each model's last call before a place in
        the log.
        """
        values: list[np.ndarray] = []
        for kept in filter(None, self._kept):
            earlier = [own for at, own in kept if at < order]
            values += earlier[-1] if earlier else kept[0][1]
        return values


class OfModel(Objective):
    """A stated function of a model and a batch.

    Attributes:
        is_coupled: whether a term is one number for a whole batch, as its first trace
            shows.
        beside: the other models that the loop calls.
    """

    def __init__(self, given: objective.Objective, model: keras.Model):
        self.given, self.beside, self.is_coupled = given, Beside(model), False
        self._takes_mode = "training" in signature(given.function).parameters

    @property
    def loss(self) -> "OfModel":
        """The loss, which is this objective."""
        return self

    def __call__(
        self, model: keras.Model, batch: Tree, training: bool
    ) -> ObjectiveOutput:
        """Return the terms of (inputs, perhaps the other parts, values of models
        beside).
        """
        x, *rest, beside = batch
        for variable, value in zip(self.beside.variables, beside, strict=True):
            variable.assign(value)  # in a stateless scope: nothing is moved
        inputs = tuple(x) if isinstance(x, tuple | list) else (x,)
        parts = (x, *rest[0]) if rest else inputs
        others = {"training": training} if self._takes_mode else {}
        found = self.given.function(model, parts, **others)
        named = found if isinstance(found, dict) else {"": found}
        return ObjectiveOutput(
            {name: self._term(each) for name, each in named.items()}, {}, []
        )

    def _term(self, given: Any) -> Term:
        values, weights = (
            given if isinstance(given, tuple | list) else (given, None)
        )
        values = ops.convert_to_tensor(values)
        if not len(values.shape):
            self.is_coupled = True
            return ScalarTerm(values)
        if weights is not None:
            weights = ops.stop_gradient(ops.convert_to_tensor(weights))
        return Mean(values, weights)

    def join(self, log: Log) -> None:
        """Let each `calls` passes of one step with a gradient be one, with all that it
        needs.
        """
        ones: dict[int, Called | None] = {}
        num = self.given.calls
        for step in steps(log):
            end = float("inf") if step.applied is None else step.applied.order
            taken = [
                each for each in step.called if each.differentiated is not False
            ]
            for replica in {each.replica for each in taken}:
                own = [each for each in taken if each.replica == replica]
                for start in range(0, len(own) - num + 1, num):
                    group, later = own[start : start + num], own[start + num :]
                    until = later[0].order if later else end
                    ones |= dict.fromkeys(each.order for each in group)
                    setting = Setting(num, self.beside.before(until))
                    ones[group[0].order] = _one(group, setting)
        called = [ones.get(each.order, each) for each in log.called]
        log.called[:] = [each for each in called if each is not None]


def _one(group: list[Called], setting: Setting) -> Called:
    """Return passes as one pass, with the inputs and outputs of all."""
    derivatives: dict[int, list] = {}
    outputs: list[np.ndarray] = []
    for called in group:
        moved = {len(outputs) + i: own for i, own in called.derivatives.items()}
        derivatives |= moved
        outputs += called.outputs
    return replace(
        group[0],
        inputs=[leaf for called in group for leaf in called.inputs],
        outputs=outputs,
        derivatives=derivatives,
        line=group[-1].line,
        setting=setting,
    )


def as_given(log: Log) -> tuple[tuple[Tree, Tree, None], ByPass]:
    """Return (the rows that a model was given, each once, as data; that no pass has
    labels).
    """
    called = [
        each for each in log.called if each.setting is not None
    ] or log.called
    shapes = [[leaf.shape[1:] for leaf in each.inputs] for each in called]
    pairs = zip(called, shapes, strict=True)
    alike = [each.inputs for each, own in pairs if own == shapes[0]]
    leaves = [np.concatenate(parts) for parts in zip(*alike, strict=True)]
    if not leaves:
        return (np.zeros((1, 1)), (), None), {}
    places = {key: i for i, key in enumerate(keys(leaves))}
    leaves = [leaf[[*places.values()]] for leaf in leaves]
    x = leaves[0] if len(leaves) == 1 else tuple(leaves)
    return (x, (), None), {each.order: () for each in called if each.is_whole}
