"""Files that are whole or not there: created anew, synced, renamed; and a folder that one process writes to."""

import contextlib
import errno
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

from wholestep.errors import CheckpointError, DamagedError, message

_CHUNK = 1 << 24


@contextlib.contextmanager
def on_disk(must: str, attempt: str = "look at that path and its disk.") -> Iterator[None]:
    """Turn an error of the operating system into a CheckpointError.

    Args:
        must: names the path, and the step where there is one.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(message(must, error.strerror or error, attempt)) from error


class Lock:
    """A folder's lock, held until it is released or the process ends, however it ends.

    Attributes:
        owner: what whoever comes meanwhile is told, and finds in the file.

    Raises:
        CheckpointError: another process holds it, or this one.
    """

    def __init__(self, folder: Path):
        import fcntl  # which Windows lacks: who writes no checkpoints does without

        self._path = folder / "lock"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            before = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
            if before and not before.startswith('{"pid": '):
                must = f"{self._path} must be the lock of a folder of checkpoints."
                raise CheckpointError(message(must, f"a file with other content, {before[:40]!r}", "another folder."))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                must = f"One run at a time writes to {folder}."
                received = f"a folder in use by {before or 'another process'}"
                attempt = "wait for that run, or choose another folder."
                if any(lock.is_of(self._file) for lock in _held):
                    received = "a folder to which a fit or a loop of this very process is saving"
                    attempt = 'save elsewhere, as in trainer.save("runs/by-hand").'
                raise CheckpointError(message(must, received, attempt)) from error
            self.check()
            os.ftruncate(self._file, 0)
            me = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            self.owner = json.dumps(me | {"token": uuid.uuid4().hex[:12]})
            os.pwrite(self._file, self.owner.encode(), 0)
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def check(self) -> None:
        """Refuse to write where the path names another folder by now, to which another run may write.

        Raises:
            CheckpointError: the folder, or the lock in it, was removed, renamed or replaced.
        """
        must = f"{self._path.parent} must stay the folder that this run locked."
        attempt = "move it back, or start again; nothing was written to another folder."
        with on_disk(must, attempt):
            is_same = os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._file))
        if not is_same:
            raise CheckpointError(message(must, "another folder, or another lock in it", attempt))

    def is_of(self, file: int) -> bool:
        """Whether this is held, and on the file of this descriptor."""
        return self._file >= 0 and os.path.sameopenfile(self._file, file)

    def release(self) -> None:
        """Let others write. More than once does nothing, and in a forked process the lock stays its parent's."""
        file, self._file = self._file, -1
        if file >= 0:
            _close(file)


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def create(path: Path) -> int:
    """Return the descriptor of a new file; there must be none of that name, and its folder must be no link."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path.name, how, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder, and the missing ones above it, each of which survives a loss of power."""
    for missing in reversed([each for each in (path, *path.parents) if not os.path.isdir(each)]):
        missing.mkdir(exist_ok=True)
        sync_folder(missing.parent)


def _close(file: int) -> None:
    """Close a descriptor to which nothing was written; it is closed even where the system complains."""
    with contextlib.suppress(OSError):
        os.close(file)


def write_all(file: int, content: Any) -> None:
    """Write all of a bytes-like object."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(file, view[:_CHUNK]) :]


def sync_folder(path: Path) -> None:
    """Let what was created, renamed and removed in a folder survive a loss of power."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_regular(path: Path, nbytes: int | None = None, most: int | None = None) -> int:
    """Return the descriptor of a file that is to be read: a regular one, of exactly or of at most so many bytes.

    Raises:
        DamagedError: it is missing, a link, no regular file, or of another size.
        OSError: it is there, and cannot be opened now.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise DamagedError(f"{path.name} cannot be opened: {error.strerror}.") from error
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{path.name} is not a regular file.")
        if nbytes is not None and found.st_size != nbytes:
            raise DamagedError(f"{path.name} must have {nbytes} bytes. It has {found.st_size}.")
        if most is not None and found.st_size > most:
            raise DamagedError(f"{path.name} may have at most {most} bytes. It has {found.st_size}.")
    except BaseException:
        os.close(file)
        raise
    return file


class Opened:
    """The descriptor of an open file, closed when nobody holds this object any more."""

    def __init__(self, file: int):
        self.file = file
        weakref.finalize(self, _close, file)


def read_into(file: int, content: Any, offset: int | None = None) -> None:
    """Fill a writable bytes-like object from a file.

    Args:
        offset: of the first byte that is wanted; None for where the file stands.

    Raises:
        DamagedError: the file ends before.
    """
    view = memoryview(content).cast("B")
    while view:
        part = [view[:_CHUNK]]
        num = os.readv(file, part) if offset is None else os.preadv(file, part, offset)
        offset = None if offset is None else offset + num
        if num == 0:
            raise DamagedError(f"A file ended {len(view)} bytes too early.")
        view = view[num:]


def read_all(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file, of which there are at most so many.

    Raises:
        DamagedError, OSError: see `open_regular`.
    """
    file = open_regular(path, most=most)
    try:
        content = bytearray(os.fstat(file).st_size)
        read_into(file, content)
    finally:
        os.close(file)
    return bytes(content)


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to write what there is no room for.

    Raises:
        CheckpointError: as said.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        must = f"A checkpoint of {nbytes} bytes needs as much room in {folder}."
        raise CheckpointError(message(must, f"{free} bytes free", "remove something, or keep fewer checkpoints."))
