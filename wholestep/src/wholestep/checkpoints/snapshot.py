"""A snapshot of a run: numpy arrays by name, and JSON."""

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import ml_dtypes
import numpy as np

from wholestep import engines
from wholestep.checkpoints.manifest import parsed
from wholestep.checkpoints.position import CallPosition, DataPosition, other_run
from wholestep.checkpoints.shards import Numbers, ShardedArray
from wholestep.errors import DamagedError, SpecificationError, message
from wholestep.model import Findings

FACTS = "facts"  # the prefix of arrays that the JSON refers to
LOG = "log"
COLUMNS = "keys"  # in a callback's state: its file, and the names of the file's numbers
GROUPS = ("params", "slots", "buffers", "metrics")
_ARRAY = "array"
_BYTES = "bytes"  # {"array": name} in the JSON represents an array, {"bytes": name} bytes
_WHOSE = {  # in errors
    "params": "its model's weights are",
    "slots": "its optimizer's variables are",
    "buffers": "its model's variables that do not train are",
    "metrics": "its metrics are",
}
# JSON keeps these, but not their subclasses
_PLAIN = (type(None), bool, int, float, str, np.float64, np.str_)
_MOST_LEVELS = 100  # of dicts and lists in a state; a manifest has further ones around it
# the last is a number that is not finite, in a manifest
_RESERVED = ({_ARRAY}, {_BYTES}, {"float"})


@dataclass(frozen=True)
class Snapshot:
    """The state of a training, as values that any file format can hold."""

    # by name, such as "params/0"; `ShardedArray` for an array that is sharded over processes
    arrays: dict[str, Numbers]
    facts: dict[str, Any]  # JSON, in which floats may be NaN or infinite
    source: str = ""  # the folder or the store of its checkpoint; "" if there is none


@dataclass(frozen=True)
class _File:
    """The file of a CSVLogger: its name, its size, and the last bytes."""

    file: str
    size: int
    end: str


@dataclass(frozen=True)
class _Callbacks:
    """The state of the callbacks of `fit`."""

    stops: bool
    told: list[tuple[str, dict[str, Any]]]
    settings: list[dict[str, Any]] | None = None  # an earlier release did not save them

    def check(self) -> None:
        """Raise a TypeError or a ValueError for state that no callbacks have."""
        if self.settings and len(self.settings) != len(self.told):
            raise ValueError(f"settings of {len(self.settings)} callbacks of {len(self.told)}")
        for _, state in self.told:
            parsed(_File | None, state.get("log"))


@dataclass(frozen=True)
class RunFacts:
    """The JSON of a snapshot, with its types; see `wholestep.run.Run`."""

    number: int
    num_skipped: int
    begins: int
    epochs: int
    place: CallPosition
    data: DataPosition
    # the name and the shape of each number of a report
    layout: tuple[tuple[str, tuple[int, ...]], ...] | None
    findings: Findings
    also: dict[str, Any]
    paths: dict[str, list[str]]  # the paths of the variables, by group

    @classmethod
    def of(cls, snapshot: Snapshot) -> "RunFacts":
        """Return the facts of a snapshot with their arrays; a DamagedError if they are no run's."""
        try:
            facts: RunFacts = parsed(cls, from_json(snapshot.facts, snapshot.arrays))
            for group in GROUPS:
                names = {name for name in snapshot.arrays if name.startswith(f"{group}/")}
                num_paths = len(facts.paths[group])
                if names != {f"{group}/{i}" for i in range(num_paths)}:
                    raise ValueError(f"{len(names)} arrays of {group}, and {num_paths} paths")
            if "callbacks" in facts.also:
                parsed(_Callbacks, facts.also["callbacks"]).check()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"The manifest lacks facts of a run ({error!r}).") from error
        return facts


def to_json(value: Any, name: str, arrays: dict[str, Numbers], level: int = 0) -> Any:
    """Return nested numbers, strings and arrays as JSON; the arrays are added to `arrays` by name.

    >>> arrays = {}
    >>> to_json({"wait": 2, "best_weights": [np.ones(2)]}, "stop", arrays)
    {'wait': 2, 'best_weights': [{'array': 'stop/best_weights/0'}]}
    >>> from_json(_, arrays)
    {'wait': 2, 'best_weights': [array([1., 1.])]}
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes):
        return {_BYTES: _put_in(arrays, name, np.frombuffer(value, np.uint8))}
    if level > _MOST_LEVELS:
        must = f"A state may have at most {_MOST_LEVELS} levels of dicts and lists."
        attempt = "leave out what holds itself, and what holds the object above it."
        raise SpecificationError(message(must, f"more at {name[:_MOST_LEVELS]}...", attempt))
    if isinstance(value, Mapping):
        _check_keys(value, name)
        return {
            key: to_json(each, f"{name}/{key}", arrays, level + 1) for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytearray | memoryview):
        return [to_json(each, f"{name}/{i}", arrays, level + 1) for i, each in enumerate(value)]
    is_other = isinstance(value, int | float | str | bytearray | memoryview | np.ma.MaskedArray)
    array = np.array(None if is_other else value)
    if array.dtype == object:
        must = "A state must be numbers, strings and arrays, in dicts and lists."
        attempt = (
            "leave it out, or keep its parts: an enumeration's value, bytes(buffer), an "
            "array's data and mask."
        )
        raise SpecificationError(message(must, f"{type(value).__name__} as {name}", attempt))
    return {_ARRAY: _put_in(arrays, name, array)}


def _put_in(arrays: dict[str, Numbers], name: str, array: np.ndarray) -> str:
    """Add an array by a new name, and return it: of {"a/b": ..., "a": {"b": ...}} one path."""
    while name in arrays:
        name += "+"
    arrays[name] = array
    return name


def from_json(value: Any, arrays: Mapping[str, Numbers]) -> Any:
    """Undo `to_json`, with lists for all sequences."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            array = arrays[value[_ARRAY]][...]
            return array if array.ndim else array[()]
        if set(value) == {_BYTES}:
            return arrays[value[_BYTES]][...].tobytes()
        return {key: from_json(each, arrays) for key, each in value.items()}
    return [from_json(each, arrays) for each in value] if isinstance(value, list) else value


_OTHERS = "sums", "running", "failures"


def leaves_of(
    snapshot: Snapshot, groups: Mapping[str, list[keras.Variable]]
) -> dict[str, list[Numbers]]:
    """Return the arrays of a snapshot by group: of these Keras variables, and of the other parts
    of the state.

    Raises:
        SpecificationError: the snapshot is of other variables: other numbers, shapes or names.
    """
    leaves: dict[str, list[Numbers]] = {name: [] for name in (*_OTHERS, *groups)}
    for name, arrays in leaves.items():
        while (array := snapshot.arrays.get(f"{name}/{len(arrays)}")) is not None:
            arrays.append(array)
    for name, variables in groups.items():
        _check_variables(snapshot, name, variables, leaves[name])
        for variable, array in zip(variables, leaves[name], strict=False):
            _check_fits(variable, array)
    return leaves


def _check_variables(
    snapshot: Snapshot, group: str, variables: list[keras.Variable], arrays: list[Numbers]
) -> None:
    """Refuse a snapshot of other variables."""
    here = [(v.path, tuple(v.shape)) for v in variables]
    paths = snapshot.facts["paths"][group]
    saved = [(path, array.shape) for path, array in zip(paths, arrays, strict=True)]
    if group == "buffers":  # variables that an objective assigns come later
        saved = saved[: len(here)]
    differing = [
        f"{path} of shape {shape} (saved: {other} of shape {saved_shape})"
        for (path, shape), (other, saved_shape) in zip(here, saved, strict=False)
        if (plain(path), shape) != (plain(other), saved_shape)
    ]
    if differing or len(here) != len(saved):
        number = f"{len(here)} variables (saved: {len(saved)})"
        way = "its model, built and compiled in the same way"
        if group in ("slots", "metrics"):
            way += '; trainer.restore(path, only="weights") takes the weights alone'
        why = f"{_WHOSE[group]} not this one's"
        raise other_run(snapshot.source, why, "; ".join(differing[:3]) or number, f"{way}.")


def _check_fits(variable: keras.Variable, array: Numbers) -> None:
    """Refuse integers that a variable cannot hold: engines keep seeds in various integers."""
    dtype = dtype_of(variable)
    if isinstance(array, ShardedArray) or dtype == array.dtype or dtype.kind not in "iu":
        return  # seeds and counters are not sharded
    if not np.array_equal(array.astype(dtype), array):
        must = f"{variable.path} must be able to hold the saved numbers."
        received = f"{array.dtype} numbers beyond {dtype}"
        raise SpecificationError(message(must, received, "resume with the same engine."))


def dtype_of(variable: keras.Variable) -> np.dtype:
    """Return the dtype of a variable in numpy, or in ml_dtypes where numpy lacks it."""
    name = keras.backend.standardize_dtype(variable.dtype)
    return np.dtype(getattr(ml_dtypes, name, name))


def plain(path: str) -> str:
    """Return a variable's path without the numbers that Keras appends to equal names in a process.

    >>> plain("adam_2/sequential_3_dense_12_kernel_momentum")
    'adam/sequential_dense_kernel_momentum'
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def _check_keys(value: Mapping[str, Any], name: str) -> None:
    strange = [key for key in value if type(key) not in (str, np.str_)]
    if strange or set(value) in _RESERVED:
        must = "The keys of a state must be strings, and not only 'array', 'bytes' or 'float'."
        raise SpecificationError(message(must, f"{strange or list(value)} in {name}", "str(key)."))


# ---- the metrics of a snapshot, renamed: Keras numbers repeated names in a process ----

# prefixes: of values that the model computes, of validation
_BEFORE = re.compile(r"^(=?(?:val_)?)(.*)$", re.DOTALL)


def renamed(snapshot: Snapshot, here: Iterable[str]) -> Snapshot:
    """Return a snapshot with the metrics in its logs and its History renamed to their names here.

    Args:
        here: the names of the metrics and losses of this model.
    """
    facts = snapshot.facts
    names = paired((name for name, _ in facts["layout"] or ()), here)
    if not names:
        return snapshot

    def with_names(numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {_name(name, names): value for name, value in numbers.items()}

    place = dict(facts["place"])
    for key in ("latest", "logs"):
        if place[key] is not None:
            place[key] = with_names(place[key])
    layout = [[_name(name, names), shape] for name, shape in facts["layout"]]
    changed = {"place": place, "layout": layout}
    also = facts["also"]
    if "callbacks" in also:
        states: list[Any] = [[kind, dict(state)] for kind, state in also["callbacks"]["told"]]
        for kind, state in states:
            if kind == "History" and "history" in state:
                state["history"] = with_names(state["history"])
            if columns := state.get(LOG, {}).get(COLUMNS):
                state[LOG] = {**state[LOG], COLUMNS: [_name(column, names) for column in columns]}
        changed["also"] = {**also, "callbacks": {**also["callbacks"], "told": states}}
    return replace(snapshot, facts=facts | changed)


def paired(before: Iterable[str], here: Iterable[str]) -> dict[str, str]:
    """Return the changed names, from before to here, paired in the order of their numbers.

    >>> paired(["loss", "auc", "auc_1", "kl_1"], ["loss", "auc_1", "auc_2"])
    {'auc': 'auc_1', 'auc_1': 'auc_2'}
    >>> paired(["top_1", "top_5"], ["top_5", "top_1"])
    {}
    """
    names: dict[str, str] = {}
    by_words = _by_words(here)
    for words, saved in _by_words(before).items():
        named = by_words.get(words, [])
        if len(named) == len(saved) and set(named) != set(saved):
            names |= dict(zip(saved, named, strict=True))
    return names


def _by_words(names: Iterable[str]) -> dict[str, list[str]]:
    by_words: dict[str, list[str]] = {}
    for name in dict.fromkeys(_BEFORE.sub(r"\2", name) for name in names):
        by_words.setdefault(plain(name), []).append(name)
    return by_words


def _name(name: str, names: Mapping[str, str]) -> str:
    return _BEFORE.sub(lambda match: match[1] + names.get(match[2], match[2]), name)


Assigned = MutableMapping[int, keras.Variable]  # by id


def put(arrays: list[Numbers], variables: list[keras.Variable], assigned: Assigned) -> None:
    """Assign arrays to the variables that are not `assigned` yet; further arrays are ignored.

    Engines keep seeds and counters in integers of other sizes; their values fit in all of them.
    """
    for variable, array in zip(variables, arrays, strict=False):
        if id(variable) not in assigned:
            own = array.astype(dtype_of(variable)) if isinstance(array, np.ndarray) else array
            variable.assign(engines.placed(variable, own))
            assigned[id(variable)] = variable


def put_own(
    snapshot: Snapshot, variables: Mapping[str, Any], assigned: MutableMapping[int, Any]
) -> None:
    """Assign the values of the engine's own variables, by path, that are not `assigned` yet."""
    values = from_json(snapshot.facts.get("own") or {}, snapshot.arrays)
    for path, variable in variables.items():
        if path in values and id(variable) not in assigned:
            if tuple(variable.shape) != np.shape(values[path]):
                must = f"{path} must have the saved shape."
                received = f"{tuple(variable.shape)} here"
                raise SpecificationError(message(must, received, f"{np.shape(values[path])}."))
            variable.assign(values[path])
            assigned[id(variable)] = variable


def assign_by_path(
    left: list[tuple[str, Numbers]], variables: list[keras.Variable], assigned: Assigned
) -> list[tuple[str, Numbers]]:
    """Assign to each variable the first array of its path and shape; return the other arrays."""
    left = list(left)
    for variable in variables:
        wanted = plain(variable.path), tuple(variable.shape)
        for i, (path, array) in enumerate(left):
            if (plain(path), array.shape) == wanted:
                put([array], [variable], assigned)
                del left[i]
                break
    return left
