"""Workers of a `keras.utils.PyDataset`, threads or processes, which load batches ahead of use."""

import contextlib
import multiprocessing
import os
import pickle
import queue
import random
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np

from wholestep.errors import BatchError, message, warn

_PATIENCE = 2.0  # seconds for a batch that may never come
_PATIENCE_WITH_FORKS = 60.0  # seconds
Get = Callable[[int], Any]
Tasks = queue.SimpleQueue[tuple[Future, Get, int] | None]
_loads: Get  # in a process of `Forks`, from its beginning on
_seed: int


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

    def __init__(self, pool: "Threads | Forks", get: Get, most: int):
        self.most = most
        self._pool = pool
        self._get = get
        self._loading: dict[int, Future] = {}

    def expect(self, numbers: Iterable[int]) -> None:
        """Load these batches in this order, and cancel others."""
        numbers = list(numbers)
        for number in self._loading.keys() - set(numbers):
            self._loading.pop(number).cancel()
        for number in numbers:
            if number not in self._loading:
                self._loading[number] = self._pool.submit(number)

    def take(self, number: int) -> Any:
        """Return a batch, or raise the error of its loading."""
        future = self._loading.pop(number, None)
        return self._get(number) if future is None else self._pool.result(future)

    def end(self) -> None:
        """End all loading. The next batches are loaded anew, as the data set may have changed."""
        self._loading.clear()
        self._pool.end()


class Threads:
    """Threads that load batches by their numbers. A script may end while a thread loads."""

    def __init__(self, get: Get, num: int):
        self._get = get
        self._num = num
        self._threads: list[threading.Thread] = []  # not before they are needed
        self._tasks: Tasks = queue.SimpleQueue()
        # ends the threads once, at the latest with this object
        self._stop: Callable[[], object] = lambda: None

    def submit(self, number: int) -> Future:
        """Begin to load a batch."""
        future: Future = Future()
        self._tasks.put((future, self._get, number))
        if not self._threads:
            self._stop = weakref.finalize(self, _stop, self._tasks, self._num)
        if len(self._threads) < self._num:
            name = f"wholestep-load-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def result(self, future: Future) -> Any:
        """Return a batch once it is loaded, or raise the error of its loading."""
        return future.result()

    def end(self) -> None:
        """End the threads after their current batches; waits for at most two seconds."""
        threads = self._threads
        tasks = self._tasks
        self._threads = []
        self._tasks = queue.SimpleQueue()
        with contextlib.suppress(queue.Empty):
            while True:
                tasks.get_nowait()
        self._stop()
        until = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _stop(tasks: Tasks, num: int) -> None:
    for _ in range(num):
        tasks.put(None)


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, get, number = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(get(number))
            except BaseException as error:  # raised where the batch is taken
                future.set_exception(error)
        del task, future, get  # else a waiting thread keeps its data set alive


class Forks:
    """Processes that load batches by their numbers, each from its copy of the data set.

    They are forks. A fork has none of the engine's threads, so its data set must use numpy only.
    Where the engine has a GPU, a fork may hang in the driver (keras-team/keras#20619): there, new
    processes get the data set by pickling.

    `np.random` and `random` are seeded by the number of the batch: with the generators of their
    parent, all forks would draw the same numbers.
    """

    def __init__(self, get: Get, num: int):
        self._get = get
        self._num = num
        self._executor: ProcessPoolExecutor | None = None  # not before it is needed
        self._over: tuple[Connection, ...] = ()

    def submit(self, number: int) -> Future:
        """Begin to load a batch.

        Raises:
            BatchError: a process died, or the data set cannot be pickled, which is necessary with a
                GPU.
        """
        with self._death_explained(), warnings.catch_warnings():  # JAX and Python warn of threads
            for category in (RuntimeWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", ".*fork", category)
            self._executor = self._executor or self._started()
            try:
                return self._executor.submit(_load, number)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self.end()
                must = "With a GPU, a PyDataset must be picklable."
                attempt = (
                    "define its class in a module, and open files in __getitem__; or load in "
                    "threads."
                )
                raise BatchError(message(must, error, attempt)) from error

    def _started(self) -> ProcessPoolExecutor:
        devices = keras.distribution.list_devices()
        is_on_host = all(device.startswith("cpu") for device in devices)
        context = multiprocessing.get_context("fork" if is_on_host else "spawn")
        self._over = context.Pipe(duplex=False)  # an Event would wait for killed processes too
        seed = int(np.random.randint(2**31))  # seeded by keras.utils.set_random_seed
        arguments = (self._get, seed, os.getpid(), self._over[0])
        return ProcessPoolExecutor(self._num, context, _begin, arguments)

    def result(self, future: Future) -> Any:
        """Return a batch once it is loaded, or raise the error of its loading.

        Raises:
            BatchError: a process died.
        """
        with self._death_explained():
            while not wait([future], _PATIENCE_WITH_FORKS).done:
                _warn_of_silence()
            return future.result()

    def end(self) -> None:
        """End the processes at once: a process that waits for the engine would never finish."""
        executor = self._executor
        self._executor = None
        if executor is not None:
            self._over[1].send_bytes(b"over")  # never read: every process polls for it
            executor.shutdown(cancel_futures=True)
            for end in self._over:
                end.close()

    @contextlib.contextmanager
    def _death_explained(self) -> Iterator[None]:
        """Raise a BatchError if a process died, and end the others."""
        try:
            yield
        except BrokenProcessPool as error:
            self.end()
            must = "The processes of a PyDataset must live until its batches are loaded."
            attempt = (
                "see whether the system ran out of memory; with a GPU, put the script's work under "
                'if __name__ == "__main__"; or load in threads, without use_multiprocessing.'
            )
            raise BatchError(message(must, error, attempt)) from error


def _begin(get: Get, seed: int, parent: int, over: Connection) -> None:
    """Set up a process; its parent handles the signals."""
    global _loads, _seed
    _loads = get
    _seed = seed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent, over), daemon=True).start()


def _end_with(parent: int, over: Connection) -> None:
    while not over.poll(1.0) and os.getppid() == parent:
        pass
    os._exit(0)


def _load(number: int) -> Any:
    draws = np.random.SeedSequence([_seed, number]).generate_state(2)
    np.random.seed(draws[0])
    random.seed(int(draws[1]))
    return _loads(number)


def _warn_of_silence() -> None:
    must = (
        "The processes of a PyDataset must return a batch; none came for "
        f"{_PATIENCE_WITH_FORKS:.0f} s."
    )
    attempt = (
        "make batches with numpy alone: a fork cannot use keras.ops, jax or tensorflow. Or load "
        "in threads."
    )
    warn(message(must, "none yet", attempt))


def warn_of_copies(data: Any) -> None:
    """Warn of random generators in a data set, as each process draws the same from its copy."""
    for name, value in vars(data).items():
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            must = "The processes of a data set must draw different random numbers."
            received = (
                f"{type(data).__name__}.{name}, a {type(value).__name__}: each process has a "
                "copy of it"
            )
            attempt = (
                "use np.random, which is seeded for each batch; or make a generator in __getitem__."
            )
            warn(message(must, received, attempt))
