"""Keras variables on JAX that say so before somebody reads or sets them."""

from collections.abc import Callable
from typing import Any

import jax
import keras

from wholestep.safety.guards import LOOKING

_WATCH = "_wholestep_watch"
_KINDS: dict[tuple[type, bool], type] = {}  # the classes of variables that are watched, by those of others


class Watch:
    """Calls `look` before anybody reads or sets the value of a variable, until the watch ends.

    Until then the variables are of a class of their own, a subclass of the one they had.

    Args:
        variables: nobody reads or sets them unseen.
        given: nobody sets them unseen; their values may be read.
        look: ends the watch, or raises an error: then the next who looks is seen as well.
    """

    def __init__(self, variables: list[keras.Variable], given: list[keras.Variable], look: Callable[[], None]):
        self._variables = [*variables, *given]
        self._look = look
        self._is_told = False
        with LOOKING:
            for i, variable in enumerate(self._variables):
                before = vars(variable).get(_WATCH)
                if before is not None and before is not self:
                    before.notice()
                if before is not self:
                    vars(variable)[_WATCH] = self
                    variable.__class__ = _watched(type(variable), i < len(variables))

    def end(self) -> None:
        """Let the variables be what they were."""
        for variable in self._variables:
            if vars(variable).get(_WATCH) is self:
                variable.__class__ = type(variable).__base__
                del vars(variable)[_WATCH]

    def notice(self) -> None:
        """Somebody looks; not whoever is told of it."""
        if not self._is_told:
            self._is_told = True
            try:
                self._look()
            finally:
                self._is_told = False


def put(variable: keras.Variable, value: jax.Array) -> None:
    """Let a variable hold an array, watched or not."""
    if _WATCH in vars(variable):
        vars(variable)["_value"] = value
    else:
        variable._value = value


def _notice(variable: keras.Variable) -> None:
    watch = vars(variable).get(_WATCH)
    if watch is not None:  # else another thread has just looked
        watch.notice()


def _watched(kind: type, is_read: bool) -> type:
    """Return the class of variables of this kind while they are watched."""

    def read(variable: keras.Variable) -> Any:
        with LOOKING:
            if is_read:
                _notice(variable)
            return vars(variable)["_value"]

    def assign(variable: keras.Variable, value: Any) -> None:
        with LOOKING:
            _notice(variable)
            vars(variable)["_value"] = value

    def reduce(variable: keras.Variable, protocol: int) -> Any:
        with LOOKING:
            _notice(variable)
            return variable.__reduce_ex__(protocol)

    if (kind, is_read) not in _KINDS:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        own = {"_value": property(read, assign), "__reduce_ex__": reduce}
        _KINDS[kind, is_read] = type(kind.__name__, (kind,), names | own)
    return _KINDS[kind, is_read]
