"""Manual checkpoints: `trainer.save` and `trainer.restore`."""

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
    """Write and verify a checkpoint of a run, and return its folder.

    Raises:
        SpecificationError: nothing has been trained yet.
        CheckpointError: the checkpoint could not be written.
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
    """Return the checkpoint at a path, or the newest good checkpoint in it; damaged ones stay in place.

    Args:
        check: raises a SpecificationError for a snapshot of another model.

    Raises:
        CheckpointError: there is no checkpoint, or none is good.
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
        raise CheckpointError(message(must, f"none in {folder.folder}", "the folder that was passed to fit."))
    return found
