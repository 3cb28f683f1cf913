"""Keras variables on JAX. They always hold the newest values, in the same arrays that the next
program spends.
"""

import math
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.optimizers import Optimizer

from wholestep.engines.jax_devices import MeshLayout
from wholestep.keras_private import backend_numpy
from wholestep.patches import replaced
from wholestep.state import State, Variables

_BUILDING = threading.Lock()  # Keras' `zeros` is replaced in all threads
_SMALL = 1 << 20  # numbers of an array


def build_optimizer(optimizer: Optimizer, params: list[keras.Variable]) -> None:
    """Create the variables of an optimizer.

    Small arrays of zeros are copied from the host. JAX would compile a program for each of their
    shapes, which takes up to a tenth of the time to the first update.
    """
    if keras.distribution.distribution() is not None:  # Keras makes them inside of a program
        optimizer.build(params)
        return
    with _BUILDING, replaced(backend_numpy, zeros=_zeros):
        optimizer.build(params)


def _zeros(shape: Sequence[int], dtype: str | None = None) -> jax.Array:
    zeros = jnp.zeros if math.prod(shape) > _SMALL else np.zeros
    return jax.device_put(zeros(shape, jnp.dtype(dtype or keras.config.floatx())))


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
    """The part `variables` of the engine on JAX."""

    shows_changes = True  # each value is another array

    def __init__(self, layout: MeshLayout | None):
        self.layout = layout
        # to the variables: the state's arrays
        self._gives_whole = layout is None or layout.distribution is not None
        self._given = ByVariable()  # (array of the first device, full array)
        self._seen = ByVariable()
        self._sharing = ByVariable()

    def read(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of (params, slots, buffers): the variables' arrays, which the next
        program spends.
        """
        seen: set[int] = set()
        params = variables.params
        slots = variables.slots
        buffers = variables.buffers
        return self._own(params, seen), self._own(slots, seen), self._own(buffers, seen)

    def values(self, variables: list) -> list:
        """Return the values of these variables, to be spent by the next program."""
        return self._own(variables, set())

    def are_current(self, variables: Variables, state: State) -> bool:
        """Whether the variables that an update changes still hold the values of the state."""
        known = [*variables.params, *variables.slots, *variables.buffers]
        values = _changed(state)
        if len(known) != len(values):
            return False
        if self._gives_whole:
            return all(map(operator.is_, [variable._value for variable in known], values))
        given = self._given
        pairs = (
            (v, given.get(id(v), (None, None)), value)
            for v, value in zip(known, values, strict=True)
        )
        return all(v._value is alone and whole is value for v, (alone, whole), value in pairs)

    def write(self, variables: Variables, state: State) -> None:
        """Write the state to the Keras variables. Does not wait."""
        self.assign(variables.all, [*_changed(state), *state.metrics])

    def assign(self, variables: list, values: list) -> None:
        """Write these values to these variables. Does not wait."""
        if not self._gives_whole:
            values = [
                self._alone(variable, value)
                for variable, value in zip(variables, values, strict=True)
            ]
        for variable, value in zip(variables, values, strict=True):
            variable._value = value

    def between_programs(self, state: State) -> State:
        """Return the part of the state that is kept between programs: all of it."""
        return state

    def load_and_store(self, function: Callable, variables: Variables | None = None) -> Callable:
        """Return the function unchanged: variables are written after the program."""
        return function

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters of the state."""
        return state.params

    def replica_params(self, params: list) -> list:
        """Return the parameters unchanged: every device has them."""
        return params

    def captured(self, variables: list, state: State) -> list:
        """Return the values of variables that the trainer does not own. They are not spent.

        A variable that shares an array, or a device's part of one, with the state
        (`target.assign(online)`) is copied.
        """
        held = (
            (*state.params, *state.slots, *state.buffers, *self._sharing.values())
            if variables
            else ()
        )
        spent = {id(value) for value in held}
        for variable in variables:
            if id(variable.value) in spent:
                variable._value = jnp.copy(variable.value)
        return [self._read(v, v.value) for v in variables]

    def _read(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        if self.layout is None:
            return (
                value
                if len(value.devices()) == 1
                else jax.device_put(value, jax.local_devices()[0])
            )
        seen, placed = self._seen.get(id(variable), (None, None))
        if seen is not value:
            placed = self.layout.put(value, self.layout.of(variable))
            self._seen.keep(variable, (value, placed))
        return placed

    def changed_outside(self, variables: list) -> list:
        """Return the variables that were set after `write`."""
        return [v for v in variables if self._given.get(id(v), (None,))[0] is not v.value]

    def sharded(self, variables: list) -> list[str]:
        """Return the sharded variables, each with the axes of the mesh along which it is cut."""
        if self.layout is None:
            return []
        specs = [(v.path, tuple(self.layout.of(v).spec)) for v in variables]
        return [f"{path} {spec}" for path, spec in specs if any(axis is not None for axis in spec)]

    def _own(self, variables: list, seen: set[int]) -> list:
        """Return the variables' arrays; an array of two variables is copied, as no array can be
        spent twice.
        """
        values = []
        for variable in variables:
            value = variable.value
            values.append(self._at_home(variable, jnp.copy(value) if id(value) in seen else value))
            seen.add(id(value))
        return values

    def _alone(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Return the first device's copy of a replicated array, which Keras' functions can compute
        with.

        The full array is kept, for the next program if the variable still holds the returned copy.
        """
        alone = value.addressable_data(0)
        self._given.keep(variable, (alone, value))
        self._sharing.keep(variable, alone)
        return alone

    def _at_home(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        if self.layout is None:
            return (
                value
                if len(value.devices()) == 1
                else jax.device_put(value, jax.local_devices()[0])
            )
        self._sharing.keep(variable, value)
        alone, whole = self._given.get(id(variable), (None, None))
        return whole if alone is value else self.layout.put(value, self.layout.of(variable))


def _changed(state: State) -> list:
    """Return the values of the Keras variables that an update changes."""
    return [*state.params, *state.slots, *state.buffers]
