"""The process group of a run of one process."""

from contextlib import AbstractContextManager, nullcontext

from wholestep.processes.protocol import T


class SingleProcess:
    """What `wholestep.processes.group.ProcessGroup` is for several processes, for one, which has nobody to wait for."""

    index = 0
    count = 1
    doing = "starting"

    def check_equal(self, facts: dict[str, str]) -> None:
        """Make sure that all processes say the same."""

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        return value

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        return [value]

    def set_status(self, doing: str) -> None:
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

    def barrier(self, where: str) -> None:
        """Wait until all processes have come to the same place."""

    def close(self) -> None:
        """Forget what was asked."""

    def aside(self, name: str) -> "SingleProcess":
        """Return what another thread asks."""
        return self
