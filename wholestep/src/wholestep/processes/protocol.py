"""The interface of a run to its processes, and a run of one process."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

T = TypeVar("T")


class Exchange(Protocol):
    """Exchange of values between processes, which all make the same calls in the same order."""

    index: int  # of this process, from 0
    count: int  # of processes in the run

    def broadcast(self, value: T, what: str) -> T:
        """Every process gets process 0's JSON value; `what` describes the call."""

    def all_gather(self, value: T, what: str) -> list[T]:
        """Every process gets the values of all; after different calls, all raise a PeerError."""

    def close(self) -> None:
        """No call follows, and the values of earlier calls are not kept."""


class Processes(Exchange, Protocol):
    """The processes of a run."""

    @property
    def doing(self) -> str:
        """The activity is the last `set_status`."""

    def check_equal(self, facts: dict[str, str]) -> None:
        """Every process raises the same PeerError if the facts of one differ."""

    def barrier(self, where: str) -> None:
        """No process continues before all are here; at different positions, all raise PeerError."""

    def set_status(self, doing: str) -> None:
        """Messages name this activity if the process hangs or is ended."""

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Inside, this process dispatches a program in which all processes take part."""

    def waiting(self, doing: str) -> AbstractContextManager:
        """Inside, this process waits for the other processes."""

    def fail(self, error: BaseException) -> None:
        """The other processes end, with the message that this one has failed."""

    def aside(self, name: str) -> Exchange:
        """Another thread may make calls there, in a separate order."""


class SingleProcess:
    """The processes of a run of one process, which waits for no other."""

    index = 0
    count = 1
    doing = "starting"

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        return value

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        return [value]

    def set_status(self, doing: str) -> None:
        """Record the activity of this process."""
        self.doing = doing

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Do nothing: there is no other process."""
        return nullcontext()

    waiting = dispatching

    def check_equal(self, facts: dict[str, str]) -> None:
        """Do nothing: there is no other process."""

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is no other process."""

    def barrier(self, where: str) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        """Do nothing: nothing is kept."""

    def aside(self, name: str) -> "SingleProcess":
        """Return this process, which needs no separate order of calls."""
        return self
