"""From a folder to a snapshot: the newest checkpoint that is good, of this model."""

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
    """A checkpoint that has been read, every byte of it verified.

    Args:
        aside: what was damaged, and newer.
    """

    manifest: Manifest
    snapshot: Snapshot
    path: Path
    aside: list[str]


def newest(
    common: CommonFolder, check: Callable[[Snapshot, Manifest], None], *, sets_aside: bool, step: int | None = None
) -> Found | None:
    """Return the newest checkpoint that is good, in the eyes of all processes; None if there is none at all.

    Args:
        check: raises a SpecificationError if it is another model's, or of other data; is given arrays without room.
            Only a DamagedError of its own makes this checkpoint a damaged one.
        sets_aside: whether damaged ones are renamed; only whoever holds the lock may.
        step: of the only one that is wanted.

    Raises:
        CheckpointError: there are some, and all are damaged; or one cannot be read here, which may be good.
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
    # A writer may have removed all that were there, once it had written others.
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
            must = f"One checkpoint in {folder.folder} at least must be good."
            try_next = "copy one back from elsewhere; or begin anew in another folder."
            raise CheckpointError(message(must, "; ".join(aside), try_next))
    if steps:
        must = f"Checkpoints that are listed in {folder.folder} must be there to be read."
        raise CheckpointError(message(must, f"steps {steps}, all gone", "again."))
    return None


def _attempt(
    folder: Folder, step: int, fits: Callable[[Manifest], None], share: tuple[int, int], *, is_only: bool
) -> tuple[tuple[Manifest, dict[str, Numbers]], str]:
    """Return what a checkpoint holds, and why it is not good, if it is not: then there may be another one."""
    try:
        return folder.read(step, fits, share), ""
    except DamagedError as error:
        if is_only:
            raise CheckpointError(f"{folder.path(step)} must be good. {error}") from error
        # Its writer may have removed it meanwhile.
        return (Manifest(step, [], [], {}, {}), {}), str(error) if os.path.lexists(folder.path(step)) else _GONE


def _set_aside(folder: Folder, step: int, why: str, *, really: bool) -> str:
    """Return what a damaged checkpoint is called now."""
    return (folder.set_aside(step, why) if really else folder.path(step)).name


def check_any(folder: Folder) -> None:
    """Refuse to begin where nothing is left but what has been set aside.

    Raises:
        CheckpointError: as said.
    """
    if folder.bad() and not folder.steps():
        names = ", ".join(path.name for path in folder.bad())
        must = f"One checkpoint in {folder.folder} at least must be good."
        attempt = "look at their why.json; to begin anew, move them away, or choose another folder."
        raise CheckpointError(message(must, f"{names} alone", attempt))


def locate(path: str | os.PathLike) -> tuple[Folder, int | None]:
    """Return the folder of checkpoints that a path names, and the step, if the path is that of a checkpoint."""
    folder = Folder(path)
    parent = Folder(folder.folder.parent)
    for step in parent.steps() if folder.folder.name.startswith("step-") else ():
        if parent.path(step).name == folder.folder.name:
            return parent, step
    return folder, None
