"""The stack of the running code, and code that must not wait for the collection of
garbage.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def running(frame: FrameType | None = None) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of a frame (default: the caller's) and of its callers,
    innermost first.
    """
    for each in frames(frame or sys._getframe(1)):
        yield each.f_code.co_filename, each.f_lineno


@contextmanager
def uncollected() -> Iterator[None]:
    """Return a context without garbage collection.

    Deleting TensorFlow functions waits for the running program. In a callback on
    another thread that would deadlock, as the program waits for the callback.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
