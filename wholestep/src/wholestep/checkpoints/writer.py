"""The thread that writes during training, and the host memory with the copies that it writes."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from wholestep.checkpoints.shards import Numbers, copied, on_host
from wholestep.errors import tell

_SHORT = 1.0  # seconds of waiting without a message


class CopyBuffers:
    """Host memory for a copy of a state, reused: writes to fresh memory take five times as long."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def copy(self, name: str, value: Any) -> Numbers:
        """Return a copy of a tensor, or of the pieces written here, in the last copy's memory."""
        return copied(
            on_host(value), lambda part, array: self._copy(name + part, array), are_own=True
        )

    def _copy(self, name: str, array: np.ndarray) -> np.ndarray:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != array.shape or buffer.dtype != array.dtype:
            buffer = self._buffers[name] = np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        return buffer


class Writer:
    """Runs one write at a time, in a thread for which the script waits at its end.

    >>> writer, written = Writer(), []
    >>> writer.start(lambda: written.append("all"))
    >>> writer.wait()
    >>> written
    ['all']
    """

    def __init__(self) -> None:
        self._has_told = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether there is an error that has not been raised yet."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Start to write. The last write must have ended; see `wait`."""
        assert self._thread is None, "the writer is at work"
        thread = threading.Thread(target=self._work, args=(work,), name="wholestep-writer")
        thread.start()
        self._thread = thread

    def wait(self, *, tells: bool = False) -> None:
        """Wait for the last write, and raise its error; `tells`: print once that training waits."""
        if self._thread is not None:
            self._thread.join(_SHORT if tells else None)
            if tells and not self._has_told and self._thread.is_alive():
                self._has_told = True
                line = "wholestep: training waits until the previous checkpoint is written; "
                tell(f"{line}saving less often, or to a faster disk, avoids this (shown once)")
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def then(self, call: Callable[[], None]) -> None:
        """Make a call as soon as no write is running: now, unless `wait` was interrupted."""
        if (thread := self._thread) is None or not thread.is_alive():
            call()
            return

        def after() -> None:
            thread.join()
            call()

        threading.Thread(target=after, name="wholestep-release").start()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            if not threading.main_thread().is_alive():  # no caller is left to raise it
                tell(f"{type(error).__name__}: {error}")
