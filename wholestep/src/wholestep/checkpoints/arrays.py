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
    found = _NAMES.get(
        np.dtype(dtype).newbyteorder("<") if dtype.kind in "iuf" else np.dtype(dtype)
    )
    if found is None:
        must = f"{name} must be of numbers that a file can hold ({', '.join(DTYPES)})."
        raise CheckpointError(f"{must} Received: {dtype}.")
    return found


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
    return [
        Content(name, piece.read(), numbers.shape, piece.begin)
        for piece in numbers.pieces
        if piece.is_own
    ]


def shared_out(contents: Iterable[Content]) -> list[list[Content]]:
    """Return the contents of each file, in order; pieces come last, in separate files.

    >>> [several] = shared_out([Content("a", np.zeros(2)), Content("b", np.ones(1))])
    >>> [content.name for content in several]
    ['a', 'b']
    """
    files: list[list[Content]] = []
    room = 0
    for content in sorted(contents, key=lambda content: content.begin is not None):
        if (
            not files
            or content.array.nbytes > room
            or (content.begin is None) != (files[-1][0].begin is None)
        ):
            files.append([])
            room = _MOST_BYTES
        files[-1].append(content)
        room -= content.array.nbytes
    return files


def write(path: Path, contents: Iterable[Content]) -> tuple[FileInfo, list[Leaf]]:
    """Write and sync a new file of these arrays; return its description and its leaves."""
    entries: dict[str, dict[str, Any]] = {}
    ends = 0
    for name, array, _, at in contents:
        begins = ends
        ends = ends + array.nbytes
        entry = {
            "dtype": check_dtype(name, array.dtype),
            "shape": list(array.shape),
            "data_offsets": [begins, ends],
        }
        entries[name if at is None else f"{name}{list(at)}"] = entry
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    prefix = len(header).to_bytes(8, "little") + header
    digest = xxhash.xxh3_128(prefix)
    leaves = []
    offset = len(prefix)
    with created(path) as file:
        write_all(file, prefix)
        for name, array, of, at in contents:
            content = _bytes_of(array)
            digest.update(content)
            dtype = check_dtype(name, array.dtype)
            own = xxhash.xxh3_128_hexdigest(content)
            leaves.append(Leaf(name, array.shape, dtype, path.name, offset, own, of, at))
            write_all(file, content)
            offset += array.nbytes
    return FileInfo(path.name, offset, digest.hexdigest()), leaves


def read(folder: Path, facts: FileInfo, leaves: Iterable[Leaf]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, after verifying every byte."""
    path = folder / facts.name
    ordered = sorted(leaves, key=lambda leaf: leaf.offset)
    with opened(path, nbytes=facts.nbytes) as file:
        prefix = bytearray(ordered[0].offset if ordered else facts.nbytes)
        read_into(file, prefix)
        digest = xxhash.xxh3_128(prefix)
        arrays = {}
        for leaf in ordered:
            array = np.empty(leaf.shape, DTYPES[leaf.dtype])
            read_into(file, _bytes_of(array))
            digest.update(_bytes_of(array))
            arrays[leaf.name] = array
    _check(path.name, digest.hexdigest(), facts.digest)
    return arrays


def open_pieces(folder: Path, facts: FileInfo, leaves: Iterable[Leaf]) -> list[tuple[Leaf, Shard]]:
    """Return the pieces of a file; each use of a piece reads and verifies it.

    The file stays open while a piece exists, so the pieces outlive a removal of the checkpoint.
    """
    path = folder / facts.name
    file = open_regular(path, nbytes=facts.nbytes)

    def read(leaf: Leaf) -> np.ndarray:
        array = np.empty(leaf.shape, DTYPES[leaf.dtype])
        with on_disk(f"{leaf.name} must be read from {path}."):
            read_into(file, _bytes_of(array), leaf.offset)
        _check(path.name, xxhash.xxh3_128_hexdigest(_bytes_of(array)), leaf.digest)
        return array

    weakref.finalize(read, close, file)
    return [(leaf, Shard(leaf.begin or (), leaf.shape, partial(read, leaf))) for leaf in leaves]


def verify(folder: Path, facts: FileInfo) -> None:
    """Read a file, and compare its digest with the recorded digest."""
    for _ in chunks(folder, facts):
        pass


def chunks(folder: Path, facts: FileInfo) -> Iterator[bytes]:
    """Yield the content of a file, see `checked`."""
    with opened(folder / facts.name, nbytes=facts.nbytes) as file:
        yield from checked(iter(partial(os.read, file, 1 << 22), b""), facts)


def checked(content: Iterable[bytes], facts: FileInfo) -> Iterator[bytes]:
    """Yield the content of a file; a DamagedError at its end if its digest differs from the
    recorded digest.
    """
    digest = xxhash.xxh3_128()
    for chunk in content:
        digest.update(chunk)
        yield chunk
    _check(facts.name, digest.hexdigest(), facts.digest)


def check_leaves(facts: list[FileInfo], leaves: list[Leaf]) -> None:
    """Refuse leaves that do not fill files of these sizes: a file is its header and its arrays,
    without a gap.
    """
    by_file: dict[str, list[Leaf]] = {file.name: [] for file in facts}
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault(leaf.name, []).append(leaf)
    if len(by_file) != len(facts) or any(
        len(same) > 1 and same[0].begin is None for same in by_name.values()
    ):
        raise DamagedError("Every file and every array must have a unique name.")
    for leaf in leaves:
        if leaf.file not in by_file:
            raise DamagedError(
                f"{leaf.name} must be in a file that is listed. It is in {leaf.file!r}."
            )
        if leaf.dtype not in DTYPES or len(leaf.shape) > _MOST_RANK:
            raise DamagedError(
                f"{leaf.name} must be of known numbers. It is {leaf.dtype} of {len(leaf.shape)} "
                "axes."
            )
        by_file[leaf.file].append(leaf)
    for same in by_name.values():
        _check_tiles(same)
    for file in facts:
        ends = None
        for leaf in sorted(by_file[file.name], key=lambda leaf: (leaf.offset, leaf.nbytes)):
            if leaf.offset < 8 or ends not in (None, leaf.offset):
                raise DamagedError(
                    f"The arrays of {file.name} must follow one another. {leaf.name} does not."
                )
            ends = leaf.offset + leaf.nbytes
        if ends != file.nbytes:
            raise DamagedError(
                f"The arrays of {file.name} must end with it, at {file.nbytes}. They end at {ends}."
            )


def _check_tiles(leaves: list[Leaf]) -> None:
    """Refuse pieces that do not form a grid over their array: some overlap, or some are missing."""
    first = leaves[0]
    if first.begin is None and first.whole is None:
        return
    cells = [leaf.begin for leaf in leaves]
    is_one = all((leaf.whole, leaf.dtype) == (first.whole, first.dtype) for leaf in leaves)
    if (
        not is_one
        or first.whole is None
        or any(begin is None or len(begin) != len(first.whole) for begin in cells)
    ):
        raise DamagedError(f"The pieces of {first.name} must be of one array. They are not.")
    # Along every axis, each piece must end where the next begins.
    axes = [sorted(set(places)) for places in zip(*cells, strict=True)]
    ends = [
        dict(zip(places, [*places[1:], size], strict=True))
        for places, size in zip(axes, first.whole, strict=True)
    ]
    is_grid = len(set(cells)) == len(cells) == math.prod(map(len, axes)) and all(
        places[0] == 0 for places in axes
    )
    for leaf in leaves:
        bounds = zip(ends, leaf.begin or (), leaf.shape, strict=False)
        is_grid &= len(leaf.shape) == len(ends) and all(
            end[at] == at + size for end, at, size in bounds
        )
    if not is_grid:
        raise DamagedError(f"The pieces of {first.name} must fill {first.whole} once. They do not.")


def _check(name: str, found: str, known: str) -> None:
    if found != known:
        raise DamagedError(f"{name} must have the digest {known}. It has {found}.")


def _bytes_of(array: np.ndarray) -> Any:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
