"""The time of an epoch in one and in two processes, each on a core of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = Path(__file__).parent / "worker.py"


def measure(work: str, num: int, quick: bool) -> dict:
    """Return the seconds of an epoch, and from the start of the command to the end of the first
    update.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = (
            [sys.executable, "-m", "wholestep.cli", "launch", "-n", str(num)]
            if num > 1
            else [sys.executable]
        )
        path = os.pathsep.join([str(_SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
        begin = time.time()
        subprocess.run(
            [*command, str(_SCRIPT), work, str(int(quick)), str(Path(folder) / "found")],
            env=os.environ | {"PYTHONPATH": path},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads((Path(folder) / "found").read_text())
    return {"epoch": found["epoch"], "first": found["at"] - begin, "updates": found["updates"]}
