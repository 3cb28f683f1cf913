"""The other processes of a run that has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Alone:
    """What `wholestep.engines.peers.Peers` is for several processes, for one: there is nobody to agree with."""

    index = 0
    count = 1

    def agree(self, facts: dict[str, str]) -> None:
        """Make sure that all processes say the same."""

    def share(self, value: Any) -> Any:
        """Return process 0's value."""
        return value

    def gather(self, value: Any) -> list:
        """Return every process's value."""
        return [value]

    def at(self, doing: str) -> None:
        """Take note of what this process is doing, to be told if it hangs."""

    @contextmanager
    def waiting(self, doing: str, where: str = "a collective") -> Iterator[None]:
        """Take note that this process waits for the others' part."""
        yield

    def meet(self, where: str) -> None:
        """Wait until all processes have come to the same place."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed, so that they end."""
