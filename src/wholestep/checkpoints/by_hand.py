"""A checkpoint that is written, or read, because somebody says so now."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from wholestep.checkpoints.common import CommonFolder
from wholestep.checkpoints.facts import facts_of
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.reading import Found, locate, newest
from wholestep.checkpoints.snapshot import RunFacts, Snapshot
from wholestep.checkpoints.together import slowly
from wholestep.checkpoints.writer import Room
from wholestep.engines import connect
from wholestep.errors import CheckpointError, message
from wholestep.executor import Executor
from wholestep.run import Run


def save_once(path: str | os.PathLike, run: Run, executor: Executor | None) -> Path:
    """Write a checkpoint of a run, and return its folder when it has been verified.

    Raises:
        SpecificationError: nothing has been trained yet.
        CheckpointError: it could not be written.
    """
    processes = connect()
    common = CommonFolder(Folder(path), processes)
    with slowly(processes):
        snapshot = common.together.all(lambda: run.snapshot(common.copies(Room())), f"saving to {common.folder.folder}")
        common.lock()
        try:
            rest = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": {} if executor is None else facts_of(executor)}
            common.write(Manifest(run.number, [], [], snapshot.facts, rest), snapshot.arrays)
        finally:
            common.release()
    return common.folder.path(run.number)


def read_one(path: str | os.PathLike, check: Callable[[Snapshot], None]) -> Found:
    """Return the checkpoint of a path, or the newest good one in it; damaged ones are left as they are.

    Args:
        check: raises a SpecificationError if it is another model's.

    Raises:
        CheckpointError: there is none, or none is good.
    """
    folder, step = locate(path)
    processes = connect()

    def check_found(snapshot: Snapshot, _: Manifest) -> None:
        RunFacts.of(snapshot)
        check(snapshot)

    with slowly(processes):
        found = newest(CommonFolder(folder, processes), check_found, sets_aside=False, step=step)
    if found is None:
        must = "restore needs a folder with a checkpoint."
        raise CheckpointError(message(must, f"none in {folder.folder}", "the folder that fit was given."))
    return found
