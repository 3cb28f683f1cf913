"""What the processes of a run agree on, before one of them acts on it: with one process, nothing is asked."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from wholestep import errors
from wholestep.errors import CheckpointError, SpecificationError, WholestepError
from wholestep.processes.protocol import Exchange, Processes

T = TypeVar("T")
_SECONDS = 1.0  # between two questions
_MOST = 1 << 6  # boundaries between them


class Signs(NamedTuple):
    """What may be on at a boundary.

    Args:
        terminated: SIGTERM has come.
        failed: the checkpoint before this could not be written.
        late: the time for another one has come.
    """

    terminated: bool
    failed: bool
    late: bool


class Together:
    """The processes of a run where one of them may fail, or know what the others do not. All ask in the same order."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._pauses: dict[str, _Pause] = {}
        self.share = exchange.index, exchange.count  # the number of this process, of so many
        self.is_first = exchange.index == 0

    def all(self, call: Callable[[], T], what: str) -> T:
        """Make a call in every process, and return this one's result.

        Args:
            what: says in words what all are doing; see `Exchange`.

        Raises:
            Exception: what the call raised, in this process; a WholestepError in the others.
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
        """Make a call in process 0, and return its result, which JSON can hold, in all; see `all`."""
        found = self.all(call if self.is_first else lambda: None, what)
        return self._exchange.broadcast(found, what)  # type: ignore[return-value]

    def gather(self, value: T, what: str) -> list[T]:
        """Return the values of all processes, by their numbers; JSON can hold each."""
        return self._exchange.all_gather(value, what)

    def close(self) -> None:
        """Ask nothing more."""
        self._exchange.close()

    def ask(self, boundary: str, signs: Signs, *, now: bool = False) -> Signs:
        """Return what is on in any process, the time being process 0's.

        Several processes ask each other about once a second, and in between nothing is on.

        Args:
            boundary: what kind of boundary all of them have come to.
            now: whether they ask in any case.
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
    """How many boundaries go by between two questions; the same number in all processes."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._num = 1
        self._gone = 0

    @property
    def is_over(self) -> bool:
        """Whether all ask at this boundary, which is counted."""
        self._gone += 1
        return self._gone >= self._num

    def begin(self, seconds: float) -> None:
        """Begin anew, the boundaries since the last question having taken so long on process 0's clock."""
        by_time = self._gone * _SECONDS / max(seconds, 1e-6)
        self._num, self._gone = int(min(max(1, by_time), 2 * self._num, _MOST)), 0
        self.since = time.monotonic()


@contextmanager
def slowly(processes: Processes) -> Iterator[None]:
    """Let nobody take this process for lost while it writes or reads a checkpoint."""
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
