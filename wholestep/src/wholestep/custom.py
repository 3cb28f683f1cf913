"""A model's custom `train_step`, `test_step` and `predict_step`, run unchanged.

An update by a `train_step` is checked, and undone if it is not finite.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
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
from wholestep.errors import NonFiniteError, invalid, message
from wholestep.keras_private import compile_loss, compile_metrics
from wholestep.model import Forward, are_same, is_overridden, layers
from wholestep.nonfinite import Skip
from wholestep.reports.report import NO_LOGS, Report, ReportLayout
from wholestep.state import State, Variables, merged
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree
from wholestep.update import Update, with_verdict

_TRAIN = "train_step"
_TEST = "test_step"
_PREDICT = "predict_step"
_NESTED = (dict, list, tuple)


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

    def _train(self, *arguments: Tree) -> Any:
        results = self.model.train_step(*arguments)
        self.iterations.assign_add(1)
        return results

    def _test(self, *arguments: Tree) -> Any:
        return self.model.test_step(*arguments)

    def _predict(self, *arguments: Any) -> Any:
        results = self.model.predict_step(*arguments)
        if len(arguments) == 1:
            return results
        outputs, buffers = results
        params = arguments[0][0]
        return outputs, (params, buffers)  # Keras' step returns only the second part of the state

    def forget(self) -> None:
        """Drop the functions if the model's parts differ from the remembered ones."""
        if not are_same(self._made_for, self._parts()):
            self._functions = {}

    def remember(self) -> None:
        """Remember the model's parts."""
        self._made_for = self._parts()

    def _parts(self) -> list:
        model = self.model
        compiled = [compile_loss(model), compile_metrics(model)]
        parts = [self._optimizer, *compiled, *self._optimizers(), model.run_eagerly]
        for layer in layers(model):
            parts += [layer, layer.trainable]
        return parts

    # ---- the variables ----

    @property
    def _optimizer(self) -> Any:
        return getattr(self.model, "optimizer", None)

    @property
    def optimizer_slots(self) -> list[keras.Variable]:
        """The variables of the model's optimizer, which Keras passes to a step."""
        return [] if self._optimizer is None else list(self._optimizer.variables)

    @property
    def slots(self) -> list[keras.Variable]:
        """All variables that an update changes, except weights, seeds and metrics.

        First the variables of the model's optimizer, then of other optimizers that are attributes
        of the model, or in a list or dict that is one, and of metrics missing from `model.metrics`,
        last the number of updates.
        """
        slots = self.optimizer_slots
        known = {id(v) for v in (*slots, *self.model.variables, *self.model.metrics_variables)}
        for owner in (*self._optimizers(), *self._metrics()):
            for variable in owner.variables:
                if id(variable) not in known:
                    known.add(id(variable))
                    slots.append(variable)
        return [*slots, self.iterations]

    @property
    def are_built(self) -> bool:
        """Whether all known parts that a step may use have their variables."""
        parts = [*layers(self.model), *self._optimizers(), *self._metrics(), self._optimizer]
        parts.append(compile_loss(self.model))
        return all(getattr(part, "built", True) for part in parts)

    def watched(self) -> list[Collection]:
        """Return live collections; one grows where a part of a step, or its variables, change."""
        attributes = [vars(layer).values() for layer in layers(self.model)]
        nested = [_items(part) for part in chain(*attributes) if isinstance(part, _NESTED)]
        owners = [*self._optimizers(), *self._metrics(), self._optimizer]
        owners += [getattr(owner, "inner_optimizer", None) for owner in owners]
        variables = [owner._variables for owner in owners if owner is not None]
        return [*attributes, *nested, *variables]

    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        return [part for part in self._attributes() if isinstance(part, keras.optimizers.Optimizer)]

    def _metrics(self) -> list[keras.metrics.Metric]:
        return [part for part in self._attributes() if isinstance(part, keras.metrics.Metric)]

    def _attributes(self) -> Iterator[Any]:
        for layer in layers(self.model):
            for attribute in list(vars(layer).values()):
                yield from _items(attribute) if isinstance(attribute, _NESTED) else [attribute]


def _items(part: dict | list | tuple) -> Collection:
    return part.values() if isinstance(part, dict) else part


def with_reads(forward: Forward, read: list[keras.Variable]) -> Forward:
    """Return `forward` with the variables that a step has read; itself if it knows them all."""
    captured = forward.facts.captured
    known = {id(v) for v in captured}
    new = {id(v): v for v in read if id(v) not in known}
    if not new:
        return forward
    return replace(forward, facts=replace(forward.facts, captured=(*captured, *new.values())))


def logs_of(results: Any, name: str) -> dict[str, Tensor]:
    """Return the numbers of a step by name, with nested mappings flattened.

    Raises:
        SpecificationError: the step returned no mapping.
    """
    if not isinstance(results, dict | None):
        raise invalid(
            f"{name} must return its numbers by name.",
            type(results).__name__,
            'return {"loss": loss}.',
        )
    logs: dict[str, Tensor] = {}
    for key, value in (results or {}).items():
        if isinstance(value, dict):
            logs |= logs_of(value, name)
        else:
            logs[key] = ops.convert_to_tensor(value)
    return logs


def _traced_step(
    engine: Engine,
    steps: CustomSteps,
    name: str,
    groups: list[list],
    num: int,
    read: list[keras.Variable],
) -> Callable:
    """Return a step as a function (values by group, batch) -> (results, values by group).

    Args:
        groups: the variables by group, the last of which is read only.
        num: the number of groups that Keras passes to the step.
        read: receives other variables that the step reads.
    """
    step = steps.function(name)

    def call(values: list[list], batch: Tree) -> tuple[Tree, list[list]]:
        results, values = engine.steps.call(step, groups, values, num, batch, read.append)
        return results if name == _PREDICT else logs_of(results, name), values

    return engine.programs.traced(call)


def check_choices(model: keras.Model, **choices: object) -> None:
    """Refuse settings that have no meaning for a custom train step.

    Raises:
        SpecificationError: such a setting is given.
    """
    custom = [name for name in (_TRAIN, "compute_metrics") if is_overridden(model, name)]
    received = [
        f"{name}={value!r}" for name, value in choices.items() if value not in (None, "auto", 1, [])
    ]
    if custom and received:
        raise invalid(
            f"An update by the model's own `{custom[0]}` is run whole, on one device, and "
            "feeds its own metrics.",
            ", ".join(received),
            "leave them out; or write the loss as a wholestep.Objective, as docs/recipes.md "
            "shows, and pass Trainer(model, MyObjective(), optimizer=...), which may be cut "
            "and spread.",
        )


def check_replicas(num_replicas: int) -> None:
    """Refuse several replicas for a custom train step.

    Raises:
        SpecificationError: there are several replicas; nothing has been computed.
    """
    if num_replicas > 1:
        raise invalid(
            "An update by the model's own `train_step` is run whole, on one device.",
            f"{num_replicas} replicas",
            "leave the distribution out, or write the loss as a wholestep.Objective, which "
            "may be spread.",
        )


class CustomEvaluation:
    """The function of a batch: (moved state, rest of the state, data, rows) -> (moved state,
    results).

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
        predicts: whether the step is `predict_step`; else it is `test_step`.
        is_whole: whether a batch for prediction is (x, ...), the first part of which is the input.

    Attributes:
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
    ):
        self.forward = forward
        self.layout = NO_LOGS
        self._engine = engine
        self._steps = steps
        self._predicts = predicts
        self._is_whole = is_whole
        self._read: list[keras.Variable] = []
        indexes = {id(v): i for i, v in enumerate(forward.variables.metrics)}
        metrics = [] if predicts else steps.model.metrics_variables
        self._metrics = [indexes[id(v)] for v in metrics]
        self._step = self._traced()

    @cached_property
    def no_sums(self) -> tuple:
        """The sums before the first batch, on the device."""
        return () if self._predicts else self._engine.devices.place(EpochSums(self.forward).empty())

    def learned(self, state: State, data: Tree, rows: Tensor) -> "CustomEvaluation":
        """Return this function with the properties that its trace finds."""
        layout = self.layout
        state = self._engine.variables.between_programs(state)

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            results = self._evaluated(state, data, rows)[0]
            layout = NO_LOGS if self._predicts else ReportLayout.of(results)
            return ops.zeros(())

        self._engine.programs.shapes(once, state, data, rows)
        forward = with_reads(self.forward, self._read)
        facts = replace(forward.facts, moved=tuple(range(len(state.buffers))))
        learned = copy.copy(self)
        learned.layout = layout
        learned.forward = replace(forward, facts=facts)
        if forward is not self.forward:
            learned._step = learned._traced()
        return learned

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state and the results."""
        state = self._engine.variables.between_programs(merged(moved, rest))
        results, buffers, metrics = self._evaluated(state, data, rows)
        if moved.buffers:
            moved = moved._replace(buffers=buffers)
        if self._predicts:
            return moved, results
        return moved._replace(metrics=metrics), self.layout.pack(results)

    def _groups(self, source: Variables | State, captured: Sequence) -> list[list]:
        metrics = [source.metrics[i] for i in self._metrics]
        return [list(source.params), list(source.buffers), metrics, list(captured)]

    def _traced(self) -> Callable:
        name, num = (_PREDICT, 2) if self._predicts else (_TEST, 3)
        groups = self._groups(self.forward.variables, self.forward.facts.captured)
        return _traced_step(self._engine, self._steps, name, groups, num, self._read)

    def _evaluated(self, state: State, data: Tree, rows: Tensor) -> tuple[Any, list, list]:
        """Return the results of a batch, and the buffers and metrics after it."""
        batch = self._engine.replicas.batch(data, rows)
        if self._predicts and not self._is_whole and isinstance(batch, list | tuple):
            batch = (batch,)  # as Keras does with several inputs
        results, values = self._step(self._groups(state, state.captured), batch)
        _, buffers, changed, _ = values
        metrics = list(state.metrics)
        for i, value in zip(self._metrics, changed, strict=True):
            metrics[i] = value
        return results, buffers, metrics


class CustomUpdate(Update):
    """An update by the `train_step` of one model.

    Args:
        forward: the model's variables, and other variables that the step reads; it is not called.
    """

    suits_xla = False  # XLA draws other random numbers than Keras' step without it
    assigns = True

    def __init__(self, engine: Engine, forward: Forward, steps: CustomSteps, on_nonfinite: Skip):
        super().__init__(engine, forward, None, on_nonfinite=on_nonfinite)
        self._steps = steps
        self._num_optimizer_slots = len(steps.optimizer_slots)
        self._read: list[keras.Variable] = []
        self._step = self._traced()

    def learned(self, cut: Cut, state: State, data: Tree, rows: Tensor) -> "CustomUpdate":
        """Return this update with the step's logs, and other variables that it reads."""
        layout = self.layout

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            logs = self._stepped(state, data, rows)[1]
            layout = ReportLayout.of(with_verdict(logs, ops.zeros(()), ops.zeros(())))
            return ops.zeros(())

        state = self.engine.variables.between_programs(state)
        self.engine.programs.shapes(once, state, data, rows)
        forward = with_reads(self.forward, self._read)
        if layout == self.layout and forward is self.forward:
            return self
        learned = copy.copy(self)
        learned.layout = layout
        learned.forward = forward
        learned.epoch_sums = EpochSums(forward)
        if forward is not self.forward:
            learned._step = learned._traced()
        return learned

    def whole_update(self, cut: Cut, row_plan: RowPlan) -> Callable:
        """Return the function (state, captured, data, rows, count) -> (state, report)."""
        engine = self.engine

        def whole_update(
            state: State, captured: list[Tensor], data: Tree, rows: Tensor, count: Tensor
        ) -> tuple[State, Tensor]:
            def attempt(state: State) -> tuple[State, Tensor, dict[str, Tensor]]:
                new, logs = self._stepped(state._replace(captured=captured), data, rows)
                dtype = keras.config.floatx()
                losses = [ops.cast(value, dtype) for name, value in logs.items() if is_loss(name)]
                is_good = engine.ops.is_finite([*losses, *engine.variables.params(new)])
                return new._replace(captured=()), is_good & (state.stopped == 0), logs

            state, ok, logs = engine.steps.attempt(attempt, state, self.forward.variables)
            losses = [value for k, value in logs.items() if is_loss(k) and value.shape == ()]
            loss = losses[0] if losses else ops.full((), math.nan)
            return self._reported(state, logs, loss, ok)

        return whole_update

    def _groups(self, source: Variables | State, captured: Sequence) -> list[list]:
        num = self._num_optimizer_slots
        optimizer_slots = source.slots[:num]
        others = source.slots[num:]
        groups = (source.params, source.buffers, optimizer_slots, source.metrics, others, captured)
        return [list(group) for group in groups]

    def _traced(self) -> Callable:
        groups = self._groups(self.forward.variables, self.forward.facts.captured)
        return _traced_step(self.engine, self._steps, _TRAIN, groups, 4, self._read)

    def _stepped(self, state: State, data: Tree, rows: Tensor) -> tuple[State, dict[str, Tensor]]:
        batch = self.engine.replicas.batch(data, rows)
        logs, values = self._step(self._groups(state, state.captured), batch)
        params, buffers, optimizer_slots, metrics, others, _ = values
        slots = [*optimizer_slots, *others]
        return state._replace(params=params, buffers=buffers, slots=slots, metrics=metrics), logs


def undone(report: Report, i: int) -> NonFiniteError:
    """Return the error that explains why update i of a dispatch was undone."""
    number = report.first + i
    bad = [
        f"{name}={value}"
        for name, value in report.numbers(i).items()
        if is_loss(name) and not np.all(np.isfinite(value))
    ]
    limit = report.block.program.function.on_nonfinite
    received = ", ".join(bad) or "weights that are not finite"
    text = message(
        f"Update {number} must have a finite loss and finite new weights{limit.reached}. It was "
        f"undone; the weights are those after update {number - 1}.",
        f"{received}, from the model's train_step, which does not report single rows",
        f"look at the batch, lower the learning rate, clip gradients, or {limit.way_out}; a number "
        "that may be NaN needs a name that does not end with 'loss'.",
    )
    return NonFiniteError(text, number)


def is_loss(name: str) -> bool:
    """Whether a number of this name must be finite.

    >>> [is_loss(name) for name in ("loss", "d_loss", "accuracy")]
    [True, True, False]
    """
    return name.endswith("loss")
