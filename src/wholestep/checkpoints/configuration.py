"""The settings of a model, a loss, an optimizer or a callback, as flat JSON by their paths: "dropout/rate": 0.2.

Reads attributes, as Keras' `get_config` imports TensorFlow to serialise anything, and many classes lack it.
"""

import enum
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import takewhile
from types import CodeType, FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import xxhash

from wholestep.checkpoints.snapshot import plain
from wholestep.data.batches import Batches
from wholestep.data.facts import content_of, layout_of
from wholestep.model.compiled import distinct, layers

Settings = dict[str, Any]

_MOST_WORDS, _MOST_BYTES = 60, 1 << 16  # of a string, and of all settings in a manifest
_MOST_CHANGES = 8  # in one line
_NESTED = (
    *(keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer, keras.regularizers.Regularizer),
    *(keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule),
)
_RESTORED = (keras.Variable, keras.layers.Layer, keras.initializers.Initializer, keras.random.SeedGenerator)
_NO_SETTINGS = {  # attributes that Keras sets itself
    *("name", "built", "autocast", "supports_jit", "call_signature_parameters", "build", "quantize"),
    *("compiled", "loss", "optimizer", "stop_training", "stop_evaluating", "stop_predicting"),
    *("train_function", "test_function", "predict_function", "history", "output_names", "jit_compile"),
    *("input_spec", "inputs", "outputs", "steps_per_execution", "auto_scale_loss", "run_eagerly"),
}


def settings_of(thing: Any, *, but: Iterable[str] = ()) -> Settings:
    """Return the public attributes of an object and its nested Keras objects, and digests of user-defined classes.

    Args:
        but: names of attributes to leave out.

    >>> found = settings_of(keras.layers.Dense(2, "relu", kernel_regularizer=keras.regularizers.L2(0.5)))
    >>> found["activation"], found["kernel_regularizer"], found["kernel_regularizer/l2"], found["dtype"]
    ('relu', 'L2', 0.5, 'float32')
    """
    held = {k: v for k, v in vars(thing).items() if not k.startswith("_") and k not in _NO_SETTINGS.union(but)}
    held |= getattr(thing, "_fn_kwargs", {})  # of a loss or a metric that wraps a function
    held["dtype"] = getattr(getattr(thing, "_dtype_policy", None), "name", None)
    rate = getattr(thing, "_learning_rate", None)
    held["learning_rate"] = rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
    held["code"] = _code_of_class(type(thing))
    return {path: value for name, each in held.items() for path, value in flat(name, each).items()}


def flat(path: str, value: Any) -> Settings:
    """Return the settings of a value by paths below `path`; {} for None, and for values in a checkpoint.

    >>> flat("class_weight", {0: 1.0, 1: 2.0})
    {'class_weight/0': 1.0, 'class_weight/1': 2.0}
    """
    if value is None or isinstance(value, _RESTORED):
        return {}
    if isinstance(value, Batches):
        value = _digest(str([layout_of(value), content_of(value)]))
    if isinstance(value, _NESTED):
        return {path: type(value).__name__, **{f"{path}/{k}": v for k, v in settings_of(value).items()}}
    if isinstance(value, list | tuple) and not all(isinstance(each, bool | int | float | str) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {k: v for key, each in value.items() for k, v in flat(f"{path}/{key}", each).items()}
    return {path: _word(value)}


def rates_of(model: keras.Model) -> dict[str, float]:
    """Return the constant learning rates of the model's optimizers, by the optimizers' attributes."""
    held = {name: getattr(model, name) for name in sorted({"optimizer", *vars(model)}) if name != "_optimizer"}
    variables = {name: rate_variable(each) for name, each in held.items()}
    return {name: value_of(rate) for name, rate in variables.items() if rate is not None}


def rate_variable(optimizer: Any) -> keras.Variable | None:
    """Return the variable of an optimizer's learning rate; None if it follows a schedule, or is no optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None) if isinstance(inner, keras.optimizers.Optimizer) else None
    return rate if isinstance(rate, keras.Variable) else None


def value_of(rate: Any) -> float:
    """Return a learning rate as a user writes it, without the rounding error of single precision."""
    return float(f"{float(keras.ops.convert_to_numpy(rate)):.7g}")


def model_settings(model: keras.Model) -> Settings:
    """Return the settings of all layers and operations by their names, and a digest of their connections."""
    known = layers(model)
    graphs = [list(getattr(layer, "operations", ())) for layer in known]
    parts = [*known, *(part for graph in graphs for part in graph if not isinstance(part, keras.layers.Layer))]
    found: Settings = {}
    for name, part in zip(distinct([plain(part.name) for part in parts]), parts, strict=True):
        found |= {name: type(part).__name__, **{f"{name}/{k}": v for k, v in settings_of(part).items()}}
    return found | {"connections of layers": _digest(f"{[type(part) for part in parts]} {[*map(_wires, graphs)]}")}


def _wires(graph: list[keras.Operation]) -> list:
    """Return for each operation of a graph its parents and its constant arguments."""
    at = {id(operation): i for i, operation in enumerate(graph)}
    nodes = [node for operation in graph for node in operation._inbound_nodes]
    given = [keras.tree.flatten([node.arguments.args, node.arguments.kwargs]) for node in nodes]
    constants = [[_word(each) for each in of_node if not isinstance(each, keras.KerasTensor)] for of_node in given]
    return [[[at.get(id(parent.operation)) for parent in node.parent_nodes] for node in nodes], constants]


def few(settings: Settings) -> Settings:
    """Return the settings, or a digest for each part if the manifest would be too long."""
    return settings if len(json.dumps(settings)) <= _MOST_BYTES else _digests(settings)


def changes(before: Settings, here: Settings) -> list[str]:
    """Describe the settings that have changed.

    >>> changes({"dropout/rate": 0.2, "loss": "mse"}, {"dropout/rate": 0.7, "loss": "mse", "dense/units": 2})
    ['dropout/rate 0.7 (saved: 0.2)', 'dense/units 2 (saved: none)']
    """
    if before.keys() != here.keys() and (few(before) is not before or len(json.dumps(here)) > _MOST_BYTES):
        before, here = _digests(before), _digests(here)
    names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
    names = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    told = [f"{name} {here.get(name, 'none')} (saved: {before.get(name, 'none')})" for name in names]
    return told[:_MOST_CHANGES] + ([f"{len(told) - _MOST_CHANGES} more"] if len(told) > _MOST_CHANGES else [])


def _digests(settings: Settings) -> Settings:
    parts: dict[str, list] = {}
    for path, value in settings.items():
        parts.setdefault(path.split("/")[0], []).append((path, value))
    return {name: value[0][1] if len(value) == 1 else _digest(str(value)) for name, value in parts.items()}


def _word(value: Any) -> Any:
    """Return JSON that identifies a value: the value itself, if it is short."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        value = str(list(value))
    if isinstance(value, str):
        return value if len(value) <= _MOST_WORDS else _digest(value)
    if isinstance(value, bool | int | float):
        return value if value == value else "nan"
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.ndim == 0 else f"{value.shape} {value.dtype} {_digest(value.tobytes())}"
    if isinstance(value, partial):
        return f"{_word(value.func)} {_digest(str(flat('', [value.args, value.keywords])))}"
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("keras."):
        return f"{function.__name__} {_digest(str(_code(function, set())))}"
    return getattr(value, "__name__", type(value).__name__)


def _code_of_class(kind: type) -> str | None:
    """Return a digest of a user-defined class's methods and constants; None for a class of Keras or wholestep."""
    own = [vars(each) for each in takewhile(_is_user_defined, kind.__mro__)]
    held = [item for each in own for item in each.items() if not item[0].startswith("__") or callable(item[1])]
    return _digest(str([(name, _code(value, set())) for name, value in held])) if own else None


def _is_user_defined(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in ("builtins", "keras", "wholestep")


def _code(value: Any, seen: set[int]) -> Any:
    """Return a function's code and constants, in a form that is the same in every process."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)  # of a method
    if isinstance(value, CodeType):
        constants = [_code(each, seen) for each in value.co_consts]
        return value.co_code.hex(), value.co_names, constants
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, bool | int | float | str | bytes | None | tuple):
        return repr(value)
    if not isinstance(value, FunctionType) or id(value) in seen:
        return type(value).__name__
    seen.add(id(value))
    cells = list[Any]()
    with suppress(ValueError):  # a cell is empty while its name is being defined
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
    names = [name for name in value.__code__.co_names if name in value.__globals__]
    others = [value.__globals__[name] for name in names]
    others = [each for each in others if getattr(each, "__module__", value.__module__) == value.__module__]
    return _code(value.__code__, seen), [_code(each, seen) for each in (*(value.__defaults__ or ()), *cells, *others)]


def _digest(text: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode() if isinstance(text, str) else text)[:8]
