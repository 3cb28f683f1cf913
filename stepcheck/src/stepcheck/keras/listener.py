"""The listener: the questions of a hook to an engine, and the one of the running Keras
backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module

import keras
import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.tree import Tensor
from stepcheck.user_code.stack import running

Told = Callable[
    [int, int, list[np.ndarray]], None
]  # the index of a call, of its replica, and the numbers
ENGINES = "jax", "tensorflow"


def listener() -> "Listener":
    """Return the listener of the running Keras backend.

    Raises:
        SpecificationError: the backend is neither jax nor tensorflow.
    """
    backend = keras.backend.backend()
    if backend not in ENGINES:
        must = "Keras must run on JAX or TensorFlow."
        advice = "KERAS_BACKEND=jax or KERAS_BACKEND=tensorflow."
        raise SpecificationError(message(must, backend, advice))
    return import_module(f"stepcheck.keras.{backend}_listener").EngineListener()


class Listener(ABC):
    """The values of code that runs now, or is traced and runs later, for a trace; made
    by `listener`.

    Attributes:
        is_deaf_to_xla: true if code that XLA compiles cannot report values.
    """

    is_deaf_to_xla = False

    @abstractmethod
    def listening(self) -> AbstractContextManager:
        """Return a context in which gradients by watched values are taken, and traces
        are made anew where it must. At its end all values are reported.
        """

    @abstractmethod
    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told` on each replica with the numbers, valid in the call: now, or each
        time the trace runs.
        """

    @abstractmethod
    def watch_gradient(self, value: Tensor, told: Told) -> Tensor:
        """Return the value; `told` gets it, and the gradient by it, each time that a
        loop takes one later.
        """

    def dense(self, gradient: Tensor, by: keras.Variable) -> Tensor:
        """Return the gradient by a variable as one tensor, equal rows summed."""
        return gradient

    @abstractmethod
    def value(self, variable: keras.Variable) -> Tensor:
        """Return the value of a Keras variable at this point of the program, in its
        dtype.
        """

    @abstractmethod
    def is_differentiated(self, values: list[Tensor]) -> bool | None:
        """Whether a gradient is taken through these values; None if it is not known."""

    @abstractmethod
    def blind(self, values: list[Tensor]) -> str:
        """Return the kind of code that runs here and cannot report values; "" if it
        can.
        """

    def stack(self) -> Iterable[tuple[str, int]]:
        """Return (file, line) of the running functions in the user's source, innermost
        first.
        """
        return running()

    def unhooked(self, function: Callable) -> Callable:
        """Return the function, marked so that the engine does not convert its source."""
        return function
