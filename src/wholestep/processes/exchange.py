"""What processes tell each other through the store, call by call, in the same order in all of them."""

from wholestep.errors import PeerError, message
from wholestep.processes.protocol import T
from wholestep.processes.store import Store


class StoreExchange:
    """One order of calls.

    Args:
        index: the number of this process.
        count: how many there are.
        name: tells this order from others, which other threads may have.
        outer: the order of the main thread, if this is another one.
    """

    def __init__(self, index: int, count: int, name: str = "", outer: "StoreExchange | None" = None):
        self.index = index
        self.count = count
        self.store = Store()
        self.number = 0  # of the last call
        self._name = name
        self._outer = outer

    def key(self, kind: str) -> str:
        """Return where something of the last call is kept."""
        return f"{self._name}{kind}/{self.number}"

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value.

        Raises:
            PeerError: process 0 tells something else.
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
            PeerError: in every process, if they do not do the same.
        """
        self.number += 1
        earlier, self.store.once = self.store.once, []
        key, everything = self.key("gathered"), self.key("all")
        self.store.set(f"{key}/{self.index}", [what, value])
        if self.index == 0:
            self.store.set(everything, [self.store.get(f"{key}/{i}") for i in range(self.count)])
        told = self.store.get(everything)
        for one in earlier:  # all have come here, so nobody will ask for these any more
            self.store.delete(one)
        self._check([said for said, _ in told], range(self.count))
        return [found for _, found in told]

    def close(self) -> None:
        """Let what is left be deleted when all processes have met again."""
        if self._outer is not None:
            self._outer.store.once.extend(self.store.once)
            self.store.once = []

    def _check(self, said: list[str], processes: "range | tuple[int, ...]") -> None:
        if len(set(said)) > 1:
            first = dict(reversed(list(zip(said, processes, strict=True))))
            found = "; ".join(f"process {i} is {what}" for what, i in sorted(first.items(), key=lambda each: each[1]))
            must = "All processes of a run must do the same, in the same order."
            raise PeerError(message(must, found, "call fit, steps, save and restore alike in every process."))
