"""Processes that load batches of a `keras.utils.PyDataset`: they have the data set as it was when they began.

They are forks. A fork has none of the engine's threads, so a data set in it is to use numpy alone. Where the engine has
a GPU, a fork may hang in the driver (keras-team/keras#20619): there new processes get the data set by pickling.
"""

import multiprocessing
import os
import pickle
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np

from wholestep.errors import BatchError, message, warn

_PATIENCE = 60.0  # seconds
_get: Callable[[int], Any]  # in a fork, from its beginning on
_seed: int


class Forks:
    """Processes that load batches by their numbers.

    What is drawn by `np.random` and `random` depends on the number of the batch, and on no process: forks that went on
    with the numbers of their parent would all draw the same.
    """

    def __init__(self, get: Callable[[int], Any], num: int):
        self._get = get
        self._num = num
        self._executor: ProcessPoolExecutor | None = None  # not before it is needed
        self._over: tuple[Connection, ...] = ()

    def submit(self, number: int) -> Future:
        """Begin to load a batch.

        Raises:
            BatchError: a process was ended, or the data set cannot be pickled, as it must be where there is a GPU.
        """
        with self._told(), warnings.catch_warnings():  # JAX and Python say that threads are not copied
            warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            self._executor = self._executor or self._begun()
            try:
                return self._executor.submit(_load, number)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self.end()
                must = "Beside a GPU, a PyDataset is pickled for its processes."
                attempt = "define its class in a module, and open files in __getitem__; or load in threads."
                raise BatchError(message(must, error, attempt)) from error

    def _begun(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context(_start_method())
        self._over = context.Pipe(duplex=False)  # no event: that waits for all who wait for it, also for one killed
        seed = int(np.random.randint(2**31))  # as keras.utils.set_random_seed says
        arguments = self._get, seed, os.getpid(), self._over[0]
        return ProcessPoolExecutor(self._num, context, _begin, arguments)

    def result(self, future: Future) -> Any:
        """Return a batch once it is loaded, and raise what its loading raised.

        Raises:
            BatchError: a process was ended.
        """
        with self._told():
            return _awaited(future)

    def end(self) -> None:
        """End the processes at once: one that waits for the engine would do so for ever."""
        executor, self._executor = self._executor, None
        if executor is not None:
            self._over[1].send_bytes(b"over")  # which nobody reads: all see that there is something
            executor.shutdown(cancel_futures=True)
            for end in self._over:
                end.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in here that a process was ended, and end the others."""
        try:
            yield
        except BrokenProcessPool as error:
            self.end()
            must = "The processes of a PyDataset must live until its batches are loaded."
            attempt = (
                "see whether the system had too little memory; beside a GPU, let the script do its work under "
                'if __name__ == "__main__"; or load in threads, without use_multiprocessing.'
            )
            raise BatchError(message(must, error, attempt)) from error


def _start_method() -> str:
    is_on_host = all(device.startswith("cpu") for device in keras.distribution.list_devices())
    return "fork" if is_on_host else "spawn"


def _begin(get: Callable[[int], Any], seed: int, parent: int, over: Connection) -> None:
    """Begin a process. Signals are its parent's business."""
    global _get, _seed
    _get, _seed = get, seed
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
    return _get(number)


def _awaited(future: Future) -> Any:
    while not future.done():
        try:
            return future.result(_PATIENCE)
        except TimeoutError:
            if future.done():  # meanwhile; or the error is the data set's own
                break
            must = f"A batch must come from the processes of a PyDataset; for {_PATIENCE:.0f} s none has."
            attempt = (
                "make batches with numpy alone: a fork cannot use keras.ops, jax or tensorflow. Or load in threads."
            )
            warn(message(must, "none yet", attempt))
    return future.result()


def warn_of_copies(data: Any) -> None:
    """Warn of generators of random numbers that a data set holds: each process draws the same from its copy."""
    kinds = np.random.Generator, np.random.RandomState, random.Random
    for name, value in vars(data).items():
        if isinstance(value, kinds):
            must = "What a data set draws must not be the same in each of its processes."
            received = f"{type(data).__name__}.{name}, a {type(value).__name__}: each process has a copy of it"
            attempt = "draw by np.random, which is seeded for each batch; or make a generator in __getitem__."
            warn(message(must, received, attempt))
