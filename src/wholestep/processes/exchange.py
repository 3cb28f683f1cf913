"""What processes tell each other through the store, call by call, in the same order in all of them."""

from wholestep.processes.protocol import T
from wholestep.processes.store import Store


class StoreExchange:
    """One order of calls.

    Args:
        index: the number of this process.
        count: how many there are.
        name: tells this order from others, which other threads may have.
    """

    def __init__(self, index: int, count: int, name: str = ""):
        self.index = index
        self.count = count
        self.store = Store()
        self.number = 0  # of the last call
        self._name = name

    def key(self, kind: str) -> str:
        """Return where something of the last call is kept."""
        return f"{self._name}{kind}/{self.number}"

    def broadcast(self, value: T) -> T:
        """Return process 0's value."""
        self.number += 1
        if self.index == 0:
            self.store.set(self.key("shared"), value)
        return self.store.get(self.key("shared"))

    def all_gather(self, value: T) -> list[T]:
        """Return every process's value."""
        self.number += 1
        earlier, self.store.once = self.store.once, []
        key, everything = self.key("gathered"), self.key("all")
        self.store.set(f"{key}/{self.index}", value)
        if self.index == 0:
            self.store.set(everything, [self.store.get(f"{key}/{i}") for i in range(self.count)])
        values = self.store.get(everything)
        for one in earlier:  # all have come here, so nobody will ask for these any more
            self.store.delete(one)
        return values
