"""Bounded reads from an HDF5 file: a string of an attribute, the numbers of a dataset.

HDF5's library finds objects, after their groups have been checked: it never ends in a loop of
names. Nor does it end in a damaged heap of strings, and it decompresses chunks to any size, so
attributes and numbers are read here (docs/notes/007-locks-and-hdf5.md). The format:
https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from h5py import h5d, h5o, h5s, h5t

_MOST_TEXT = 1 << 10  # bytes of a string
_MOST_HEADER = 1 << 20  # bytes of a part of a header
_MOST_HEADERS = 1 << 27  # bytes of all headers, and _EACH for each read
_EACH = 1 << 7
_MOST_HOLES = 1 << 12  # in a heap of names
_MOST_NODES = 1 << 16  # in a tree of names
_MOST_HEAP = 1 << 16  # bytes of a heap of strings
_MOST_CHUNKS = 100  # of a small array; of a large one, one for each KiB
_BLOCK = 1 << 24  # bytes of another dtype that are converted at once
_COMPACT = 1 << 16  # the most bytes of an array in its header
_DEFLATE = 1
_SHUFFLE = 2  # the numbers of filters
_ATTRIBUTE = 0x0C
_CONTINUATION = 0x10  # the numbers of messages
_TABLE = 0x11
_MANY_ATTRIBUTES = 0x15
_FIXED = 3
_VARIABLE = 9  # the numbers of classes of types
_NOWHERE = (1 << 64) - 1


class FileBytes:
    """The bytes of a file, of which no more is read than it has."""

    def __init__(self, file: Any):
        self._file = file
        self._left = _MOST_HEADERS

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return few bytes, such as a part of a header."""
        self._left -= nbytes + _EACH
        if nbytes > _MOST_HEADER or self._left < 0:
            raise ValueError("headers that are too large, or in a loop")
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fill an array of bytes."""
        self._file.seek(offset)
        view = memoryview(out)
        while view:
            num = self._file.readinto(view)
            if not num:
                raise ValueError(f"the file ends {len(view)} bytes too early")
            view = view[num:]

    # ---- groups ----

    def check_root(self) -> None:
        """Refuse a file whose first group is in a loop; see `check_group`."""
        begin = self.read(0, 96)
        version = begin[8]
        if begin[:8] != b"\x89HDF\r\n\x1a\n":
            raise ValueError("it is not a file of HDF5")
        at = {0: 64, 1: 68}.get(version, 36)  # of its address
        self.check_group(*struct.unpack_from("<Q", begin, at))
        is_cached = version < 2 and struct.unpack_from("<I", begin, at + 8)[0] == 1
        if is_cached:
            self._check_table(*struct.unpack("<QQ", self.read(at + 16, 16)))

    def check_group(self, address: int) -> None:
        """Refuse the object at this address if it is a group in which the library never ends."""
        for kind, body in self._messages(address):
            if kind == _TABLE:
                self._check_table(*struct.unpack_from("<QQ", body))

    def _check_table(self, tree: int, heap: int) -> None:
        self._check_heap(heap)
        nodes = [tree]
        seen = {tree}
        while nodes:
            children = self._children(nodes.pop())
            num_seen = len(seen) + len(children)
            seen.update(children)
            if len(seen) < num_seen or num_seen > _MOST_NODES:
                raise ValueError("a group in a loop")
            nodes.extend(children)

    def _check_heap(self, heap: int) -> None:
        size, hole, begin = struct.unpack("<8xQQQ", self.read(heap, 32))
        num = 0
        while hole + 16 <= size and hole != 1:  # 1 is the end
            num += 1
            if num > _MOST_HOLES:
                raise ValueError("names in a loop")
            (hole,) = struct.unpack("<Q", self.read(begin + hole, 8))

    def _children(self, node: int) -> tuple[int, ...]:
        """Return the addresses of the nodes, or of the lists of names, below a node of a group."""
        signature, num = struct.unpack("<4s2xH", self.read(node, 8))
        if signature != b"TREE":
            return ()
        keys_and_children = struct.unpack(f"<{2 * num}Q", self.read(node + 24, 16 * num))
        return keys_and_children[1::2]

    # ---- the strings of attributes ----

    def text(self, owner: Any, name: str) -> str:
        """Return a string that is an attribute of an object; "" without it."""
        for kind, body in self._messages(h5o.get_info(owner).addr):
            if kind == _MANY_ATTRIBUTES:
                (heap,) = struct.unpack_from("<Q", body, 4 if body[1] & 1 else 2)
                if heap != _NOWHERE:
                    raise ValueError("an object with many attributes")
            text = self._attribute(body, name.encode()) if kind == _ATTRIBUTE else None
            if text is not None:
                return text
        return ""

    def _messages(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Yield the messages in the header of an object: their numbers and contents."""
        is_old = self.read(address, 4) != b"OHDR"
        parsed = _old_messages if is_old else _new_messages
        blocks = [self._first_block(address, is_old=is_old)]
        while blocks:
            begin, nbytes, has_order = blocks.pop()
            for kind, body in parsed(self.read(begin, nbytes), has_order):
                if kind == _CONTINUATION:
                    begin, nbytes = struct.unpack_from("<QQ", body)
                    around = 0 if is_old else 4  # a signature and a digest
                    blocks.append((begin + around, max(0, nbytes - 2 * around), has_order))
                yield kind, body

    def _first_block(self, address: int, *, is_old: bool) -> tuple[int, int, bool]:
        """Return the address of the messages, their size, and whether they are numbered."""
        if is_old:
            version, nbytes = struct.unpack("<B7xI", self.read(address, 12))
            if version != 1:
                raise ValueError(f"an object of version {version}")
            return address + 16, nbytes, False
        flags = self.read(address + 5, 1)[0]
        begin = address + 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
        width = 1 << (flags & 3)
        nbytes = int.from_bytes(self.read(begin, width), "little")
        return begin + width, nbytes, bool(flags & 4)

    def _attribute(self, body: bytes, wanted: bytes) -> str | None:
        """Return the string of an attribute; None if it has another name."""
        version, flags, *sizes = struct.unpack_from("<BBHHH", body)
        begin = 9 if version == 3 else 8
        parts = []
        for size in sizes:
            parts.append(body[begin : begin + size])
            begin += -(-size // 8) * 8 if version == 1 else size
        name, kind, space = parts
        if name.rstrip(b"\0") != wanted:
            return None
        is_shared = version > 1 and flags & 3
        number = kind[0] & 15
        variant = kind[1] & 15
        is_string = number == _FIXED or (number == _VARIABLE and variant == 1)
        if is_shared or not is_string or space[1] > 0:
            raise ValueError(f"an attribute {wanted.decode()!r} that is not a string")
        if number == _FIXED:
            (size,) = struct.unpack_from("<I", kind, 4)
            text = body[begin : begin + size]
        else:
            text = self._string(*struct.unpack_from("<IQI", body, begin))
        return text.rstrip(b"\0").decode()

    def _string(self, nbytes: int, address: int, wanted: int) -> bytes:
        """Return a string in a heap."""
        if nbytes == 0:
            return b""
        signature, size = struct.unpack("<4s4xQ", self.read(address, 16))
        if signature != b"GCOL" or size > _MOST_HEAP or nbytes > _MOST_TEXT:
            raise ValueError(f"a name of {nbytes} bytes in a heap of {size}")
        heap = self.read(address, size)
        begin = 16
        index = -1
        while begin + 16 + nbytes <= size and index != 0:
            index, room = struct.unpack_from("<H6xQ", heap, begin)
            begin += 16
            if index == wanted and room >= nbytes:
                return heap[begin : begin + nbytes]
            begin += -(-room // 8) * 8
        raise ValueError("a name that is not in its heap")


def _old_messages(block: bytes, _: bool) -> Iterator[tuple[int, bytes]]:
    begin = 0
    while begin + 8 <= len(block):
        kind, size = struct.unpack_from("<HH", block, begin)
        yield kind, block[begin + 8 : begin + 8 + size]
        begin += 8 + size


def _new_messages(block: bytes, has_order: bool) -> Iterator[tuple[int, bytes]]:
    begin = 0
    prefix = 6 if has_order else 4
    while begin + prefix <= len(block):
        kind, size = struct.unpack_from("<BH", block, begin)
        yield kind, block[begin + prefix : begin + prefix + size]
        begin += prefix + size


class StoredNumbers:
    """The numbers of a dataset, of which only the shape and the dtype have been read.

    Attributes:
        dtype: object for everything except numbers.
    """

    def __init__(self, name: str, dataset: Any, content: FileBytes):
        plist = dataset.get_create_plist()
        if plist.get_external_count() or plist.get_layout() == h5d.VIRTUAL:
            raise ValueError(f"{name} is not stored in this file")
        self._name = name
        self._dataset = dataset
        self._content = content
        self._plist = plist
        is_empty = dataset.get_space().get_simple_extent_type() == h5s.NULL
        self.shape = () if is_empty else tuple(dataset.shape)
        self.dtype = np.dtype(object) if is_empty else _dtype(dataset, content)
        is_bool = self.dtype == bool
        self._stored = np.dtype(np.uint8) if is_bool else self.dtype  # of any bits
        self._nbytes = math.prod(self.shape) * self._stored.itemsize

    def read(self, dtype: np.dtype) -> np.ndarray:
        """Return the numbers in a dtype; refuse another number of stored bytes than expected."""
        layout = self._plist.get_layout()
        size = self._dataset.get_storage_size()
        if layout != h5d.CHUNKED and size != self._nbytes:
            raise ValueError(f"{self._name} is stored in {size} bytes in place of {self._nbytes}")
        if layout == h5d.COMPACT and size > _COMPACT:
            raise ValueError(f"{self._name} has {size} bytes in its header")
        out = np.empty(self.shape, dtype)
        if self._nbytes == 0:
            return out
        if layout == h5d.CHUNKED:
            self._read_chunks(out)
        elif layout == h5d.COMPACT:
            stored = np.empty(self.shape, self._stored)
            self._dataset.read(h5s.ALL, h5s.ALL, stored, self._dataset.get_type())
            out[...] = stored
        else:
            self._read_blocks(out.reshape(-1))
        return out

    def _read_blocks(self, out: np.ndarray) -> None:
        num = _BLOCK // self._stored.itemsize
        offset = self._dataset.get_offset()
        for begin in range(0, out.size, num):
            part = out[begin : begin + num]
            block = part if out.dtype == self._stored else np.empty(part.size, self._stored)
            self._content.read_into(block.view(np.uint8), offset)
            if block is not part:
                part[...] = block
            offset += block.nbytes

    def _read_chunks(self, out: np.ndarray) -> None:
        chunk = self._plist.get_chunk()
        nbytes = math.prod(chunk) * self._stored.itemsize
        counts = [-(-size // step) for size, step in zip(self.shape, chunk, strict=True)]
        num = math.prod(counts)
        most = max(_MOST_CHUNKS, self._nbytes >> 10)
        if nbytes > max(self._nbytes, _MOST_HEADER) or num > most:
            raise ValueError(f"{self._name} is stored in {num} chunks of shape {chunk}")
        for index in np.ndindex(*counts):
            begin = tuple(i * step for i, step in zip(index, chunk, strict=True))
            block = np.frombuffer(self._chunk(begin, nbytes), self._stored).reshape(chunk)
            places = tuple(slice(at, at + step) for at, step in zip(begin, chunk, strict=True))
            part = out[places]
            part[...] = block[tuple(map(slice, part.shape))]

    def _chunk(self, begin: tuple[int, ...], nbytes: int) -> bytes:
        """Return the bytes of a chunk, decompressed to the expected size."""
        stored = self._dataset.get_chunk_info_by_coord(begin)
        most = nbytes + nbytes // 100 + 100  # an incompressible chunk grows
        if stored.byte_offset is None or stored.size > most:
            raise self._wrong_chunk(stored.size, nbytes)
        raw = np.empty(stored.size, np.uint8)
        self._content.read_into(raw, stored.byte_offset)
        content = raw.tobytes()
        for i in reversed(range(self._plist.get_nfilters())):
            if not stored.filter_mask >> i & 1:
                content = self._unfiltered(content, i, most)
        if len(content) != nbytes:
            raise self._wrong_chunk(len(content), nbytes)
        return content

    def _wrong_chunk(self, nbytes: int, expected: int) -> ValueError:
        return ValueError(f"{self._name} has a chunk of {nbytes} bytes in place of {expected}")

    def _unfiltered(self, content: bytes, i: int, most: int) -> bytes:
        number, _, _, name = self._plist.get_filter(i)
        if number == _DEFLATE:
            return zlib.decompressobj().decompress(content, most)
        if number == _SHUFFLE:
            parts = np.frombuffer(content, np.uint8).reshape(self._stored.itemsize, -1)
            return parts.T.tobytes()
        way = "h5repack -f NONE undoes it"
        raise ValueError(f"{self._name} is compressed by {name.decode()}; {way}")


def _dtype(dataset: Any, content: FileBytes) -> np.dtype:
    stored = dataset.get_type()
    is_opaque = isinstance(stored, h5t.TypeOpaqueID) and stored.get_size() == 2
    if is_opaque and content.text(dataset, "dtype") == "bfloat16":  # as Keras stores it
        return np.dtype(ml_dtypes.bfloat16)
    dtype = stored.dtype
    is_number = dtype.kind in "biufc" and h5t.py_create(dtype, logical=True) == stored
    return dtype if is_number else np.dtype(object)
