"""The number of updates in one dispatch."""

import math
import time

from wholestep.dispatch.repeat import MOST_UPDATES
from wholestep.processes import Processes

_SECONDS_PER_DISPATCH = 0.1


class DispatchSize:
    """The number of updates to send in one dispatch: about 0.1 s of them. It cannot change a bit of the updates.

    All processes use the number of process 0, which is broadcast after 1, 2, 4, 8, ... dispatches.
    """

    def __init__(self, processes: Processes) -> None:
        self.size = 1
        self.seconds = math.inf  # of an update in the latest dispatch
        self._processes = processes
        self._notes = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, num: int) -> None:
        """Record that `num` updates have just finished."""
        now = time.perf_counter()
        self.seconds, self._since = (now - self._since) / num, now
        self._notes += 1
        if self._processes.count == 1 or self._notes & (self._notes - 1) == 0:
            size = int(min(max(1, _SECONDS_PER_DISPATCH / self.seconds), 8 * self.size, MOST_UPDATES))
            self.size = self._processes.broadcast(size, "sharing how many updates go in a dispatch")
