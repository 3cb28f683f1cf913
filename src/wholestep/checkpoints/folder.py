"""A folder of checkpoints: each is there as a whole, or not at all; damaged ones are set aside.

    lock   step-00000500/{manifest.json, 00000-of-00001-00.safetensors, ...}   bad-00000450-1/{..., why.json}

A checkpoint is written beside the others under a name of its own, synced, and renamed: that is its commit. Then the
files are read back and verified, and only then do older ones go.
"""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wholestep.checkpoints import arrays as carrier
from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints.files import Lock, UnreadableError, check_room, create, remove, sync_folder, write_all
from wholestep.checkpoints.manifest import Manifest
from wholestep.errors import CheckpointError, SpecificationError, message

Arrays = Mapping[str, np.ndarray]
Facts = Mapping[str, Any]

_STEP = re.compile(r"step-(\d{8,18})")
_STORE = re.compile(r"[\w+.-]+://|(?:gs|s3|hdfs|abfss?|https?):/")  # of two slashes, a Path leaves one
_REPLACED = ".replaced-"
_ROOM = 1 << 16  # bytes beside the arrays


class Folder:
    """A folder of checkpoints, by the number of updates before each.

    Raises:
        SpecificationError: the folder is no path of a file system.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Folder(folder)
    ...     _ = kept.write(7, {"w": np.ones(3)}, {"epoch": 0})
    ...     manifest, arrays = kept.read(7)
    ...     kept.steps(), manifest.facts, arrays["w"].tolist()
    ([7], {'epoch': 0}, [1.0, 1.0, 1.0])
    """

    def __init__(self, folder: str | os.PathLike):
        if _STORE.match(os.fspath(folder)):
            must = "Checkpoints are written to, and read from, a file system: one can rename a folder and lock a file."
            attempt = "a local or a network folder; a step-* folder may be copied from there as soon as it is there."
            raise SpecificationError(message(must, os.fspath(folder), attempt))
        self.folder = Path(folder)

    def steps(self) -> list[int]:
        """Return the steps that are there, newest first; none has been looked into."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def bad(self) -> list[Path]:
        """Return what has been set aside."""
        return sorted(self.folder.glob("bad-*")) if self.folder.is_dir() else []

    # ---- writing ----

    def lock(self) -> Lock:
        """Return the lock of the folder, which is made if there is none.

        Raises:
            CheckpointError: somebody else holds the lock, or the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return Lock(self.folder)
        except (OSError, ImportError) as error:
            must = f"Checkpoints need a folder that can be written to and locked: {self.folder}."
            raise CheckpointError(message(must, str(error), "another folder, on Linux or macOS.")) from error

    def write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        facts: Mapping[str, Any],
        rest: Mapping[str, Any] | None = None,
        *,
        replaces: bool = False,
    ) -> Path:
        """Write the checkpoint of a step, and return its folder once it has been read back and verified.

        Args:
            replaces: whether it takes the place of one of this step.

        Raises:
            CheckpointError: it could not be written, or is there; the others are as they were.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        check_room(self.folder, sum(array.nbytes for array in arrays.values()) + _ROOM)
        new, path = self.folder / f".new-{uuid.uuid4().hex[:12]}", self.path(step)
        try:
            if path.exists() and not replaces:
                raise FileExistsError(17, "there is one of this step already", str(path))
            new.mkdir()
            self._fill(new, Manifest(step, [], [], dict(facts), dict(rest or {})), arrays)
            if path.exists():
                # Whoever comes next puts it back, or removes it.
                os.rename(path, self.folder / f"{_REPLACED}{step:08d}")
            os.rename(new, path)
            sync_folder(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                remove(new)
                self._put_back()
            needed = sum(array.nbytes for array in arrays.values())
            must = f"The checkpoint of step {step} ({needed} bytes) could not be written to {self.folder}."
            attempt = "look at that folder and its disk; the checkpoints before this one are as they were."
            raise CheckpointError(message(must, error.strerror or error, attempt)) from error
        except BaseException:
            remove(new)
            raise
        self.verify(step)  # else whoever comes next puts back what was replaced
        remove(self.folder / f"{_REPLACED}{step:08d}")
        return path

    def _fill(self, new: Path, manifest: Manifest, arrays: Arrays) -> None:
        groups = carrier.shared_out(arrays)
        for i, names in enumerate(groups):
            part = {name: arrays[name] for name in names}
            file, leaves = carrier.write(new / f"00000-of-00001-{i:02d}.safetensors", part)
            manifest.files.append(file)
            manifest.leaves.extend(leaves)
        sync_folder(new)
        manifests.write(new, manifest)
        sync_folder(new)

    def clear(self) -> None:
        """Remove what writers left that were stopped. Only whoever holds the lock may."""
        self._put_back()
        for path in [*self.folder.glob(".new-*"), *self.folder.glob(".old-*")]:
            remove(path)

    def _put_back(self) -> None:
        """Let a checkpoint that was to be replaced be there again, unless the other one is, and is good."""
        for path in self.folder.glob(f"{_REPLACED}*"):
            number = path.name.removeprefix(_REPLACED)
            home = self.folder / f"step-{number}"
            if home.exists():
                try:
                    self.verify(int(number))
                except UnreadableError:
                    continue
                except CheckpointError as error:
                    self.set_aside(int(number), str(error))
            remove(path) if home.exists() else path.rename(home)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step; nobody finds half of it.

        Raises:
            CheckpointError: it cannot be removed.
        """
        old = self.folder / f".old-{uuid.uuid4().hex[:12]}"
        try:
            os.rename(self.path(step), old)
        except OSError as error:
            must = f"An older checkpoint must be removed: {self.path(step)}."
            attempt = "look at that folder; the newer ones are as they should be."
            raise CheckpointError(message(must, error.strerror or error, attempt)) from error
        remove(old)

    # ---- reading ----

    def manifest(self, step: int) -> Manifest:
        """Return what the checkpoint of a step holds, without reading it.

        Raises:
            CheckpointError: there is no manifest that verifies.
        """
        manifest = manifests.read(self.path(step))
        if manifest.step != step:
            raise CheckpointError(
                f"The manifest of {self.path(step).name} must be of its step. It is of {manifest.step}."
            )
        return manifest

    def verify(self, step: int) -> Manifest:
        """Read all of a checkpoint, and return what it holds.

        Raises:
            CheckpointError: something is not what was written.
        """
        manifest = self.manifest(step)
        for file in manifest.files:
            carrier.verify(self.path(step), file)
        return manifest

    def read(
        self, step: int, check: Callable[[Manifest], None] = lambda manifest: None
    ) -> tuple[Manifest, dict[str, np.ndarray]]:
        """Return what a checkpoint holds, and its arrays, all of which have been verified.

        Args:
            check: raises an error if these are not the arrays that are wanted, before room is made for one of them.

        Raises:
            CheckpointError: something is not what was written.
        """
        manifest, arrays = self.manifest(step), dict[str, np.ndarray]()
        check(manifest)
        for file in manifest.files:
            arrays |= carrier.read(self.path(step), file, [leaf for leaf in manifest.leaves if leaf.file == file.name])
        return manifest, arrays

    def newest(
        self,
        check: Callable[[Manifest], None] = lambda manifest: None,
        tell: Callable[[int, str], object] | None = None,
    ) -> Iterator[tuple[Manifest, dict[str, np.ndarray]]]:
        """Yield checkpoints that have been verified, newest first.

        Args:
            check: as of `read`.
            tell: is told of damaged ones, and why; None if they are to be set aside.

        Raises:
            CheckpointError: one cannot be read here, which may be good.
        """
        tell = tell or self.set_aside
        for step in self.steps():
            try:
                found = self.read(step, check)
            except UnreadableError:
                raise
            except OSError as error:
                must = f"{self.path(step)} must be there to be read."
                raise CheckpointError(message(must, error.strerror or error, "look at its disk.")) from error
            except CheckpointError as error:
                if self.path(step).exists():  # its writer may have removed it meanwhile
                    tell(step, str(error))
                continue
            yield found

    def check_any(self) -> None:
        """Refuse to begin where nothing is left but what has been set aside.

        Raises:
            CheckpointError: as said.
        """
        if self.bad() and not self.steps():
            names = ", ".join(path.name for path in self.bad())
            must = f"One checkpoint in {self.folder} at least must be good."
            attempt = "look at their why.json; to begin anew, move them away, or choose another folder."
            raise CheckpointError(message(must, f"{names} alone", attempt))

    def set_aside(self, step: int, why: str) -> Path:
        """Keep a damaged checkpoint under a name that nobody reads, with the reason."""
        num = 1
        while (bad := self.folder / f"bad-{step:08d}-{num}").exists():
            num += 1
        os.rename(self.path(step), bad)
        file = create(bad / "why.json") if not (bad / "why.json").exists() else -1
        if file >= 0:
            try:
                write_all(file, json.dumps({"step": step, "why": why}).encode())
            finally:
                os.close(file)
        sync_folder(self.folder)
        return bad
