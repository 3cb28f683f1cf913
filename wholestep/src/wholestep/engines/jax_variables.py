"""Keras variables on JAX. They always hold the newest values, in the same arrays that the next
program spends.
"""

import operator
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras

from wholestep.engines.jax_devices import MeshLayout
from wholestep.state import State, Variables

_WATCH = "_wholestep_watch"
_KINDS: dict[tuple[type, bool], type] = {}  # classes of watched variables, by original class
_MARKING = threading.Lock()  # held briefly, and never while waiting for another lock


class VariableWatch:
    """Calls `on_access` before a variable is read or set, from `begin` to `end`.

    Meanwhile the variables have a subclass of their class.

    Args:
        variables: reads and writes are reported.
        given: only writes are reported.
        on_access: ends the watch, or raises an error: then the next access is reported as well.
        lock: held while `on_access` runs, so that another thread waits for the writes of
            `on_access`.
    """

    def __init__(
        self,
        variables: list[keras.Variable],
        given: list[keras.Variable],
        on_access: Callable[[], None],
        lock: AbstractContextManager,
    ):
        self._variables = [*variables, *given]
        self._num_read = len(variables)
        self._on_access = on_access
        self._lock = lock
        self._is_reported = self._has_ended = False

    def begin(self) -> None:
        """Watch all variables, unless the watch has ended already; end other trainers' watches on
        them.
        """
        while other := self._mark():
            other.notice()
            other.end()

    def _mark(self) -> "VariableWatch | None":
        """Mark all variables and return None, or return another watch on one of them."""
        with _MARKING:
            for variable in [] if self._has_ended else self._variables:
                if (other := vars(variable).get(_WATCH)) is not None:
                    return other
            for i, variable in enumerate([] if self._has_ended else self._variables):
                if _WATCH not in vars(variable):  # else it is listed twice, or both read and given
                    vars(variable)[_WATCH] = self
                    variable.__class__ = _watched(type(variable), i < self._num_read)
            return None

    def end(self) -> None:
        """Restore the class of the variables."""
        with _MARKING:
            self._has_ended = True
            for variable in self._variables:
                if vars(variable).get(_WATCH) is self:
                    variable.__class__ = type(variable).__base__
                    del vars(variable)[_WATCH]

    def notice(self) -> None:
        """Call `on_access`, except from within `on_access`."""
        with self._lock:
            if not self._is_reported:
                self._is_reported = True
                try:
                    self._on_access()
                finally:
                    self._is_reported = False


def _notice(variable: keras.Variable) -> None:
    watch = vars(variable).get(_WATCH)
    if watch is not None:  # else another thread's access has ended it
        watch.notice()


def _watched(kind: type, is_read: bool) -> type:
    """Return the subclass for watched variables of this class."""

    def read(variable: keras.Variable) -> Any:
        if is_read:
            _notice(variable)
        return vars(variable)["_value"]

    def assign(variable: keras.Variable, value: Any) -> None:
        _notice(variable)
        vars(variable)["_value"] = value

    def reduce(variable: keras.Variable, protocol: int) -> Any:
        _notice(variable)
        return variable.__reduce_ex__(protocol)

    if (kind, is_read) not in _KINDS:
        names = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        own = {"_value": property(read, assign), "__reduce_ex__": reduce}
        _KINDS[kind, is_read] = type(kind.__name__, (kind,), names | own)
    return _KINDS[kind, is_read]


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

    watch = VariableWatch  # arrays do not change, so newer values are read through the variable

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
            if _WATCH in variable.__dict__:
                variable.__dict__["_value"] = value  # without a report
            else:
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
