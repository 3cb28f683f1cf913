"""Ctrl-C and SIGTERM, held back for the moment in which they would leave something half done."""

import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

# What `signal` wraps in enumerations, which takes a third of the time of an update's own work on the host.
_signals = importlib.import_module("_signal")


class Terminated(BaseException):
    """SIGTERM came. It passes every `except Exception` on its way, as an interrupt does."""


def end_when_terminated() -> None:
    """Let the first SIGTERM raise Terminated in the main thread. What handled the signal before is not asked."""

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("SIGTERM came")

    signal.signal(signal.SIGTERM, handle)


_HELD = int(signal.SIGINT), int(signal.SIGTERM)


class _Held:
    """What `uninterrupted` does; no generator, as that would take longer, and every update comes here twice."""

    def __init__(self, twice: bool):
        self._twice = twice
        self._handlers: dict[int, Callable] = {}
        self._calls: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            known = [(number, _signals.getsignal(number)) for number in _HELD]
            self._handlers = {number: handler for number, handler in known if callable(handler)}
        for number in self._handlers:
            _signals.signal(number, self._hold)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            _signals.signal(number, handler)
        for number, frame in self._calls[:1]:
            self._handlers[number](number, frame)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._calls.append((number, frame))
        if len(self._calls) > 1 and not self._twice:
            self._handlers[number](number, frame)


def uninterrupted(*, twice: bool = True) -> AbstractContextManager[None]:
    """Hold a signal back to the end of a block; Python would raise what it means after any call in there.

    Args:
        twice: whether a second one is held back too. A block that may wait for ever lets it through.

    >>> before = signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    >>> with uninterrupted():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("whole")
    whole
    interrupted
    >>> before = signal.signal(signal.SIGINT, before)
    """
    return _Held(twice)
