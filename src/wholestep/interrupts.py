"""Ctrl-C, held back for the moment in which it would leave something half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt back to the end of a block; Python would raise it after any call in there.

    >>> before = signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    >>> with uninterrupted():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("whole")
    whole
    interrupted
    >>> before = signal.signal(signal.SIGINT, before)
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *call: held.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for call in held[:1]:
            handler(*call)
