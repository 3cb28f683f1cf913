"""What nobody asked for while the script ran is told when it ends, or when its trainer is gone."""

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
    """Who knows of a last update whether it was applied."""

    def settle(self, run: Run) -> None:
        """An error is raised if the last update was not applied, and nobody has asked."""


class Ending:
    """Tells on stderr of a last update that was not applied, if nobody has asked.

    Holds its owner weakly, and of the update some numbers on the device: it keeps no model alive. Never raises.

    Args:
        owner: whose `settle(run)` raises the error that is to be told.
    """

    def __init__(self, owner: Owner, run: Run):
        # The update's number, and its report: 1 at the end if it was applied.
        self.last: tuple[int, Tensor] | None = None
        self._run = run
        self._owner = weakref.ref(owner, self._leave)
        self._process = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        """The script ends."""
        owner = self._owner()
        if self.last is None or owner is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            try:
                owner.settle(self._run)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    def _leave(self, _: weakref.ref) -> None:
        """The owner is gone, and with it what could tell the rows."""
        atexit.unregister(self._end)
        if self.last is None or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            number, report = self.last
            if np.asarray(report)[0, -1] != 1:
                must = f"Update {number} must have a finite loss and gradient. It was not applied."
                received = "one of them not finite, and nobody who read the update's numbers while there was a trainer"
                print(f"NonFiniteError: {message(must, received, 'read them: that names the rows.')}", file=sys.stderr)
