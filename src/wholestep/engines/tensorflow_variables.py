"""Keras variables on TensorFlow: programs read and write them in place."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import tensorflow as tf

from wholestep.state import State, Variables
from wholestep.tree import Tree


class Unseen:
    """A watch that reports nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class TensorflowVariables:
    """The methods of `wholestep.engines.protocol` that read and write Keras variables."""

    def __init__(self) -> None:
        self._variables: list = []  # the parameters
        self._buffers: list = []
        self._metrics: list = []

    def read_variables(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of (params, slots, buffers); the first two stay in their variables."""
        self._variables[:], self._buffers[:] = variables.params, variables.buffers
        self._metrics[:] = variables.metrics
        return [], [], [tf.identity(v.value) for v in variables.buffers]

    def read_metrics(self, variables: Variables) -> list:
        """Return the values of the Keras metrics' variables."""
        return [tf.identity(v.value) for v in variables.metrics]

    def holds(self, variables: Variables, state: State) -> bool:
        """Return True: programs read the current values of the variables when they run."""
        return True

    def write_variables(self, variables: Variables, state: State) -> None:
        """Do nothing: the program has written the state to the Keras variables."""

    sees_looks = False  # a traced function reads a variable without Python

    def watch(self, variables: list, given: list, look: Callable[[], None], lock: AbstractContextManager) -> "Unseen":
        """Return a watch that reports nothing: accesses are not visible on TensorFlow."""
        return Unseen()

    def copied(self, values: Tree) -> Tree:
        """Return copies of the values."""
        return tf.nest.map_structure(tf.identity, values)

    def write_metrics(self, variables: Variables, metrics: list) -> None:
        """Write these values to the variables of the Keras metrics."""
        _assign(variables.metrics, metrics)

    def write_buffers(self, variables: Variables, buffers: list) -> None:
        """Write these values to the variables that are no parameters."""
        _assign(variables.buffers, buffers)

    def at_rest(self, state: State) -> State:
        """Return the part of the state kept between programs: buffers stay in their variables."""
        return state._replace(buffers=[])

    def loaded(self, state: State) -> State:
        """Return, in a program, the full state from the part kept between programs and the variables."""
        return state._replace(buffers=[tf.convert_to_tensor(v.value) for v in self._buffers])

    def stored(self, state: State) -> State:
        """Return, in a program, the part of the state to keep; write buffers and metrics to their variables."""
        _assign(self._buffers, state.buffers)
        _assign(self._metrics, state.metrics)
        return self.at_rest(state)

    def read_captured(self, variables: list, state: State) -> list:
        """Return []: programs read variables that the trainer does not own themselves."""
        return []

    def changed_outside(self, variables: list) -> list:
        """Return all variables: assignments by others are not visible."""
        return variables


def _assign(variables: list, values: list) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value.assign(value, read_value=False)
