"""The end of a script of which enough was seen. Needs no Keras."""

import ctypes
import sys
import threading
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
        """Return that of a script that runs."""
        return cls(threading.Event(), threading.Event())


class Enough(BaseException):
    """Ends a loop of which enough was seen. No `except Exception` of the user's catches it."""


class Command(Protocol):
    """What `wholestep audit` is for an audit that the script makes itself."""

    @property
    def has_stopped(self) -> bool:
        """Whether the loop was asked to end; an engine may make an error of its own of that."""

    def listener(self) -> Any:
        """Return the listener to be used, which ends the script when enough was seen."""

    def adopt(self, report: Any, log: Any) -> None:
        """Take the report of the script's own audit for the answer."""


COMMAND: ContextVar[Command | None] = ContextVar("the command that runs this script", default=None)


def stop(ended: threading.Event, *, is_direct: bool) -> None:
    """End what the main thread runs, and again after a while as long as it goes on.

    Args:
        ended: set once it has ended.
        is_direct: whether the script's own code called here. From an engine's program nothing can be raised: it would
            become an error of the engine's. There the main thread is ended as soon as it is back in Python.
    """
    is_direct = is_direct and threading.current_thread() is threading.main_thread()
    threading.Thread(target=_end, args=(ended, _AGAIN if is_direct else 0.0), daemon=True).start()
    if is_direct:
        raise Enough


def _end(ended: threading.Event, pause: float) -> None:
    from wholestep.engines import uncollected  # there is Keras where a loop is ended

    main = threading.main_thread().ident or 0
    while not ended.wait(pause):
        pause = _SOON
        with _ENDING, uncollected():
            if not ended.is_set() and not _is_busy(sys._current_frames().get(main)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Enough))
                pause = _AGAIN


def over(ended: threading.Event) -> None:
    """Note that the script has ended. If it was about to be ended, `Enough` is raised here, and not later."""
    try:
        _set(ended)
    except Enough:
        _set(ended)
        raise


def _set(ended: threading.Event) -> None:
    with _ENDING:
        ended.set()
    for _ in range(2):  # what another thread has raised comes between two rounds
        pass


def _is_busy(frame: FrameType | None) -> bool:
    """Whether the engine's program has called back, and what it called runs; or a thread is started just now.

    A thread that begins has its starter's identity for a moment: it would be ended instead, and be waited for.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_CALLING_BACK) or code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False
