"""What an audit asks of an engine: to tell it the numbers of code that runs now, or that is traced and runs later."""

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
    """The verbs of an audit, engine by engine.

    `is_deaf_to_xla`: whether nothing can be told from what XLA compiles.
    """

    is_deaf_to_xla: bool

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Inside, traces are made anew; `told` gets the shape of whatever a gradient is asked of, where it can be seen.

        Afterwards every attribute is what it was, whatever happened inside.
        """

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told` with its place in the order of all calls and the numbers: now, or each time the trace runs.

        The arrays are valid only in the call: what is kept has to be copied.
        """

    def value(self, variable: Tensor) -> Tensor:
        """Return the value that a Keras variable has at this place of the program, in its own dtype."""

    def dense(self, gradient: Tensor) -> Tensor:
        """Return a gradient as one tensor, equal rows summed."""

    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether a gradient is taken of what is computed from these values here; None where nobody can tell."""

    def replica(self) -> int:
        """Return which replica runs here, 0 outside of them."""

    def blind(self, values: list[Tensor]) -> str:
        """Return why nothing of what runs here can be told, or ""."""

    def stack(self) -> Iterable[tuple[str, int]]:
        """Return (file, line) of the functions that run now, innermost first, in the user's source."""

    def unhooked(self, function: Callable) -> Callable:
        """Return the function as one that the engine takes as it is: no conversion of its source."""

    def settle(self) -> None:
        """Return once everything that ran has been told."""


def running(frame: FrameType | None = None) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of a frame and of those around it, innermost first; of the caller's by default."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be collected inside: TensorFlow's functions among it wait for the program that runs.

    And that one waits for Python, if what runs inside is another thread than the program's.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
