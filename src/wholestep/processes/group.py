"""The other processes of a run on JAX: what must be alike is compared, and one that dies or hangs ends them all.

A collective waits for ever if one process does not take part. So every process has a thread that gives a sign of life,
says what it is doing, and ends its process when the verdict falls. Process 0 watches all and passes the verdict; all
watch process 0. They talk through the key-value store of `jax.distributed`, outside of every collective: two small
messages a second for each process, however many there are.

Reads `jax._src.distributed.global_state`, the only way to that store.
"""

import atexit
import json
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from wholestep.errors import PeerError, SpecificationError, message
from wholestep.processes.protocol import Processes, T
from wholestep.processes.single import SingleProcess
from wholestep.processes.watchdog import ENDING, PATIENCE, Beat, judge, silence
from wholestep.safety.interrupts import Terminated, end_when_terminated

_INTERVAL = 1.0
_DAY = 24 * 3600 * 1000  # ms
_KEY = "wholestep/"
_BROKEN = ("Gloo", "gloo", "UNAVAILABLE", "Connection", "Socket", "ABORTED", "NCCL", "heartbeat")

_is_over = threading.Event()  # set when this process is about to be ended


@cache
def connect() -> Processes:
    """Return this process's group."""
    return SingleProcess() if jax.process_count() == 1 else ProcessGroup(jax.process_index(), jax.process_count())


def join() -> None:
    """Join the run that `wholestep launch -n` or a cluster's own launcher started this process for.

    All processes draw the same random numbers afterwards, so that their models begin alike.

    Raises:
        PeerError: it is not known what run this is.
        SpecificationError: WHOLESTEP_PATIENCE is no number of seconds.
    """
    _seconds("WHOLESTEP_PATIENCE", PATIENCE)  # before there are others to be left waiting
    known = {
        name: os.environ.get(f"WHOLESTEP_{name.upper()}")
        for name in ("coordinator_address", "num_processes", "process_id")
    }
    given = {k: v if k == "coordinator_address" else int(v) for k, v in known.items() if v is not None}
    try:
        jax.distributed.initialize(**given, shutdown_timeout_seconds=_DAY // 1000)
    except (ValueError, RuntimeError) as error:
        attempt = "wholestep launch -n 2 SCRIPT for two processes here; on a cluster, see the docs of jax.distributed."
        raise PeerError(
            message("A process must know the run that it belongs to.", str(error).rstrip("."), attempt)
        ) from error
    end_when_terminated()  # not before: jax.distributed takes the signal for itself, and does nothing with it
    seed = connect().broadcast(int.from_bytes(os.urandom(4), "little"))
    # As keras.utils.set_random_seed, which imports tensorflow beside: Keras draws its seeds from Python's numbers.
    random.seed(seed)
    np.random.seed(seed)


class ProcessGroup:
    """The other processes, by way of the key-value store.

    Args:
        index: the number of this process.
        count: how many there are.
    """

    def __init__(self, index: int, count: int):
        self.index = index
        self.count = count
        self._store = distributed.global_state.client
        self.doing, self._waits, self._since = "starting", "", time.monotonic()
        self._call, self._dispatched = "", deque[float](maxlen=20)
        self._number = 0
        self._keys: list[str] = []
        self._heard = time.monotonic()
        self._patience = _seconds("WHOLESTEP_PATIENCE", PATIENCE)
        self._launcher = os.environ.get("WHOLESTEP_LAUNCHER")
        _calm_gloo()
        works = (self._beat, self._guard)
        self._threads = [threading.Thread(target=work, name="wholestep-processes", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        atexit.register(self._leave)
        sys.excepthook = self._uncaught

    # ---- what a run asks for ----

    def check_equal(self, facts: dict[str, str]) -> None:
        """Make sure that all processes say the same.

        Raises:
            PeerError: in every process, naming what differs and where.
        """
        number = self._next()
        with self.waiting("comparing what must be alike", f"the store, call {number}"):
            if self.index == 0:
                self._set(f"facts/{number}", facts)
            self._set(f"differs/{number}/{self.index}", _difference(self._get(f"facts/{number}"), facts))
            if self.index == 0:
                answers = [self._get(f"differs/{number}/{i}") for i in range(self.count)]
                found = [f"process {i}: {text}" for i, text in enumerate(answers) if text]
                self._set(f"summary/{number}", "; ".join(found[:8]))
            summary = self._get(f"summary/{number}")
        if summary:
            must = "All processes must begin alike. Nothing was updated."
            raise PeerError(message(must, summary, "start every process with the same code, data and seed."))

    def broadcast(self, value: T) -> T:
        """Return process 0's value."""
        number = self._next()
        if self.index == 0:
            self._set(f"shared/{number}", value)
        with self.waiting("sharing a number", f"the store, call {number}"):
            return self._get(f"shared/{number}")

    def all_gather(self, value: T) -> list[T]:
        """Return every process's value."""
        number, earlier, self._keys = self._next(), self._keys, []
        self._set(f"gathered/{number}/{self.index}", value)
        with self.waiting(f"comparing places ({value})", f"the store, call {number}"):
            if self.index == 0:
                self._set(f"all/{number}", [self._get(f"gathered/{number}/{i}") for i in range(self.count)])
            values = self._get(f"all/{number}")
        for key in earlier:  # all have come here, so nobody will ask for these any more
            self._store.key_value_delete(_KEY + key)
        return values

    def barrier(self, where: str) -> None:
        """Wait until all processes have come to the same place.

        Raises:
            PeerError: in every process, if they have not.
        """
        places = self.all_gather(where)
        if len(set(places)) > 1:
            found = "; ".join(f"process {i} {place}" for i, place in enumerate(places[:8]))
            must = "All processes must have the same batches."
            raise PeerError(message(must, found, "give every process the same data; each uses its own share of them."))

    def set_status(self, doing: str) -> None:
        """Take note of what this process is doing, to be told if it hangs."""
        self.doing, self._waits, self._since = doing, "", time.monotonic()

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Take note that this process sends a program in which all take part."""
        self._call = doing
        self._dispatched.append(time.monotonic())
        return self.waiting(doing)

    @contextmanager
    def waiting(self, doing: str, call: str = "") -> Iterator[None]:
        """Take note that this process waits for the others' part; `call` is "" for that in the last program.

        Raises:
            PeerError: the connection broke; if it is known by then which process ended, this one ends instead.
        """
        before = self.doing
        self.doing, self._waits, self._since = doing, call or self._call or "a program", time.monotonic()
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not any(sign in str(error) for sign in _BROKEN):
                raise
            # The verdict names the process that is lost, and ends this one.
            _is_over.wait(4 * silence(self._patience) + 5 * _INTERVAL)
            must = "All processes must take part in every update."
            raise PeerError(message(must, error, "look at the output of the other processes.")) from error
        finally:
            self.set_status(before)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process has failed, so that they end."""
        _is_over.set()
        if not isinstance(error, PeerError):  # which all have
            with suppress(jax.errors.JaxRuntimeError):  # the store may be gone
                self._publish(f"Process {self.index} failed while {self.doing}: {type(error).__name__}: {error}.")
        if self.index == 0:
            time.sleep(3 * _INTERVAL)  # the store lives here: let the others read it

    def _uncaught(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        """Leave at once after an error: an orderly exit would wait for the others, and they for this one."""
        sys.__excepthook__(kind, error, trace)
        self.fail(error)
        sys.stdout.flush()
        os._exit(1)

    def _leave(self) -> None:
        """Wait for all scripts' end, then for this process's threads: inside the store they would abort its exit."""
        self.set_status(ENDING)
        try:
            jax.distributed.shutdown()
        finally:
            _is_over.set()
            for thread in self._threads:
                thread.join(timeout=10)

    # ---- the thread that gives signs of life ----

    def _beat(self) -> None:
        number = 0
        seen: dict[int, tuple[Beat, float]] = {}
        while not _is_over.wait(_INTERVAL):
            number += 1
            try:
                self._set(f"beat/{self.index}", self._sign(number), again=True)
                verdict = self._verdict(seen) if self.index == 0 else self._read("verdict")
                self._heard = time.monotonic()
            except jax.errors.JaxRuntimeError:
                continue  # the guard counts the seconds
            if verdict:
                self._end(verdict)

    def _sign(self, number: int) -> Beat:
        times = list(self._dispatched)
        gaps = [b - a for a, b in pairwise(times)]
        step = statistics.median(gaps) if gaps else 0.0
        return Beat(number, self.doing, self._waits, time.monotonic() - self._since, step)

    def _verdict(self, seen: dict) -> str | None:
        now = time.monotonic()
        for key, value in self._store.key_value_dir_get(_KEY + "beat/"):
            beat, process = Beat(*json.loads(value)), int(key.rsplit("/", 1)[1])
            if process not in seen or seen[process][0].number != beat.number:
                seen[process] = (beat, now)
        beats = {process: (beat, now - when) for process, (beat, when) in seen.items()}
        verdict = self._read("verdict") or judge(beats, self._patience)
        if verdict:
            self._publish(verdict)
            time.sleep(3 * _INTERVAL)
        return verdict

    def _guard(self) -> None:
        ticked = time.monotonic()
        while not _is_over.wait(_INTERVAL):
            before, ticked = ticked, time.monotonic()
            if ticked - before > 3 * _INTERVAL:  # this process was silent itself, and could hear nobody
                self._heard = ticked
            unheard = ticked - self._heard
            if self.doing != ENDING and unheard > silence(self._patience) + _INTERVAL:
                self._end(f"Process 0 has given no sign of life for {unheard:.0f} s: killed, or stopped?")
            if self._launcher is not None and os.getppid() != int(self._launcher):
                self._end("The launcher is gone.")

    def _end(self, verdict: str) -> None:
        """End this process. Its main thread may be inside a collective, from where nothing else brings it back."""
        if _is_over.is_set():
            return
        _is_over.set()
        end(f"{verdict} Process {self.index} ends too; it was {self.doing}.")

    # ---- the store ----

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _publish(self, verdict: str) -> None:
        self._set("verdict", verdict, again=True)

    def _set(self, key: str, value: object, again: bool = False) -> None:
        if not again:
            self._keys.append(key)
        self._store.key_value_set(_KEY + key, json.dumps(value), allow_overwrite=again)

    def _get(self, key: str) -> Any:
        return json.loads(self._store.blocking_key_value_get(_KEY + key, _DAY))

    def _read(self, key: str) -> Any:
        """Return what is there, or None."""
        try:
            return json.loads(self._store.key_value_try_get(_KEY + key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise


def _seconds(name: str, default: float) -> float:
    """Return a number of seconds from the environment."""
    given = os.environ.get(name, str(default))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise SpecificationError(message(f"{name} must be a number of seconds.", given, f"{name}={default:g}"))
    return seconds


def _calm_gloo() -> None:
    """Let no thread of this process push another off its core when it wakes.

    Gloo's thread wakes for every message, and was seen to spin: probably while a computing thread holds its lock. If it
    has pushed that thread off their core, that lasts until the scheduler's next tick, some 4 ms.
    """
    if jax.default_backend() == "cpu" and hasattr(os, "SCHED_BATCH"):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it may have ended by now
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def end(message: str) -> None:
    """End this process at once, with exit code 1 and a message."""
    _print(message)
    os._exit(1)


def end_terminated(stop: Terminated) -> None:
    """End this process as SIGTERM asks, with exit code 143 and a message; the others of its run are told, and end."""
    processes = connect()
    what = "is asked to end (SIGTERM), and does so after a whole number of updates"
    _print(f"Process {processes.index} {what}; it was {processes.doing}.")
    processes.fail(stop)
    os._exit(128 + signal.SIGTERM)


def _print(message: str) -> None:
    with suppress(OSError):  # there may be nobody left to read it
        print(f"wholestep: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()


def _difference(expected: dict, facts: dict) -> str:
    names = [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]
    found = [f"{name} is {facts.get(name, 'missing')}, not {expected.get(name, 'missing')}" for name in names]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
