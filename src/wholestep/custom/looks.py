"""Evaluation and prediction of one batch by a model's custom `test_step` and `predict_step`."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import keras
from keras import ops

from wholestep.custom.steps import CustomSteps, logs_of, with_reads
from wholestep.engines import Engine
from wholestep.evaluation.scoring import joined
from wholestep.model import Forward
from wholestep.reports.layout import NOTHING_TOLD, ReportLayout
from wholestep.state import State
from wholestep.sums import EpochSums
from wholestep.tree import Tensor, Tree


class CustomLook:
    """The function of one batch: (moved state, rest of the state, data, rows) -> (moved state, results).

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

    def learned(self, state: State, data: Tree, rows: Tensor) -> "CustomLook":
        """Return this function with the properties that its trace finds."""
        layout, at_rest = self.layout, self._engine.variables.between_programs(state)

        def once(state: State, data: Tree, rows: Tensor) -> Tensor:
            nonlocal layout
            found = self._looked(state, self._engine.replicas.batch(data, rows))[0]
            layout = self.layout if self._predicts else ReportLayout.of(found)
            return ops.zeros(())

        self._engine.programs.shapes(once, at_rest, data, rows)
        forward = with_reads(self.forward, self._read)
        facts = replace(forward.facts, moved=tuple(range(len(at_rest.buffers))))
        how = {"predicts": self._predicts, "is_whole": self._is_whole}
        found = CustomLook(self._engine, replace(forward, facts=facts), self._steps, **how, layout=layout)
        found._take = self._take if forward is self.forward else found._take
        return found

    def __call__(self, moved: State, rest: State, data: Tree, rows: Tensor) -> tuple[State, Tree]:
        """Return the moved state and the results."""
        state = self._engine.variables.between_programs(joined(moved, rest))
        found, buffers, metrics = self._looked(state, self._engine.replicas.batch(data, rows))
        moved = moved._replace(buffers=buffers if moved.buffers else [])
        return (moved, found) if self._predicts else (moved._replace(metrics=metrics), self.layout.pack(found))

    def _taking(self) -> Callable:
        """Return the step as a function (values of groups of variables, batch) -> (results, values)."""
        v, steps, predicts = self.forward.variables, self._steps, self._predicts
        held = [[] if predicts else [v.metrics[i] for i in self._places], list(self.forward.facts.captured)]
        name = "predict_step" if predicts else "test_step"
        step, groups = steps.function(name), [v.params, v.buffers, *held]

        def take(values: list[list], batch: Tree) -> tuple[Tree, list[list]]:
            num = 2 if predicts else 3
            found, values = self._engine.steps.call(step, groups, values, num, batch, self._read.append)
            return found if predicts else logs_of(found, name), values

        return take

    def _looked(self, state: State, batch: Tree) -> tuple[Any, list, list]:
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
