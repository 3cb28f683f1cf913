"""The protocol by which an audit gets the values of code that runs now, or is traced and runs later."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Protocol

import numpy as np

from wholestep.tree import Tensor

Told = Callable[[int, list[np.ndarray]], None]


class Listener(Protocol):
    """The methods of an audit that depend on the engine.

    `is_deaf_to_xla`: whether code that XLA compiles cannot report values.
    """

    is_deaf_to_xla: bool

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Return a context that calls `told` with the shape of each differentiated target, if it is visible.

        On exit every attribute is restored, also after an error.
        """

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told` with the index of this call and the numbers: now, or each time the trace runs.

        The arrays are valid only during the call; copy them to keep them.
        """

    def value(self, variable: Tensor) -> Tensor:
        """Return the value of a Keras variable at this point of the program, in its dtype."""

    def dense(self, gradient: Tensor) -> Tensor:
        """Return a gradient as one tensor, equal rows summed."""

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether a gradient is taken through these values; None if it is not known."""

    def replica(self) -> int:
        """Return the index of the current replica; 0 outside of replicas."""

    def blind(self, values: list[Tensor]) -> str:
        """Return the kind of code that runs here and cannot report values; "" if it can."""

    def stack(self) -> Iterable[tuple[str, int]]:
        """Return (file, line) of the running functions in the user's source, innermost first."""

    def unhooked(self, function: Callable) -> Callable:
        """Return the function, marked so that the engine does not convert its source."""

    def settle(self) -> None:
        """Return once all values of finished code are reported."""


def running(frame: FrameType | None = None) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of a frame (default: the caller's) and of its callers, innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@contextmanager
def uncollected() -> Iterator[None]:
    """Return a context without garbage collection: deleting TensorFlow functions waits for the running program.

    In a callback on another thread that would deadlock, as the program waits for the callback.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
