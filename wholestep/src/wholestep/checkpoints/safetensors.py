"""Arrays in safetensors files, written and read with checks of their bounds.

A file is eight bytes with the length of a JSON header, the header, and the arrays one after the
other (https://huggingface.co/docs/safetensors). Digests are xxh3_128: they find damage, not
forgers. A file with other content than was written is a DamagedError.
"""

import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from wholestep.checkpoints.files import (
    close,
    created,
    on_disk,
    open_regular,
    opened,
    read_into,
    write_all,
)
from wholestep.checkpoints.shards import Numbers, Shard
from wholestep.errors import CheckpointError, DamagedError

DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_BYTES = 1 << 30  # of arrays in one file, unless a single array has more
_MOST_RANK = 32


@dataclass(frozen=True)
class FileInfo:
    """The name, size and digest of a written file."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Leaf:
    """An array in a file, or a piece of an array."""

    name: str
    shape: tuple[int, ...]  # the shape in the file
    dtype: str
    file: str
    offset: int  # the offset of its first byte in the file
    digest: str
    whole: tuple[int, ...] | None = None  # for a piece, the shape of the full array
    # for a piece, its start in the full array along every axis
    begin: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def check_dtype(name: str, dtype: np.dtype) -> str:
    """Return the name of a dtype in a file; a CheckpointError if files cannot hold it."""
    stored = np.dtype(dtype)
    if stored.kind in "iuf":
        stored = stored.newbyteorder("<")
    if stored not in _NAMES:
        must = f"{name} must be of numbers that a file can hold ({', '.join(DTYPES)})."
        raise CheckpointError(f"{must} Received: {dtype}.")
    return _NAMES[stored]


class Content(NamedTuple):
    """An array to write to a file, or a piece of an array; see `Leaf`."""

    name: str
    array: np.ndarray
    whole: tuple[int, ...] | None = None
    begin: tuple[int, ...] | None = None


def contents_of(name: str, numbers: Numbers) -> list[Content]:
    """Return the parts of an array that this process writes."""
    if isinstance(numbers, np.ndarray):
        return [Content(name, numbers)]
    shards = [shard for shard in numbers.shards if shard.is_own]
    return [Content(name, shard.read(), numbers.shape, shard.begin) for shard in shards]


def shared_out(contents: Iterable[Content]) -> list[list[Content]]:
    """Return the contents of each file, in order; pieces come last, in separate files.

    >>> [file] = shared_out([Content("a", np.zeros(2)), Content("b", np.ones(1))])
    >>> [content.name for content in file]
    ['a', 'b']
    """
    files: list[list[Content]] = []
    room = 0
    was_piece = False
    for content in sorted(contents, key=lambda content: content.begin is not None):
        is_piece = content.begin is not None
        if not files or content.array.nbytes > room or is_piece != was_piece:
            files.append([])
            room = _MOST_BYTES
        files[-1].append(content)
        room -= content.array.nbytes
        was_piece = is_piece
    return files


def write(path: Path, contents: list[Content]) -> tuple[FileInfo, list[Leaf]]:
    """Write and sync a new file of these arrays; return its description and its leaves."""
    prefix = _header(contents)
    file_digest = xxhash.xxh3_128(prefix)
    leaves = []
    offset = len(prefix)
    with created(path) as file:
        write_all(file, prefix)
        for name, array, whole, begin in contents:
            content = _bytes_of(array)
            file_digest.update(content)
            dtype = check_dtype(name, array.dtype)
            digest = xxhash.xxh3_128_hexdigest(content)
            leaves.append(Leaf(name, array.shape, dtype, path.name, offset, digest, whole, begin))
            write_all(file, content)
            offset += array.nbytes
    return FileInfo(path.name, offset, file_digest.hexdigest()), leaves


def _header(contents: list[Content]) -> bytes:
    """Return the first bytes of a file of these arrays."""
    entries = {}
    end = 0
    for name, array, _, begin in contents:
        key = name if begin is None else f"{name}{list(begin)}"
        offsets = [end, end + array.nbytes]
        entries[key] = {
            "dtype": check_dtype(name, array.dtype),
            "shape": array.shape,
            "data_offsets": offsets,
        }
        end = offsets[1]
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read(folder: Path, info: FileInfo, leaves: Iterable[Leaf]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, after verifying every byte."""
    ordered = sorted(leaves, key=lambda leaf: leaf.offset)
    with opened(folder / info.name, nbytes=info.nbytes) as file:
        prefix = bytearray(ordered[0].offset if ordered else info.nbytes)
        read_into(file, prefix)
        digest = xxhash.xxh3_128(prefix)
        arrays = {}
        for leaf in ordered:
            array = np.empty(leaf.shape, DTYPES[leaf.dtype])
            read_into(file, _bytes_of(array))
            digest.update(_bytes_of(array))
            arrays[leaf.name] = array
    _check(info.name, digest.hexdigest(), info.digest)
    return arrays


def open_shards(folder: Path, info: FileInfo, leaves: Iterable[Leaf]) -> list[tuple[Leaf, Shard]]:
    """Return the pieces of a file; each use of a piece reads and verifies it.

    The file stays open while a piece exists, so the pieces outlive a removal of the checkpoint.
    """
    path = folder / info.name
    file = open_regular(path, nbytes=info.nbytes)

    def read(leaf: Leaf) -> np.ndarray:
        array = np.empty(leaf.shape, DTYPES[leaf.dtype])
        with on_disk(f"{leaf.name} must be read from {path}."):
            read_into(file, _bytes_of(array), leaf.offset)
        _check(path.name, xxhash.xxh3_128_hexdigest(_bytes_of(array)), leaf.digest)
        return array

    weakref.finalize(read, close, file)
    return [(leaf, Shard(leaf.begin or (), leaf.shape, partial(read, leaf))) for leaf in leaves]


def chunks(folder: Path, info: FileInfo) -> Iterator[bytes]:
    """Yield the content of a file, see `checked`."""
    with opened(folder / info.name, nbytes=info.nbytes) as file:
        yield from checked(iter(partial(os.read, file, 1 << 22), b""), info)


def checked(content: Iterable[bytes], info: FileInfo) -> Iterator[bytes]:
    """Yield the content of a file; a DamagedError at its end if it has another digest."""
    digest = xxhash.xxh3_128()
    for chunk in content:
        digest.update(chunk)
        yield chunk
    _check(info.name, digest.hexdigest(), info.digest)


def drain(chunks: Iterable[bytes]) -> None:
    """Read and verify all of a file."""
    for _ in chunks:
        pass


def check_leaves(files: list[FileInfo], leaves: list[Leaf]) -> None:
    """Refuse leaves that do not fill these files: a header, and arrays without a gap."""
    by_file: dict[str, list[Leaf]] = {file.name: [] for file in files}
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.file not in by_file:
            must = f"{leaf.name} must be in a file that is listed."
            raise DamagedError(f"{must} It is in {leaf.file!r}.")
        if leaf.dtype not in DTYPES or len(leaf.shape) > _MOST_RANK:
            found = f"{leaf.dtype} of {len(leaf.shape)} axes"
            raise DamagedError(f"{leaf.name} must be of known numbers. It is {found}.")
        by_file[leaf.file].append(leaf)
        by_name.setdefault(leaf.name, []).append(leaf)
    is_repeated = any(len(same) > 1 and same[0].begin is None for same in by_name.values())
    if is_repeated or len(by_file) != len(files):
        raise DamagedError("Every file and every array must have a unique name.")
    for same in by_name.values():
        _check_grid(same)
    for file in files:
        _check_file(file, by_file[file.name])


def _check_file(file: FileInfo, leaves: list[Leaf]) -> None:
    """Refuse a gap between the arrays of a file, or after them."""
    end = None
    for leaf in sorted(leaves, key=lambda leaf: (leaf.offset, leaf.nbytes)):
        if leaf.offset < 8 or end not in (None, leaf.offset):
            must = f"The arrays of {file.name} must follow one another."
            raise DamagedError(f"{must} {leaf.name} does not.")
        end = leaf.offset + leaf.nbytes
    if end != file.nbytes:
        must = f"The arrays of {file.name} must end with it, at {file.nbytes}."
        raise DamagedError(f"{must} They end at {end}.")


def _check_grid(leaves: list[Leaf]) -> None:
    """Refuse pieces that do not form a grid over their array: some overlap, or some are missing."""
    name, whole = leaves[0].name, leaves[0].whole
    cells = [leaf.begin for leaf in leaves]
    kinds = {(leaf.whole, leaf.dtype, len(leaf.begin or ())) for leaf in leaves}
    if cells == [None] and whole is None:
        return
    if whole is None or None in cells or kinds != {(whole, leaves[0].dtype, len(whole))}:
        raise DamagedError(f"The pieces of {name} must be of one array. They are not.")
    # Along every axis, each piece must end where the next begins.
    axes = [sorted(set(begins)) for begins in zip(*cells, strict=True)]
    ends = [dict(pairwise([*begins, size])) for begins, size in zip(axes, whole, strict=True)]
    is_grid = len(set(cells)) == len(cells) == math.prod(map(len, axes))
    is_grid &= all(begins[0] == 0 for begins in axes)
    for leaf in leaves:
        places = zip(ends, leaf.begin or (), strict=True)
        is_grid &= leaf.shape == tuple(end[begin] - begin for end, begin in places)
    if not is_grid:
        raise DamagedError(f"The pieces of {name} must fill {whole} once. They do not.")


def _check(name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise DamagedError(f"{name} must have the digest {expected}. It has {digest}.")


def _bytes_of(array: np.ndarray) -> Any:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
