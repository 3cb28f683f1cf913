"""A remote folder of checkpoints, in an object store or another file system that fsspec knows.

    lock
    step-00000500/{00000-of-00001-00.safetensors, ..., manifest.json}
    step-00000500-2/{...}

A store cannot rename, so nothing is overwritten: the files of a checkpoint are written under a new
name, read back and verified, and the manifest is written last. Without a manifest there is no
checkpoint. A second checkpoint of a step has a version in its name; the highest complete version
counts, and the others are removed after it is complete.

No lock holds across machines: the object `lock` names the last run that began, and any other run
publishes nothing.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from wholestep.checkpoints import manifest as manifests
from wholestep.checkpoints.address import Address, Location, is_remote
from wholestep.checkpoints.folder import NUMBER, CheckpointFolder, Chunks, Folder, locate
from wholestep.checkpoints.manifest import Manifest
from wholestep.checkpoints.safetensors import FileInfo, checked, drain
from wholestep.errors import (
    CheckpointError,
    DamagedError,
    GoneError,
    SpecificationError,
    WholestepError,
    message,
    pip_install,
    tell,
)

T = TypeVar("T")
_STEP = re.compile(rf"step-({NUMBER})(?:-([1-9][0-9]*))?")
STORE = "store"  # an entry of a manifest: the name of the store of the run that wrote it
_CHUNK = 1 << 24
_ATTEMPT = (
    "look at that address, its credentials and the network; the other checkpoints there are "
    "unchanged."
)
_PAUSES = 1.0, 4.0  # seconds before the second and the third try
_PATIENCE = 60.0  # seconds without an answer, after which an operation is not tried again


class Store(CheckpointFolder):
    """A remote folder of checkpoints.

    Attributes:
        newest: its newest step at the last `pull`.

    Raises:
        SpecificationError: the address names no folder, or the packages for its kind are missing.
        CheckpointError: there is no connection.
    """

    def __init__(self, url: str):
        self.folder = Address(url).stripped()
        if not self.folder.partition("://")[2].strip("/"):
            must = "An address must name a folder."
            raise SpecificationError(message(must, Address(url), "s3://bucket/runs/a."))
        self._owner = ""
        # the latest `_versions`, until this process changes them
        self._known: dict[int, dict[int, bool]] = {}
        self.newest: list[int] = []
        self._manifests: dict[str, Manifest] = {}  # by address: a published manifest never changes
        self._files: Any = None  # the file system of fsspec; None until it is connected
        self._root = ""
        self._num_connections = 0
        self._is_fresh = True  # whether the connection has not answered yet
        self._heard = 0.0  # the time of the store's last answer
        self._again(f"{self.folder} must be accessible.", lambda: None)

    def _connect(self) -> None:
        """Make the file system anew; some connect at once, and not again if the connection ends."""
        how = {"skip_instance_cache": True} if self._num_connections else {}
        self._num_connections += 1
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(self.folder.raw, **how)
        except (ImportError, ValueError) as error:
            must = f"{self.folder} needs fsspec, and its package for this kind of address."
            attempt = (
                f"{pip_install('wholestep[remote]')}, with s3fs for s3://, gcsfs for gs:// or "
                "adlfs for az://."
            )
            received = self.folder.without_secrets(str(error))
            cause = self.folder.cause(error)
            raise SpecificationError(message(must, received, attempt)) from cause
        self._root = root.rstrip("/")
        self._is_fresh = True

    # ---- reading ----

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first."""
        versions = self._versions()
        return sorted((step for step in versions if any(versions[step].values())), reverse=True)

    def path(self, step: int) -> Address:
        """Return the address of the checkpoint of a step; it may not exist."""
        versions = self._versions_of(step)
        complete = [version for version, is_complete in versions.items() if is_complete]
        return self.folder / _name(step, max(complete, default=1))

    def _versions_of(self, step: int) -> dict[int, bool]:
        versions = self._known if step in self._known else self._versions()
        return versions.get(step, {})

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step's checkpoint, without reading its arrays."""
        path = self.path(step)
        if path not in self._manifests:
            manifest = super().manifest(step)
            path = self.path(step)  # of another version, if a writer has replaced the checkpoint
            self._manifests[path] = manifest
        return self._manifests[path]

    def seen(self, step: int) -> tuple[object, bytes]:
        """Return the address of the checkpoint of a step, and the content of its manifest."""
        path = self.path(step)
        most = {"start": 0, "end": manifests.MOST_BYTES}
        return path, self._ask(path / manifests.NAME, "cat_file", **most)

    def has(self, step: int) -> bool:
        """Whether there is a complete checkpoint of a step now."""
        return step in self.steps()

    def chunks(self, step: int) -> Chunks:
        """Return the function that yields the verified content of a file of a checkpoint."""
        return partial(self._chunks, self.path(step))

    def _chunks(self, path: Address, file: FileInfo) -> Iterator[bytes]:
        path = path / file.name
        size = self._ask(path, "info")["size"]
        if size != file.nbytes:
            raise DamagedError(f"{file.name} must have {file.nbytes} bytes. It has {size}.")
        content = (
            self._ask(path, "cat_file", start=begin, end=min(begin + _CHUNK, size))
            for begin in range(0, size, _CHUNK)
        )
        yield from checked(content, file)

    def _key(self, path: Address) -> str:
        return self._root + path.removeprefix(self.folder)

    def _ask(self, path: Address, verb: str, **how: Any) -> Any:
        """Return the result of a call of the file system; a DamagedError for a missing object."""

        def call() -> Any:
            self._files.invalidate_cache()
            answer = getattr(self._files, verb)(self._key(path), **how)
            self._is_fresh = False
            return answer

        def ask() -> Any:
            if not self._is_fresh and not self._files.async_impl:
                try:
                    return call()
                except FileNotFoundError:
                    self._connect()  # fsspec's FTP says so, too, if the connection has ended
            try:
                return call()
            except FileNotFoundError as error:
                raise DamagedError(f"{path} must exist.") from path.cause(error)

        return self._again(f"{path} must be accessible.", ask)

    def _versions(self) -> dict[int, dict[int, bool]]:
        """Return whether each version of each step is complete; such ones are not listed again."""
        versions: dict[int, dict[int, bool]] = {}
        for match in filter(None, map(_STEP.fullmatch, self._listed(self.folder))):
            step = int(match[1])
            version = int(match[2] or 1)
            is_known = self._known.get(step, {}).get(version, False)
            is_complete = is_known or manifests.NAME in self._listed(self.folder / match[0])
            versions.setdefault(step, {})[version] = is_complete
        self._known = versions
        return versions

    def _listed(self, path: Address) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        keys: list[str] = []
        with suppress(DamagedError):
            keys = self._ask(path, "ls", detail=False)
        return [key.rstrip("/").rpartition("/")[2] for key in keys]

    # ---- writing ----

    def claim(self, owner: str) -> None:
        """Become the run that writes here, and remove the remains of interrupted uploads."""

        def write() -> None:
            self._make_folder(self._root)
            self._files.pipe_file(f"{self._root}/lock", owner.encode())

        self._again(f"{self.folder} must be writable.", write)
        self._owner = owner
        for step, versions in tuple(self._versions().items()):
            self._remove(step, [version for version in versions if not versions[version]])

    def put(self, manifest: Manifest, chunks: Chunks) -> None:
        """Write a copy of a checkpoint, read it back and verify it, and publish its manifest last.

        Raises:
            CheckpointError: it could not be written, also in two further attempts; or another run
                writes here.
        """
        step = manifest.step
        why = f"The checkpoint of step {step} could not be copied to {self.folder}."
        self._check_owner(why)
        others = self._versions().get(step, {})
        path = self.folder / _name(step, max(others, default=0) + 1)
        key = self._key(path)
        content = manifests.rendered(manifest)

        def write(file: FileInfo) -> None:
            self._make_folder(key)
            with self._files.open(f"{key}/{file.name}", "wb") as out:
                for chunk in chunks(file):
                    out.write(chunk)
                    self._heard = time.monotonic()
            try:
                drain(self._chunks(path, file))
            except DamagedError as error:
                raise OSError(f"reads back otherwise than written. {error}") from error

        def publish() -> None:
            self._files.pipe_file(f"{key}/{manifests.NAME}", content)
            if self._files.cat_file(f"{key}/{manifests.NAME}") != content:
                raise OSError(f"{manifests.NAME} reads back otherwise than written")

        for file in manifest.files:
            self._again(why, partial(write, file))
        self._check_owner(why)
        self._again(why, publish)
        self._remove(step, list(others))

    def _make_folder(self, key: str) -> None:
        """Make a folder, except in object stores, which are asynchronous in fsspec."""
        if not self._files.async_impl:
            self._files.makedirs(key, exist_ok=True)

    def _check_owner(self, why: str) -> None:
        if not self._owner:
            return
        owner = self._ask(self.folder / "lock", "cat_file").decode(errors="replace")
        if owner != self._owner:
            must = f"{why} One run at a time may write there."
            received = f"another run that writes there, which began later: {owner}"
            raise CheckpointError(message(must, received, "another address."))

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step: each manifest before its files, older versions first."""
        self._remove(step, list(self._versions_of(step)))

    def _remove(self, step: int, versions: list[int]) -> None:
        for version in sorted(versions):
            path = self.folder / _name(step, version)
            self._manifests.pop(path, None)
            self._known.pop(step, None)
            with suppress(DamagedError):  # it is gone
                self._ask(path / manifests.NAME, "rm")
            with suppress(DamagedError):
                self._ask(path, "rm", recursive=True)

    def _again(self, must: str, call: Callable[[], T]) -> T:
        """Return the result of a call; after an error, try it again with a new connection.

        It is not tried again if the store would have been silent for longer than `_PATIENCE` then:
        the packages of stores try several times themselves.

        Raises:
            CheckpointError: no try succeeded.
        """
        begun = self._heard = time.monotonic()
        num = 0
        while True:
            num += 1
            tried = time.monotonic()
            try:
                if self._files is None:
                    self._connect()
                return call()
            except WholestepError:  # of the source; or it has been tried again already
                raise
            except Exception as error:  # each kind of store raises its own errors
                failure: Exception = error
            self._files = None
            now = time.monotonic()
            silent = now - self._heard
            last = now - max(tried, self._heard)
            if num > len(_PAUSES) or silent + _PAUSES[num - 1] + last > _PATIENCE:
                break
            time.sleep(_PAUSES[num - 1])
        words = self.folder.without_secrets(f"{type(failure).__name__}: {failure}")
        tries = "1 try" if num == 1 else f"{num} tries"
        received = f"{words} ({tries} in {now - begun:.0f} s)"
        raise CheckpointError(message(must, received, _ATTEMPT)) from self.folder.cause(failure)


def _name(step: int, version: int) -> str:
    return f"step-{step:08d}" if version == 1 else f"step-{step:08d}-{version}"


def find(path: Location) -> tuple[Folder | Store, int | None]:
    """Return the folder or store of a path, and the step if it is a checkpoint; see `locate`."""
    if not is_remote(path):
        return locate(path)
    address = Address(path).stripped()
    if match := _STEP.fullmatch(address.name):
        store = Store(address.parent)
        step = int(match[1])
        if step in store.steps() and store.path(step) == address:
            return store, step
    return Store(address), None


def copy(source: CheckpointFolder, step: int, target: CheckpointFolder) -> None:
    """Copy a checkpoint, and verify every byte on both sides."""
    source.using(step, lambda manifest: target.put(manifest, source.chunks(step)))


def push(folder: Folder, step: int, store: Store) -> None:
    """Copy a checkpoint to a store; an error names the local checkpoint, which stays."""
    try:
        copy(folder, step, store)
    except CheckpointError as error:
        way = f"Checkpoints({store.folder!r}, local={str(folder.folder)!r}) resumes from it."
        here = f"The checkpoint is complete in {folder.path(step)}; {way}"
        raise CheckpointError(f"{error} {here}") from error


def fetch(store: Store, steps: Callable[[], list[int]], folder: Folder) -> int | None:
    """Copy the first good checkpoint to a folder, and return its step; None if none is good.

    Args:
        steps: returns the steps that are there now. A writer may remove some after writing others.
    """
    tried: list[int] = []
    damaged: set[int] = set()
    while (left := [step for step in steps() if step not in damaged]) and left != tried:
        tried = left
        step = left[0]
        try:
            copy(store, step, folder)
            return step
        except GoneError:
            continue
        except DamagedError as error:
            damaged.add(step)
            tell(f"wholestep: {store.path(step)} is damaged, and is not used: {error}")
    return None


def pull(folder: Folder, store: Store) -> None:
    """Copy the newest good checkpoint of a store to a locked folder, if it is newer.

    Raises:
        CheckpointError: the checkpoints of the folder are of another run; or all in the store are
            damaged.
    """
    here = _newest_good(folder)
    there = store.steps()
    if here is not None:
        _check_own(folder.manifest(here), folder, store, is_empty=not there)
    store.newest = there[:1]

    def newer() -> list[int]:
        return [step for step in store.steps() if here is None or step > here]

    if (step := fetch(store, newer, folder)) is not None:
        tell(f"wholestep: copied {store.path(step)} to {folder.path(step)}")
    elif there and here is None:
        must = f"At least one checkpoint in {store.folder} must be good."
        raise CheckpointError(message(must, f"steps {there}, all damaged", "another address."))


def _check_own(manifest: Manifest, folder: Folder, store: Store, *, is_empty: bool) -> None:
    """Refuse a run that writes elsewhere; an empty store takes one of a run without a store."""
    address = manifest.rest.get(STORE)
    writer = Address(address) if address else None
    if writer == store.folder or (is_empty and writer is None) or _has_copy(store, manifest):
        return
    must = f"The local folder {folder.folder} must be of the run in {store.folder}."
    received = f"its step {manifest.step}, of a run in {writer or 'that folder alone'}"
    way = (
        "another local folder; or copy that run to a new address: wholestep checkpoint copy "
        f"{folder.folder} ADDRESS."
    )
    raise CheckpointError(message(must, received, way))


def publish(folder: Folder, store: Store, owner: str) -> None:
    """Claim a store after `pull`, and copy the folder's newest checkpoint to it if it lacks it."""
    store.claim(owner)
    if (there := store.steps()[:1]) != store.newest:
        must = f"No other run may write to {store.folder} while this one begins."
        received = f"step {there}, which was {store.newest} before"
        raise CheckpointError(message(must, received, "again."))
    for step in folder.steps()[:1]:
        if not _has_copy(store, folder.manifest(step)):
            push(folder, step, store)


def _newest_good(folder: Folder) -> int | None:
    for step in folder.steps():
        try:
            folder.verify(step)
        except DamagedError as error:
            tell(f"wholestep: set aside: {folder.set_aside(step, str(error))}")
        else:
            return step
    return None


def _has_copy(store: Store, manifest: Manifest) -> bool:
    with suppress(DamagedError):
        return manifests.rendered(store.manifest(manifest.step)) == manifests.rendered(manifest)
    return False
