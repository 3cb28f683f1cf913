"""Paths that do not name the folder of a run: a checkpoint in it, a part of one, a file."""

import os
import re
from collections.abc import Iterator
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


class Kind(StrEnum):
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

    kind: Kind
    folder: str = ""
    checkpoint: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.checkpoint}" if self.checkpoint else str(self.kind)


def other_path(path: Location) -> OtherPath | None:
    """Return the kind of a path or address that is not the folder of a run; None if it may be one.

    >>> other_path("s3://bucket/runs/a/step-00000012")
    OtherPath(kind=<Kind.STEP: 'a checkpoint'>, folder='s3://bucket/runs/a', checkpoint='')
    >>> other_path("s3://bucket/runs/a")
    """
    if is_remote(path):
        return _in_store(path)
    here = Path(str(path))
    other = _in_checkpoint(Path(os.path.realpath(here))) or _in_checkpoint(here)
    if other is not None:
        return other
    # also a name of a file that does not exist yet
    if here.suffix in _KERAS and not os.path.isdir(here):
        return OtherPath(Kind.KERAS)
    # not is_file, which raises an error of the disk
    return OtherPath(Kind.FILE) if os.path.isfile(here) else None


def check_run_folder(path: Location) -> None:
    """Refuse to write the checkpoints of a run to a path that is not the folder of a run."""
    path = as_location(path)
    if (other := other_path(path)) is not None:
        must = "The checkpoints of a run need a folder of their own."
        is_of_run = other.folder != ""
        resume = f"{other.folder}, to resume that run; or another folder."
        attempt = resume if is_of_run else 'a folder: "runs/a".'
        raise SpecificationError(message(must, f"{path}, {other}", attempt))


def reading(path: Location) -> tuple[str, str] | None:
    """Return (received, attempt) for a path without a checkpoint; None for an ordinary path."""
    path = as_location(path)
    other = other_path(path)
    inside = runs_inside(path)
    if inside and other is None:
        return f"{path}, which has no checkpoint itself", f"{' or '.join(inside)}."
    if other is None or (other.kind is Kind.STEP and not os.path.islink(str(path))):
        return None
    ways = {
        Kind.STEP: os.path.realpath(str(path)),
        Kind.BAD: other.folder,
        Kind.RENAMED: "name it as it was, by its step: step-00000012",
        Kind.PART: other.checkpoint,
        Kind.FILE: "the folder that was passed to fit",
        Kind.KERAS: "ws.load_weights(model, path) for its weights",
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
    for each in _upwards(whole):
        if (match := _NAME.fullmatch(each.name)) and len(each.parts) > 1:
            is_part = each != whole
            return _of(match[1], f"{start}://{each}" if is_part else "", f"{start}://{each.parent}")
    return OtherPath(Kind.KERAS) if whole.suffix in _KERAS else None


def _in_checkpoint(path: Path) -> OtherPath | None:
    for each in _upwards(path):
        match = _NAME.fullmatch(each.name)
        is_part = each != path
        if (match and not is_part) or _is_checkpoint(each):
            return _of(match[1] if match else "", str(each) if is_part else "", str(each.parent))
    return None


def _of(name: str, checkpoint: str, folder: str) -> OtherPath:
    if not name:
        return OtherPath(Kind.PART if checkpoint else Kind.RENAMED, "", checkpoint)
    kind = Kind.STEP if name == "step" else Kind.BAD
    return OtherPath(Kind.PART if checkpoint else kind, folder, checkpoint)


def _upwards(path: Path | PurePosixPath) -> Iterator[Path | PurePosixPath]:
    yield path
    yield from path.parents


def _is_checkpoint(folder: Path | PurePosixPath) -> bool:
    """Whether a local folder holds the files of a checkpoint."""
    path = Path(folder)
    with suppress(OSError):
        has_manifest = (path / "manifest.json").is_file()
        return has_manifest and any(next(path.glob(name), None) for name in _FILES)
    return False
