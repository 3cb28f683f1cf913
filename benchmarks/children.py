"""Child processes: one measurement each, one at a time, told what to do and telling what they found
in JSON.
"""

import json
import os
import subprocess
import sys
from typing import Any


def use_cores(num: int) -> int:
    """Let this process and its children use at most `num` cores; return how many there are to
    use.
    """
    cores = sorted(os.sched_getaffinity(0))[:num]
    os.sched_setaffinity(0, cores)
    return len(cores)


_peaks: list[float] = []  # MiB, of the processes since the last `take_peak`


def take_peak() -> float:
    """Return the largest peak memory of the processes since the last call, MiB."""
    peak = max(_peaks, default=0.0)
    _peaks.clear()
    return peak


def measure(task: str, engine: str, **arguments: Any) -> Any:
    """Return what a fresh process on this engine finds when it carries out a task of
    `benchmarks.child`.
    """
    what = " ".join(str(value) for value in arguments.values())
    print(f"... {task} {engine} {what}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.child", task, json.dumps(arguments)]
    environment = os.environ | {
        "KERAS_BACKEND": engine,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
    }
    # installed modules have their bytecode, so Keras' has
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{task} on {engine} failed.\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    _peaks.append(found["peak"])
    return found["found"]
