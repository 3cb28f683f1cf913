"""One thread that writes while training goes on, and the room in which it finds what it writes."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from wholestep.checkpoints.pieces import Numbers, copied, on_host

_SHORT = 1.0  # seconds that nobody need hear of


class Room:
    """Room on the host for a copy of a state. It is kept, as memory that was never touched costs five times as much."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def copy(self, name: str, value: Any) -> Numbers:
        """Return a copy of a tensor, or of the pieces that this process writes, in the room that they had before."""
        return copied(on_host(value), lambda part, array: self._copy(name + part, array), are_own=True)

    def _copy(self, name: str, array: np.ndarray) -> np.ndarray:
        held = self._held.get(name)
        if held is None or held.shape != array.shape or held.dtype != array.dtype:
            held = self._held[name] = np.empty(array.shape, array.dtype)
        np.copyto(held, array)
        return held


class Writer:
    """Writes one thing at a time, in a thread that a script waits for when it ends.

    >>> writer, written = Writer(), []
    >>> writer.start(lambda: written.append("all"))
    >>> writer.wait()
    >>> written
    ['all']
    """

    def __init__(self, tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)):
        self._tell = tell
        self._has_told = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether there is an error that nobody has been told of."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin to write. Nothing may be under way; see `wait`."""
        assert self._thread is None, "the writer is at work"
        thread = threading.Thread(target=self._work, args=(work,), name="wholestep-writer")
        thread.start()
        self._thread = thread

    def wait(self, *, tells: bool = False) -> None:
        """Wait until all is written.

        Args:
            tells: whether it is said, once, that the training waits.

        Raises:
            CheckpointError: it could not be written. Or whatever else went wrong; told once.
        """
        if self._thread is not None:
            self._thread.join(_SHORT if tells else None)
            if tells and not self._has_told and self._thread.is_alive():
                self._has_told = True
                self._tell(
                    "wholestep: training waits for the checkpoint before this one to be written; "
                    "saving less often, or to a faster disk, would spare that (said once)"
                )
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def then(self, call: Callable[[], None]) -> None:
        """Make a call as soon as nothing is under way, which is now unless `wait` was interrupted."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            call()
        else:
            threading.Thread(target=_after, args=(thread, call), name="wholestep-release").start()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():  # nobody is there to be told
                self._tell(f"{type(error).__name__}: {error}")


def _after(thread: threading.Thread, call: Callable[[], None]) -> None:
    thread.join()
    call()
