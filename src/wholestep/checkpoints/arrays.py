"""Arrays in files that any tool can read: the layout of safetensors, written and read with bounds.

Eight bytes with the length of a JSON header, the header, and the arrays one after the other
(https://huggingface.co/docs/safetensors). Digests are xxh3_128: they find damage, not forgers.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from wholestep.checkpoints.files import create, open_regular, read_into, write_all
from wholestep.errors import CheckpointError

_DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_BYTES = 1 << 30  # of arrays in one file, unless one array alone has more
_MOST_RANK = 32


@dataclass(frozen=True)
class FileFacts:
    """What is known of a file that was written."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Leaf:
    """An array in a file.

    Args:
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    digest: str

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return _num_bytes(self.shape, self.dtype)


def check_dtype(name: str, dtype: np.dtype) -> str:
    """Return what a dtype is called in a file.

    Raises:
        CheckpointError: no file holds such numbers.
    """
    found = _NAMES.get(np.dtype(dtype).newbyteorder("<") if dtype.kind in "iuf" else np.dtype(dtype))
    if found is None:
        raise CheckpointError(
            f"{name} must be of numbers that a file can hold ({', '.join(_DTYPES)}). Received: {dtype}."
        )
    return found


def dtype_of(name: str) -> np.dtype:
    """Return numpy's dtype for what it is called in a file."""
    return _DTYPES[name]


def shared_out(arrays: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return which arrays go in which file, in their order.

    >>> shared_out({"a": np.zeros(2), "b": np.zeros(3)})
    [['a', 'b']]
    """
    files: list[list[str]] = []
    room = 0
    for name, array in arrays.items():
        if not files or array.nbytes > room:
            files.append([])
            room = _MOST_BYTES
        files[-1].append(name)
        room -= array.nbytes
    return files


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[FileFacts, list[Leaf]]:
    """Write a new file of these arrays, synced; return what is known of it."""
    entries: dict[str, dict] = {}
    ends = 0
    for name, array in arrays.items():
        begins, ends = ends, ends + array.nbytes
        dtype = check_dtype(name, array.dtype)
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begins, ends]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    prefix = len(header).to_bytes(8, "little") + header
    whole, leaves, offset = xxhash.xxh3_128(prefix), [], len(prefix)
    file = create(path)
    try:
        write_all(file, prefix)
        for name, array in arrays.items():
            content = _bytes_of(array)
            whole.update(content)
            digest = xxhash.xxh3_128_hexdigest(content)
            leaves.append(Leaf(name, array.shape, entries[name]["dtype"], path.name, offset, digest))
            write_all(file, content)
            offset += array.nbytes
        os.fsync(file)
    finally:
        os.close(file)
    return FileFacts(path.name, offset, whole.hexdigest()), leaves


def read(folder: Path, facts: FileFacts, leaves: Iterable[Leaf]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, every byte of which has been verified.

    Raises:
        CheckpointError: the file is not what was written.
    """
    path = folder / facts.name
    ordered = sorted(leaves, key=lambda leaf: leaf.offset)
    file = open_regular(path, nbytes=facts.nbytes)
    try:
        begins = ordered[0].offset if ordered else facts.nbytes
        prefix = bytearray(begins)
        read_into(file, prefix)
        digest, arrays = xxhash.xxh3_128(prefix), {}
        for leaf in ordered:
            array = np.empty(leaf.shape, _DTYPES[leaf.dtype])
            read_into(file, _bytes_of(array))
            digest.update(_bytes_of(array))
            arrays[leaf.name] = array
    finally:
        os.close(file)
    _check(path, digest.hexdigest(), facts.digest)
    return arrays


def verify(folder: Path, facts: FileFacts) -> None:
    """Read a file, and compare its digest with the one that was written.

    Raises:
        CheckpointError: the file is not what was written.
    """
    file, digest = open_regular(folder / facts.name, nbytes=facts.nbytes), xxhash.xxh3_128()
    try:
        while content := os.read(file, 1 << 22):
            digest.update(content)
    finally:
        os.close(file)
    _check(folder / facts.name, digest.hexdigest(), facts.digest)


def check_leaves(facts: list[FileFacts], leaves: list[Leaf]) -> None:
    """Refuse arrays that files of these sizes cannot hold: each file is its header and its arrays, without a gap.

    Raises:
        CheckpointError: as said.
    """
    by_file: dict[str, list[Leaf]] = {file.name: [] for file in facts}
    if len(by_file) != len(facts) or len({leaf.name for leaf in leaves}) != len(leaves):
        raise CheckpointError("Every file and every array must have a name of its own.")
    for leaf in leaves:
        if leaf.file not in by_file:
            raise CheckpointError(f"{leaf.name} must be in a file that is listed. It is in {leaf.file!r}.")
        if leaf.dtype not in _DTYPES or len(leaf.shape) > _MOST_RANK:
            raise CheckpointError(
                f"{leaf.name} must be of known numbers. It is {leaf.dtype} of {len(leaf.shape)} axes."
            )
        by_file[leaf.file].append(leaf)
    for file in facts:
        ends = None
        for leaf in sorted(by_file[file.name], key=lambda leaf: (leaf.offset, leaf.nbytes)):
            if leaf.offset < 8 or ends not in (None, leaf.offset):
                raise CheckpointError(f"The arrays of {file.name} must follow one another. {leaf.name} does not.")
            ends = leaf.offset + leaf.nbytes
        if ends != file.nbytes:
            raise CheckpointError(f"The arrays of {file.name} must end with it, at {file.nbytes}. They end at {ends}.")


def _check(path: Path, found: str, known: str) -> None:
    if found != known:
        raise CheckpointError(f"{path.name} must have the digest {known}. It has {found}.")


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    num = _DTYPES[dtype].itemsize
    for size in shape:
        num *= size
    return num


def _bytes_of(array: np.ndarray) -> Any:
    """Return the bytes of an array; not of a copy, if it lies in order."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
