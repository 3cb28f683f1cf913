"""A call without checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.checkpoints.place import Keeps, Watch
from wholestep.executor import Executor


class Unsaved:
    """What `Saver` is, for a call without checkpoints."""

    also: Mapping[str, Keeps] = {}

    def is_due(self) -> bool:
        """Ask whether the run is to be saved at this boundary."""
        return False

    def left(self) -> int:
        """Return how many updates may go by before a boundary must be met."""
        return sys.maxsize

    def open(self, executor: Executor, watch: Watch | None = None, **arguments: Any) -> None:
        """Say from where the run goes on."""

    def check(self, callbacks: Sequence[tuple[str, Keeps]]) -> None:
        """Refuse what could not be kept."""

    def save(self) -> None:
        """Save the run."""

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Save the run, if that is due."""

    def look(self) -> None:
        """Look whether the process is to end."""

    def finish(self) -> None:
        """Save the run at the end of its call."""

    def __enter__(self) -> "Unsaved":
        return self

    def __exit__(self, *_: object) -> None:
        pass
