"""Read the newest good checkpoint of a folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wholestep.checkpoints.arrays import DTYPES
from wholestep.checkpoints.common import CommonFolder, slowly
from wholestep.checkpoints.folder import Folder, locate
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.pieces import Numbers, hollow
from wholestep.checkpoints.snapshot import RunFacts, Snapshot
from wholestep.engines import connect
from wholestep.errors import CheckpointError, DamagedError, message

_GONE = "gone"


@dataclass(frozen=True)
class Found:
    """A checkpoint that has been read and verified.

    Args:
        aside: descriptions of newer checkpoints, which are damaged.
    """

    manifest: Manifest
    snapshot: Snapshot
    path: Path
    aside: list[str]


def newest(
    common: CommonFolder, check: Callable[[Snapshot, Manifest], None], *, sets_aside: bool, step: int | None = None
) -> Found | None:
    """Return the newest checkpoint that is good in all processes; None if the folder has no checkpoint.

    Args:
        check: raises a SpecificationError for a snapshot of another model or other data; gets hollow arrays. If it
            raises a DamagedError, the checkpoint counts as damaged.
        sets_aside: whether to rename damaged checkpoints, for which the caller must hold the lock.
        step: the step of the only checkpoint to read.

    Raises:
        CheckpointError: all checkpoints are damaged; or one, which may be good, cannot be read here.
    """
    folder, together = common.folder, common.together
    what = f"reading checkpoints from {folder.folder}"
    together.all(partial(_check_any, folder), what)
    aside: list[str] = []

    def fits(manifest: Manifest) -> None:
        shapes = manifest.arrays.items()
        arrays: dict[str, Numbers] = {name: hollow(shape, DTYPES[dtype]) for name, (shape, dtype) in shapes}
        check(Snapshot(arrays, manifest.facts), manifest)

    def attempt(one: int) -> tuple[Found | None, str]:
        """Return the checkpoint and ""; or None and the reason."""
        path = folder.path(one)
        try:
            manifest, arrays = folder.read(one, fits, together.share)
        except DamagedError as error:
            if step is not None:
                raise CheckpointError(f"{path} must be good. {error}") from error
            return None, str(error) if os.path.lexists(path) else _GONE  # a writer may have removed it meanwhile
        return Found(manifest, Snapshot(arrays, manifest.facts), path, aside), ""

    def set_aside(one: int, why: str) -> str:
        return (folder.set_aside(one, why) if sets_aside else folder.path(one)).name

    tried: list[int] = []
    # A writer may have removed all listed checkpoints after writing others.
    while (steps := together.first(folder.steps, what) if step is None else [step]) != tried:
        tried = steps
        for one in steps:
            found, why = together.all(partial(attempt, one), what)
            whys = [words for words in together.exchange.all_gather(why, what) if words]
            if not whys:
                return found
            if _GONE not in whys:
                name = together.first(partial(set_aside, one, whys[0]), what)
                aside.append(f"{name} ({whys[0].rstrip('.')})")
        if aside:
            must = f"At least one checkpoint in {folder.folder} must be good."
            try_next = "copy a good one there; or begin anew in another folder."
            raise CheckpointError(message(must, "; ".join(aside), try_next))
    if steps:
        must = f"Checkpoints that are listed in {folder.folder} must exist."
        raise CheckpointError(message(must, f"steps {steps}, all gone", "again."))
    return None


def _check_any(folder: Folder) -> None:
    """Refuse a folder in which all checkpoints have been set aside."""
    if folder.bad() and not folder.steps():
        names = ", ".join(path.name for path in folder.bad())
        must = f"At least one checkpoint in {folder.folder} must be good."
        attempt = "look at their why.json; to begin anew, move them away, or choose another folder."
        raise CheckpointError(message(must, f"{names} only", attempt))


def read_one(path: str | os.PathLike, check: Callable[[Snapshot], None]) -> Found:
    """Return the checkpoint at a path, or the newest good checkpoint in it, see `newest`; damaged ones stay in place."""
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
