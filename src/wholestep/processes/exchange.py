"""Exchange of values between processes through the store, in calls in the same order in all processes."""

from wholestep.errors import PeerError, message
from wholestep.processes.protocol import T
from wholestep.processes.store import Store


class StoreExchange:
    """A sequence of calls, the same in all processes.

    Args:
        index: the index of this process.
        count: the number of processes.
        name: distinguishes this sequence from the sequences of other threads.
        outer: the sequence of the main thread, if this is another.
    """

    def __init__(self, index: int, count: int, name: str = "", outer: "StoreExchange | None" = None):
        self.index = index
        self.count = count
        self.store = Store()
        self.number = 0  # of the last call
        self._name = name
        self._outer = outer

    def key(self, kind: str) -> str:
        """Return the key of a kind of value of the last call."""
        return f"{self._name}{kind}/{self.number}"

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value.

        Raises:
            PeerError: process 0 makes a different call.
        """
        self.number += 1
        if self.index == 0:
            self.store.set(self.key("shared"), [what, value])
        said, found = self.store.get(self.key("shared"))
        self._check([said, what], (0, self.index))
        return found

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value.

        Raises:
            PeerError: in every process, if they make different calls.
        """
        self.number += 1
        earlier, self.store.once = self.store.once, []
        key, everything = self.key("gathered"), self.key("all")
        self.store.set(f"{key}/{self.index}", [what, value])
        if self.index == 0:
            self.store.set(everything, [self.store.get(f"{key}/{i}") for i in range(self.count)])
        told = self.store.get(everything)
        for one in earlier:  # all processes are here, so none reads these any more
            self.store.delete(one)
        self._check([said for said, _ in told], range(self.count))
        return [found for _, found in told]

    def close(self) -> None:
        """Leave the remaining keys to the outer sequence, which deletes them in its next call."""
        if self._outer is not None:
            self._outer.store.once.extend(self.store.once)
            self.store.once = []

    def _check(self, said: list[str], processes: "range | tuple[int, ...]") -> None:
        if len(set(said)) > 1:
            first = dict(reversed(list(zip(said, processes, strict=True))))
            found = "; ".join(f"process {i} is {what}" for what, i in sorted(first.items(), key=lambda each: each[1]))
            must = "All processes of a run must make the same calls, in the same order."
            raise PeerError(message(must, found, "call fit, steps, save and restore alike in every process."))
