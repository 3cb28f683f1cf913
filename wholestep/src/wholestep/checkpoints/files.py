"""Files, created, synced and read with checks, and the lock of a folder with a single writer.

A file that is missing, not regular or of another size is a DamagedError; what cannot be opened now,
an OSError.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wholestep.errors import CheckpointError, DamagedError, message, warn

_CHUNK = 1 << 24
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES}


@contextlib.contextmanager
def on_disk(must: str, attempt: str = "look at that path and its disk.") -> Iterator[None]:
    """Turn an OSError into a CheckpointError; `must` names the path, and the step if any."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(message(must, error.strerror or error, attempt)) from error


class Lock:
    """A folder's lock, held until it is released or the process ends in any way.

    Its file holds `owner`, which other processes read and report.

    Raises:
        CheckpointError: another process, or this process, holds the lock.
    """

    owner: str

    def __init__(self, folder: Path):
        import fcntl  # missing on Windows, where only checkpoints need it

        self._path = folder / "lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        try:
            before = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
            if before and not before.startswith('{"pid": '):
                must = f"{self._path} must be the lock of a folder of checkpoints."
                received = f"a file with other content, {before[:40]!r}"
                raise CheckpointError(message(must, received, "another folder."))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                must = f"One run at a time may write to {folder}."
                received = f"a folder in use by {before or 'another process'}"
                attempt = "wait for that run, or choose another folder."
                if before in [lock.owner for lock in _held]:
                    received = "a folder to which a fit or a loop of this very process is saving"
                    attempt = 'save elsewhere, as in trainer.save("runs/by-hand").'
                raise CheckpointError(message(must, received, attempt)) from error
            self.check()
            owner = {
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "token": uuid.uuid4().hex[:12],
            }
            self.owner = json.dumps(owner)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self.owner.encode(), 0)
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def check(self) -> None:
        """Refuse to write if the folder or its lock was replaced, as another run may write."""
        must = f"{self._path.parent} must stay the folder that this run locked."
        attempt = "move it back, or start again; nothing was written to another folder."
        with on_disk(must, attempt):
            is_same = os.path.samestat(os.lstat(self._path), os.fstat(self._file))
        if not is_same:
            raise CheckpointError(message(must, "another folder, or another lock in it", attempt))

    def release(self) -> None:
        """Release the lock, once. In a forked process, the parent keeps the lock."""
        file = self._file
        self._file = -1
        _held.discard(self)
        if file >= 0:
            close(file)


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Context with the descriptor of a new file, synced at the end; its folder must be no link."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path.name, how, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, all synced to survive a power loss."""
    for missing in reversed([each for each in (path, *path.parents) if not os.path.isdir(each)]):
        missing.mkdir(exist_ok=True)
        sync_folder(missing.parent, path)


def close(file: int) -> None:
    """Close a descriptor to which nothing was written; after an error it is closed, too."""
    with contextlib.suppress(OSError):
        os.close(file)


def write_all(file: int, content: Any) -> None:
    """Write all of a bytes-like object."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(file, view[:_CHUNK]) :]


def sync_folder(path: Path, checkpoints: Path) -> None:
    """Sync a folder, so that creations, renames and removals in it survive a power loss.

    If the file system cannot sync folders, a warning says so once for each folder of checkpoints.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        lacks = f"cannot sync folders ({error.strerror})"
        effect = "Checkpoints are complete, but the newest may be lost if the power fails."
        _warn_once(checkpoints, lacks, effect)
    finally:
        os.close(folder)


@functools.cache
def _warn_once(checkpoints: Path, lacks: str, effect: str) -> None:
    """Warn once for each folder that the file system of checkpoints lacks something."""
    warn(f"The file system of {checkpoints} {lacks}. {effect}")


def open_regular(path: Path, nbytes: int | None = None, most: int | None = None) -> int:
    """Return a descriptor of a regular file of `nbytes` bytes, or of at most `most`, to read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise DamagedError(f"{path.name} cannot be opened: {error.strerror}.") from error
        raise
    try:
        state = os.fstat(file)
        size = state.st_size
        if not stat.S_ISREG(state.st_mode):
            raise DamagedError(f"{path.name} is not a regular file.")
        if nbytes is not None and size != nbytes:
            raise DamagedError(f"{path.name} must have {nbytes} bytes. It has {size}.")
        if most is not None and size > most:
            raise DamagedError(f"{path.name} may have at most {most} bytes. It has {size}.")
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def opened(path: Path, nbytes: int | None = None, most: int | None = None) -> Iterator[int]:
    """Context with the descriptor of `open_regular`."""
    file = open_regular(path, nbytes, most)
    try:
        yield file
    finally:
        os.close(file)


def read_into(file: int, content: Any, offset: int | None = None) -> None:
    """Fill a writable bytes-like object from a file, at this offset or its current position."""
    view = memoryview(content).cast("B")
    while view:
        part = [view[:_CHUNK]]
        if offset is None:
            num = os.readv(file, part)
        else:
            num = os.preadv(file, part, offset)
            offset += num
        if num == 0:
            raise DamagedError(f"A file ended {len(view)} bytes too early.")
        view = view[num:]


def read_all(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes."""
    with opened(path, most=most) as file:
        return content_of(file)


def content_of(file: int) -> bytes:
    """Return the content of a file that has just been opened."""
    content = bytearray(os.fstat(file).st_size)
    read_into(file, content)
    return bytes(content)


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to write more bytes than the disk has room for.

    Some file systems always report 0: a warning says so, and a full disk fails at the first write.
    """
    free = shutil.disk_usage(folder).free
    if free == 0:
        effect = "Checkpoints are written without looking for room."
        _warn_once(folder, "reports 0 free bytes", effect)
    elif nbytes > free:
        must = f"A checkpoint of {nbytes} bytes needs as much room in {folder}."
        attempt = "remove something, or keep fewer checkpoints."
        raise CheckpointError(message(must, f"{free} bytes free", attempt))
