"""A trace: the record of a training, by model, which is saved as arrays and JSON."""

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Stage
from stepcheck.trace.log import Applied, Called, Log, Other, Scaled, Values
from stepcheck.values import Line, Reason, Unjudged

SCHEMA = 1  # of the files
_OF_LOG = (
    "called",
    "applied",
    "scaled",
    "others",
    "unjudged",
    "is_stateless",
    "is_shared",
)


@dataclass(frozen=True)
class Parameter:
    """A parameter, or another value of a model: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of its entries."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Run:
    """The record of one model's training; of large values the entries of
    `measure.places`.

    Attributes:
        parameters: those that are trained, in the order of all lists of them.
        others: statistics, seeds and frozen parameters.
        slots: of each optimizer, by its number in `Applied.optimizer`, the names of its
            slots.
        ended: all values after the training.
        dtypes: in which its layers compute.
    """

    name: str
    parameters: tuple[Parameter, ...]
    others: tuple[Parameter, ...]
    slots: dict[int, tuple[str, ...]]
    ended: Values
    dtypes: tuple[str, ...]
    log: Log


@dataclass
class Trace:
    """The record of a training; complete after the `with` of `stepcheck.record`.

    Attributes:
        runs: of each model that was trained, in the order of their first passes.
        versions: of the framework and other packages.
        failed: the kind of the error that ended the training, or "".
    """

    runs: list[Run] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def num_updates(self) -> int:
        """The number of updates of the model that has most."""
        return max((run.log.num_moves for run in self.runs), default=0)

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace to one file of arrays and JSON, for `stepcheck.load`. It
        holds no code.

        >>> import tempfile, stepcheck
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Trace(versions={"keras": "3"}).save(f"{folder}/a.trace")
        ...     stepcheck.load(f"{folder}/a.trace").versions
        {'keras': '3'}
        """
        arrays = _Arrays()
        content = {"schema": SCHEMA, "trace": _packed(self, arrays)}
        text = np.frombuffer(json.dumps(content).encode(), "uint8")
        with Path(path).open("wb") as file:
            np.savez(file, **{"stepcheck": text} | arrays.joined())  # type: ignore[arg-type]

    def __repr__(self) -> str:
        models = ", ".join(run.name for run in self.runs) or "no model"
        return f"<stepcheck.Trace of {models}: {self.num_updates} updates>"


def load(path: str | os.PathLike) -> Trace:
    """Return the trace that `Trace.save` wrote. Needs no framework, and runs no code of
    the file.

    Raises:
        SpecificationError: the file is not a trace, or one of another version of
            stepcheck.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(file["stepcheck"].tobytes())
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        must, attempt = (
            "The file must be a trace.",
            "one that `trace.save(path)` has written.",
        )
        raise SpecificationError(message(must, str(path), attempt)) from error
    if content["schema"] != SCHEMA:
        must = f"The file must be a trace of schema {SCHEMA}."
        attempt = (
            "record the training again, or load it with the stepcheck that wrote it."
        )
        raise SpecificationError(message(must, f"schema {content['schema']}", attempt))
    return _unpacked(content["trace"], arrays)


class _Arrays:
    """Arrays, each once, laid end to end by dtype."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[np.ndarray, list]] = {}
        self._parts: dict[str, list[np.ndarray]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, array: np.ndarray) -> list:
        """Return the place of an array: [dtype, offset, shape]."""
        if id(array) not in self._known:
            dtype = array.dtype.str[1:]
            start = self._sizes.get(dtype, 0)
            self._parts.setdefault(dtype, []).append(array.reshape(-1))
            self._sizes[dtype] = start + array.size
            self._known[id(array)] = array, [dtype, start, list(array.shape)]
        return self._known[id(array)][1]

    def joined(self) -> dict[str, np.ndarray]:
        """Return one array for each dtype."""
        return {dtype: np.concatenate(parts) for dtype, parts in self._parts.items()}


_NOT_SAVED = "setting", "rules", "slots_of"
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Applied,
        Called,
        Line,
        Other,
        Parameter,
        Run,
        Scaled,
        Trace,
        Unjudged,
        Values,
    )
}


def _packed(value: Any, arrays: _Arrays) -> Any:
    """Return a value as JSON: an array as its place, others as a list that begins with
    a kind.
    """
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return ["array", *arrays.add(value)]
    if isinstance(value, Reason | Stage):
        return [kind, value.name]
    if isinstance(value, Log):
        return [
            "Log",
            *([name, _packed(getattr(value, name), arrays)] for name in _OF_LOG),
        ]
    if kind in _KINDS:
        return [kind, *([name, _packed(part, arrays)] for name, part in _parts(value))]
    if isinstance(value, dict):
        return [
            "dict",
            *([_packed(key, arrays), _packed(v, arrays)] for key, v in value.items()),
        ]
    if isinstance(value, list | tuple):
        return [kind, *(_packed(part, arrays) for part in value)]
    return value.item() if isinstance(value, np.generic) else value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, part) of a value of several, without the settings, by which a port
    alone makes it again.
    """
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = [each.name for each in fields] or value._fields
    yield from (
        (name, getattr(value, name)) for name in names if name not in _NOT_SAVED
    )


def _unpacked(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return the value that was packed."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "array":
        dtype, start, shape = rest
        return arrays[dtype][start : start + int(np.prod(shape))].reshape(shape)
    if kind in ("Reason", "Stage"):
        return {"Reason": Reason, "Stage": Stage}[kind][rest[0]]
    if kind in ("list", "tuple"):
        parts = (_unpacked(part, arrays) for part in rest)
        return [*parts] if kind == "list" else tuple(parts)
    named = {_unpacked(key, arrays): _unpacked(part, arrays) for key, part in rest}
    return named if kind == "dict" else ({"Log": Log} | _KINDS)[kind](**named)
