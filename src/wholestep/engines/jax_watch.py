"""Keras variables on JAX that report accesses before they happen."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras

_WATCH = "_wholestep_watch"
_KINDS: dict[tuple[type, bool], type] = {}  # classes of watched variables, by original class
_MARKING = threading.Lock()  # held briefly, and never while waiting for another lock


class Watch:
    """Calls `look` before a variable is read or set, from `begin` to `end`.

    Meanwhile the variables have a subclass of their class.

    Args:
        variables: reads and writes are reported.
        given: only writes are reported.
        look: ends the watch, or raises an error: then the next access is reported as well.
        lock: held while `look` runs, so that another thread waits for the writes of `look`.
    """

    def __init__(
        self,
        variables: list[keras.Variable],
        given: list[keras.Variable],
        look: Callable[[], None],
        lock: AbstractContextManager,
    ):
        self._variables = [*variables, *given]
        self._num_read = len(variables)
        self._look = look
        self._lock = lock
        self._is_reported = self._has_ended = False

    def begin(self) -> None:
        """Watch all variables, unless the watch has ended already; end other trainers' watches on them."""
        while other := self._mark():
            other.notice()
            other.end()

    def _mark(self) -> "Watch | None":
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
        """Call `look`, except from within `look`."""
        with self._lock:
            if not self._is_reported:
                self._is_reported = True
                try:
                    self._look()
                finally:
                    self._is_reported = False


def put(variable: keras.Variable, value: jax.Array) -> None:
    """Set a variable without a report."""
    if _WATCH in vars(variable):
        vars(variable)["_value"] = value
    else:
        variable._value = value


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
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        own = {"_value": property(read, assign), "__reduce_ex__": reduce}
        _KINDS[kind, is_read] = type(kind.__name__, (kind,), names | own)
    return _KINDS[kind, is_read]
