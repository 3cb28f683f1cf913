"""A model's custom `train_step`, `test_step` and `predict_step`, run unchanged.

An update by a `train_step` is checked, and undone if it is not finite.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.cut import Cut
from wholestep.embeddings.rows import RowPlan
from wholestep.engines import Engine
from wholestep.errors import NonFiniteError, SpecificationError, message
from wholestep.model import Forward, are_same, is_overridden, layers
from wholestep.reports.report import NOTHING_TOLD, Report, ReportLayout
from wholestep.state import State, merged
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree
from wholestep.update import Update, with_verdict

_TRAIN = "train_step"
_TEST = "test_step"
_PREDICT = "predict_step"


class CustomSteps:
    """The custom steps of one model, with the signatures of the Keras backend.

    A custom `compute_metrics` is called by Keras' steps, so these count as custom steps as well.

    Args:
        as_function: returns a step in the form that the engine runs.
        has_objective: whether an objective replaces the steps that have a loss.

    Attributes:
        trains, tests, predicts: whether an update, an evaluation, a prediction is a custom step.
        iterations: the number of applied updates; a step may use any optimizer, or several, or
            none.
    """

    def __init__(
        self,
        model: keras.Model,
        as_function: Callable[[Callable], Callable],
        *,
        has_objective: bool,
    ):
        self.model = model
        self._as_function = as_function
        self.trains = not has_objective and any(
            is_overridden(model, name) for name in (_TRAIN, "compute_metrics")
        )
        self.tests = self.trains or (not has_objective and is_overridden(model, _TEST))
        self.predicts = is_overridden(model, _PREDICT)
        if self.trains:
            self.iterations = keras.Variable(0, trainable=False, dtype="int", name="updates")
        self._functions: dict[str, Callable] = {}
        self._made_for: list = []

    # ---- the steps ----

    def function(self, name: str) -> Callable:
        """Return a step by the name of its method, in the form that the engine runs."""
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

    def _predict(self, *given: Any) -> Any:
        if len(given) == 1:
            return self.model.predict_step(*given)
        state, data = given
        found, buffers = self.model.predict_step(state, data)
        return found, (state[0], buffers)  # Keras' step returns only the second part of the state

    def forget(self) -> None:
        """Drop the functions if the model's parts differ from the remembered ones."""
        if not are_same(self._made_for, self._parts()):
            self._functions = {}

    def remember(self) -> None:
        """Remember the model's parts."""
        self._made_for = self._parts()

    def _parts(self) -> list:
        names = ("optimizer", "_compile_loss", "_compile_metrics")
        flags = [part for layer in layers(self.model) for part in (layer, layer.trainable)]
        held = (getattr(self.model, name, None) for name in names)
        return [*held, *self._optimizers(), *flags, self.model.run_eagerly]

    # ---- the variables ----

    @property
    def own_slots(self) -> list[keras.Variable]:
        """The variables of the model's optimizer, which Keras passes to a step."""
        optimizer = getattr(self.model, "optimizer", None)
        return [] if optimizer is None else list(optimizer.variables)

    @property
    def slots(self) -> list[keras.Variable]:
        """All variables that an update changes, except weights, seeds and metrics.

        First the variables of the model's optimizer, then of other optimizers that are attributes
        of the model, or in a list or dict that is one, and of metrics missing from `model.metrics`,
        last the number of updates.
        """
        model = self.model
        own = self.own_slots
        known = {id(v) for v in (*own, *model.variables, *model.metrics_variables)}
        beside = [
            v
            for owner in (*self._optimizers(), *self._metrics())
            for v in owner.variables
            if id(v) not in known
        ]
        return [*own, *{id(v): v for v in beside}.values(), self.iterations]

    @property
    def are_built(self) -> bool:
        """Whether all known parts that a step may use have their variables."""
        parts = (*layers(self.model), *self._optimizers(), *self._metrics())
        loss = getattr(self.model, "_compile_loss", None)
        return all(
            getattr(part, "built", True)
            for part in (*parts, getattr(self.model, "optimizer", None), loss)
        )

    def watched(self) -> list[Collection]:
        """Return live collections, one of which gets another item where a part of a step, or its
        variables, change.
        """
        held = [vars(layer).values() for layer in layers(self.model)]
        nested = [_items(part) for part in chain(*held) if isinstance(part, dict | list | tuple)]
        owners = [*self._optimizers(), *self._metrics(), getattr(self.model, "optimizer", None)]
        owners += [getattr(owner, "inner_optimizer", None) for owner in owners]
        return [*held, *nested, *(owner._variables for owner in owners if owner is not None)]

    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        return [part for part in self._attributes() if isinstance(part, keras.optimizers.Optimizer)]

    def _metrics(self) -> list[keras.metrics.Metric]:
        return [part for part in self._attributes() if isinstance(part, keras.metrics.Metric)]

    def _attributes(self) -> Iterator[Any]:
        for layer in layers(self.model):
            for attribute in list(vars(layer).values()):
                yield from (
                    _items(attribute) if isinstance(attribute, dict | list | tuple) else [attribute]
                )


def _items(part: dict | list | tuple) -> Collection:
    return part.values() if isinstance(part, dict) else part


def with_reads(forward: Forward, read: list[keras.Variable]) -> Forward:
    """Return the variables of a step, and other variables that it has read; `forward` itself if it
    knows them all.
    """
    known = forward.facts.captured
    new = [v for v in {id(v): v for v in read}.values() if not any(v is k for k in known)]
    return (
        replace(forward, facts=replace(forward.facts, captured=(*known, *new))) if new else forward
    )


def logs_of(found: Any, name: str) -> dict[str, Tensor]:
    """Return the numbers of a step by name, with nested mappings flattened.

    Raises:
        SpecificationError: the step returned no mapping.
    """
    if not isinstance(found, dict | None):
        must = f"{name} must return its numbers by name."
        attempt = 'return {"loss": loss}.'
        raise SpecificationError(message(must, type(found).__name__, attempt))
    logs: dict[str, Tensor] = {}
    for key, value in (found or {}).items():
        logs |= (
            logs_of(value, name)
            if isinstance(value, dict)
            else {key: keras.ops.convert_to_tensor(value)}
        )
    return logs


def check_choices(model: keras.Model, **choices: object) -> None:
    """Refuse settings that have no meaning for a custom train step.

    Raises:
        SpecificationError: such a setting is given.
    """
    own = [name for name in ("train_step", "compute_metrics") if is_overridden(model, name)]
    given = [
        f"{name}={value!r}" for name, value in choices.items() if value not in (None, "auto", 1, [])
    ]
    if own and given:
        must = (
            f"An update by the model's own `{own[0]}` is run whole, on one device, and feeds "
            "its own metrics."
        )
        attempt = (
            "leave them out; or write the loss as a wholestep.Objective, as docs/recipes.md shows, "
            "and pass "
            "Trainer(model, MyObjective(), optimizer=...), which may be cut and spread."
        )
        raise SpecificationError(message(must, ", ".join(given), attempt))


def check_replicas(num_replicas: int) -> None:
    """Refuse several replicas for a custom train step.

    Raises:
        SpecificationError: there are several replicas; nothing has been computed.
    """
    if num_replicas > 1:
        must = "An update by the model's own `train_step` is run whole, on one device."
        attempt = (
            "leave the distribution out, or write the loss as a wholestep.Objective, which may "
            "be spread."
        )
        raise SpecificationError(message(must, f"{num_replicas} replicas", attempt))


class CustomEvaluation:
    """The function of one batch: (moved state, rest of the state, data, rows) -> (moved state,
    results).

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
        predicts: whether the step is `predict_step`; else it is `test_step`.
        is_whole: whether a batch for prediction is (x, ...), the first part of which is the input.
        layout: the layout of the numbers.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward,
        steps: CustomSteps,
        *,
        predicts: bool,
        is_whole: bool = False,
        layout: ReportLayout = NOTHING_TOLD,
    ):
        self.forward = forward
        self.layout = layout
        self._engine = engine
        self._steps = steps
        self._predicts = predicts
        self._is_whole = is_whole
        self._read: list[keras.Variable] = []
        at = {id(v): i for i, v in enumerate(forward.variables.metrics)}
        self._places = [] if predicts else [at[id(v)] for v in steps.model.metrics_variables]
        self._take = engine.programs.traced(self._taking())

    @cached_property
    def no_sums(self) -> tuple:
        """The sums before the first batch, on the device."""
        return () if self._predicts else self._engine.devices.place(EpochSums(self.forward).empty())

    def learned(self, state: State, data: Tree, rows: Tensor) -> "CustomEvaluation":
        """Return this function with the properties that its trace finds."""
        layout = self.layout
        at_rest = self._engine.variables.between_programs(state)

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            found = self._evaluated(state, self._engine.replicas.batch(data, rows))[0]
            layout = self.layout if self._predicts else ReportLayout.of(found)
            return ops.zeros(())

        self._engine.programs.shapes(once, at_rest, data, rows)
        forward = with_reads(self.forward, self._read)
        facts = replace(forward.facts, moved=tuple(range(len(at_rest.buffers))))
        how = {"predicts": self._predicts, "is_whole": self._is_whole}
        found = CustomEvaluation(
            self._engine, replace(forward, facts=facts), self._steps, **how, layout=layout
        )
        found._take = self._take if forward is self.forward else found._take
        return found

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state and the results."""
        state = self._engine.variables.between_programs(merged(moved, rest))
        found, buffers, metrics = self._evaluated(state, self._engine.replicas.batch(data, rows))
        moved = moved._replace(buffers=buffers if moved.buffers else [])
        return (
            (moved, found)
            if self._predicts
            else (moved._replace(metrics=metrics), self.layout.pack(found))
        )

    def _taking(self) -> Callable:
        """Return the step as a function (values of groups of variables, batch) -> (results,
        values).
        """
        v = self.forward.variables
        steps = self._steps
        predicts = self._predicts
        held = [
            [] if predicts else [v.metrics[i] for i in self._places],
            list(self.forward.facts.captured),
        ]
        name = "predict_step" if predicts else "test_step"
        step = steps.function(name)
        groups = [v.params, v.buffers, *held]

        def take(values: list[list], batch: Tree) -> tuple[Tree, list[list]]:
            num = 2 if predicts else 3
            found, values = self._engine.steps.call(
                step, groups, values, num, batch, self._read.append
            )
            return found if predicts else logs_of(found, name), values

        return take

    def _evaluated(self, state: State, batch: Tree) -> tuple[Any, list, list]:
        """Return the results of a batch, and the buffers and metrics after it."""
        if self._predicts and not self._is_whole and isinstance(batch, list | tuple):
            batch = (batch,)  # as Keras does with several inputs
        own = [state.metrics[i] for i in self._places]
        given = [list(state.params), list(state.buffers), own, list(state.captured)]
        found, (_, buffers, own, _) = self._take(given, batch)
        metrics = list(state.metrics)
        for place, value in zip(self._places, own, strict=True):
            metrics[place] = value
        return found, buffers, metrics


class CustomUpdate(Update):
    """An update by the `train_step` of one model.

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
    """

    suits_xla = False  # XLA draws other random numbers than Keras' step without it
    assigns = True

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps, *, stops: bool):
        super().__init__(engine, forward, None, stops=stops)
        self._steps = steps
        self._num_own_slots = len(steps.own_slots)
        self._read: list[keras.Variable] = []
        self._take = engine.programs.traced(self._taking(forward))

    def learned(
        self, cut: Cut, state: State, data: Tree, rows: Tensor, count: Tensor
    ) -> "CustomUpdate":
        """Return this update with the results of a trace: the step's logs, and the other variables
        it reads.
        """
        layout = self.layout

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            logs = self._stepped(state, self.engine.replicas.batch(data, rows))[1]
            layout = ReportLayout.of(with_verdict(logs, ops.zeros(()), ops.zeros(())))
            return ops.zeros(())

        self.engine.programs.shapes(once, self.engine.variables.between_programs(state), data, rows)
        forward = with_reads(self.forward, self._read)
        if layout == self.layout and forward is self.forward:
            return self
        found = copy.copy(self)
        found.layout = layout
        found.forward = forward
        found.epoch_sums = EpochSums(found.forward)
        if forward is not self.forward:
            found._take = self.engine.programs.traced(found._taking(found.forward))
        return found

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, captured, data, rows, count) -> (state, report): one whole
        update.
        """
        engine = self.engine

        def whole_update(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor
        ) -> tuple[State, Tensor]:
            batch = engine.replicas.batch(data, rows)

            def attempt(state: State) -> tuple[State, Tensor, dict[str, Tensor]]:
                new, logs = self._stepped(state._replace(captured=captured), batch)
                losses = [
                    ops.cast(value, keras.config.floatx())
                    for name, value in logs.items()
                    if is_loss(name)
                ]
                good = engine.ops.is_finite([*losses, *engine.variables.params(new)])
                return new._replace(captured=()), good & (state.stopped == 0), logs

            state, ok, logs = engine.steps.attempt(attempt, state, self.forward.variables)
            loss = next(
                (v for k, v in logs.items() if is_loss(k) and v.shape == ()), ops.full((), math.nan)
            )
            return self._reported(state, logs, loss, ok)

        return whole_update

    def _taking(self, forward: Forward) -> Callable:
        """Return the function (values of groups of variables, batch) -> (logs, values): the step
        itself.
        """
        v = forward.variables
        num = self._num_own_slots
        groups = [
            v.params,
            v.buffers,
            v.slots[:num],
            v.metrics,
            v.slots[num:],
            list(forward.facts.captured),
        ]
        step = self._steps.function("train_step")

        def take(values: list[list], batch: Tree) -> tuple[dict[str, Tensor], list[list]]:
            found, values = self.engine.steps.call(
                step, groups, values, 4, batch, self._read.append
            )
            return logs_of(found, "train_step"), values

        return take

    def _stepped(self, state: State, batch: Tree) -> tuple[State, dict[str, Tensor]]:
        num = self._num_own_slots
        groups = [
            state.params,
            state.buffers,
            state.slots[:num],
            state.metrics,
            state.slots[num:],
            [*state.captured],
        ]
        logs, (params, buffers, own, metrics, beside, _) = self._take(
            [list(group) for group in groups], batch
        )
        return state._replace(
            params=params, buffers=buffers, slots=[*own, *beside], metrics=metrics
        ), logs


def undone(report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was undone."""
    number = report.first + i
    bad = {k: v for k, v in report.numbers(i).items() if is_loss(k) and not np.all(np.isfinite(v))}
    received = (
        ", ".join(f"{name}={value}" for name, value in bad.items()) or "weights that are not finite"
    )
    told = message(
        f"Update {number} must have a finite loss and finite new weights. It was undone; the "
        "weights are those after "
        f"update {number - 1}.",
        f"{received}, from the model's train_step, which does not report single rows",
        "look at the batch, lower the learning rate, clip gradients, or pass "
        'Trainer(on_nonfinite="skip"); a '
        "number that may be NaN needs a name that does not end with 'loss'.",
    )
    return NonFiniteError(told, number)


def is_loss(name: str) -> bool:
    """Whether a number of this name must be finite.

    >>> [is_loss(name) for name in ("loss", "d_loss", "accuracy")]
    [True, True, False]
    """
    return name.endswith("loss")
