"""A listener that ends the script when enough was seen."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from wholestep.audit.stop import Ended, stop
from wholestep.engines import Listener, Told
from wholestep.tree import Tensor


class Counting:
    """An engine's listener that ends the script at the first value after enough updates.

    Args:
        ended: what is set once the script was asked to end, and once it has; several listeners to one script share it.
        is_entered: whether somebody else has entered the engine's listener: several hooks may share it.
    """

    def __init__(self, listener: Listener, is_enough: Callable[[], bool], ended: Ended, *, is_entered: bool):
        self._listener, self._is_enough, self._ended, self._is_entered = listener, is_enough, ended, is_entered
        self._is_telling = False

    def listening(self, told: Callable[[tuple[int, ...]], None]) -> AbstractContextManager:
        """Enter the engine's listener, unless that was done."""
        return nullcontext() if self._is_entered else self._listener.listening(told)

    def tell(self, told: Told, values: list[Tensor]) -> None:
        """Call `told` with the values, or end the script if it has made enough updates before."""

        def heard(order: int, numbers: list[np.ndarray]) -> None:
            # Before `told`: a script may end by itself after its last update.
            if not self._ended.is_asked.is_set() and self._is_enough():
                self._ended.is_asked.set()
                stop(self._ended.has_come, is_direct=self._is_telling)
            told(order, numbers)

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
            if not self._ended.is_asked.is_set():
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
