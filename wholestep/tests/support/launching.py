"""Start processes that run what `launched.py` names, and read what they print."""

import json
import os
import re
import subprocess
import sys
import time

import keras
import pytest
from scripts import HERE, lean

BOUND = 60.0  # seconds in which every run ends, whatever happens


only_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="several processes need the JAX engine"
)


def begin(num, *arguments, patience=4, devices=1):
    """Return the process of a run that begins."""
    # the last one counts
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = lean(HERE, WHOLESTEP_PATIENCE=str(patience), XLA_FLAGS=flags)
    command = [
        sys.executable,
        "-m",
        "wholestep.cli",
        "launch",
        "-n",
        str(num),
        str(HERE / "launched.py"),
        *arguments,
    ]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def launch(num, *arguments, **how):
    """Return (exit code, output, seconds) of a run, which is killed if it does not end."""
    since = time.monotonic()
    with begin(num, *arguments, **how) as launched:
        try:
            output, _ = launched.communicate(timeout=4 * BOUND)
        except subprocess.TimeoutExpired:
            launched.kill()
            raise
    return launched.returncode, output, time.monotonic() - since


def found(output, process):
    line = re.search(rf"^\[{process}\] FOUND (.*)$", output, re.MULTILINE)
    assert line, output
    return json.loads(line[1])
