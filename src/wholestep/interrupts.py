"""Ctrl-C and SIGTERM, held back for the moment in which they would leave something half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(BaseException):
    """SIGTERM came. It passes every `except Exception` on its way, as an interrupt does."""


def end_when_terminated() -> None:
    """Let the first SIGTERM raise Terminated in the main thread. What handled the signal before is not asked."""

    def handle(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated("SIGTERM came")

    signal.signal(signal.SIGTERM, handle)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a signal back to the end of a block; Python would raise what it means after any call in there.

    >>> before = signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    >>> with uninterrupted():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("whole")
    whole
    interrupted
    >>> before = signal.signal(signal.SIGINT, before)
    """
    in_main = threading.current_thread() is threading.main_thread()
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    held: list[tuple] = []
    for number in handlers:
        signal.signal(number, lambda *call: held.append(call))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for call in held[:1]:
            handlers[call[0]](*call)
