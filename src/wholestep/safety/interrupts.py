"""Ctrl-C and SIGTERM, held back for the moment in which they would leave something half done."""

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def uninterrupted(*, twice: bool = True) -> Iterator[None]:
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
    in_main = threading.current_thread() is threading.main_thread()
    known = {number: _signals.getsignal(number) for number in _HELD if in_main}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1 and not twice:
            handlers[number](number, frame)

    for number in handlers:
        _signals.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _signals.signal(number, handler)
        for number, frame in held[:1]:
            handlers[number](number, frame)
