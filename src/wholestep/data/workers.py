"""Batches of a `keras.utils.PyDataset` with workers: several are loaded at once, before they are asked for."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Workers:
    """Threads that load batches by their numbers.

    Args:
        get: loads one batch.
        num: how many are loaded at once.
        most: how many are loaded, or under way, that nobody has asked for.

    >>> workers = Workers(lambda number: number**2, num=2, most=3)
    >>> workers.expect([4, 2, 7])
    >>> workers.take(4), workers.take(2), workers.take(5)
    (16, 4, 25)
    """

    def __init__(self, get: Callable[[int], Any], num: int, most: int):
        self.most = most
        self._get = get
        self._num = num
        self._threads: ThreadPoolExecutor | None = None  # not before they are needed
        self._under_way: dict[int, Future] = {}

    def expect(self, numbers: Iterable[int]) -> None:
        """Load these, in this order, and no others."""
        numbers = list(numbers)
        self._threads = self._threads or ThreadPoolExecutor(self._num, "wholestep-load")
        for number in self._under_way.keys() - set(numbers):
            self._under_way.pop(number).cancel()
        for number in numbers:
            if number not in self._under_way:
                self._under_way[number] = self._threads.submit(self._get, number)

    def take(self, number: int) -> Any:
        """Return a batch, and raise what its loading raised."""
        future = self._under_way.pop(number, None)
        return self._get(number) if future is None else future.result()

    def end(self) -> None:
        """End the threads, after what they are at; others begin with the next batch that is asked for."""
        threads, self._threads = self._threads, None
        self._under_way.clear()
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def forget(self) -> None:
        """Load everything anew: the data set may have changed."""
        self.expect([])
