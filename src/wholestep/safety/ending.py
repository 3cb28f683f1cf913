"""Report an unread failure of the last update at the end of the script, or of its trainer."""

import atexit
import contextlib
import os
import sys
import weakref
from typing import Protocol

import numpy as np

from wholestep.errors import message
from wholestep.run import Run
from wholestep.tree import Tensor


class Owner(Protocol):
    """The owner of the last update, which knows whether it was applied."""

    def settle(self, run: Run) -> None:
        """It raises an error if the last update was not applied, and its report has not been read."""


class Ending:
    """Prints to stderr that the last update was not applied, if its report has not been read.

    Holds its owner weakly, and the update's report on the device: it keeps no model alive. Never raises.

    Args:
        owner: its `settle(run)` raises the error to print.
    """

    def __init__(self, owner: Owner, run: Run):
        # The update's number, and its report: 1 at the end if it was applied.
        self.last: tuple[int, Tensor] | None = None
        self._run = run
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self._leave).atexit = False  # a callback of a weak reference would be called at the end
        self._process = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        """Print the error at the end of the script."""
        owner = self._owner()
        if self.last is None or owner is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            try:
                owner.settle(self._run)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    def _leave(self) -> None:
        """Print the error after the owner is gone, without the rows, which only the owner can find."""
        atexit.unregister(self._end)
        if self.last is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            number, report = self.last
            if np.asarray(report)[0, -1] != 1:
                must = f"Update {number} must have a finite loss and gradient. It was not applied."
                received = "a loss or gradient that is not finite, in a report that was not read"
                print(f"NonFiniteError: {message(must, received, 'read it: it names the rows.')}", file=sys.stderr)
