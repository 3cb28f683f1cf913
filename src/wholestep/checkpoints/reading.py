"""Read the newest good checkpoint of a folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wholestep.checkpoints.arrays import dtype_of
from wholestep.checkpoints.common import CommonFolder
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.pieces import Numbers, hollow
from wholestep.checkpoints.snapshot import Snapshot
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
        SpecificationError: what `check` raises.
    """
    folder, together = common.folder, common.together
    what = f"reading checkpoints from {folder.folder}"
    together.all(lambda: check_any(folder), what)
    aside: list[str] = []

    def fits(manifest: Manifest) -> None:
        shapes = manifest.arrays.items()
        arrays: dict[str, Numbers] = {name: hollow(shape, dtype_of(dtype)) for name, (shape, dtype) in shapes}
        check(Snapshot(arrays, manifest.facts), manifest)

    tried: list[int] = []
    # A writer may have removed all listed checkpoints after writing others.
    while (steps := together.first(folder.steps, what) if step is None else [step]) != tried:
        tried = steps
        for one in steps:
            attempt = partial(_attempt, folder, one, fits, together.share, is_only=step is not None)
            found, why = together.all(attempt, what)
            whys = [words for words in together.gather(why, what) if words]
            if not whys:
                manifest, arrays = found
                return Found(manifest, Snapshot(arrays, manifest.facts), folder.path(one), aside)
            if _GONE not in whys:
                name = together.first(partial(_set_aside, folder, one, whys[0], really=sets_aside), what)
                aside.append(f"{name} ({whys[0].rstrip('.')})")
        if aside:
            must = f"At least one checkpoint in {folder.folder} must be good."
            try_next = "copy a good one there; or begin anew in another folder."
            raise CheckpointError(message(must, "; ".join(aside), try_next))
    if steps:
        must = f"Checkpoints that are listed in {folder.folder} must exist."
        raise CheckpointError(message(must, f"steps {steps}, all gone", "again."))
    return None


def _attempt(
    folder: Folder, step: int, fits: Callable[[Manifest], None], share: tuple[int, int], *, is_only: bool
) -> tuple[tuple[Manifest, dict[str, Numbers]], str]:
    """Return the content of a checkpoint and ""; or, if it is damaged, the reason."""
    try:
        return folder.read(step, fits, share), ""
    except DamagedError as error:
        if is_only:
            raise CheckpointError(f"{folder.path(step)} must be good. {error}") from error
        # A writer may have removed it meanwhile.
        return (Manifest(step, [], [], {}, {}), {}), str(error) if os.path.lexists(folder.path(step)) else _GONE


def _set_aside(folder: Folder, step: int, why: str, *, really: bool) -> str:
    """Set a damaged checkpoint aside, and return its name."""
    return (folder.set_aside(step, why) if really else folder.path(step)).name


def check_any(folder: Folder) -> None:
    """Refuse a folder in which all checkpoints have been set aside.

    Raises:
        CheckpointError: no checkpoint is left.
    """
    if folder.bad() and not folder.steps():
        names = ", ".join(path.name for path in folder.bad())
        must = f"At least one checkpoint in {folder.folder} must be good."
        attempt = "look at their why.json; to begin anew, move them away, or choose another folder."
        raise CheckpointError(message(must, f"{names} only", attempt))


def locate(path: str | os.PathLike) -> tuple[Folder, int | None]:
    """Return the folder of checkpoints of a path, and the step, if the path is a checkpoint."""
    folder = Folder(path)
    parent = Folder(folder.folder.parent)
    for step in parent.steps() if folder.folder.name.startswith("step-") else ():
        if parent.path(step).name == folder.folder.name:
            return parent, step
    return folder, None
