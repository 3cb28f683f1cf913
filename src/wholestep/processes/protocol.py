"""What a run asks of its processes, be there one or several: each member with one line of contract."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Exchange(Protocol):
    """What processes tell each other, as one of them sees it. All must ask the same things in the same order."""

    @property
    def index(self) -> int:
        """The number of this process, from 0."""

    @property
    def count(self) -> int:
        """The number of processes in the run."""

    def broadcast(self, value: T, what: str) -> T:
        """Every process gets process 0's value, which JSON can hold; `what` says in words what all are doing."""

    def all_gather(self, value: T, what: str) -> list[T]:
        """Every process gets the values of all, by number; if one is doing something else, all raise a PeerError."""

    def close(self) -> None:
        """Nothing is asked here any more, and nothing of what was asked is kept."""


class Processes(Exchange, Protocol):
    """The processes of a run."""

    @property
    def doing(self) -> str:
        """The words are those of the last `set_status`."""

    def check_equal(self, facts: dict[str, str]) -> None:
        """Every process raises the same PeerError if one of them says something else."""

    def barrier(self, where: str) -> None:
        """No process goes on before all are here; every process raises the same PeerError if one is elsewhere."""

    def set_status(self, doing: str) -> None:
        """The words say what this process is doing, should it hang or be ended."""

    def dispatching(self, doing: str) -> AbstractContextManager:
        """A program in which all processes take part is sent inside."""

    def waiting(self, doing: str) -> AbstractContextManager:
        """What the other processes must do first is waited for inside."""

    def fail(self, error: BaseException) -> None:
        """The other processes learn that this one has failed, and end."""

    def aside(self, name: str) -> Exchange:
        """What is asked there, in another thread, has an order of its own."""
