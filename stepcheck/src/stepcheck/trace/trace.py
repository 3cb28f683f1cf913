"""A trace: the record of a training, by model, which is saved as arrays and JSON."""

import json
import math
import os
import zipfile
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from stepcheck.errors import SpecificationError, message
from stepcheck.faults import Stage
from stepcheck.trace.log import Applied, Called, Log, Other, Scaled, Values
from stepcheck.values import Line, Reason, Unjudged

SCHEMA = 2  # of the files
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
        return math.prod(self.shape)


@dataclass(frozen=True)
class Run:
    """The record of one model's training; of large values the entries of
    `measure.places`.

    Attributes:
        parameters: those that are trained, in the order of all lists of them.
        others: statistics, seeds and frozen parameters.
        ended: all values after the training.
        dtypes: in which its layers compute.
    """

    name: str
    parameters: tuple[Parameter, ...]
    others: tuple[Parameter, ...]
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
        parts = json.dumps(content).encode(), b"".join(arrays.parts)
        text, data = (np.frombuffer(part, "uint8") for part in parts)
        with Path(path).open("wb") as file:
            np.savez(file, stepcheck=text, data=data)

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
            data = file["data"] if content["schema"] == SCHEMA else None
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:
        must, advice = "The file must be a trace.", "one of `trace.save(path)`."
        raise SpecificationError(message(must, str(path), advice)) from error
    if data is None:
        must = f"The file must be a trace of schema {SCHEMA}."
        received = f"schema {content['schema']}"
        raise SpecificationError(
            message(must, received, "record the training again.")
        )
    return _unpacked(content["trace"], data)


class _Arrays:
    """Arrays as bytes, each once, laid end to end."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._known: dict[int, tuple[np.ndarray, list]] = {}
        self._size = 0

    def add(self, array: np.ndarray) -> list:
        """Return the place of an array: [dtype, shape, first byte]."""
        if id(array) not in self._known:
            place = [array.dtype.str, [*array.shape], self._size]
            self._known[id(array)] = array, place
            self.parts.append(array.tobytes())
            self._size += array.nbytes
        return self._known[id(array)][1]


# by which a port alone makes a step again
_NOT_SAVED = (
    "setting",
    "rules",
    "slots_of",
)
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Applied,
        Called,
        Line,
        Log,
        Other,
        Parameter,
        Reason,
        Run,
        Scaled,
        Stage,
        Trace,
        Unjudged,
        Values,
    )
}


def _packed(value: Any, arrays: _Arrays) -> Any:
    """Return a value as JSON: all but plain ones as a list that begins with a kind."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return ["array", *arrays.add(value)]
    if isinstance(value, Enum):
        return [kind, value.name]
    if isinstance(value, dict):
        return [kind, *(_packed(pair, arrays) for pair in value.items())]
    if kind in _KINDS:
        names = getattr(value, "_fields", None) or vars(value)
        kept = _OF_LOG if isinstance(value, Log) else names
        parts = [(n, getattr(value, n)) for n in kept if n not in _NOT_SAVED]
        return [kind, *([name, _packed(part, arrays)] for name, part in parts)]
    if isinstance(value, list | tuple):
        return [kind, *(_packed(part, arrays) for part in value)]
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(value: Any, data: np.ndarray) -> Any:
    """Return the value that was packed."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "array":
        dtype, shape, start = np.dtype(rest[0]), *rest[1:]
        stop = start + math.prod(shape) * dtype.itemsize
        return data[start:stop].view(dtype).reshape(shape)
    if kind in ("Reason", "Stage"):
        return _KINDS[kind][rest[0]]
    if kind in _KINDS:
        return _KINDS[kind](
            **{name: _unpacked(part, data) for name, part in rest}
        )
    parts = [_unpacked(part, data) for part in rest]
    return {"list": list, "tuple": tuple, "dict": dict}[kind](parts)
