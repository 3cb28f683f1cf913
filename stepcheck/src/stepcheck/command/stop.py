"""The end of a script once enough updates were seen. Needs no Keras."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any

_SOON, _AGAIN = 0.001, 10.0  # seconds; a script's own `finally` has the latter
_ENDING = threading.Lock()
_CALLING_BACK = "debugging.py", "callback.py", "script_ops.py"  # files of JAX and TensorFlow


class Enough(BaseException):
    """Ends a loop once enough updates were seen. No `except Exception` of the user's catches it."""


class Limit:
    """Ends a loop once enough was seen, and holds the audits that run inside of it.

    A loop of an audit inside ends after `num_updates`, any other if `is_enough` says so, and if the main thread runs
    it (`can_end`): no other can be ended. `reports` has the reports of the audits inside, with their logs.
    """

    def __init__(self, num_updates: int, is_enough: Callable[[], bool] = bool, *, can_end: bool = True):
        self.num_updates, self._is_enough, self._can_end = num_updates, is_enough, can_end
        self.reports: list[tuple[Any, Any]] = []
        self.is_asked, self.has_come = threading.Event(), threading.Event()

    @property
    def has_stopped(self) -> bool:
        """Whether the loop was asked to end; an engine may raise another error for it."""
        return self.is_asked.is_set()

    def adopt(self, report: Any, log: Any) -> None:
        """Take an audit that the loop makes itself."""
        self.reports.append((report, log))

    def listener(self, entered: Any = None) -> Any:
        """Return a listener that ends the loop at the limit, perhaps by one of an engine that was entered elsewhere."""
        from stepcheck.keras.listener import listener  # Keras is imported when there is a loop

        return _Counting(listener() if entered is None else entered, self, is_entered=entered is not None)

    def is_reached(self) -> bool:
        """Whether the loop is to end; the log of an audit inside is closed then."""
        if not self._can_end or not self.reports:
            return self._can_end and self._is_enough()
        log = self.reports[-1][1]
        log.is_open &= log.num_updates < self.num_updates  # later updates are not recorded
        return not log.is_open


COMMAND: ContextVar[Limit | None] = ContextVar("the limit of the loop that runs", default=None)


@contextmanager
def as_command(limit: Limit) -> Iterator[None]:
    """Let audits inside find the command's limit; of several the first."""
    before = COMMAND.get()
    token = COMMAND.set(before or limit)
    try:
        yield
    finally:
        COMMAND.reset(token)


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
    from stepcheck.user_code.stack import uncollected  # Keras is imported when a loop is ended

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


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_busy(frame: FrameType | None) -> bool:
    """Whether a callback of an engine's program runs, or a thread is being started.

    A new thread has its starter's identity for a moment: it would be ended instead, and its starter would wait.
    """
    codes = [each.f_code for each in frames(frame)]
    return any(c.co_filename.endswith(_CALLING_BACK) or c is threading.Thread.start.__code__ for c in codes)


class _Counting:
    """An engine's listener that ends the loop at its limit."""

    def __init__(self, listener: Any, limit: Limit, *, is_entered: bool):
        self._listener, self._limit, self._is_entered = listener, limit, is_entered
        self._is_telling = False

    def listening(self, told: Callable[[tuple[int, ...], list], None]) -> AbstractContextManager:
        """Enter the engine's listener, unless it was entered."""
        return nullcontext() if self._is_entered else self._listener.listening(told)

    def tell(self, told: Callable[[int, int, list], None], values: list) -> None:
        """Call `told` with the values, or end the loop if it has made enough updates before."""

        def heard(order: int, replica: int, numbers: list) -> None:
            # Before `told`: a script may end by itself after its last update.
            if not self._limit.has_stopped and self._limit.is_reached():
                self._limit.is_asked.set()
                stop(self._limit.has_come, is_direct=self._is_telling)
            told(order, replica, numbers)

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
            if not self._limit.has_stopped:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
