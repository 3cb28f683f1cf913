"""Paths that do not name the folder of a run: a checkpoint in it, a part of one, a file."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from wholestep.checkpoints.address import Location, as_location, is_remote
from wholestep.checkpoints.folder import NUMBER, Folder
from wholestep.errors import SpecificationError, message

_NAME = re.compile(rf"(step|bad)-{NUMBER}(?:-[1-9][0-9]*)?")
_FILES = "*-of-*-*.safetensors", "why.json"
_KERAS = (".keras", ".h5")
_MOST = 3  # the most folders that a line names


class PathKind(StrEnum):
    """The kind of a path that is not the folder of a run, as a noun."""

    STEP = "a checkpoint"
    BAD = "a damaged checkpoint, which was set aside"
    RENAMED = "a checkpoint under another name than that of its step"
    PART = "a part"
    FILE = "a file"
    KERAS = "a Keras file"


@dataclass(frozen=True)
class OtherPath:
    """A path in place of the folder of a run.

    Attributes:
        folder: the folder of the run to which it belongs; "" if it belongs to none.
        checkpoint: the checkpoint of which it is a part; "" if it is no part of one.
    """

    kind: PathKind
    folder: str = ""
    checkpoint: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.checkpoint}" if self.checkpoint else str(self.kind)


def other_path(path: Location) -> OtherPath | None:
    """Return the kind of a path or address that is not the folder of a run; None if it may be one.

    >>> other_path("s3://bucket/runs/a/step-00000012")
    OtherPath(kind=<PathKind.STEP: 'a checkpoint'>, folder='s3://bucket/runs/a', checkpoint='')
    >>> other_path("s3://bucket/runs/a")
    """
    if is_remote(path):
        return _in_store(path)
    here = Path(str(path))
    if other := _in_checkpoint(Path(os.path.realpath(here))) or _in_checkpoint(here):
        return other
    # also a name of a file that does not exist yet
    if here.suffix in _KERAS and not os.path.isdir(here):
        return OtherPath(PathKind.KERAS)
    # not is_file, which raises an error of the disk
    return OtherPath(PathKind.FILE) if os.path.isfile(here) else None


def check_run_folder(path: Location) -> None:
    """Refuse to write the checkpoints of a run to a path that is not the folder of a run."""
    path = as_location(path)
    if (other := other_path(path)) is not None:
        must = "The checkpoints of a run need a folder of their own."
        attempt = 'a folder: "runs/a".'
        if other.folder:
            attempt = f"{other.folder}, to resume that run; or another folder."
        raise SpecificationError(message(must, f"{path}, {other}", attempt))


def reading(path: Location) -> tuple[str, str] | None:
    """Return (received, attempt) for a path without a checkpoint; None for an ordinary path."""
    path = as_location(path)
    other = other_path(path)
    inside = runs_inside(path)
    if inside and other is None:
        return f"{path}, which has no checkpoint itself", f"{' or '.join(inside)}."
    if other is None or (other.kind is PathKind.STEP and not os.path.islink(str(path))):
        return None
    ways = {
        PathKind.STEP: os.path.realpath(str(path)),
        PathKind.BAD: other.folder,
        PathKind.RENAMED: "name it as it was, by its step: step-00000012",
        PathKind.PART: other.checkpoint,
        PathKind.FILE: "the folder that was passed to fit",
        PathKind.KERAS: "ws.load_weights(model, path) for its weights",
    }
    return f"{path}, {other}", f"{ways[other.kind]}."


def runs_inside(path: Location) -> list[str]:
    """Return the subfolders of a local folder that hold checkpoints: a few of them."""
    if is_remote(path):
        return []
    with suppress(OSError):
        folders = sorted(each for each in Path(str(path)).iterdir() if each.is_dir())
        others = [each for each in folders if not _NAME.fullmatch(each.name)]
        return [str(each) for each in others if Folder(each).steps()][:_MOST]
    return []


def _in_store(address: str) -> OtherPath | None:
    start, _, key = address.rstrip("/").partition("://")
    whole = PurePosixPath(key)
    for path in (whole, *whole.parents):
        if (match := _NAME.fullmatch(path.name)) and len(path.parts) > 1:
            checkpoint = f"{start}://{path}" if path != whole else ""
            return _of(match[1], checkpoint, f"{start}://{path.parent}")
    return OtherPath(PathKind.KERAS) if whole.suffix in _KERAS else None


def _in_checkpoint(whole: Path) -> OtherPath | None:
    for path in (whole, *whole.parents):
        match = _NAME.fullmatch(path.name)
        if (match and path == whole) or _is_checkpoint(path):
            checkpoint = str(path) if path != whole else ""
            return _of(match[1] if match else "", checkpoint, str(path.parent))
    return None


def _of(name: str, checkpoint: str, folder: str) -> OtherPath:
    if not name:
        return OtherPath(PathKind.PART if checkpoint else PathKind.RENAMED, "", checkpoint)
    kind = PathKind.STEP if name == "step" else PathKind.BAD
    return OtherPath(PathKind.PART if checkpoint else kind, folder, checkpoint)


def _is_checkpoint(path: Path) -> bool:
    """Whether a local folder holds the files of a checkpoint."""
    with suppress(OSError):
        has_manifest = (path / "manifest.json").is_file()
        return has_manifest and any(next(path.glob(name), None) for name in _FILES)
    return False
