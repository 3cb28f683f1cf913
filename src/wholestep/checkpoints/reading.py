"""From a folder to a snapshot: the newest checkpoint that is good, of this model."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wholestep.checkpoints.arrays import dtype_of
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.snapshot import Snapshot
from wholestep.errors import CheckpointError, WholestepError, message


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
    folder: Folder, check: Callable[[Snapshot, Manifest], None], *, sets_aside: bool, step: int | None = None
) -> Found | None:
    """Return the newest checkpoint that is good; None if there is none at all.

    Args:
        check: raises a SpecificationError if it is another model's, or of other data; is given arrays without room.
        sets_aside: whether damaged ones are renamed; only whoever holds the lock may.
        step: of the only one that is wanted.

    Raises:
        CheckpointError: there are some, and all are damaged.
        SpecificationError: what `check` raises.
    """
    aside: list[str] = []

    def note(step: int, why: str) -> None:
        name = folder.set_aside(step, why).name if sets_aside else folder.path(step).name
        aside.append(f"{name} ({why.rstrip('.')})")

    def fits(manifest: Manifest) -> None:
        hollow = {leaf.name: _hollow(leaf.shape, leaf.dtype) for leaf in manifest.leaves}
        with_reason(lambda: check(Snapshot(hollow, manifest.facts), manifest))

    folder.check_any()
    found = folder.newest(fits, note) if step is None else iter([folder.read(step, fits)])
    for manifest, arrays in found:
        return Found(manifest, Snapshot(arrays, manifest.facts), folder.path(manifest.step), aside)
    if aside:
        must = f"One checkpoint in {folder.folder} at least must be good."
        attempt = "copy one back from elsewhere; or begin anew in another folder."
        raise CheckpointError(message(must, "; ".join(aside), attempt))
    # Their writer may have removed all that were there, once it had written others.
    return newest(folder, check, sets_aside=sets_aside) if step is None and folder.steps() else None


def locate(path: str | os.PathLike) -> tuple[Folder, int | None]:
    """Return the folder of checkpoints that a path names, and the step, if the path is that of a checkpoint."""
    folder = Folder(path)
    parent = Folder(folder.folder.parent)
    for step in parent.steps() if folder.folder.name.startswith("step-") else ():
        if parent.path(step).name == folder.folder.name:
            return parent, step
    return folder, None


def with_reason(call: Callable[[], None]) -> None:
    """Make a call that looks into a manifest's facts; what is not as a run has said it is a CheckpointError."""
    try:
        call()
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, ValueError) as error:
        if isinstance(error, WholestepError):
            raise
        raise CheckpointError(f"The manifest does not say of a run what it must ({error!r}).") from error


def _hollow(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of this shape that takes no room."""
    return np.broadcast_to(np.zeros((), dtype_of(dtype)), shape)
