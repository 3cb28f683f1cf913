"""Custom steps on TensorFlow: functions of data, with Keras' signature, that assign variables in place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from wholestep import tree
from wholestep.engines.tensorflow_leaves import tensor_of
from wholestep.engines.tensorflow_programs import specs_of
from wholestep.state import State, Variables
from wholestep.tree import Tensor, Tree


class TensorflowSteps:
    """The methods of `wholestep.engines.protocol` for custom steps."""

    def call_step(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Callable[[keras.Variable], None],
    ) -> tuple[Tree, list[list]]:
        """Call a step; return its results, and the values of the groups that are passed as values."""
        carried = [(group, given) for group, given in zip(groups, values, strict=True) if given]
        for group, given in carried:
            for variable, value in zip(group, given, strict=True):
                variable.value.assign(value, read_value=False)
        found = step(data)
        after = zip(groups, values, strict=True)
        return found, [[tf.convert_to_tensor(v.value) for v in group] if given else [] for group, given in after]

    def trying(self, variables: Variables) -> AbstractContextManager:
        """Return an empty context: a traced step assigns only when its program runs."""
        return nullcontext()

    def attempt(
        self, function: Callable[[State], tuple[State, Tensor, Tree]], state: State, variables: Variables
    ) -> tuple[State, Tensor, Tree]:
        """Return the results of (state) -> (state, is_good, results); unless good, restore state and variables."""
        held = [*variables.params, *variables.slots, *variables.buffers]
        before = [tf.convert_to_tensor(v.value) for v in held]
        new, ok, found = function(state)

        def go_back() -> tf.Tensor:
            pairs = zip([*held, *variables.metrics], [*before, *state.metrics], strict=True)
            for variable, value in pairs:
                variable.value.assign(value, read_value=False)
            return tf.constant(False)

        tf.cond(ok, lambda: tf.constant(True), go_back)
        return tf.nest.map_structure(lambda n, o: n if n is o else tf.where(ok, n, o), new, state), ok, found


def as_function(step: Callable) -> Any:
    """Return a step as a function that is traced once for each shape, and creates variables in its first trace."""
    return tf.function(step, autograph=False)


def make_variables(function: Any, batch: Tree) -> None:
    """Create the variables of a function for such a batch. Nothing is computed."""
    traced = function if hasattr(function, "get_concrete_function") else as_function(function)
    traced.get_concrete_function(*specs_of((tree.map_leaves(tensor_of, batch),)))
