"""The processes of a run on JAX, which compare configurations, and end if one dies or hangs.

They communicate through `wholestep.processes.store`. A collective waits for ever if one process
does not take part: so every process has a thread that writes a sign of life with its activity, and
ends its process after a verdict. Process 0 watches all processes and writes the verdict; all watch
process 0: two small messages a second for each process.
"""

import atexit
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
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax
import numpy as np

from wholestep.errors import PeerError, SpecificationError, message
from wholestep.processes.protocol import Exchange, Processes, SingleProcess, T
from wholestep.processes.store import KeyValueStore, StoreExchange, Unreachable
from wholestep.processes.watchdog import ENDING, PATIENCE, Beat, judge, silence
from wholestep.safety import Terminated, end_when_terminated

_DAY = 24 * 3600  # s
_BROKEN = ("Gloo", "gloo", "UNAVAILABLE", "Connection", "Socket", "ABORTED", "NCCL", "heartbeat")


@cache
def connect() -> Processes:
    """Return this process's group."""
    if jax.process_count() == 1:
        return SingleProcess()
    return ProcessGroup(jax.process_index(), jax.process_count())


def join() -> None:
    """Join the run for which `wholestep launch -n` or a cluster's launcher started this process.

    All processes get the same seed, so that their models start with equal weights.

    Raises:
        PeerError: the run is unknown.
        SpecificationError: WHOLESTEP_PATIENCE is not a positive number of seconds.
    """
    _seconds("WHOLESTEP_PATIENCE", PATIENCE)  # before other processes wait for this one
    kinds = {"coordinator_address": str, "num_processes": int, "process_id": int}
    arguments = {}
    for name, kind in kinds.items():
        if (value := os.environ.get(f"WHOLESTEP_{name.upper()}")) is not None:
            arguments[name] = kind(value)
    if hasattr(jax.config, "jax_enable_preemption_service"):  # it would catch SIGTERM, and lose it
        jax.config.update("jax_enable_preemption_service", False)
    name = "shutdown_timeout_seconds"  # JAX 0.8 waits for five minutes
    if name in signature(jax.distributed.initialize).parameters:
        arguments[name] = _DAY
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError) as error:
        must = "A process must know the run that it belongs to."
        attempt = (
            "wholestep launch -n 2 SCRIPT for two processes here; on a cluster, see the docs "
            "of jax.distributed."
        )
        raise PeerError(message(must, str(error).rstrip("."), attempt)) from error
    end_when_terminated()  # only now: some versions of jax.distributed catch the signal
    seed = connect().broadcast(int.from_bytes(os.urandom(4), "little"), "sharing the first seed")
    # As keras.utils.set_random_seed, without its import of tensorflow: Keras draws its seeds from
    # `random`.
    random.seed(seed)
    np.random.seed(seed)


class ProcessGroup:
    """The processes of a run, connected by the key-value store."""

    def __init__(self, index: int, count: int):
        self.index = index
        self.count = count
        self._exchange = StoreExchange(index, count)
        patience = _seconds("WHOLESTEP_PATIENCE", PATIENCE)
        self._heart = Heartbeat(index, self._exchange.store, patience)
        self._call = ""
        _calm_gloo()
        self._heart.start()
        atexit.register(self._leave)
        sys.excepthook = self._uncaught

    # ---- the interface `Processes` ----

    @property
    def doing(self) -> str:
        """A description of the current activity."""
        return self._heart.doing

    def check_equal(self, facts: dict[str, str]) -> None:
        """Check that these facts are equal in all processes; the error names those that differ."""
        what = "comparing configurations"
        differing = self.all_gather(_difference(self.broadcast(facts, what), facts), what)
        if any(differing):
            received = [f"process {i}: {text}" for i, text in enumerate(differing) if text]
            must = "All processes must begin alike. Nothing was updated."
            attempt = "start every process with the same code, data and seed."
            raise PeerError(message(must, "; ".join(received[:8]), attempt))

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        with self._asking(what):
            return self._exchange.broadcast(value, what)

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        with self._asking(what):
            return self._exchange.all_gather(value, what)

    def _asking(self, what: str, where: str = "") -> AbstractContextManager:
        """Record that this process waits in a call, for those that make the same call."""
        return self.waiting(what + where, f"the store, call {self._exchange.number + 1}, {what}")

    def close(self) -> None:
        """Do nothing: the sequence of the main thread stays open."""

    def aside(self, name: str) -> Exchange:
        """Return the exchange of another thread. A lost process ends all, also during a wait."""
        return StoreExchange(self.index, self.count, f"{name}/", self._exchange)

    def barrier(self, where: str) -> None:
        """Wait until all processes are at the same position."""
        with self._asking("comparing positions", f" ({where})"):
            places = self._exchange.all_gather(where, "comparing positions")
        if len(set(places)) > 1:
            received = "; ".join(f"process {i} {place}" for i, place in enumerate(places[:8]))
            must = "All processes must have the same batches."
            attempt = "give every process the same data; each uses its share."
            raise PeerError(message(must, received, attempt))

    def set_status(self, doing: str) -> None:
        """Record the activity of this process, for the message if it hangs."""
        self._heart.say(doing)

    def dispatching(self, doing: str) -> AbstractContextManager:
        """Record that this process dispatches a program in which all processes take part."""
        self._call = doing
        self._heart.count()
        return self.waiting(doing)

    @contextmanager
    def waiting(self, doing: str, call: str = "") -> Iterator[None]:
        """Record that this process waits for the others in a call; "" for the last program.

        Raises:
            PeerError: the connection broke. If the lost process is known by then, this process ends
                instead.
        """
        before = self.doing
        self._heart.say(doing, call or self._call or "a program")
        try:
            yield
        except (Unreachable, ValueError) as error:
            if not any(sign in str(error) for sign in _BROKEN):
                raise
            self._heart.wait_for_verdict()
            must = "All processes must take part in every update."
            attempt = "look at the output of the other processes."
            raise PeerError(message(must, error, attempt)) from error
        finally:
            self.set_status(before)

    def fail(self, error: BaseException) -> None:
        """Report to the other processes that this one has failed, so that they end."""
        self._heart.end()
        if not isinstance(error, PeerError):  # all processes raise it
            what = f"failed while {self.doing}: {type(error).__name__}: {error}"
            if isinstance(error, Terminated):
                what = f"{BY_SIGTERM} while {self.doing}"
            with suppress(Unreachable):  # the store may be gone
                self._heart.pass_verdict(f"Process {self.index} {what}.")
        if self.index == 0:
            time.sleep(3 * _INTERVAL)  # for the others to read: the store ends with this process

    def _uncaught(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        """Exit at once after an error: an orderly exit would wait for processes that wait here."""
        sys.__excepthook__(kind, error, trace)
        self.fail(error)
        sys.stdout.flush()
        os._exit(1)

    def _leave(self) -> None:
        """Wait for the end of all scripts, then for the threads, which would abort the exit."""
        self.set_status(ENDING)
        try:
            jax.distributed.shutdown()
        finally:
            self._heart.join()


def _seconds(name: str, default: float) -> float:
    """Return a number of seconds from the environment."""
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise SpecificationError(
            message(f"{name} must be a number of seconds.", text, f"{name}={default:g}")
        )
    return seconds


def _calm_gloo() -> None:
    """Set SCHED_BATCH, so that a waking thread of this process preempts no other.

    Gloo's thread wakes for every message, and was seen to spin, probably while a computing thread
    holds its lock. If it has preempted that thread, the spin lasts until the scheduler's next tick,
    some 4 ms.
    """
    if jax.default_backend() == "cpu" and hasattr(os, "SCHED_BATCH"):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it may have ended by now
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def end_terminated(stop: Terminated) -> None:
    """End this process after SIGTERM, with exit code 143 and a message; the others end too."""
    processes = connect()
    what = "is asked to end (SIGTERM), and does so after a whole number of updates"
    tell(f"Process {processes.index} {what}; it was {processes.doing}.")
    processes.fail(stop)
    os._exit(128 + signal.SIGTERM)


def _difference(expected: dict, facts: dict) -> str:
    names = [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]
    words = [
        f"{name} is {facts.get(name, 'missing')}, not {expected.get(name, 'missing')}"
        for name in names[:4]
    ]
    return ", ".join(words) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# in a verdict: then all processes end with the exit code of SIGTERM
BY_SIGTERM = "was asked to end (SIGTERM)"
_INTERVAL = 1.0


class Heartbeat:
    """The threads of a process that use the store while it computes; see `judge`."""

    def __init__(self, index: int, store: KeyValueStore, patience: float):
        self.say("starting")
        self._index = index
        self._store = store
        self._patience = patience
        self._dispatched = deque[float](maxlen=20)
        self._heard = time.monotonic()
        self._is_over = threading.Event()  # set when this process is about to end
        self._launcher = os.environ.get("WHOLESTEP_LAUNCHER")
        works = (self._beat, self._guard)
        self._threads = [
            threading.Thread(target=work, name="wholestep-processes", daemon=True) for work in works
        ]

    def start(self) -> None:
        """Start to write signs of life."""
        for thread in self._threads:
            thread.start()

    def say(self, doing: str, waits: str = "") -> None:
        """Set the activity in the signs of life, and the call in which this process waits."""
        self.doing = doing
        self._waits = waits
        self._since = time.monotonic()

    def count(self) -> None:
        """Record a dispatch: the others wait at least for 10 median intervals of dispatches."""
        self._dispatched.append(time.monotonic())

    def pass_verdict(self, verdict: str) -> None:
        """Write the verdict, the reason why all processes end."""
        self._store.set("verdict", verdict, again=True)

    def wait_for_verdict(self) -> None:
        """Wait until a lost process would be detected, which ends this process."""
        self._is_over.wait(4 * silence(self._patience) + 5 * _INTERVAL)

    def end(self) -> None:
        """Let the threads finish, without ending the process."""
        self._is_over.set()

    def join(self) -> None:
        """Join the threads: in the store, they would abort the process's exit."""
        self.end()
        for thread in self._threads:
            thread.join(timeout=10)

    def _beat(self) -> None:
        number = 0
        seen: dict[int, tuple[Beat, float]] = {}
        while not self._is_over.wait(_INTERVAL):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", self._sign(number), again=True)
                verdict = self._verdict(seen) if self._index == 0 else self._store.read("verdict")
                self._heard = time.monotonic()
            except Unreachable:
                continue  # the guard counts the seconds
            if verdict:
                self._end_process(verdict)

    def _sign(self, number: int) -> Beat:
        times = list(self._dispatched)
        gaps = [b - a for a, b in pairwise(times)]
        step = statistics.median(gaps) if gaps else 0.0
        return Beat(number, self.doing, self._waits, time.monotonic() - self._since, step)

    def _verdict(self, seen: dict) -> str | None:
        now = time.monotonic()
        for name, value in self._store.read_all("beat"):
            beat = Beat(*value)
            process = int(name)
            if process not in seen or seen[process][0].number != beat.number:
                seen[process] = (beat, now)
        beats = {process: (beat, now - when) for process, (beat, when) in seen.items()}
        verdict = self._store.read("verdict") or judge(beats, self._patience)
        if verdict:
            self.pass_verdict(verdict)
            time.sleep(3 * _INTERVAL)  # for the others to read it
        return verdict

    def _guard(self) -> None:
        ticked = time.monotonic()
        while not self._is_over.wait(_INTERVAL):
            before = ticked
            ticked = time.monotonic()
            # this process was itself stopped, and could read nothing
            if ticked - before > 3 * _INTERVAL:
                self._heard = ticked
            unheard = ticked - self._heard
            if self.doing != ENDING and unheard > silence(self._patience) + _INTERVAL:
                what = f"no sign of life for {unheard:.0f} s: killed, or stopped?"
                self._end_process(f"Process 0 has given {what}")
            if self._launcher is not None and os.getppid() != int(self._launcher):
                self._end_process("The launcher is gone.")

    def _end_process(self, verdict: str) -> None:
        """End this process, also inside a collective, which cannot be interrupted."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        code = 128 + signal.SIGTERM if BY_SIGTERM in verdict else 1
        end(f"{verdict} Process {self._index} ends too; it was {self.doing}.", code)


def end(message: str, code: int = 1) -> NoReturn:
    """End this process at once, with a message, and without waiting for other processes."""
    tell(message)
    os._exit(code)


def tell(message: str) -> None:
    """Print a message to stderr, and flush stdout."""
    with suppress(OSError):  # the reader may have closed
        print(f"wholestep: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
