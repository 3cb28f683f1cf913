"""The processes of a run on JAX: they compare their configurations, and all end if one dies or hangs.

They communicate through `wholestep.processes.store`; `wholestep.processes.heartbeat` ends them.
"""

import atexit
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from inspect import signature
from pathlib import Path
from types import TracebackType

import jax
import numpy as np

from wholestep.errors import PeerError, SpecificationError, message
from wholestep.processes.heartbeat import BY_SIGTERM, Heartbeat, tell
from wholestep.processes.protocol import Exchange, Processes, SingleProcess, T
from wholestep.processes.store import StoreExchange, Unreachable
from wholestep.processes.watchdog import ENDING, PATIENCE
from wholestep.safety import Terminated, end_when_terminated

_DAY = 24 * 3600  # s
_BROKEN = ("Gloo", "gloo", "UNAVAILABLE", "Connection", "Socket", "ABORTED", "NCCL", "heartbeat")


@cache
def connect() -> Processes:
    """Return this process's group."""
    return SingleProcess() if jax.process_count() == 1 else ProcessGroup(jax.process_index(), jax.process_count())


def join() -> None:
    """Join the run for which `wholestep launch -n` or a cluster's launcher started this process.

    All processes get the same seed, so that their models start with equal weights.

    Raises:
        PeerError: the run is unknown.
        SpecificationError: WHOLESTEP_PATIENCE is not a positive number of seconds.
    """
    _seconds("WHOLESTEP_PATIENCE", PATIENCE)  # before other processes wait for this one
    kinds = {"coordinator_address": str, "num_processes": int, "process_id": int}
    known = {name: os.environ.get(f"WHOLESTEP_{name.upper()}") for name in kinds}
    given = {name: kinds[name](value) for name, value in known.items() if value is not None}
    if hasattr(jax.config, "jax_enable_preemption_service"):  # it would catch SIGTERM, and lose it
        jax.config.update("jax_enable_preemption_service", False)
    is_known = "shutdown_timeout_seconds" in signature(jax.distributed.initialize).parameters
    patience = {"shutdown_timeout_seconds": _DAY} if is_known else {}  # JAX 0.8 waits for five minutes
    try:
        jax.distributed.initialize(**given, **patience)
    except (ValueError, RuntimeError) as error:
        must = "A process must know the run that it belongs to."
        attempt = "wholestep launch -n 2 SCRIPT for two processes here; on a cluster, see the docs of jax.distributed."
        raise PeerError(message(must, str(error).rstrip("."), attempt)) from error
    end_when_terminated()  # only now: some versions of jax.distributed catch the signal
    seed = connect().broadcast(int.from_bytes(os.urandom(4), "little"), "sharing the first seed")
    # As keras.utils.set_random_seed, without its import of tensorflow: Keras draws its seeds from `random`.
    random.seed(seed)
    np.random.seed(seed)


class ProcessGroup:
    """The processes of a run, connected by the key-value store."""

    def __init__(self, index: int, count: int):
        self.index = index
        self.count = count
        self._exchange = StoreExchange(index, count)
        self._heart = Heartbeat(index, self._exchange.store, _seconds("WHOLESTEP_PATIENCE", PATIENCE))
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
        """Check that these facts are equal in all processes; the error has the differing facts and processes."""
        what = "comparing configurations"
        differing = self.all_gather(_difference(self.broadcast(facts, what), facts), what)
        if any(differing):
            found = [f"process {i}: {text}" for i, text in enumerate(differing) if text]
            must, attempt = "All processes must begin alike. Nothing was updated.", "start every process with the same"
            raise PeerError(message(must, "; ".join(found[:8]), f"{attempt} code, data and seed."))

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        with self._asking(what):
            return self._exchange.broadcast(value, what)

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        with self._asking(what):
            return self._exchange.all_gather(value, what)

    def _asking(self, what: str, where: str = "") -> AbstractContextManager:
        """Record that this process waits in a call; processes in different calls wait for each other."""
        return self.waiting(what + where, f"the store, call {self._exchange.number + 1}, {what}")

    def close(self) -> None:
        """Do nothing: the sequence of the main thread stays open."""

    def aside(self, name: str) -> Exchange:
        """Return the exchange of another thread. If a process is lost, all processes end, also during a wait."""
        return StoreExchange(self.index, self.count, f"{name}/", self._exchange)

    def barrier(self, where: str) -> None:
        """Wait until all processes are at the same position."""
        with self._asking("comparing positions", f" ({where})"):
            places = self._exchange.all_gather(where, "comparing positions")
        if len(set(places)) > 1:
            found = "; ".join(f"process {i} {place}" for i, place in enumerate(places[:8]))
            must = "All processes must have the same batches."
            raise PeerError(message(must, found, "give every process the same data; each uses its share."))

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
            PeerError: the connection broke. If the lost process is known by then, this process ends instead.
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
            raise PeerError(message(must, error, "look at the output of the other processes.")) from error
        finally:
            self.set_status(before)

    def fail(self, error: BaseException) -> None:
        """Report to the other processes that this one has failed, so that they end."""
        self._heart.end()
        if not isinstance(error, PeerError):  # all processes raise it
            failed = f"failed while {self.doing}: {type(error).__name__}: {error}"
            ended = f"{BY_SIGTERM} while {self.doing}"
            with suppress(Unreachable):  # the store may be gone
                self._heart.pass_verdict(f"Process {self.index} {ended if isinstance(error, Terminated) else failed}.")
        if self.index == 0:
            self._heart.let_others_read()  # the store ends with this process

    def _uncaught(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        """Exit at once after an error: an orderly exit would wait for the other processes, which wait for this one."""
        sys.__excepthook__(kind, error, trace)
        self.fail(error)
        sys.stdout.flush()
        os._exit(1)

    def _leave(self) -> None:
        """Wait for the end of all scripts, then for this process's threads: in the store, they would abort its exit."""
        self.set_status(ENDING)
        try:
            jax.distributed.shutdown()
        finally:
            self._heart.join()


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
    """Set SCHED_BATCH, so that a waking thread of this process preempts no other.

    Gloo's thread wakes for every message, and was seen to spin, probably while a computing thread holds its lock. If it
    has preempted that thread, the spin lasts until the scheduler's next tick, some 4 ms.
    """
    if jax.default_backend() == "cpu" and hasattr(os, "SCHED_BATCH"):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it may have ended by now
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def end_terminated(stop: Terminated) -> None:
    """End this process after SIGTERM, with exit code 143 and a message; the other processes of the run end too."""
    processes = connect()
    what = "is asked to end (SIGTERM), and does so after a whole number of updates"
    tell(f"Process {processes.index} {what}; it was {processes.doing}.")
    processes.fail(stop)
    os._exit(128 + signal.SIGTERM)


def _difference(expected: dict, facts: dict) -> str:
    names = [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]
    found = [f"{name} is {facts.get(name, 'missing')}, not {expected.get(name, 'missing')}" for name in names]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
