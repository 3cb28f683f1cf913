"""Agreement of the processes of a run; a single process does not communicate."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from wholestep import errors
from wholestep.errors import CheckpointError, SpecificationError, WholestepError
from wholestep.processes import Exchange, Processes

T = TypeVar("T")
_SECONDS = 1.0  # between two exchanges
_MOST = 1 << 6  # boundaries between two exchanges


class Signs(NamedTuple):
    """The reasons to save at a boundary.

    Args:
        terminated: SIGTERM has come.
        failed: the previous checkpoint could not be written.
        late: `every_seconds` have passed.
    """

    terminated: bool
    failed: bool
    late: bool


class Together:
    """Calls that all processes of a run make in the same order, and that fail in all if one fails."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._pauses: dict[str, _Pause] = {}
        self.share = exchange.index, exchange.count  # the index of this process, and the number of processes
        self.is_first = exchange.index == 0

    def all(self, call: Callable[[], T], what: str) -> T:
        """Make a call in every process, and return this one's result.

        Args:
            what: describes the call; see `Exchange`.

        Raises:
            Exception: the call's error, in this process; a WholestepError in the others.
        """
        if self.share[1] == 1:
            return call()
        error, result = None, []
        try:
            result.append(call())
        except Exception as failure:
            error = failure
        told = self._exchange.all_gather(None if error is None else [type(error).__name__, str(error)], what)
        if error is not None:
            raise error
        for i, said in enumerate(told):
            if said is not None:
                raise _raised(said, i)
        return result[0]

    def first(self, call: Callable[[], T], what: str) -> T:
        """Make a call in process 0, and return its JSON result in all processes; see `all`."""
        found = self.all(call if self.is_first else lambda: None, what)
        return self._exchange.broadcast(found, what)  # type: ignore[return-value]

    def gather(self, value: T, what: str) -> list[T]:
        """Return the JSON values of all processes, by index."""
        return self._exchange.all_gather(value, what)

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()

    def ask(self, boundary: str, signs: Signs, *, now: bool = False) -> Signs:
        """Return the signs that are set in any process; `late` is process 0's.

        Several processes exchange their signs about once a second; in between, no sign is returned.

        Args:
            boundary: the kind of boundary, the same in all processes.
            now: whether to exchange in any case.
        """
        if self.share[1] == 1:
            return signs
        pause = self._pauses.setdefault(boundary, _Pause())
        if not pause.is_over and not now:
            return Signs(terminated=False, failed=False, late=False)
        told = self._exchange.all_gather(
            [*signs, time.monotonic() - pause.since], f"asking for reasons to save {boundary}"
        )
        pause.begin(told[0][3])
        return Signs(any(each[0] for each in told), any(each[1] for each in told), bool(told[0][2]))


class _Pause:
    """The number of boundaries between two exchanges, the same in all processes."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._num = 1
        self._gone = 0

    @property
    def is_over(self) -> bool:
        """Count a boundary, and return whether the processes exchange their signs there."""
        self._gone += 1
        return self._gone >= self._num

    def begin(self, seconds: float) -> None:
        """Begin anew; `seconds` is the time since the last exchange on process 0's clock."""
        by_time = self._gone * _SECONDS / max(seconds, 1e-6)
        self._num, self._gone = int(min(max(1, by_time), 2 * self._num, _MOST)), 0
        self.since = time.monotonic()


@contextmanager
def slowly(processes: Processes) -> Iterator[None]:
    """Keep this process from counting as lost while it writes or reads a checkpoint."""
    before = processes.doing
    processes.set_status("saving, or reading a checkpoint")
    try:
        yield
    finally:
        processes.set_status(before)


def _raised(said: list[str], process: int) -> WholestepError:
    """Return the error of another process."""
    kind = SpecificationError if said[0] == SpecificationError.__name__ else CheckpointError
    is_ours = hasattr(errors, said[0])
    return kind(f"Process {process}: {said[1] if is_ours else ': '.join(said)}")
