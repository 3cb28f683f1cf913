"""The other processes of a run that has none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Alone:
    """What `wholestep.engines.peers.Peers` is for several processes, for one: there is nobody to agree with."""

    index = 0
    count = 1
    doing = "starting"

    def agree(self, facts: dict[str, str]) -> None:
        """Make sure that all processes say the same."""

    def share(self, value: Any) -> Any:
        """Return process 0's value."""
        return value

    def gather(self, value: Any) -> list:
        """Return every process's value."""
        return [value]

    def at(self, doing: str) -> None:
        """Take note of what this process is doing, to be told if it hangs or is ended."""
        self.doing = doing

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed."""

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Take note that this process sends a program in which all take part."""
        return nullcontext()

    def waiting(self, doing: str) -> AbstractContextManager:
        """Take note that this process waits for the others' part."""
        return nullcontext()

    def meet(self, where: str) -> None:
        """Wait until all processes have come to the same place."""
