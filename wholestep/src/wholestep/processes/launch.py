"""Launch several processes on one machine, which run the same script and end together."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from wholestep.safety import Ended, Terminated, end_when_terminated

_SAVING = 600.0  # seconds for processes to save, once they must end
_GRACE = 6.0  # seconds for processes to print why they end, once one has ended


def launch(num: int, script: str, arguments: list[str]) -> int:
    """Run a script in `num` processes of one run; return the first exit code that is not 0.

    Each process has an equal share of the processor's cores, if there are enough: else threads of
    one would delay the messages of another. Output lines are prefixed with the process's index.
    When a process ends with an error, the others are ended. An interrupt (Ctrl-C) or SIGTERM ends
    all processes, and so does any end of this process. After SIGTERM they may save checkpoints; a
    second SIGTERM, more than a second later, ends them at once.
    """
    environment = os.environ | {
        "WHOLESTEP_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}",
        "WHOLESTEP_NUM_PROCESSES": str(num),
        "WHOLESTEP_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "wholestep.cli", "launch", script, *arguments]
    processes = []
    copiers = []
    lock = threading.Lock()
    for i in range(num):
        variables = environment | {"WHOLESTEP_PROCESS_ID": str(i), "JAX_LOCAL_DEVICE_IDS": str(i)}
        with _cores(i, num):
            process = _started(command, variables)
        processes.append(process)
        for lines, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            copier = threading.Thread(target=_copy, args=(i, lines, to, lock), daemon=True)
            copiers.append(copier)
            copier.start()
    before = signal.getsignal(signal.SIGTERM)
    end_when_terminated()
    try:
        return _watch(processes)
    except (KeyboardInterrupt, Terminated) as stop:
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        print(f"wholestep launch: interrupted ({number.name}); all processes end.", file=sys.stderr)
        if number == signal.SIGTERM:
            return _let_end(processes)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(processes)
        for copier in copiers:
            copier.join(timeout=2)


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def run(script: str, arguments: list[str]) -> int:
    """Run a script in this process of a run. SIGTERM ends it between two updates."""
    # imports Keras and JAX, which the launching process does not need
    from wholestep.processes import group

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Ended:  # raised in all processes
        raise
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise RuntimeError(f"the script left with exit code {stop.code}") from stop
    except Terminated as stop:
        group.end_terminated(stop)
    return 0


@contextmanager
def _cores(index: int, num: int) -> Iterator[None]:
    """Give a process that is started in this block its share of the cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // num
    if each:
        os.sched_setaffinity(0, cores[index * each : (index + 1) * each])
    try:
        yield
    finally:
        if each:
            os.sched_setaffinity(0, cores)


def _watch(processes: list[subprocess.Popen]) -> int:
    """Wait until all processes have succeeded, or one has failed; return the exit code."""
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code:
                _report_end(index, code, [i for i, other in enumerate(codes) if other == 0])
                _wait(processes, _GRACE if code > 0 else 0)
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _report_end(index: int, code: int, ended: list[int]) -> None:
    how = (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
    before = "".join(f"; process {other} had ended before" for other in ended)
    line = f"wholestep launch: process {index} {how}{before}; the others end too."
    print(line, file=sys.stderr, flush=True)


def _wait(processes: list[subprocess.Popen], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def _let_end(processes: list[subprocess.Popen]) -> int:
    """Pass SIGTERM on, and wait until all processes have saved, or a second signal comes.

    Returns the exit code: 143, or the code of a process that failed otherwise.
    """
    end_when_terminated()
    with suppress(Terminated, KeyboardInterrupt):
        for process in processes:
            process.terminate()
        _wait(processes, _SAVING)
    codes = [process.poll() for process in processes]
    return next((code for code in codes if code is not None and code not in (0, 143, -15)), 143)


def _end(processes: list[subprocess.Popen]) -> None:
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:  # those that have ended ignore it
            stop(process)
        _wait(processes, 2.0)


def _copy(index: int, lines: TextIO, to: TextIO, lock: threading.Lock) -> None:
    with lines:
        for line in lines:
            with lock:
                to.write(f"[{index}] {line}" if line.endswith("\n") else f"[{index}] {line}\n")
                to.flush()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
