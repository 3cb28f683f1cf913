"""A folder of checkpoints: each is complete or does not exist; damaged checkpoints are set aside.

    lock
    step-00000500/{manifest.json, 00000-of-00001-00.safetensors, ...}
    bad-00000450-1/{..., why.json}

A checkpoint is written under a temporary name, synced, and committed by a rename. Then its files
are read back and verified, and only then are older checkpoints removed. Entries that the library
has not made are not counted, renamed or removed.

If the file system fails, a CheckpointError names the folder; other checkpoints are unchanged. A
checkpoint with other content than was written is a DamagedError; after any other error, it may be
good.
"""

import errno
import json
import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from wholestep.checkpoints import files as disk
from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints import safetensors
from wholestep.checkpoints.address import Address
from wholestep.checkpoints.files import Lock, created, on_disk, sync_folder
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.safetensors import FileInfo, Leaf, drain
from wholestep.checkpoints.shards import Numbers, Shard, ShardedArray
from wholestep.errors import CheckpointError, DamagedError, GoneError, SpecificationError, message

Arrays = Mapping[str, Numbers]
Facts = Mapping[str, Any]
Chunks = Callable[[FileInfo], Iterator[bytes]]  # the verified content of a file

# Names of the folders that the library makes. Each holds a file that the library names, or nothing.
NUMBER = r"(?:[0-9]{8}|[1-9][0-9]{8,17})"
_STEP = re.compile(rf"step-{NUMBER}")
_BAD = re.compile(rf"bad-{NUMBER}-[1-9][0-9]*")
_REPLACED = re.compile(rf"\.replaced-{NUMBER}")
_LITTER = re.compile(r"\.(?:new|old)-[0-9a-f]{12}(?:-[0-9]+)?")
_FILE = re.compile(r"manifest\.json|why\.json|[0-9]+-of-[0-9]+-[0-9]+\.safetensors")
_STORE = re.compile(r"[\w+.-]+:/")  # a Path drops one of two slashes
_ROOM = 1 << 16  # bytes besides the arrays
_PAUSES = (0.01,) * 10  # seconds until another look at a checkpoint that is being replaced
_MOST_READS = 10  # of a checkpoint that is replaced again and again

T = TypeVar("T")


class CheckpointFolder(ABC):
    """Checkpoints by step, which another process may replace or remove: a folder, or a store.

    Attributes:
        folder: its absolute path, or its address.
    """

    folder: Any

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first."""

    @abstractmethod
    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of a step now, also while a writer replaces it."""

    @abstractmethod
    def path(self, step: int) -> Any:
        """Return the path or address of the checkpoint of a step; it may not exist."""

    @abstractmethod
    def seen(self, step: int) -> tuple[object, bytes]:
        """Return the identity of the checkpoint of a step, and the content of its manifest."""

    @abstractmethod
    def chunks(self, step: int) -> Chunks:
        """Return the function that yields the verified content of a file of a checkpoint."""

    @abstractmethod
    def put(self, manifest: Manifest, chunks: Chunks) -> None:
        """Write a copy of a checkpoint, whose files these chunks are."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step."""

    def bad(self) -> list[Path]:
        """Return the checkpoints that have been set aside."""
        return []

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step's checkpoint, without reading its arrays."""
        return self.using(step, lambda manifest: manifest)

    def verify(self, step: int) -> Manifest:
        """Read and verify all of a checkpoint, and return its manifest."""

        def read(manifest: Manifest) -> Manifest:
            chunks = self.chunks(step)
            for file in manifest.files:
                drain(chunks(file))
            return manifest

        return self.using(step, read)

    def using(self, step: int, use: Callable[[Manifest], T]) -> T:
        """Return the result of a reader of a checkpoint, which gets its manifest.

        A writer may replace or remove the checkpoint between its manifest and its arrays. So it is
        damaged only if it is still the same checkpoint; for another one, the reader is called
        again.

        Raises:
            GoneError: the checkpoint was removed.
            DamagedError: it is damaged.
        """
        for attempt in range(_MOST_READS):
            before = None
            try:
                before = self.seen(step)
                manifest = manifests.parse(before[1], self.path(step))
                if manifest.step != step:
                    must = f"The manifest of {self.path(step)} must name its step."
                    raise DamagedError(f"{must} It names {manifest.step}.")
                return use(manifest)
            except DamagedError as error:
                if not self.has(step):
                    must = f"{self.path(step)} must exist."
                    raise GoneError(f"{must} It was removed meanwhile.") from error
                if attempt + 1 == _MOST_READS or before == self._seen_or_none(step):
                    raise
        raise AssertionError

    def _seen_or_none(self, step: int) -> tuple[object, bytes] | None:
        with suppress(DamagedError):
            return self.seen(step)
        return None


class Folder(CheckpointFolder):
    """A folder of checkpoints, named by their numbers of updates.

    A process that shares a checkpoint with others passes its `share`: its index, and the number of
    processes.

    Raises:
        SpecificationError: the folder is not a path of a file system.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Folder(folder)
    ...     _ = kept.write(7, {"w": np.ones(3)}, {"epoch": 0})
    ...     manifest, arrays = kept.read(7)
    ...     kept.steps(), manifest.facts, arrays["w"].tolist()
    ([7], {'epoch': 0}, [1.0, 1.0, 1.0])
    """

    def __init__(self, folder: str | os.PathLike[str]):
        path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        try:
            is_path = isinstance(path, str) and path != "" and b"\0" not in os.fsencode(path)
        except UnicodeEncodeError:
            is_path = False
        if not is_path or _STORE.match(path):
            must = "A run writes to a file system, which can rename folders and lock files."
            attempt = (
                "a local or a network folder, or a string for a remote address: "
                '"s3://bucket/runs/a".'
            )
            received = Address(path) if is_path else repr(folder)
            raise SpecificationError(message(must, received, attempt))
        with on_disk(f"{path} must be in a working directory that exists."):
            self.folder = Path(path).absolute()

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, newest first, without reading their manifests."""
        for pause in (*_PAUSES, 0):
            steps = {_step_of(path) for path in self._entries(_STEP)}
            if {_step_of(path) for path in self._entries(_REPLACED)} <= steps:
                break
            # A writer is between the two renames of `commit`, or was killed there.
            time.sleep(pause)
        return sorted(steps, reverse=True)

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step; it may not exist."""
        return self.folder / f"step-{step:08d}"

    def bad(self) -> list[Path]:
        """Return the checkpoints that have been set aside."""
        return sorted(self._entries(_BAD))

    def _entries(self, pattern: re.Pattern[str]) -> list[Path]:
        """Return the subfolders with such names that the library has made."""
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
                # A writer has removed all listed checkpoints, and written others.

    # ---- writing ----

    def lock(self) -> Lock:
        """Lock the folder, which is made if it does not exist, against other runs."""
        must = f"Checkpoints need a folder that can be written to and locked: {self.folder}."
        attempt = "another folder, on Linux or macOS."
        try:
            with on_disk(must, attempt):
                disk.make_folder(self.folder)
                return Lock(self.folder)
        except ImportError as error:
            raise CheckpointError(message(must, error, attempt)) from error

    def owner(self) -> str:
        """Return the last `Lock.owner` of the folder; "" if it was never locked."""
        try:
            return disk.read_all(self.folder / "lock", _ROOM).decode(errors="replace")
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
        """Write the checkpoint of a step in a single process; see `fill` and `commit`."""
        token = uuid.uuid4().hex[:12]
        try:
            files, leaves = self.fill(token, step, arrays)
            manifest = Manifest(step, files, leaves, dict(facts), dict(rest or {}))
            return self.commit(token, manifest, replaces=replaces)
        except BaseException:
            self.discard(token)
            raise

    def put(self, manifest: Manifest, chunks: Chunks) -> None:
        """Write a copy of a checkpoint, whose files these chunks are; see `commit`."""
        token = uuid.uuid4().hex[:12]
        new = self._new(token)
        try:
            with self._writing(manifest.step, manifest.nbytes):
                disk.check_room(self.folder, manifest.nbytes + _ROOM)
                new.mkdir()
                for file in manifest.files:
                    with created(new / file.name) as out:
                        for chunk in chunks(file):
                            disk.write_all(out, chunk)
            self.commit(token, manifest, replaces=False)
        except BaseException:
            self.discard(token)
            raise

    def fill(
        self, token: str, step: int, arrays: Arrays, share: tuple[int, int] = (0, 1)
    ) -> tuple[list[FileInfo], list[Leaf]]:
        """Write arrays for the checkpoint of a step, and return their locations.

        It exists after its `commit`; after an error, `discard` its token.
        """
        new = self._new(token)
        index, count = share
        files = list[FileInfo]()
        leaves = list[Leaf]()
        contents = list[safetensors.Content]()
        for name, array in arrays.items():
            contents += safetensors.contents_of(name, array)
        nbytes = sum(content.array.nbytes for content in contents)
        with self._writing(step, nbytes):
            disk.check_room(self.folder, nbytes + _ROOM)
            new.mkdir(exist_ok=count > 1)
            for i, part in enumerate(safetensors.shared_out(contents)):
                name = f"{index:05d}-of-{count:05d}-{i:02d}.safetensors"
                file, written = safetensors.write(new / name, part)
                files.append(file)
                leaves += written
            sync_folder(new, self.folder)
        return files, leaves

    def commit(self, token: str, manifest: Manifest, *, replaces: bool) -> Path:
        """Commit a checkpoint of written arrays, verify it, and return its folder.

        Args:
            replaces: whether it may replace a checkpoint of this step.
        """
        new = self._new(token)
        step = manifest.step
        path = self.path(step)
        replaced = self._replaced(step)
        try:
            with self._writing(step, manifest.nbytes):
                is_there = os.path.lexists(path)
                if is_there and not (replaces and path in self._entries(_STEP)):
                    raise FileExistsError(errno.EEXIST, f"{path.name} exists already")
                safetensors.check_leaves(manifest.files, manifest.leaves)
                manifests.write(new, manifest)
                sync_folder(new, self.folder)
                if is_there:
                    os.rename(path, replaced)  # the next `clear` restores it, or removes it
                os.rename(new, path)
                sync_folder(self.folder, self.folder)
        except CheckpointError:
            with suppress(CheckpointError):  # the next `clear` tries again
                self._put_back()
            raise
        try:
            self.verify(step)  # if it fails, the next `clear` restores the replaced checkpoint
        except DamagedError as error:
            must = f"{path} must read back as it was written."
            raise CheckpointError(f"{must} {error} Try: another disk.") from error
        if is_there:
            _remove(replaced)
        return path

    def discard(self, token: str) -> None:
        """Remove the files of a checkpoint that was not committed."""
        _remove(self._new(token))

    def _new(self, token: str) -> Path:
        return self.folder / f".new-{token}"

    def _replaced(self, step: int) -> Path:
        return self.folder / f".replaced-{step:08d}"

    def _writing(self, step: int, nbytes: int) -> AbstractContextManager[None]:
        of = f"The checkpoint of step {step} ({nbytes} bytes)"
        attempt = "look at that folder and its disk; earlier checkpoints are unchanged."
        return on_disk(f"{of} could not be written to {self.folder}.", attempt)

    def clear(self) -> None:
        """Remove the remains of interrupted writers. The caller must hold the lock."""
        self._put_back()
        for path in self._entries(_LITTER):
            _remove(path)

    def _put_back(self) -> None:
        """Restore each checkpoint that was being replaced, unless its replacement is good."""
        for replaced in self._entries(_REPLACED):
            step = _step_of(replaced)
            path = self.path(step)
            if os.path.lexists(path):
                try:
                    self.verify(step)
                    _remove(replaced)
                    continue
                except DamagedError as error:
                    self.set_aside(step, str(error))
            with on_disk(f"The checkpoint of step {step} must be renamed back to {path}."):
                replaced.rename(path)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, atomically."""
        old = self.folder / f".old-{uuid.uuid4().hex[:12]}"
        attempt = "look at that folder; newer checkpoints are good."
        with on_disk(f"An older checkpoint must be removed: {self.path(step)}.", attempt):
            os.rename(self.path(step), old)
        _remove(old)

    # ---- reading ----

    def seen(self, step: int) -> tuple[object, bytes]:
        """Return the identity of the checkpoint of a step: its manifest's file, and the content."""
        path = self.path(step) / manifests.NAME
        with self._reading(step), disk.opened(path, most=manifests.MOST_BYTES) as file:
            return os.fstat(file).st_ino, disk.content_of(file)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, also while a writer replaces it."""
        for pause in _PAUSES:
            if os.path.lexists(self.path(step)):
                return True
            if not os.path.lexists(self._replaced(step)):
                break
            time.sleep(pause)
        return os.path.lexists(self.path(step))

    def chunks(self, step: int) -> Chunks:
        """Return the function that yields the verified content of a file of a checkpoint."""

        def chunks(file: FileInfo) -> Iterator[bytes]:
            with self._reading(step):
                yield from safetensors.chunks(self.path(step), file)

        return chunks

    def read(
        self,
        step: int,
        check: Callable[[Manifest], None] = lambda manifest: None,
        share: tuple[int, int] = (0, 1),
    ) -> tuple[Manifest, dict[str, Numbers]]:
        """Return the manifest and the verified arrays; each piece is verified by one process.

        Args:
            check: raises an error for unsuitable arrays, before memory is allocated for them.
        """

        def use(manifest: Manifest) -> tuple[Manifest, dict[str, Numbers]]:
            check(manifest)
            return manifest, self._arrays(manifest, share)

        return self.using(step, use)

    def _arrays(self, manifest: Manifest, share: tuple[int, int]) -> dict[str, Numbers]:
        path = self.path(manifest.step)
        index, count = share
        arrays = dict[str, Numbers]()
        shards = defaultdict[str, list[Shard]](list)
        by_file = defaultdict[str, list[Leaf]](list)
        for leaf in manifest.leaves:
            by_file[leaf.file].append(leaf)
        with self._reading(manifest.step):
            for i, file in enumerate(manifest.files):
                leaves = by_file[file.name]
                if all(leaf.begin is None for leaf in leaves):
                    arrays |= safetensors.read(path, file, leaves)
                    continue
                if i % count == index:
                    drain(safetensors.chunks(path, file))
                for j, (leaf, shard) in enumerate(safetensors.open_shards(path, file, leaves)):
                    # so that a later checkpoint has each piece once
                    is_own = (i + j) % count == index
                    shards[leaf.name].append(replace(shard, is_own=is_own))
        described = manifest.arrays
        for name, pieces in shards.items():
            shape, dtype = described[name]
            arrays[name] = ShardedArray(shape, safetensors.DTYPES[dtype], pieces)
        return arrays

    def _reading(self, step: int) -> AbstractContextManager[None]:
        return on_disk(f"The checkpoint of step {step} must be readable: {self.path(step)}.")

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a damaged checkpoint to a bad-* folder, and write the reason there."""
        path = self.path(step)
        with on_disk(f"The damaged checkpoint of step {step} must be set aside: {path}."):
            num = 1
            while os.path.lexists(bad := self.folder / f"bad-{step:08d}-{num}"):
                num += 1
            os.rename(path, bad)
            with suppress(FileExistsError), created(bad / "why.json") as file:
                disk.write_all(file, json.dumps({"step": step, "why": why}).encode())
            sync_folder(self.folder, self.folder)
        return bad


def locate(path: str | os.PathLike[str]) -> tuple[Folder, int | None]:
    """Return the folder of checkpoints of a path, and the step, if the path is a checkpoint."""
    folder = Folder(path)
    parent = Folder(folder.folder.parent)
    name = folder.folder.name
    for step in parent.steps() if name.startswith("step-") else []:
        if parent.path(step).name == name:
            return parent, step
    return folder, None


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _is_ours(path: Path) -> bool:
    """Whether this is a folder with a file of the library, or an empty or unreadable one."""
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
    with suppress(OSError):  # `ignore_errors` lets some errors through
        shutil.rmtree(path, ignore_errors=True)
