"""The end of a script of which enough was seen."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from wholestep.audit.log import Log
from wholestep.engines.listener import Listener, Told
from wholestep.tree import Tensor


class Enough(BaseException):
    """Ends a loop of which enough was seen. No `except Exception` of the user's catches it."""


class Command(Protocol):
    """What `wholestep audit` is for an audit that the script makes itself."""

    def listener(self) -> Listener:
        """Return the listener to be used, which ends the script when enough was seen."""

    def adopt(self, report: Any, log: Log) -> None:
        """Take the report of the script's own audit for the answer."""


COMMAND: ContextVar[Command | None] = ContextVar("the command that runs this script", default=None)


class Counting:
    """An engine's listener that ends the main thread's code once `is_enough` says so.

    `listening` is entered once, by whoever makes it: several hooks may share the listener.
    """

    def __init__(self, listener: Listener, is_enough: Callable[[], bool], enter: Callable[[], AbstractContextManager]):
        self._listener, self._is_enough, self._enter = listener, is_enough, enter
        self._is_telling = False
        self.has_stopped = False

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Return a context in which nothing more is done."""
        return self._enter()

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told`, and end the script after it if that was enough."""

        def heard(order: int, numbers: list[np.ndarray]) -> None:
            told(order, numbers)
            if self._is_enough():
                self._stop()

        outer, self._is_telling = self._is_telling, True
        try:
            self._listener.tell(heard, values)
        finally:
            self._is_telling = outer

    def _stop(self) -> None:
        self.has_stopped = True
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._is_telling:
            raise Enough
        if is_main:  # in the middle of an engine's program: an error raised here would become the engine's own
            threading.Thread(target=_stop_main, daemon=True).start()
        else:
            _stop_main()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def _stop_main() -> None:
    """Raise `Enough` in the main thread, as soon as it runs Python again."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Enough))
