"""The end of a script once enough updates were seen. Needs no Keras."""

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, Protocol

_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
_ENDING = threading.Lock()
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"  # files of JAX and TensorFlow


class Ended(NamedTuple):
    """The end of a script.

    Attributes:
        is_asked: set once the script was asked to end.
        has_come: set once the script has ended.
    """

    is_asked: threading.Event
    has_come: threading.Event

    @classmethod
    def not_yet(cls) -> "Ended":
        """Return the end of a script that still runs."""
        return cls(threading.Event(), threading.Event())


class Enough(BaseException):
    """Ends a loop once enough updates were seen. No `except Exception` of the user's catches it."""


class Command(Protocol):
    """The caller of an audit, such as `wholestep audit` around an audit that the script makes itself."""

    @property
    def has_stopped(self) -> bool:
        """Whether the loop was asked to end; an engine may raise another error for it."""

    def listener(self) -> Any:
        """Return the listener to use, which ends the script once enough updates were seen."""

    def adopt(self, report: Any, log: Any) -> None:
        """Take the report of the script's own audit."""


COMMAND: ContextVar[Command | None] = ContextVar("the command that runs this script", default=None)


def stop(ended: threading.Event, *, is_direct: bool) -> None:
    """End the script in the main thread, and try again after a while as long as it runs.

    Args:
        ended: set once it has ended.
        is_direct: whether the script's own code called here. An exception in an engine's program would become the
            engine's error: then the main thread is ended as soon as it is back in Python.
    """
    is_direct = is_direct and threading.current_thread() is threading.main_thread()
    threading.Thread(target=_end, args=(ended, _AGAIN if is_direct else 0.0), daemon=True).start()
    if is_direct:
        raise Enough


def _end(ended: threading.Event, pause: float) -> None:
    from wholestep.engines import uncollected  # Keras is imported when a loop is ended

    main = threading.main_thread().ident or 0
    while not ended.wait(pause):
        pause = _SOON
        with _ENDING, uncollected():
            if not ended.is_set() and not _is_busy(sys._current_frames().get(main)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Enough))
                pause = _AGAIN


def over(ended: threading.Event) -> None:
    """Note that the script has ended. A pending `Enough` is raised here, and not later."""
    try:
        _set(ended)
    except Enough:
        _set(ended)
        raise


def _set(ended: threading.Event) -> None:
    with _ENDING:
        ended.set()
    for _ in range(2):  # an exception from another thread is raised between two rounds
        pass


def _is_busy(frame: FrameType | None) -> bool:
    """Whether a callback of an engine's program runs, or a thread is being started.

    A new thread has its starter's identity for a moment: it would be ended instead, and its starter would wait.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_CALLING_BACK) or code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


class Counting:
    """An engine's listener that ends the script once enough was recorded.

    Args:
        ended: the end of the script, shared by its listeners.
        is_entered: whether the engine's listener was entered elsewhere: several hooks may share it.
    """

    def __init__(self, listener: Any, is_enough: Callable[[], bool], ended: Ended, *, is_entered: bool):
        self._listener, self._is_enough, self._ended, self._is_entered = listener, is_enough, ended, is_entered
        self._is_telling = False

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Enter the engine's listener, unless it was entered."""
        return nullcontext() if self._is_entered else self._listener.listening(told)

    def tell(self, told: Callable[[int, list], None], values: list) -> None:
        """Call `told` with the values, or end the script if it has made enough updates before."""

        def heard(order: int, numbers: list) -> None:
            # Before `told`: a script may end by itself after its last update.
            if not self._ended.is_asked.is_set() and self._is_enough():
                self._ended.is_asked.set()
                stop(self._ended.has_come, is_direct=self._is_telling)
            told(order, numbers)

        outer, self._is_telling = self._is_telling, True
        try:
            self._listener.tell(heard, values)
        finally:
            self._is_telling = outer

    def settle(self) -> None:
        """Wait for pending records; a step that was ended halfway has none."""
        try:
            self._listener.settle()
        except Exception:  # the engine's, of a step that the audit itself has ended
            if not self._ended.is_asked.is_set():
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
