"""A snapshot: numpy arrays by name, and JSON. Whatever is kept of a run is one of the two."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from wholestep.checkpoints.pieces import Numbers, Pieces
from wholestep.checkpoints.place import DataPlace, Place, parsed
from wholestep.errors import DamagedError, SpecificationError, message
from wholestep.model.findings import Findings

FACTS = "facts"  # before the names of arrays that stand in the JSON
GROUPS = ("params", "slots", "buffers", "metrics")
_ARRAY, _BYTES = "array", "bytes"  # {"array": name} stands in the JSON for an array, {"bytes": name} for bytes
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    str,
    np.float64,
    np.str_,
)  # JSON keeps these; others derived from them it does not
_RESERVED = ({_ARRAY}, {_BYTES}, {"float"})  # the last is a number that is not finite, in a manifest


@dataclass(frozen=True)
class Snapshot:
    """Where a training stood, as values that any file format can hold.

    Args:
        arrays: by name, such as "params/0"; `Pieces` of one that lies over several processes.
        facts: what `json.dumps` takes; numbers that are not finite are Python's.
    """

    arrays: dict[str, Numbers]
    facts: dict[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """The JSON of a snapshot, with its types; see `wholestep.run.Run`.

    Args:
        layout: the name and the shape of each number of a report.
        paths: of the variables, by group.
    """

    number: int
    num_skipped: int
    begins: int
    epochs: int
    place: Place
    data: DataPlace
    layout: tuple[tuple[str, tuple[int, ...]], ...] | None
    findings: Findings
    also: dict[str, Any]
    paths: dict[str, list[str]]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "RunFacts":
        """Return the facts of a snapshot, with the arrays that stand in them.

        Raises:
            DamagedError: no run has written such facts.
        """
        try:
            facts: RunFacts = parsed(cls, put_together(snapshot.facts, snapshot.arrays))
            for group in GROUPS:
                held = {name for name in snapshot.arrays if name.startswith(f"{group}/")}
                if held != {f"{group}/{i}" for i in range(len(facts.paths[group]))}:
                    raise ValueError(f"{len(held)} arrays of {group}, and {len(facts.paths[group])} paths")
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"The manifest does not say of a run what it must ({error!r}).") from error
        return facts


def taken_apart(value: Any, name: str, arrays: dict[str, Numbers]) -> Any:
    """Return nested numbers, words and arrays as JSON, the arrays being put into `arrays`, each under a name.

    >>> arrays = {}
    >>> taken_apart({"wait": 2, "best_weights": [np.ones(2)]}, "stop", arrays)
    {'wait': 2, 'best_weights': [{'array': 'stop/best_weights/0'}]}
    >>> put_together(_, arrays)
    {'wait': 2, 'best_weights': [array([1., 1.])]}

    Raises:
        SpecificationError: something is neither.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes):
        return {_BYTES: _put_in(arrays, name, np.frombuffer(value, np.uint8))}
    if isinstance(value, Mapping):
        _check_keys(value, name)
        return {key: taken_apart(each, f"{name}/{key}", arrays) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytearray | memoryview):
        return [taken_apart(each, f"{name}/{i}", arrays) for i, each in enumerate(value)]
    is_other = isinstance(value, int | float | str | bytearray | memoryview | np.ma.MaskedArray)
    array = np.array(None if is_other else value)
    if array.dtype == object:
        must = "What is kept must be numbers, words and arrays, in dicts and lists."
        attempt = "leave it out, or keep its parts: an enumeration's value, bytes(buffer), an array's data and mask."
        raise SpecificationError(message(must, f"{type(value).__name__} as {name}", attempt))
    return {_ARRAY: _put_in(arrays, name, array)}


def _put_in(arrays: dict[str, Numbers], name: str, array: np.ndarray) -> str:
    """Put an array under a name of its own, and return it: {"a/b": ..., "a": {"b": ...}} has one name for two."""
    while name in arrays:
        name += "+"
    arrays[name] = array
    return name


def put_together(value: Any, arrays: Mapping[str, Numbers]) -> Any:
    """Return what `taken_apart` took apart, with lists for all sequences."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            array = arrays[value[_ARRAY]][...]
            return array if array.ndim else array[()]
        if set(value) == {_BYTES}:
            return arrays[value[_BYTES]][...].tobytes()
        return {key: put_together(each, arrays) for key, each in value.items()}
    return [put_together(each, arrays) for each in value] if isinstance(value, list) else value


def leaves_of(snapshot: Snapshot, groups: Mapping[str, list[keras.Variable]]) -> dict[str, list[Numbers]]:
    """Return the arrays of a snapshot by groups, those of these Keras variables and those of the epoch.

    Raises:
        SpecificationError: they are of other variables: another number of them, other shapes, other names.
    """
    kept: dict[str, list[Numbers]] = {name: [] for name in ("sums", "running", *groups)}
    for name, held in kept.items():
        while (array := snapshot.arrays.get(f"{name}/{len(held)}")) is not None:
            held.append(array)
    for name, variables in groups.items():
        known = [(plain(v.path), tuple(v.shape)) for v in variables]
        paths = snapshot.facts["paths"][name]
        given = [(plain(path), array.shape) for path, array in zip(paths, kept[name], strict=True)]
        given = given[: len(known)] if name == "buffers" else given  # what an objective assigns besides is found later
        if known != given:
            differing = [f"{one} and {two}" for one, two in zip(given, known, strict=False) if one != two][:3]
            received = "; ".join(differing) or f"{len(given)} in the snapshot, {len(known)} here"
            must = f"A snapshot must be of the same model and optimizer ({name})."
            raise SpecificationError(message(must, received, "build and compile them as they were."))
        for variable, array in zip(variables, kept[name], strict=False):
            _check_fits(variable, array)
    return kept


def _check_fits(variable: keras.Variable, array: Numbers) -> None:
    """Refuse whole numbers that a variable cannot hold: engines keep seeds and counters in integers of other sizes."""
    dtype = dtype_of(variable)
    if isinstance(array, Pieces):  # of numbers with a fraction: seeds and counters lie in all processes
        return
    if dtype != array.dtype and dtype.kind in "iu" and not np.array_equal(array.astype(dtype), array):
        must = f"{variable.path} must hold the numbers that it held."
        raise SpecificationError(message(must, f"{array.dtype} numbers beyond {dtype}", "go on with the same engine."))


def dtype_of(variable: keras.Variable) -> np.dtype:
    """Return numpy's own name for the dtype of a variable, or, of one that numpy lacks, the array library's."""
    return keras.ops.convert_to_numpy(keras.ops.zeros((), variable.dtype)).dtype


def plain(path: str) -> str:
    """Return a variable's path without the numbers by which Keras tells equal names of one process apart.

    >>> plain("adam_2/sequential_3_dense_12_kernel_momentum")
    'adam/sequential_dense_kernel_momentum'
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def _check_keys(value: Mapping, name: str) -> None:
    strange = [key for key in value if type(key) not in (str, np.str_)]
    if strange or set(value) in _RESERVED:
        must = "The names in what is kept must be words, and not 'array', 'bytes' or 'float' alone."
        raise SpecificationError(message(must, f"{strange or list(value)} in {name}", "str(key)."))
