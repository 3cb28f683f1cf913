"""A call without checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.checkpoints.place import Keeps, Watch
from wholestep.executor import Executor


class Unsaved:
    """The counterpart of `Saver` for a call without checkpoints."""

    also: Mapping[str, Keeps] = {}

    def is_due(self) -> bool:
        """Return False: no save is due."""
        return False

    def left(self) -> int:
        """Return the largest integer: no boundary is required."""
        return sys.maxsize

    def open(self, executor: Executor, watch: Watch | None = None, **arguments: Any) -> None:
        """Do nothing."""

    def check(self, callbacks: Sequence[tuple[str, Keeps]]) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Do nothing."""

    def look(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "Unsaved":
        return self

    def __exit__(self, *_: object) -> None:
        pass
