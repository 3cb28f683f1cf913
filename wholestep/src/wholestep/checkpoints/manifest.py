"""The manifest of a checkpoint: its content in a line of JSON, and in the next line its digest.

A checkpoint whose manifest is missing or damaged is damaged. Unknown entries of a manifest are
kept, and shown.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import xxhash

from wholestep.checkpoints.files import created, write_all
from wholestep.checkpoints.safetensors import FileInfo, Leaf, check_leaves
from wholestep.errors import CheckpointError, DamagedError, message

FORMATS = (1, 2)  # in the second, arrays may be in pieces
NAME = "manifest.json"
MOST_BYTES = 64 << 20
_MOST_INTEGER = 1 << 62
_MOST_LEVELS = 200  # of dicts and lists in one another
_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ENTRIES = ("format", "step", "files", "leaves", "facts")
_RESUMED: dict[str, Any] = {  # further entries that a resumed run reads
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
    entries = {
        **finite(manifest.rest),
        "format": FORMATS[any(leaf.begin is not None for leaf in manifest.leaves)],
        "step": manifest.step,
        "files": [as_json(file) for file in manifest.files],
        "leaves": [as_json(leaf) for leaf in manifest.leaves],
        "facts": finite(manifest.facts),
    }
    line = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def parse(content: bytes, folder: object) -> Manifest:
    """Return the manifest with this content; `folder` is named in errors."""
    entries = _verified(content)
    try:
        if _counted(entries["format"]) not in FORMATS:
            must = f"{folder}: {NAME} must be of format {' or '.join(map(str, FORMATS))}."
            received = f"format {entries['format']}"
            raise CheckpointError(message(must, received, "the release that wrote it."))
        files, leaves = parts(entries)
        rest = infinite({key: entries[key] for key in entries if key not in _ENTRIES})
        for key, kind in _RESUMED.items():
            parsed(kind, rest.get(key))
        facts = parsed(dict[str, Any], infinite(entries["facts"]))
        manifest = Manifest(_counted(entries["step"]), files, leaves, facts, rest)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        must = f"{NAME} lacks an entry of a manifest, or has a wrong one"
        raise DamagedError(f"{must} ({error!r}).") from error
    check_leaves(files, leaves)
    return manifest


def as_json(part: FileInfo | Leaf) -> dict[str, Any]:
    """Return the manifest entry of a file, or of an array in a file."""
    return {name: value for name, value in vars(part).items() if value is not None}


def parts(entries: Mapping[str, Any]) -> tuple[list[FileInfo], list[Leaf]]:
    """Return the files of a manifest, and the arrays in them.

    Raises:
        KeyError, TypeError, ValueError: an entry is wrong.
    """
    files = parsed(list[FileInfo], entries["files"])
    leaves = parsed(list[Leaf], entries["leaves"])
    for name in {file.name for file in files} | {leaf.file for leaf in leaves}:
        _check_name(name, _FILE)
    for part in (*files, *leaves):
        _check_name(part.digest, _DIGEST)
    for file in files:
        _counted(file.nbytes)
    for leaf in leaves:
        whole = leaf.whole or leaf.shape
        for count in (leaf.offset, *leaf.shape, *(leaf.begin or ()), *whole, math.prod(whole)):
            _counted(count)
    return files, leaves


def _check_name(name: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(name) or ".." in name:
        raise ValueError(f"a name such as {pattern.pattern} expected, not {name[:40]!r}")


def _verified(content: bytes) -> dict[str, Any]:
    line, _, second = content.partition(b"\n")
    digest = xxhash.xxh3_128_hexdigest(line)
    if second != digest.encode() + b"\n":
        expected = second[:40].decode(errors="replace").strip() or "that its second line says"
        raise DamagedError(f"{NAME} must have the digest {expected}. It has {digest}.")
    try:
        entries = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{NAME} is not readable JSON ({error}).") from error
    if not isinstance(entries, dict):
        raise DamagedError(f"{NAME} must hold a JSON object.")
    return entries


def _counted(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_INTEGER:
        raise ValueError(f"a number of at least 0 expected, not {str(value)[:40]}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key comes twice")
    return entries


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


_JSON: dict[Any, tuple[type, ...]] = {tuple: (list, tuple), float: (int, float)}  # others: as named
_hints = cache(get_type_hints)


def parsed(kind: Any, value: Any) -> Any:
    """Return JSON as a value of a type.

    Names that a dataclass lacks, as from a later release, are dropped.

    >>> parsed(FileInfo, {"name": "a", "nbytes": 3, "digest": "0", "news": 1})
    FileInfo(name='a', nbytes=3, digest='0')
    >>> parsed(tuple[int, ...] | None, [0, 3])
    (0, 3)

    Raises:
        TypeError: it has another type.
    """
    if kind is Any:
        return value
    origin = get_origin(kind) or kind
    of = get_args(kind)
    if origin is UnionType:  # of a type and None
        return None if value is None else parsed(of[0], value)
    is_record = is_dataclass(kind)
    if type(value) not in _JSON.get(origin, (dict if is_record else origin,)):
        name = getattr(kind, "__name__", kind)
        raise TypeError(f"{name} expected, not {str(value)[:40]!r}")
    if is_record:
        fields = _hints(kind).items()
        return kind(**{name: parsed(field, value[name]) for name, field in fields if name in value})
    if origin is dict:
        return {key: parsed(of[1], part) for key, part in value.items()}
    if origin in (list, tuple):
        kinds = of if origin is tuple and of[-1] is not ... else of[:1] * len(value)
        return origin(parsed(kind, part) for kind, part in zip(kinds, value, strict=True))
    return value
