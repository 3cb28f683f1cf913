"""The heartbeat of a process in a run of several: it reports the activity of the process, and ends it if all must end.

A collective waits for ever if one process does not take part. So every process has a thread that writes a sign of life
with its activity, and ends its process after a verdict. Process 0 watches all processes and writes the verdict; all
watch process 0: two small messages a second for each process, however many there are.
"""

import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from wholestep.processes.store import Store, Unreachable
from wholestep.processes.watchdog import ENDING, Beat, judge, silence

BY_SIGTERM = "was asked to end (SIGTERM)"  # in a verdict: then all processes end with the exit code of SIGTERM
_INTERVAL = 1.0


class Heartbeat:
    """The threads of a process that use the store while it computes; for `patience`, see `judge`."""

    def __init__(self, index: int, store: Store, patience: float):
        self.doing, self._waits, self._since = "starting", "", time.monotonic()
        self._index = index
        self._store = store
        self._patience = patience
        self._dispatched = deque[float](maxlen=20)
        self._heard = time.monotonic()
        self._is_over = threading.Event()  # set when this process is about to end
        self._launcher = os.environ.get("WHOLESTEP_LAUNCHER")
        works = (self._beat, self._guard)
        self._threads = [threading.Thread(target=work, name="wholestep-processes", daemon=True) for work in works]

    def start(self) -> None:
        """Start to write signs of life."""
        for thread in self._threads:
            thread.start()

    def say(self, doing: str, waits: str = "") -> None:
        """Set the activity in the signs of life, and the call in which this process waits for others."""
        self.doing, self._waits, self._since = doing, waits, time.monotonic()

    def count(self) -> None:
        """Record a dispatch: the others wait at least for 10 median intervals between dispatches."""
        self._dispatched.append(time.monotonic())

    def pass_verdict(self, verdict: str) -> None:
        """Write the verdict, the reason why all processes end."""
        self._store.set("verdict", verdict, again=True)

    def wait_for_verdict(self) -> None:
        """Wait until a lost process would be detected; if one is, this process ends, and the call does not return."""
        self._is_over.wait(4 * silence(self._patience) + 5 * _INTERVAL)

    def let_others_read(self) -> None:
        """Wait until the other processes have read the store."""
        time.sleep(3 * _INTERVAL)

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
            beat, process = Beat(*value), int(name)
            if process not in seen or seen[process][0].number != beat.number:
                seen[process] = (beat, now)
        beats = {process: (beat, now - when) for process, (beat, when) in seen.items()}
        verdict = self._store.read("verdict") or judge(beats, self._patience)
        if verdict:
            self.pass_verdict(verdict)
            self.let_others_read()
        return verdict

    def _guard(self) -> None:
        ticked = time.monotonic()
        while not self._is_over.wait(_INTERVAL):
            before, ticked = ticked, time.monotonic()
            if ticked - before > 3 * _INTERVAL:  # this process was itself stopped, and could read nothing
                self._heard = ticked
            unheard = ticked - self._heard
            if self.doing != ENDING and unheard > silence(self._patience) + _INTERVAL:
                self._end_process(f"Process 0 has given no sign of life for {unheard:.0f} s: killed, or stopped?")
            if self._launcher is not None and os.getppid() != int(self._launcher):
                self._end_process("The launcher is gone.")

    def _end_process(self, verdict: str) -> None:
        """End this process, as its main thread may be inside a collective that cannot be interrupted."""
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
