"""Keras variables on JAX. They always hold the newest values, in the same arrays that the next program spends."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from wholestep.engines.jax_watch import Watch, put
from wholestep.engines.mesh import MeshLayout
from wholestep.state import State, Variables
from wholestep.tree import Tree

_copied = jax.jit(partial(jax.tree.map, jnp.copy))


class ByVariable(dict[int, Any]):
    """Arrays by the id of a variable, kept for the variable's lifetime."""

    def keep(self, variable: keras.Variable, arrays: Any) -> None:
        """Keep arrays for the variable, in place of earlier ones."""
        if id(variable) not in self:
            weakref.finalize(variable, _drop, weakref.ref(self), id(variable)).atexit = False
        self[id(variable)] = arrays


def _drop(kept: Callable[[], ByVariable | None], key: int) -> None:
    if (arrays := kept()) is not None:
        arrays.pop(key, None)


class JaxVariables:
    """The methods of `wholestep.engines.protocol` that read and write Keras variables.

    Args:
        layout: the placement of arrays on several devices; None for one.
    """

    def __init__(self, layout: MeshLayout | None):
        self.layout = layout
        self._given = ByVariable()  # (array of the first device, full array)
        self._seen = ByVariable()
        self._sharing = ByVariable()

    def read_variables(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of (params, slots, buffers): the variables' arrays, which the next program spends."""
        seen: set[int] = set()
        params, slots, buffers = variables.params, variables.slots, variables.buffers
        return self._own(params, seen), self._own(slots, seen), self._own(buffers, seen)

    def read_metrics(self, variables: Variables) -> list:
        """Return the values of the Keras metrics' variables, to be spent by the next program."""
        return self._own(variables.metrics, set())

    def holds(self, variables: Variables, state: State) -> bool:
        """Whether the variables that an update changes still hold the values of the state."""
        known, values = [*variables.params, *variables.slots, *variables.buffers], _changed(state)
        if len(known) != len(values):
            return False
        if self._gives_whole:
            return all(variable._value is value for variable, value in zip(known, values, strict=True))
        given = self._given
        pairs = ((v, given.get(id(v), (None, None)), value) for v, value in zip(known, values, strict=True))
        return all(v._value is alone and whole is value for v, (alone, whole), value in pairs)

    def write_variables(self, variables: Variables, state: State) -> None:
        """Write the state to the Keras variables. Does not wait."""
        self._write([*variables.params, *variables.slots, *variables.buffers], _changed(state))
        self._write(variables.metrics, state.metrics)

    sees_looks = True  # arrays do not change, so newer values are read through the variable

    def watch(self, variables: list, given: list, look: Callable[[], None], lock: AbstractContextManager) -> Watch:
        """Return a watch that calls `look` under the lock before an access to a variable or a write to `given`."""
        return Watch(variables, given, look, lock)

    def copied(self, values: Tree) -> Tree:
        """Return copies of the values."""
        return _copied(values)

    def write_metrics(self, variables: Variables, metrics: list) -> None:
        """Write these values to the variables of the Keras metrics. Does not wait."""
        self._write(variables.metrics, metrics)

    def write_buffers(self, variables: Variables, buffers: list) -> None:
        """Write these values to the variables that are no parameters. Does not wait."""
        self._write(variables.buffers, buffers)

    def _write(self, variables: list, values: list) -> None:
        whole = self._gives_whole
        for variable, value in zip(variables, values, strict=True):
            put(variable, value if whole else self._alone(variable, value))

    def at_rest(self, state: State) -> State:
        """Return the part of the state that is kept between programs: all of it."""
        return state

    def loaded(self, state: State) -> State:
        """Return, in a program, the full state from the part kept between programs: the same."""
        return state

    def stored(self, state: State) -> State:
        """Return, in a program, the part of the state to keep: all; variables are written after the program."""
        return state

    def read_captured(self, variables: list, state: State) -> list:
        """Return the values of variables that the trainer does not own. They are not spent.

        A variable that shares an array, or a device's part of one, with the state (`target.assign(online)`) is copied.
        """
        held = (*state.params, *state.slots, *state.buffers, *self._sharing.values()) if variables else ()
        spent = {id(value) for value in held}
        for variable in variables:
            if id(variable.value) in spent:
                variable._value = jnp.copy(variable.value)
        return [self._read(v, v.value) for v in variables]

    def _read(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        if self.layout is None:
            return value if len(value.devices()) == 1 else jax.device_put(value, jax.local_devices()[0])
        seen, placed = self._seen.get(id(variable), (None, None))
        if seen is not value:
            placed = self.layout.put(value, self.layout.of(variable))
            self._seen.keep(variable, (value, placed))
        return placed

    def changed_outside(self, variables: list) -> list:
        """Return the variables that were set after `write_variables`."""
        return [v for v in variables if self._given.get(id(v), (None,))[0] is not v.value]

    def _own(self, variables: list, seen: set[int]) -> list:
        """Return the variables' arrays; an array of two variables is copied, as no array can be spent twice."""
        values = []
        for variable in variables:
            value = variable.value
            values.append(self._at_home(variable, jnp.copy(value) if id(value) in seen else value))
            seen.add(id(value))
        return values

    def _alone(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Return the first device's copy of a replicated array, which Keras' functions can compute with.

        The full array is kept, for the next program if the variable still holds the returned copy.
        """
        alone = value.addressable_data(0)
        self._given.keep(variable, (alone, value))
        self._sharing.keep(variable, alone)
        return alone

    @property
    def _gives_whole(self) -> bool:
        """Whether variables hold the full arrays of the state."""
        return self.layout is None or self.layout.distribution is not None

    def _at_home(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        if self.layout is None:
            return value if len(value.devices()) == 1 else jax.device_put(value, jax.local_devices()[0])
        self._sharing.keep(variable, value)
        alone, whole = self._given.get(id(variable), (None, None))
        return whole if alone is value else self.layout.put(value, self.layout.of(variable))


def _changed(state: State) -> list:
    """Return the values of the Keras variables that an update changes."""
    return [*state.params, *state.slots, *state.buffers]
