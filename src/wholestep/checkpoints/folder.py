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
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholestep.checkpoints import arrays as carrier
from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints.arrays import FileFacts, Leaf
from wholestep.checkpoints.files import Lock, UnreadableError, check_room, create, remove, sync_folder, write_all
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.pieces import Numbers, Piece, Pieces
from wholestep.errors import CheckpointError, SpecificationError, message

Arrays = Mapping[str, Numbers]
Facts = Mapping[str, Any]

_STEP = re.compile(r"step-(\d{8,18})")
_STORE = re.compile(r"[\w+.-]+://|(?:gs|s3|hdfs|abfss?|https?):/")  # of two slashes, a Path leaves one
_REPLACED = ".replaced-"
_ROOM = 1 << 16  # bytes beside the arrays


class Folder:
    """A folder of checkpoints, by the number of updates before each.

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

    def owner(self) -> str:
        """Return who holds the lock, as `Lock.owner` says it; nothing if nobody ever did."""
        try:
            return (self.folder / "lock").read_text(errors="replace")
        except OSError:
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
            self.folder.mkdir(parents=True, exist_ok=True)
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
        path, replaced = self.path(step), self.folder / f"{_REPLACED}{step:08d}"
        with self._told(token, step, manifest.nbytes):
            if path.exists() and not replaces:
                raise FileExistsError(17, "there is one of this step already", str(path))
            carrier.check_leaves(manifest.files, manifest.leaves)
            manifests.write(new, manifest)
            sync_folder(new)
            if path.exists():
                os.rename(path, replaced)  # whoever comes next puts it back, or removes it
            os.rename(new, path)
            sync_folder(self.folder)
        self.verify(step)  # else whoever comes next puts back what was replaced
        remove(replaced)
        return path

    def discard(self, token: str) -> None:
        """Remove what was written and not committed."""
        remove(self._new(token))

    def _new(self, token: str) -> Path:
        return self.folder / f".new-{token}"

    @contextlib.contextmanager
    def _told(self, token: str, step: int, nbytes: int, share: tuple[int, int] = (0, 1)) -> Iterator[None]:
        """Tell what cannot be written, and leave nothing of it; of several processes' part, that is for them to say."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                if share[1] == 1:
                    self.discard(token)
                    self._put_back()
            must = f"The checkpoint of step {step} ({nbytes} bytes) could not be written to {self.folder}."
            attempt = "look at that folder and its disk; the checkpoints before this one are as they were."
            raise CheckpointError(message(must, error.strerror or error, attempt)) from error
        except BaseException:
            if share[1] == 1:
                self.discard(token)
            raise

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
        self, step: int, check: Callable[[Manifest], None] = lambda manifest: None, share: tuple[int, int] = (0, 1)
    ) -> tuple[Manifest, dict[str, Numbers]]:
        """Return what a checkpoint holds, and its arrays, all of which have been verified.

        Args:
            check: raises an error if these are not the arrays that are wanted, before room is made for one of them.
            share: the number of this process, of so many, which verify the files of pieces together.

        Raises:
            CheckpointError: something is not what was written.
        """
        manifest, arrays = self.manifest(step), dict[str, Numbers]()
        check(manifest)
        pieces: dict[str, list[Piece]] = {}
        for i, file in enumerate(manifest.files):
            leaves = [leaf for leaf in manifest.leaves if leaf.file == file.name]
            if all(leaf.begin is None for leaf in leaves):
                arrays |= carrier.read(self.path(step), file, leaves)
                continue
            if i % share[1] == share[0]:
                carrier.verify(self.path(step), file)
            for j, (leaf, piece) in enumerate(carrier.open_pieces(self.path(step), file, leaves)):
                is_own = (i + j) % share[1] == share[0]  # whoever saves them again, saves each once
                pieces.setdefault(leaf.name, []).append(replace(piece, is_own=is_own))
        for name, found in pieces.items():
            shape, dtype = manifest.arrays[name]
            arrays[name] = Pieces(shape, carrier.dtype_of(dtype), found)
        return manifest, arrays

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
