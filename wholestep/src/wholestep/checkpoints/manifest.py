"""The manifest of a checkpoint: its content in one line of JSON, and the digest of that line in the
next.

A checkpoint whose manifest is missing or damaged is damaged. Unknown entries of a manifest are
kept, and shown.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import xxhash

from wholestep.checkpoints.arrays import FileInfo, Leaf, check_leaves
from wholestep.checkpoints.files import created, write_all
from wholestep.errors import CheckpointError, DamagedError, message

FORMATS = (1, 2)  # in the second, arrays may be in pieces
NAME = "manifest.json"
MOST_BYTES = 64 << 20
_MOST_INTEGER = 1 << 62
_MOST_LEVELS = 200  # of dicts and lists in one another
_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_RESUMED: dict[str, Any] = {  # entries besides the known ones that a resumed run reads
    "store": str | None,
    "run": dict[str, Any] | None,
    "content": dict[str, str] | None,
    "settings": dict[str, Any] | None,
    "rates": dict[str, float] | None,
}


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    # the number in its name: the number of updates, or more if a loss scale has counted back
    step: int
    files: list[FileInfo]  # the files of arrays
    leaves: list[Leaf]  # the arrays in the files
    facts: dict[str, Any]  # the state of the training besides the arrays, as JSON
    rest: dict[str, Any]  # all other entries

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The full shape and the dtype of every array, by name."""
        return {
            leaf.name: (leaf.shape if leaf.whole is None else leaf.whole, leaf.dtype)
            for leaf in self.leaves
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all files of arrays."""
        return sum(file.nbytes for file in self.files)


def write(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest of a folder's files."""
    with created(folder / NAME) as file:
        write_all(file, rendered(manifest))


def rendered(manifest: Manifest) -> bytes:
    """Return the content of the file of a manifest."""
    said = {
        **finite(manifest.rest),
        "format": FORMATS[any(leaf.begin is not None for leaf in manifest.leaves)],
        "step": manifest.step,
        "files": [as_said(file) for file in manifest.files],
        "leaves": [as_said(leaf) for leaf in manifest.leaves],
        "facts": finite(manifest.facts),
    }
    line = json.dumps(said, separators=(",", ":"), allow_nan=False).encode()
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def parse(content: bytes, folder: object) -> Manifest:
    """Return the manifest with this content; `folder` is named in errors."""
    said = _verified(content)
    try:
        if _counted(said["format"]) not in FORMATS:
            must = f"{folder}: {NAME} must be of format {' or '.join(map(str, FORMATS))}."
            raise CheckpointError(
                message(must, f"format {said['format']}", "the release that wrote it.")
            )
        files, leaves = parts(said)
        known = ("format", "step", "files", "leaves", "facts")
        rest = infinite({key: value for key, value in said.items() if key not in known})
        for key, kind in _RESUMED.items():
            parsed(kind, rest.get(key))
        step = _counted(said["step"])
        facts = parsed(dict[str, Any], infinite(said["facts"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(
            f"{NAME} lacks an entry of a manifest, or has a wrong one ({error!r})."
        ) from error
    check_leaves(files, leaves)
    return Manifest(step, files, leaves, facts, rest)


def as_said(part: FileInfo | Leaf) -> dict[str, Any]:
    """Return the manifest entry of a file, or of an array in a file, as JSON."""
    said = {key: value for key, value in vars(part).items() if value is not None}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}


def parts(said: Mapping[str, Any]) -> tuple[list[FileInfo], list[Leaf]]:
    """Return the files of a manifest, and the arrays in them; a KeyError, TypeError or ValueError
    for a wrong entry.
    """
    files = parsed(list[FileInfo], said["files"])
    leaves = parsed(list[Leaf], said["leaves"])
    for part, name in [
        *((file, file.name) for file in files),
        *((leaf, leaf.file) for leaf in leaves),
    ]:
        for pattern, word in ((_FILE, name), (_DIGEST, part.digest)):
            if not pattern.fullmatch(word) or ".." in word:
                raise ValueError(f"a name such as {pattern.pattern} expected, not {word[:40]!r}")
    counts = [file.nbytes for file in files]
    for leaf in leaves:
        counts += [leaf.offset, *leaf.shape, *(leaf.begin or ()), *(leaf.whole or ())]
        counts.append(math.prod(leaf.whole or leaf.shape))
    for count in counts:
        _counted(count)
    return files, leaves


def _verified(content: bytes) -> dict[str, Any]:
    line, _, digest = content.partition(b"\n")
    found = xxhash.xxh3_128_hexdigest(line)
    if digest != found.encode() + b"\n":
        told = digest[:40].decode(errors="replace").strip()
        raise DamagedError(
            f"{NAME} must have the digest {told or 'that its second line says'}. It has {found}."
        )
    try:
        said = json.loads(line, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{NAME} is not readable JSON ({error}).") from error
    if not isinstance(said, dict):
        raise DamagedError(f"{NAME} must hold a JSON object.")
    return said


def _counted(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_INTEGER:
        raise ValueError(f"a number of at least 0 expected, not {str(value)[:40]}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def finite(value: Any) -> Any:
    """Return JSON in which numbers that are not finite are objects with a string.

    >>> infinite(finite({"best": float("-inf"), "word": "nan"}))
    {'best': -inf, 'word': 'nan'}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def infinite(value: Any, level: int = 0) -> Any:
    """Undo `finite`; a ValueError for dicts and lists in too many others."""
    if level > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} levels of dicts and lists")
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: infinite(part, level + 1) for key, part in value.items()}
    return [infinite(part, level + 1) for part in value] if isinstance(value, list) else value


Reader = Callable[[Any], Any]  # returns JSON as a value of a type


def parsed(kind: Any, said: Any) -> Any:
    """Return JSON as a value of a type. Names that a dataclass lacks, as from a later release, are
    dropped.

    >>> parsed(FileInfo, {"name": "a", "nbytes": 3, "digest": "0", "news": 1})
    FileInfo(name='a', nbytes=3, digest='0')
    >>> parsed(tuple[int, ...] | None, [0, 3])
    (0, 3)

    Raises:
        TypeError: it has another type.
    """
    return _reader(kind)(said)


@cache
def _reader(kind: Any) -> Reader:
    """Return the reader of a type; a manifest may have 100,000 arrays."""
    origin = get_origin(kind)
    of = get_args(kind)
    if kind is Any:
        return lambda said: said
    if origin is UnionType:  # of a type and None
        read = _reader(of[0])
        return lambda said: None if said is None else read(said)
    if is_dataclass(kind):
        return _reader_of_record(kind)
    if origin is dict:
        return _expecting(kind, (dict,), _reader_of_values(_reader(of[1])))
    if origin is list:
        part = _reader(of[0])
        return _expecting(kind, (list,), lambda said: [part(each) for each in said])
    if origin is tuple:
        return _expecting(kind, (list,), _reader_of_parts(of))
    types = (int, float) if kind is float else (kind,)
    return _expecting(kind, types, lambda said: said)


def _expecting(kind: Any, types: tuple[type, ...], read: Reader) -> Reader:
    """Return a reader that refuses JSON of other types."""

    def checked(said: Any) -> Any:
        if type(said) not in types:
            raise TypeError(f"{getattr(kind, '__name__', kind)} expected, not {str(said)[:40]!r}")
        return read(said)

    return checked


def _reader_of_values(read: Reader) -> Reader:
    return lambda said: {key: read(value) for key, value in said.items()}


def _reader_of_record(kind: Any) -> Reader:
    readers = {name: _reader(of) for name, of in get_type_hints(kind).items()}

    def record(said: Any) -> Any:
        return kind(**{name: read(said[name]) for name, read in readers.items() if name in said})

    return _expecting(kind, (dict,), record)


def _reader_of_parts(kinds: tuple[Any, ...]) -> Reader:
    """Return the reader of a tuple's parts."""
    if kinds[-1] is ...:
        read = _reader(kinds[0])
        return lambda said: tuple(read(part) for part in said)
    readers = [_reader(of) for of in kinds]
    return lambda said: tuple(read(part) for read, part in zip(readers, said, strict=True))
