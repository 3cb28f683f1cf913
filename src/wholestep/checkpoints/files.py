"""Files that are whole or not there: created anew, synced, renamed; and a folder that one process writes to."""

import errno
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

from wholestep.errors import CheckpointError, message

_CHUNK = 1 << 24


class UnreadableError(CheckpointError):
    """What cannot be read here may be good: nobody sets it aside."""


class Lock:
    """A folder's lock, held until it is released or the process ends, however it ends.

    Attributes:
        owner: what whoever comes meanwhile is told, and finds in the file.

    Raises:
        CheckpointError: another process holds it, or this one.
    """

    def __init__(self, folder: Path):
        import fcntl  # which Windows lacks: who writes no checkpoints does without

        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._file, 1000).decode(errors="replace").strip()
            is_mine = any(lock.is_of(self._file) for lock in _held)
            os.close(self._file)
            must = f"One run at a time writes to {folder}."
            received = f"a folder in use by {owner or 'another process'}"
            attempt = "wait for that run, or choose another folder."
            if is_mine:
                received = "a folder to which a fit or a loop of this very process is saving"
                attempt = 'save elsewhere, as in trainer.save("runs/by-hand").'
            raise CheckpointError(message(must, received, attempt)) from error
        os.ftruncate(self._file, 0)
        me = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.owner = json.dumps(me | {"token": uuid.uuid4().hex[:12]})
        os.pwrite(self._file, self.owner.encode(), 0)
        _held.add(self)

    def is_of(self, file: int) -> bool:
        """Whether this is held, and on the file of this descriptor."""
        return self._file >= 0 and os.path.sameopenfile(self._file, file)

    def release(self) -> None:
        """Let others write. More than once does nothing, and in a forked process the lock stays its parent's."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def create(path: Path) -> int:
    """Return the descriptor of a new file; there must be none of that name."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


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
        CheckpointError: it is missing, a link, no regular file, or of another size.
        UnreadableError: it is there, and cannot be opened now.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_damage = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
        why = error.strerror or str(error)
        if is_damage:
            raise CheckpointError(f"{path.name} cannot be opened: {why}.") from error
        must = f"{path} must be opened to be read."
        raise UnreadableError(message(must, why, "again, when that is mended.")) from error
    found = os.fstat(file)
    why = "" if stat.S_ISREG(found.st_mode) else f"{path.name} is not a regular file."
    if not why and nbytes is not None and found.st_size != nbytes:
        why = f"{path.name} must have {nbytes} bytes. It has {found.st_size}."
    if not why and most is not None and found.st_size > most:
        why = f"{path.name} may have at most {most} bytes. It has {found.st_size}."
    if why:
        os.close(file)
        raise CheckpointError(why)
    return file


class Opened:
    """The descriptor of an open file, closed when nobody holds this object any more."""

    def __init__(self, file: int):
        self.file = file
        weakref.finalize(self, os.close, file)


def read_into(file: int, content: Any, offset: int | None = None) -> None:
    """Fill a writable bytes-like object from a file.

    Args:
        offset: of the first byte that is wanted; None for where the file stands.

    Raises:
        CheckpointError: the file ends before.
    """
    view = memoryview(content).cast("B")
    while view:
        part = [view[:_CHUNK]]
        num = os.readv(file, part) if offset is None else os.preadv(file, part, offset)
        offset = None if offset is None else offset + num
        if num == 0:
            raise CheckpointError(f"A file ended {len(view)} bytes too early.")
        view = view[num:]


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to write what there is no room for.

    Raises:
        CheckpointError: as said.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        must = f"A checkpoint of {nbytes} bytes needs as much room in {folder}."
        raise CheckpointError(message(must, f"{free} bytes free", "remove something, or keep fewer checkpoints."))


def remove(path: Path) -> None:
    """Remove a folder or a file, of which nothing may be left; what is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
