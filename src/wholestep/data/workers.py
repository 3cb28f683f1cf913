"""Workers of a `keras.utils.PyDataset`: they load several batches at once, ahead of their use."""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

_PATIENCE = 2.0  # seconds for a batch that may never come


class Pool(Protocol):
    """Loads batches by their numbers, several at once."""

    def submit(self, number: int) -> Future:
        """Begin to load a batch."""

    def result(self, future: Future) -> Any:
        """Return a batch once it is loaded, and raise what its loading raised."""

    def end(self) -> None:
        """End all loading; the next batch is loaded anew."""


class Workers:
    """Keeps some batches loading ahead of their use.

    Args:
        pool: loads them.
        get: loads a batch that was not expected.
        most: the number of batches to load ahead.

    >>> square = lambda number: number**2
    >>> workers = Workers(Threads(square, num=2), square, most=3)
    >>> workers.expect([4, 2, 7])
    >>> workers.take(4), workers.take(2), workers.take(5)
    (16, 4, 25)
    """

    def __init__(self, pool: Pool, get: Callable[[int], Any], most: int):
        self.most = most
        self._pool = pool
        self._get = get
        self._under_way: dict[int, Future] = {}

    def expect(self, numbers: Iterable[int]) -> None:
        """Load these batches in this order, and cancel others."""
        numbers = list(numbers)
        for number in self._under_way.keys() - set(numbers):
            self._under_way.pop(number).cancel()
        for number in numbers:
            if number not in self._under_way:
                self._under_way[number] = self._pool.submit(number)

    def take(self, number: int) -> Any:
        """Return a batch, and raise what its loading raised."""
        future = self._under_way.pop(number, None)
        return self._get(number) if future is None else self._pool.result(future)

    def end(self) -> None:
        """End all loading. The next batches are loaded anew, as the data set may have changed."""
        self._under_way.clear()
        self._pool.end()


class Threads:
    """Threads that load batches by their numbers. A script may end while one of them loads."""

    def __init__(self, get: Callable[[int], Any], num: int):
        self._get = get
        self._num = num
        self._threads: list[threading.Thread] = []  # not before they are needed
        self._asked: queue.SimpleQueue[tuple[Future, Callable, int] | None] = queue.SimpleQueue()

    def submit(self, number: int) -> Future:
        """Begin to load a batch."""
        future: Future = Future()
        self._asked.put((future, self._get, number))
        if not self._threads:
            weakref.finalize(self, _stop, self._asked, self._num)
        if len(self._threads) < self._num:
            name = f"wholestep-load-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._asked,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def result(self, future: Future) -> Any:
        """Return a batch once it is loaded, and raise what its loading raised."""
        return future.result()

    def end(self) -> None:
        """End the threads after their current batches; waits for at most two seconds."""
        threads, self._threads = self._threads, []
        asked, self._asked = self._asked, queue.SimpleQueue()
        while not asked.empty():
            with contextlib.suppress(queue.Empty):
                asked.get_nowait()
        for _ in threads:
            asked.put(None)
        until = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _stop(asked: queue.SimpleQueue, num: int) -> None:
    for _ in range(num):
        asked.put(None)


def _work(asked: queue.SimpleQueue) -> None:
    while (task := asked.get()) is not None:
        future, get, number = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(get(number))
            except BaseException as error:  # raised where the batch is taken
                future.set_exception(error)
        del task, future, get  # else a waiting thread keeps its data set alive
