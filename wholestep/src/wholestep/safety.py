"""Guards: one thread uses a trainer at a time, and no interrupt leaves half an update."""

import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from wholestep.errors import invalid

# `signal` wraps this module in enumerations, which take a third of an update's time on the host.
_signals = importlib.import_module("_signal")

_SOON = 0.01  # seconds


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt, it is not an Exception."""


class TerminatedWaiting(Terminated):
    """SIGTERM came during a wait for a data source, between two updates: the run can be saved."""


class Ended(SystemExit):
    """The process exits because SIGTERM came, after the run was saved."""

    def __init__(self) -> None:
        super().__init__(128 + int(signal.SIGTERM))


def end_when_terminated() -> None:
    """Let the first SIGTERM raise Terminated in the main thread, instead of the previous handler.

    Python drops an exception that is raised during garbage collection: then it is raised again.
    """
    unraisable = sys.unraisablehook

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("SIGTERM came")

    def raise_again(lost: Any) -> None:
        if not isinstance(lost.exc_value, Terminated):
            unraisable(lost)
            return
        signal.signal(signal.SIGTERM, handle)
        again = threading.Timer(_SOON, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()

    signal.signal(signal.SIGTERM, handle)
    sys.unraisablehook = raise_again


_SIGNALS = int(signal.SIGINT), int(signal.SIGTERM)


class _Held:
    """The context of `uninterrupted`; not a generator, as each update enters it twice, and a
    generator is slower.

    A signal may come between any two instructions here. Before a handler is called, both are
    restored. If one raises before the other is restored, the other restores itself at its next
    signal.
    """

    def __init__(self, twice: bool, *, waits: bool = False):
        self._twice = twice
        self._until = math.inf
        self._waits = waits
        self._handlers: dict[int, Callable] = {}
        self._calls: list[tuple[int, FrameType | None]] = []
        self._timer: threading.Timer | None = None
        self._is_open = self._is_over = False

    def __enter__(self) -> None:
        if self._waits:
            self._until = time.monotonic() + _ONE
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = _signals.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
        for number in self._handlers:
            _signals.signal(number, self._hold)
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self._calls:
            came = dict(reversed(self._calls))
            # SIGTERM first, which may set a flag only: SIGINT raises
            for number in sorted(came, reverse=True):
                self._handlers[number](number, came[number])

    def _restore(self) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
            if self._timer.is_alive():  # not if a second signal came while it was being started
                self._timer.join()
        try:
            # SIGINT last: its handler may raise as soon as it is restored.
            for number, handler in reversed(self._handlers.items()):
                _signals.signal(number, handler)
        finally:
            self._is_over = True

    def _hold(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self._is_over:
            _signals.signal(number, handler)
            handler(number, frame)
            return
        left = self._until - time.monotonic()
        if not self._is_open or self._twice or (not self._calls and left > 0):
            self._calls.append((number, frame))
            if self._waits and self._is_open:
                # A signal, not a call, as it wakes the main thread.
                target = (threading.main_thread().ident, number)
                self._timer = threading.Timer(left, signal.pthread_kill, target)
                self._timer.daemon = True
                self._timer.start()
            return
        self._calls = [call for call in self._calls if call[0] != number]
        self._restore()
        handler(number, frame)
        if isinstance(handler, Termination):
            raise TerminatedWaiting("SIGTERM came while a data source was waited for")


def uninterrupted(*, twice: bool = True) -> AbstractContextManager[None]:
    """Hold a signal back to the end of a block; its exception could come after any call inside.

    Args:
        twice: whether a second signal is held back too; use False if the block may wait for ever.

    >>> before = signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    >>> with uninterrupted():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("whole")
    whole
    interrupted
    >>> before = signal.signal(signal.SIGINT, before)
    """
    return _Held(twice)


def waiting() -> AbstractContextManager[None]:
    """Hold a signal back for at most a second in a block that waits for a user's data source.

    After a second in the block, or at a second signal, the signal's handler is called in the block.
    Where that is a `Termination`, the block raises TerminatedWaiting.
    """
    return _Held(twice=False, waits=True)


_ONE = 1.0  # seconds


class Termination:
    """Records a first SIGTERM during a block. A second SIGTERM has its previous effect.

    Signals within a second of the first are ignored: a cluster and a launcher may both signal each
    process. Signals arrive in the main thread; in a block of another thread, nothing is recorded.

    >>> before = signal.signal(signal.SIGTERM, lambda *_: print("terminated"))
    >>> with Termination() as termination:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print(termination.has_come)
    ...     time.sleep(1)
    ...     signal.raise_signal(signal.SIGTERM)
    True
    terminated
    >>> before = signal.signal(signal.SIGTERM, before)
    """

    def __init__(self) -> None:
        self.has_come = False
        self._since = 0.0
        self._before: Callable | int | None = None
        self._lasts = False

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            self._lasts = self._before is not None  # else set outside of Python: not restorable
            if self._lasts:
                signal.signal(signal.SIGTERM, self)
        return self

    def __exit__(self, *_: object) -> None:
        lasts = self._lasts
        self._lasts = False  # first: a signal that comes now has its previous effect
        is_ours = signal.getsignal(signal.SIGTERM) is self
        if lasts and is_ours:
            with contextlib.suppress(ValueError):  # a generator may be closed by another thread
                signal.signal(signal.SIGTERM, self._before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        now = time.monotonic()
        if self._lasts and not self.has_come:
            self.has_come = True
            self._since = now
        elif not self._lasts or now - self._since >= _ONE:
            # A second signal; or the block is over, and was left where the handler could not be
            # restored.
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)


_lock = threading.Lock()
_first_process: int | None = None
# by the id of a model, which a trainer keeps alive
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()


def is_in_use() -> bool:
    """Whether a trainer was made or used in this process."""
    return _first_process is not None


def check_process() -> None:
    """Refuse a process forked after the engine was used, by the process of the first call."""
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    if os.getpid() != _first_process:
        raise invalid(
            "A forked process cannot train, evaluate or predict if the engine was in use before "
            "the fork: the engine's threads are not copied, and it would wait for them for ever.",
            f"process {os.getpid()}, forked after process {_first_process} had made a trainer",
            'start it with multiprocessing.get_context("spawn"), or make models and trainers '
            "in it alone.",
        )


class Guard:
    """Refuses a second thread while one is inside of `with`; the same thread may enter again.

    >>> guard = Guard()
    >>> with guard, guard:
    ...     print("inside")
    inside
    """

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._depth = 0

    @classmethod
    def of(cls, model: object) -> "Guard":
        """Return the guard that all trainers of a model share."""
        with _lock:
            return _guards.setdefault(id(model), cls())

    def __enter__(self) -> None:
        check_process()
        thread = threading.current_thread()
        with _lock:
            if self._owner not in (None, thread):
                raise invalid(
                    "One thread at a time may be in the trainers of a model: an update spends the "
                    "arrays of the one before it.",
                    f"thread {thread.name!r}, while thread {self._owner.name!r} is in it",
                    "let one wait for the other, or use a separate model and trainer in each.",
                )
            self._owner = thread
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
