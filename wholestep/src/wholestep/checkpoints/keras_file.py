"""The weights of a .keras or a .weights.h5 file: first their index, then the numbers of some.

A file takes as much memory as the variables that it fills, also if it declares other sizes.
"""

import io
import os
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o

from wholestep.checkpoints.files import on_disk
from wholestep.checkpoints.hdf5 import FileBytes, StoredNumbers
from wholestep.errors import CheckpointError, DamagedError, message

_MEMBER = "model.weights.h5"
_SKIPPED = ("optimizer", "seed_generator")
_MOST_LINKS = 1 << 16
_MOST_LEVELS = 100
_MOST_NAME = 1 << 10  # characters of all names of an array
_MOST_READ = 1 << 18  # bytes of an archive at once, and so of its list of members
_MOST_GROWTH = 100  # of a compressed member; weights shrink to a half
_IN_MEMORY = 1 << 20  # bytes of a decompressed member; a larger one is on disk


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, of which only the description has been read."""

    name: str  # the layers' names, from the outermost, and an index
    num: int  # the number of arrays of this layer
    path: Path  # the file
    numbers: StoredNumbers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.numbers.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype in the file; object for everything except numbers."""
        return self.numbers.dtype

    def read(self, dtype: np.dtype) -> np.ndarray:
        """Return the numbers in a dtype; a DamagedError if the file lacks some of them."""
        with _readable(self.path):
            return self.numbers.read(dtype)


@contextmanager
def opened_weights(path: Path) -> Iterator[list[StoredArray]]:
    """Context with the index of the weights in a file, which can be read in the context.

    Raises:
        CheckpointError: the file cannot be opened.
        DamagedError: it is not as Keras writes it.
    """
    with ExitStack() as stack:
        with _readable(path):
            if path.exists() and not path.is_file():
                raise ValueError("not a regular file")
            content: Any = stack.enter_context(_Archive(path))
            if path.suffix == ".keras":
                content = stack.enter_context(_member(content))
            bounded = FileBytes(content)
            bounded.check_root()
            file = stack.enter_context(h5py.File(content, "r"))
            index = _Index(path, bounded).of(file.id)
        yield index


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise one error for all errors of the libraries that read a file."""
    must = f"The weights must be readable in {path}."
    attempt = "a file that Keras 3 has written by model.save or model.save_weights, copied in full."
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        is_of_system = error.errno is not None  # HDF5's errors have no number
        kind = CheckpointError if is_of_system else DamagedError
        raise kind(message(must, error.strerror or str(error), attempt)) from error
    except Exception as error:  # the libraries raise errors of many types
        is_worded = isinstance(error, ValueError | zipfile.BadZipFile)
        received = str(error) if is_worded else f"{type(error).__name__}: {error}"
        raise DamagedError(message(must, received, attempt)) from error


# ---- the bytes of a file ----


class _Archive(io.FileIO):
    """A file of which `zipfile` reads little at once: it would take any list of members."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_READ:
            raise ValueError(f"an archive with a list of {size} bytes")
        return super().read(size)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.FileIO, begin: int, nbytes: int):
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}
        self._at = origin[whence] + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        left = max(0, self._nbytes - self._at)
        view = memoryview(buffer).cast("B")[:left]
        num = os.preadv(self._file.fileno(), [view], self._begin + self._at)
        self._at += num
        return num


def _member(file: _Archive) -> Any:
    """Return the weights in an archive as a file, after verifying their digest."""
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo(_MEMBER)
        _check_member(info)
        with archive.open(info) as content:
            if info.compress_type == zipfile.ZIP_DEFLATED:
                return _decompressed(content, file.name)
            while content.read(_MOST_READ):
                pass
    file.seek(info.header_offset)
    lengths = struct.unpack("<26x2H", file.read(30))
    return _Window(file, info.header_offset + 30 + sum(lengths), info.file_size)


def _check_member(info: zipfile.ZipInfo) -> None:
    """Refuse a member that is compressed in an unusual way, or that would grow too much."""
    stored = info.compress_size
    nbytes = info.file_size
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{_MEMBER} is compressed by method {info.compress_type}")
    most = stored if info.compress_type == zipfile.ZIP_STORED else _MOST_GROWTH * stored
    if nbytes > most:
        raise ValueError(f"{_MEMBER} of {nbytes} bytes is stored in {stored} bytes")


def _decompressed(content: Any, path: Any) -> Any:
    """Return a file with the decompressed content."""
    attempt = f"unzip the archive, and pass its {_MEMBER}; or set TMPDIR to a folder with room."
    must = f"{path} is compressed, and is unpacked to a temporary folder."
    with on_disk(must, attempt), ExitStack() as stack:
        unpacked = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
        shutil.copyfileobj(content, unpacked)
        stack.pop_all()  # the caller closes it
    return unpacked


# ---- the index ----


class _Index:
    """Finds the weights in a file: a bounded number of objects, each once, by its address."""

    def __init__(self, path: Path, content: FileBytes):
        self._path = path
        self._content = content
        self._addresses: set[int] = set()
        self._num_links = 0
        self._found: list[StoredArray] = []

    def of(self, file: Any) -> list[StoredArray]:
        """Return the weights of all layers, in their order."""
        created = file.get_create_plist()
        if created.get_userblock() or created.get_sizes() != (8, 8):
            raise ValueError("another form of HDF5")
        root = h5g.open(file, b"/")
        self._addresses.add(h5o.get_info(root).addr)
        self._visit(root, "", ())
        return self._found

    def _visit(self, group: Any, key: str, names: tuple[str, ...], level: int = 0) -> None:
        if level > _MOST_LEVELS:
            raise ValueError(f"groups in {level} groups")
        children = self._children(group)
        values = self._open(group, "vars", children["vars"]) if "vars" in children else None
        if values is not None:
            if not isinstance(values, h5g.GroupID):
                raise ValueError(f"{'/'.join((*names, key, 'vars'))} is not a group")
            names = (*names, _printable(self._content.text(values, "name") or key))
        for child, address in children.items():
            if child not in ("vars", *_SKIPPED):
                opened = self._open(group, child, address)
                if isinstance(opened, h5g.GroupID):
                    self._visit(opened, child, names, level + 1)
        if values is not None:
            self._add(values, names)

    def _add(self, values: Any, names: tuple[str, ...]) -> None:
        """Add the arrays of a layer."""
        children = self._children(values)
        for child, address in children.items():
            name = "/".join((*names, child))
            if len(name) > _MOST_NAME:
                raise ValueError(f"a name of {len(name)} characters")
            dataset = self._open(values, child, address)
            if not isinstance(dataset, h5d.DatasetID):
                raise ValueError(f"{name} is not an array")
            numbers = StoredNumbers(name, dataset, self._content)
            self._found.append(StoredArray(name, len(children), self._path, numbers))

    def _children(self, group: Any) -> dict[str, int]:
        """Return the addresses of the objects in a group, by name; refuse links to other places."""
        links: list[tuple[bytes, int, int]] = []
        left = _MOST_LINKS - self._num_links

        def note(name: bytes, info: Any) -> bool | None:
            links.append((name, info.type, info.u))
            return True if len(links) > left else None  # an error that is raised here would be lost

        group.links.iterate(note, info=True)
        self._num_links += len(links)
        if len(links) > left:
            raise ValueError(f"more than {_MOST_LINKS} objects")
        addresses = {}
        for name, kind, address in links:
            if kind != h5l.TYPE_HARD:
                raise ValueError(f"{name.decode()!r} is a link, and is not stored in this file")
            addresses[_printable(name.decode())] = address
        return {name: addresses[name] for name in sorted(addresses, key=in_numbers)}

    def _open(self, group: Any, name: str, address: int) -> Any:
        """Return an object that has not been opened before."""
        if address in self._addresses:
            raise ValueError(f"{name!r} is a second name of another object")
        self._addresses.add(address)
        self._content.check_group(address)
        return h5o.open(group, name.encode())


def in_numbers(key: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key by which dense_10 comes after dense_9, as Keras numbers layers."""
    parts = re.split(r"(\d+)", key)
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in parts)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!r} is not a name")
    return name
