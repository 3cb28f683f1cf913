"""A listener that ends the script when enough was seen."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import numpy as np

from wholestep.audit.stop import stop
from wholestep.engines.listener import Listener, Told
from wholestep.tree import Tensor


class Counting:
    """An engine's listener, and after everything that is told a look whether it was enough.

    Args:
        ended: set once the script has ended.
        is_entered: whether somebody else has entered the engine's listener: several hooks may share it.

    Attributes:
        has_stopped: whether the script was asked to end.
    """

    def __init__(self, listener: Listener, is_enough: Callable[[], bool], ended: Event, *, is_entered: bool):
        self._listener, self._is_enough, self._ended, self._is_entered = listener, is_enough, ended, is_entered
        self._is_telling = self.has_stopped = False

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Enter the engine's listener, unless that was done."""
        return nullcontext() if self._is_entered else self._listener.listening(told)

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told`, and end the script after it if that was enough."""

        def heard(order: int, numbers: list[np.ndarray]) -> None:
            told(order, numbers)
            if not self.has_stopped and self._is_enough():
                self.has_stopped = True
                stop(self._ended, is_direct=self._is_telling)

        outer, self._is_telling = self._is_telling, True
        try:
            self._listener.tell(heard, values)
        finally:
            self._is_telling = outer

    def settle(self) -> None:
        """Wait for what is still told; of a step that was ended halfway nothing is."""
        try:
            self._listener.settle()
        except Exception:  # the engine's, of a step that the audit itself has ended
            if not self.has_stopped:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
