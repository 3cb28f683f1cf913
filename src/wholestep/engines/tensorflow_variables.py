"""Keras variables on TensorFlow: programs read and write them where they are."""

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
    """The verbs of `wholestep.engines.protocol` that read and write Keras variables."""

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
        """Whether the variables hold the values of the state: programs read them when they run, whatever they hold."""
        return True

    def write_variables(self, variables: Variables, state: State) -> None:
        """Let the Keras variables hold the values of the state: the program has done so."""

    sees_looks = False  # a function that was traced reads a variable without Python

    def watch(self, variables: list, given: list, look: Callable[[], None], lock: AbstractContextManager) -> "Unseen":
        """Accesses are not seen on TensorFlow."""
        return Unseen()

    def copied(self, values: Tree) -> Tree:
        """Return the values in tensors of their own: tensors do not change."""
        return tf.nest.map_structure(tf.identity, values)

    def write_metrics(self, variables: Variables, metrics: list) -> None:
        """Let the variables of the Keras metrics hold these values."""
        _assign(variables.metrics, metrics)

    def write_buffers(self, variables: Variables, buffers: list) -> None:
        """Let the variables that are no parameters hold these values."""
        _assign(variables.buffers, buffers)

    def at_rest(self, state: State) -> State:
        """Return what is kept of the state between programs: not what stays in its variables."""
        return state._replace(buffers=[])

    def loaded(self, state: State) -> State:
        """Return, in a program, the state that was kept between programs, with what stays in its variables."""
        return state._replace(buffers=[tf.convert_to_tensor(v.value) for v in self._buffers])

    def stored(self, state: State) -> State:
        """Return, in a program, what is to be kept of the state, and let the variables hold what they keep."""
        _assign(self._buffers, state.buffers)
        _assign(self._metrics, state.metrics)
        return self.at_rest(state)

    def read_captured(self, variables: list, state: State) -> list:
        """Return the values of variables that are not the trainer's own: none, as programs read them themselves."""
        return []

    def changed_outside(self, variables: list) -> list:
        """Return the variables that somebody else may have assigned: any of them."""
        return variables


def _assign(variables: list, values: list) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value.assign(value, read_value=False)
