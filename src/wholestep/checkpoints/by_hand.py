"""A checkpoint that is written, or read, because somebody says so now."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.reading import Found, locate, newest
from wholestep.checkpoints.snapshot import Snapshot
from wholestep.errors import CheckpointError, message
from wholestep.run import Run


def save_once(path: str | os.PathLike, run: Run, facts: dict[str, Any]) -> Path:
    """Write a checkpoint of a run, and return its folder when it has been verified.

    Raises:
        SpecificationError: nothing has been trained yet.
        CheckpointError: it could not be written.
    """
    folder = Folder(path)
    snapshot = run.snapshot()
    lock = folder.lock()
    try:
        folder.clear()
        rest = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": facts}
        return folder.write(run.number, snapshot.arrays, snapshot.facts, rest)
    finally:
        lock.release()


def read_one(path: str | os.PathLike, check: Callable[[Snapshot], None]) -> Found:
    """Return the checkpoint of a path, or the newest good one in it; damaged ones are left as they are.

    Args:
        check: raises a SpecificationError if it is another model's.

    Raises:
        CheckpointError: there is none, or none is good.
    """
    folder, step = locate(path)
    found = newest(folder, lambda snapshot, _: check(snapshot), sets_aside=False, step=step)
    if found is None:
        must = "restore needs a folder with a checkpoint."
        raise CheckpointError(message(must, f"none in {folder.folder}", "the folder that fit was given."))
    return found
