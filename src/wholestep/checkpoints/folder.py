"""A folder of checkpoints: each is there as a whole, or not at all; damaged ones are set aside.

    lock   step-00000500/{manifest.json, 00000-of-00001-00.safetensors, ...}   bad-00000450-1/{..., why.json}

A checkpoint is written beside the others under a name of its own, synced, and renamed: that is its commit. Then the
files are read back and verified, and only then do older ones go. Entries that the library has not made are not counted,
renamed or removed.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholestep.checkpoints import arrays as carrier
from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints.arrays import FileFacts, Leaf
from wholestep.checkpoints.files import Lock, check_room, create, make_folder, on_disk, read_all, sync_folder, write_all
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.pieces import Numbers, Piece, Pieces
from wholestep.errors import CheckpointError, DamagedError, SpecificationError, message

Arrays = Mapping[str, Numbers]
Facts = Mapping[str, Any]

# Names of the folders that the library makes. Each holds a file that the library names, or nothing.
_NUMBER = r"(?:[0-9]{8}|[1-9][0-9]{8,17})"
_STEP = re.compile(rf"step-{_NUMBER}")
_BAD = re.compile(rf"bad-{_NUMBER}-[1-9][0-9]*")
_REPLACED = re.compile(rf"\.replaced-{_NUMBER}")
_LITTER = re.compile(r"\.(?:new|old)-[0-9a-f]{12}(?:-[0-9]+)?")
_FILE = re.compile(r"manifest\.json|why\.json|[0-9]+-of-[0-9]+-[0-9]+\.safetensors")
_STORE = re.compile(r"[\w+.-]+://|(?:gs|s3|hdfs|abfss?|https?):/")  # of two slashes, a Path leaves one
_ROOM = 1 << 16  # bytes beside the arrays


class Folder:
    """A folder of checkpoints, by the number of updates before each.

    Attributes:
        folder: its absolute path.

    Raises:
        SpecificationError: the folder is no path of a file system.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Folder(folder)
    ...     _ = kept.write(7, {"w": np.ones(3)}, {"epoch": 0})
    ...     manifest, arrays = kept.read(7)
    ...     kept.steps(), manifest.facts, arrays["w"].tolist()
    ([7], {'epoch': 0}, [1.0, 1.0, 1.0])
    """

    def __init__(self, folder: str | os.PathLike):
        path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        try:
            is_path = isinstance(path, str) and path != "" and b"\0" not in os.fsencode(path)
        except UnicodeEncodeError:
            is_path = False
        if not is_path or _STORE.match(path):
            must = "Checkpoints are written to, and read from, a file system: one can rename a folder and lock a file."
            attempt = "a local or a network folder; a step-* folder may be copied from there as soon as it is there."
            raise SpecificationError(message(must, path if is_path else repr(folder), attempt))
        with on_disk(f"{path} must be in a working directory that is there."):
            self.folder = Path(path).absolute()

    def steps(self) -> list[int]:
        """Return the steps that are there, newest first; no manifest has been read.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return sorted((_step_of(path) for path in self._entries(_STEP)), reverse=True)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def bad(self) -> list[Path]:
        """Return the checkpoints that have been set aside.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return sorted(self._entries(_BAD))

    def _entries(self, pattern: re.Pattern) -> list[Path]:
        """Return the folders in this one that the library has made under such names."""
        with on_disk(f"{self.folder} must be readable as a folder of checkpoints."):
            while True:
                try:
                    names = os.listdir(self.folder)
                except (FileNotFoundError, NotADirectoryError):
                    return []
                paths = [self.folder / name for name in names if pattern.fullmatch(name)]
                ours = [path for path in paths if _is_ours(path)]
                if ours or all(os.path.lexists(path) for path in paths):
                    return ours
                # A writer has removed those that were listed, and written others.

    # ---- writing ----

    def lock(self) -> Lock:
        """Return the lock of the folder, which is made if there is none.

        Raises:
            CheckpointError: somebody else holds the lock, or the folder cannot be written to.
        """
        must = f"Checkpoints need a folder that can be written to and locked: {self.folder}."
        attempt = "another folder, on Linux or macOS."
        try:
            with on_disk(must, attempt):
                make_folder(self.folder)
                return Lock(self.folder)
        except ImportError as error:
            raise CheckpointError(message(must, error, attempt)) from error

    def owner(self) -> str:
        """Return who holds the lock, as `Lock.owner` says it; nothing if nobody ever did."""
        try:
            return read_all(self.folder / "lock", _ROOM).decode(errors="replace")
        except (OSError, DamagedError):
            return ""

    def write(
        self,
        step: int,
        arrays: Arrays,
        facts: Facts,
        rest: Facts | None = None,
        *,
        replaces: bool = False,
    ) -> Path:
        """Write the checkpoint of a step, and return its folder once it has been read back and verified.

        Args:
            replaces: whether it takes the place of one of this step.

        Raises:
            CheckpointError: it could not be written, or is there; the others are as they were.
        """
        token = self.new_token()
        files, leaves = self.fill(token, step, arrays)
        return self.commit(token, Manifest(step, files, leaves, dict(facts), dict(rest or {})), replaces=replaces)

    @staticmethod
    def new_token() -> str:
        """Return a name for a checkpoint that is to be written, which no other has."""
        return uuid.uuid4().hex[:12]

    def fill(
        self, token: str, step: int, arrays: Arrays, share: tuple[int, int] = (0, 1)
    ) -> tuple[list[FileFacts], list[Leaf]]:
        """Write arrays for the checkpoint of a step, which nobody finds before its `commit`; return where they are.

        Args:
            token: names what is to be committed.
            share: the number of this process, of so many, each of which writes a part.

        Raises:
            CheckpointError: they could not be written.
        """
        new, files, leaves = self._new(token), list[FileFacts](), list[Leaf]()
        contents = [content for name, array in arrays.items() for content in carrier.contents_of(name, array)]
        nbytes = sum(content.array.nbytes for content in contents)
        with self._told(token, step, nbytes, share):
            check_room(self.folder, nbytes + _ROOM)
            new.mkdir(exist_ok=share[1] > 1)
            for i, several in enumerate(carrier.shared_out(contents)):
                file, held = carrier.write(new / f"{share[0]:05d}-of-{share[1]:05d}-{i:02d}.safetensors", several)
                files.append(file)
                leaves.extend(held)
            sync_folder(new)
        return files, leaves

    def commit(self, token: str, manifest: Manifest, *, replaces: bool) -> Path:
        """Let a checkpoint be there whose arrays have been written, and return its folder once it has been verified.

        Raises:
            CheckpointError: see `write`.
        """
        new, step = self._new(token), manifest.step
        path, replaced = self.path(step), self.folder / f".replaced-{step:08d}"
        with self._told(token, step, manifest.nbytes):
            is_there = os.path.lexists(path)
            if is_there and not (replaces and path in self._entries(_STEP)):
                raise FileExistsError(errno.EEXIST, f"there is a {path.name} already")
            carrier.check_leaves(manifest.files, manifest.leaves)
            manifests.write(new, manifest)
            sync_folder(new)
            if is_there:
                os.rename(path, replaced)  # whoever comes next puts it back, or removes it
            os.rename(new, path)
            sync_folder(self.folder)
        try:
            self.verify(step)  # else whoever comes next puts back what was replaced
        except DamagedError as error:
            raise CheckpointError(f"{path} must be read back as it was written. {error} Try: another disk.") from error
        if is_there:
            _remove(replaced)
        return path

    def discard(self, token: str) -> None:
        """Remove what was written and not committed."""
        _remove(self._new(token))

    def _new(self, token: str) -> Path:
        return self.folder / f".new-{token}"

    @contextlib.contextmanager
    def _told(self, token: str, step: int, nbytes: int, share: tuple[int, int] = (0, 1)) -> Iterator[None]:
        """Leave nothing of a checkpoint that cannot be written; of several processes' part, the caller removes it."""
        must = f"The checkpoint of step {step} ({nbytes} bytes) could not be written to {self.folder}."
        try:
            with on_disk(must, "look at that folder and its disk; the checkpoints before this one are as they were."):
                yield
        except BaseException as error:
            if share[1] == 1:
                self.discard(token)
                if isinstance(error, Exception):
                    with contextlib.suppress(CheckpointError):
                        self._put_back()
            raise

    def clear(self) -> None:
        """Remove what writers left that were stopped. Only whoever holds the lock may.

        Raises:
            CheckpointError: the folder cannot be read, or changed.
        """
        self._put_back()
        for path in self._entries(_LITTER):
            _remove(path)

    def _put_back(self) -> None:
        """Let a checkpoint that was to be replaced be there again, unless the other one is, and is good."""
        for path in self._entries(_REPLACED):
            step = _step_of(path)
            if os.path.lexists(self.path(step)):
                try:
                    self.verify(step)
                    _remove(path)
                    continue
                except DamagedError as error:
                    self.set_aside(step, str(error))
            with on_disk(f"The checkpoint of step {step} must be called {self.path(step)} again."):
                path.rename(self.path(step))

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step; nobody finds half of it.

        Raises:
            CheckpointError: it cannot be removed.
        """
        old = self.folder / f".old-{uuid.uuid4().hex[:12]}"
        attempt = "look at that folder; the newer ones are as they should be."
        with on_disk(f"An older checkpoint must be removed: {self.path(step)}.", attempt):
            os.rename(self.path(step), old)
        _remove(old)

    # ---- reading ----

    def manifest(self, step: int) -> Manifest:
        """Return what the checkpoint of a step holds, without reading its arrays.

        Raises:
            DamagedError: there is no manifest that verifies.
            CheckpointError: it cannot be read now, or by this release; it may be good.
        """
        with self._reading(step):
            manifest = manifests.read(self.path(step))
        if manifest.step != step:
            raise DamagedError(f"The manifest of {self.path(step).name} must be of its step. It is of {manifest.step}.")
        return manifest

    def verify(self, step: int) -> Manifest:
        """Read all of a checkpoint, and return what it holds.

        Raises:
            DamagedError: something is not what was written.
            CheckpointError: see `manifest`.
        """
        manifest = self.manifest(step)
        with self._reading(step):
            for file in manifest.files:
                carrier.verify(self.path(step), file)
        return manifest

    def read(
        self, step: int, check: Callable[[Manifest], None] = lambda manifest: None, share: tuple[int, int] = (0, 1)
    ) -> tuple[Manifest, dict[str, Numbers]]:
        """Return what a checkpoint holds, and its arrays, all of which have been verified.

        Args:
            check: raises an error if these are not the arrays that are wanted, before room is made for one of them.
            share: the number of this process, of so many, which verify the files of pieces together.

        Raises:
            DamagedError: something is not what was written.
            CheckpointError: see `manifest`.
        """
        manifest = self.manifest(step)
        check(manifest)
        with self._reading(step):
            return manifest, self._arrays(manifest, share)

    def _reading(self, step: int) -> contextlib.AbstractContextManager[None]:
        return on_disk(f"The checkpoint of step {step} must be readable: {self.path(step)}.")

    def _arrays(self, manifest: Manifest, share: tuple[int, int]) -> dict[str, Numbers]:
        path, arrays, pieces = self.path(manifest.step), dict[str, Numbers](), dict[str, list[Piece]]()
        for i, file in enumerate(manifest.files):
            leaves = [leaf for leaf in manifest.leaves if leaf.file == file.name]
            if all(leaf.begin is None for leaf in leaves):
                arrays |= carrier.read(path, file, leaves)
                continue
            if i % share[1] == share[0]:
                carrier.verify(path, file)
            for j, (leaf, piece) in enumerate(carrier.open_pieces(path, file, leaves)):
                is_own = (i + j) % share[1] == share[0]  # whoever saves them again, saves each once
                pieces.setdefault(leaf.name, []).append(replace(piece, is_own=is_own))
        for name, found in pieces.items():
            shape, dtype = manifest.arrays[name]
            arrays[name] = Pieces(shape, carrier.dtype_of(dtype), found)
        return arrays

    def set_aside(self, step: int, why: str) -> Path:
        """Keep a damaged checkpoint under a name that nobody reads, with the reason.

        Raises:
            CheckpointError: it cannot be renamed, or the reason cannot be written.
        """
        num = 1
        with on_disk(f"The damaged checkpoint of step {step} must be set aside: {self.path(step)}."):
            while os.path.lexists(bad := self.folder / f"bad-{step:08d}-{num}"):
                num += 1
            os.rename(self.path(step), bad)
            with contextlib.suppress(FileExistsError):
                file = create(bad / "why.json")
                try:
                    write_all(file, json.dumps({"step": step, "why": why}).encode())
                finally:
                    os.close(file)
            sync_folder(self.folder)
        return bad


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _is_ours(path: Path) -> bool:
    """Whether this is a folder with a file that the library names, or an empty one, or one that may not be read."""
    if path.is_symlink():
        return False
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        return True
    return not names or any(_FILE.fullmatch(name) for name in names)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # some of which `ignore_errors` lets through
        shutil.rmtree(path, ignore_errors=True)
