"""The process group of a run of one process."""

from contextlib import AbstractContextManager, nullcontext

from wholestep.processes.protocol import T


class SingleProcess:
    """The counterpart of `wholestep.processes.group.ProcessGroup` for a run of one process."""

    index = 0
    count = 1
    doing = "starting"

    def check_equal(self, facts: dict[str, str]) -> None:
        """Do nothing: there is no other process."""

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        return value

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        return [value]

    def set_status(self, doing: str) -> None:
        """Record the activity of this process."""
        self.doing = doing

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is no other process."""

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Do nothing: there is no other process."""
        return nullcontext()

    def waiting(self, doing: str) -> AbstractContextManager:
        """Do nothing: there is no other process."""
        return nullcontext()

    def barrier(self, where: str) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        """Do nothing: nothing is kept."""

    def aside(self, name: str) -> "SingleProcess":
        """Return this process, which needs no separate order of calls."""
        return self
