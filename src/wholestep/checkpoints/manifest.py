"""The manifest of a checkpoint: its content in one line of JSON, and the digest of that line in the next.

A checkpoint whose manifest is missing or damaged is damaged. Unknown entries of a manifest are kept, and shown.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from wholestep.checkpoints.arrays import FileFacts, Leaf, check_leaves
from wholestep.checkpoints.files import create, read_all, write_all
from wholestep.errors import CheckpointError, DamagedError, message

FORMATS = (1, 2)  # in the second, arrays may be in pieces
NAME = "manifest.json"
_MOST_BYTES = 64 << 20
_MOST_INTEGER = 1 << 62
_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Args:
        step: the number in its name: the number of updates, or more if a loss scale has counted back.
        files: the files of arrays.
        leaves: the arrays in the files.
        facts: the state of the training besides the arrays, as JSON.
        rest: all other entries.
    """

    step: int
    files: list[FileFacts]
    leaves: list[Leaf]
    facts: dict[str, Any]
    rest: dict[str, Any]

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The full shape and the dtype of every array, by name."""
        return {leaf.name: (leaf.shape if leaf.whole is None else leaf.whole, leaf.dtype) for leaf in self.leaves}

    @property
    def nbytes(self) -> int:
        """The bytes of all files of arrays."""
        return sum(file.nbytes for file in self.files)


def write(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest of a folder's files."""
    said = {
        **manifest.rest,
        "format": FORMATS[any(leaf.begin is not None for leaf in manifest.leaves)],
        "step": manifest.step,
        "files": [as_said(file) for file in manifest.files],
        "leaves": [as_said(leaf) for leaf in manifest.leaves],
        "facts": manifest.facts,
    }
    line = json.dumps(finite(said), separators=(",", ":"), allow_nan=False).encode()
    file = create(folder / NAME)
    try:
        write_all(file, line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)


def read(folder: Path) -> Manifest:
    """Return the manifest of a folder, without reading arrays.

    Raises:
        DamagedError: it is missing, damaged or inconsistent.
        CheckpointError: its format is unknown.
    """
    said = _verified(folder / NAME)
    try:
        if _count(said["format"]) not in FORMATS:
            must = f"{folder}: {NAME} must be of format {' or '.join(map(str, FORMATS))}."
            raise CheckpointError(message(must, f"format {said['format']}", "the release that wrote it."))
        files, leaves = parts(said)
        known = ("format", "step", "files", "leaves", "facts")
        rest = infinite({key: value for key, value in said.items() if key not in known})
        step, facts = _count(said["step"]), infinite(said["facts"])
        if not isinstance(facts, dict) or not isinstance(said["leaves"], list):
            raise TypeError("facts and leaves")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{NAME} lacks an entry of a manifest, or has a wrong one ({error!r}).") from error
    check_leaves(files, leaves)
    return Manifest(step, files, leaves, facts, rest)


def as_said(part: FileFacts | Leaf) -> dict[str, Any]:
    """Return the manifest entry of a file, or of an array in a file."""
    return {key: value for key, value in asdict(part).items() if value is not None}


def parts(said: Mapping[str, Any]) -> tuple[list[FileFacts], list[Leaf]]:
    """Return the files of a manifest, and the arrays in them.

    Raises:
        KeyError, TypeError, ValueError: an entry is missing or wrong.
    """
    return [_file(part) for part in said["files"]], [_leaf(part) for part in said["leaves"]]


def _verified(path: Path) -> dict[str, Any]:
    line, _, digest = read_all(path, _MOST_BYTES).partition(b"\n")
    found = xxhash.xxh3_128_hexdigest(line)
    if digest != found.encode() + b"\n":
        told = digest[:40].decode(errors="replace").strip()
        raise DamagedError(f"{path.name} must have the digest {told or 'that its second line says'}. It has {found}.")
    try:
        said = json.loads(line, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is not readable JSON ({error}).") from error
    if not isinstance(said, dict):
        raise DamagedError(f"{path.name} must hold a JSON object.")
    return said


def _file(said: Mapping[str, Any]) -> FileFacts:
    return FileFacts(_matching(_FILE, said["name"]), _count(said["nbytes"]), _matching(_DIGEST, said["digest"]))


def _leaf(said: Mapping[str, Any]) -> Leaf:
    if not isinstance(said["name"], str) or not isinstance(said["dtype"], str):
        raise TypeError("a leaf's name and dtype")
    shape, whole, begin = (_counts(said.get(key)) for key in ("shape", "whole", "begin"))
    if shape is None or math.prod(whole or shape) > _MOST_INTEGER:
        raise ValueError("a leaf's shape")
    file, digest = _matching(_FILE, said["file"]), _matching(_DIGEST, said["digest"])
    return Leaf(said["name"], shape, said["dtype"], file, _count(said["offset"]), digest, whole, begin)


def _counts(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(_count(size) for size in value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_INTEGER:
        raise ValueError(f"a number of at least 0 expected, not {str(value)[:40]}")
    return value


def _matching(pattern: re.Pattern, value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or ".." in value:
        raise ValueError(f"a name such as {pattern.pattern} expected, not {str(value)[:40]!r}")
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


def infinite(value: Any) -> Any:
    """Undo `finite`."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: infinite(part) for key, part in value.items()}
    return [infinite(part) for part in value] if isinstance(value, list) else value
