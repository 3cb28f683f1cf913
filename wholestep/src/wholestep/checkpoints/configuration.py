"""The settings and the environment of a training, compared with a saved run or another process.

Settings are flat JSON by their paths: "dropout/rate": 0.2. They are read from attributes, as Keras'
`get_config` imports TensorFlow to serialise anything, and many classes lack it.
"""

import enum
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dis import get_instructions
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import xxhash

from wholestep import engines, tree
from wholestep.checkpoints.position import changed_keys
from wholestep.checkpoints.snapshot import plain
from wholestep.data import Batches, content_of, layout_of
from wholestep.embeddings.rows import GradientForm, form_of_gradients
from wholestep.keras_private import (
    compile_loss,
    compile_metrics,
    dtype_policy,
    fn_kwargs,
    inbound_nodes,
    learning_rate,
    user_argument,
)
from wholestep.model import CompiledObjective, Objective, distinct, layers
from wholestep.program import Options
from wholestep.tree import Tree

Settings = dict[str, Any]

# The arguments of `fit` among the settings of a run; a checkpoint saved by hand does not have them.
_OF_CALL = (
    "steps_per_epoch",
    "class_weight",
    "shuffle",
    "validation_data",
    "validation_steps",
    "validation_freq",
)
_MOST_WORDS = 60
_MOST_BYTES = 1 << 16  # of a string, and of all settings in a manifest
_MOST_CHANGES = 8  # in one line
_MOST_LEVELS = 20  # of a setting
_NESTED = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule,
)
_RESTORED = (
    keras.Variable,
    keras.layers.Layer,
    keras.initializers.Initializer,
    keras.random.SeedGenerator,
)
_SET_BY_KERAS = {  # attributes
    "name",
    "built",
    "autocast",
    "supports_jit",
    "call_signature_parameters",
    "build",
    "quantize",
    "compiled",
    "loss",
    "optimizer",
    "stop_training",
    "stop_evaluating",
    "stop_predicting",
    "train_function",
    "test_function",
    "predict_function",
    "history",
    "output_names",
    "jit_compile",
    "input_spec",
    "inputs",
    "outputs",
    "steps_per_execution",
    "auto_scale_loss",
    "run_eagerly",
}


def settings_of(thing: Any, *, but: Iterable[str] = ()) -> Settings:
    """Return the public attributes of an object and its Keras objects, and a digest of its code.

    Args:
        but: names of attributes to leave out.

    >>> penalty = keras.regularizers.L2(0.5)
    >>> found = settings_of(keras.layers.Dense(2, "relu", kernel_regularizer=penalty))
    >>> names = "activation", "kernel_regularizer", "kernel_regularizer/l2", "dtype"
    >>> tuple(found[name] for name in names)
    ('relu', 'L2', 0.5, 'float32')
    """
    left_out = _SET_BY_KERAS.union(but)
    attributes = {
        name: value
        for name, value in getattr(thing, "__dict__", {}).items()
        if not name.startswith("_") and name not in left_out
    }
    attributes |= fn_kwargs(thing)  # of a loss or a metric that wraps a function
    attributes["dtype"] = getattr(dtype_policy(thing), "name", None)
    rate = learning_rate(thing)
    has_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    attributes["learning_rate"] = rate if has_schedule else None
    attributes["code"] = _code_of_class(type(thing))
    return _flat_all(attributes)


def flat(path: str, value: Any) -> Settings:
    """Return the settings of a value by paths; {} for None, and for values in a checkpoint.

    >>> flat("class_weight", {0: 1.0, 1: 2.0})
    {'class_weight/0': 1.0, 'class_weight/1': 2.0}
    """
    if value is None or isinstance(value, _RESTORED):
        return {}
    if isinstance(value, Batches):
        value = _digest(str([layout_of(value), content_of(value)]))
    if isinstance(value, _NESTED):
        return _with_class(path, value)
    if isinstance(value, list | tuple):
        are_plain = all(isinstance(part, bool | int | float | str) for part in value)
        value = value if are_plain else dict(enumerate(value))
    if isinstance(value, Mapping) and path.count("/") < _MOST_LEVELS:  # it may hold itself
        return _flat_all(value, f"{path}/")
    return {path: _word(value)}


def _flat_all(values: Mapping[Any, Any], prefix: str = "") -> Settings:
    settings: Settings = {}
    for name, value in values.items():
        settings |= flat(f"{prefix}{name}", value)
    return settings


def _with_class(path: str, thing: Any) -> Settings:
    """Return the class and the settings of an object by paths."""
    settings = {f"{path}/{name}": value for name, value in settings_of(thing).items()}
    return {path: type(thing).__name__, **settings}


def rates_of(model: keras.Model) -> dict[str, float]:
    """Return the constant learning rates of the model's optimizers, by attribute."""
    names = {"optimizer", *vars(model)} - {"_optimizer"}
    variables = {name: rate_variable(getattr(model, name)) for name in sorted(names)}
    return {name: value_of(rate) for name, rate in variables.items() if rate is not None}


def rate_variable(optimizer: Any) -> keras.Variable | None:
    """Return an optimizer's learning rate; None for a schedule, and for other objects."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = learning_rate(inner)
    is_rate = isinstance(inner, keras.optimizers.Optimizer) and isinstance(rate, keras.Variable)
    return rate if is_rate else None


def value_of(rate: Any) -> float:
    """Return a learning rate as a user writes it, without the rounding error of float32."""
    return float(f"{float(keras.ops.convert_to_numpy(rate)):.7g}")


def model_settings(model: keras.Model) -> Settings:
    """Return the settings of all layers and operations by name, and a digest of their graph."""
    parts: list[Any] = layers(model)
    graphs = [list(getattr(layer, "operations", ())) for layer in parts]
    parts = parts + [
        operation
        for graph in graphs
        for operation in graph
        if not isinstance(operation, keras.layers.Layer)
    ]
    settings: Settings = {}
    for name, part in _by_name(parts).items():
        settings |= _with_class(name, part)
    graph = f"{[type(part) for part in parts]} {[*map(_wires, graphs)]}"
    return settings | {"connections of layers": _digest(graph)}


def own_variables(model: keras.Model, objective: Objective | None) -> dict[str, Any]:
    """Return the engine's own variables in attributes of the layers and the objective, by path."""
    return engines.own_variables(_by_name(layers(model)) | {"objective": objective})


def _by_name(parts: list[Any]) -> dict[str, Any]:
    names = distinct([plain(part.name) for part in parts])
    return dict(zip(names, parts, strict=True))


def _wires(graph: list[keras.Operation]) -> list[Any]:
    """Return the parents and the constant arguments of each operation of a graph."""
    at = {id(operation): i for i, operation in enumerate(graph)}
    parents: list[Any] = []
    constants: list[Any] = []
    for operation in graph:
        for node in inbound_nodes(operation):
            arguments = keras.tree.flatten([node.arguments.args, node.arguments.kwargs])
            fixed = [each for each in arguments if not isinstance(each, keras.KerasTensor)]
            parents.append([at.get(id(parent.operation)) for parent in node.parent_nodes])
            constants.append([_word(each) for each in fixed])
    return [parents, constants]


def settings_of_run(model: keras.Model, objective: Objective, **others: Any) -> Settings:
    """Return the settings of the model, its loss and metrics, and of other objects by name."""
    loss = compile_loss(model)
    metrics = compile_metrics(model)
    if isinstance(objective, CompiledObjective):
        others["loss"] = user_argument(loss, "loss")
        others["loss_weights"] = user_argument(loss, "loss_weights")
        for name in ("metrics", "weighted_metrics"):
            others[name] = user_argument(metrics, name)
    else:
        others["objective"] = objective
    settings = model_settings(model) | _flat_all(others)
    is_short = len(json.dumps(without_call(settings))) <= _MOST_BYTES
    return settings if is_short else _digests(settings)


def without_call(settings: Settings) -> Settings:
    """Return the settings of a run without the arguments of its call.

    >>> without_call({"dropout/rate": 0.2, "class_weight/0": 1.0})
    {'dropout/rate': 0.2}
    """
    return {name: value for name, value in settings.items() if name.split("/")[0] not in _OF_CALL}


def optimizer_kind(settings: Settings) -> str | None:
    """Return the class of the optimizer in settings; None if they are digests.

    >>> optimizer_kind({"optimizer": "Adam", "optimizer/use_ema": False})
    'Adam'
    >>> optimizer_kind({"optimizer": "b1946ac9"})
    """
    has_all = any(name.startswith("optimizer/") for name in settings)
    return settings["optimizer"] if has_all else None


def changed_settings(before: Settings, here: Settings) -> list[str]:
    """Describe the changed settings of a run; those of its call, if both are of a `fit`."""
    if "shuffle" in before and "shuffle" in here:
        return changes(before, here)
    return changes(without_call(before), without_call(here))


def changes(before: Settings, here: Settings) -> list[str]:
    """Describe the settings that have changed.

    >>> saved = {"dropout/rate": 0.2, "loss": "mse"}
    >>> changes(saved, {"dropout/rate": 0.7, "loss": "mse", "dense/units": 2})
    ['dropout/rate 0.7 (saved: 0.2)', 'dense/units 2 (saved: none)']
    """
    nbytes = max(len(json.dumps(settings)) for settings in (before, here))
    if before.keys() != here.keys() and nbytes > _MOST_BYTES:
        before = _digests(before)
        here = _digests(here)
    names = changed_keys(before, here)
    words = []
    for name in names:
        if not any(name.startswith(f"{other}/") for other in names):
            shown = f"{name} or globals" if name.split("/")[-1] == "code" else name
            words.append(f"{shown} {here.get(name, 'none')} (saved: {before.get(name, 'none')})")
    if len(words) > _MOST_CHANGES:
        words[_MOST_CHANGES:] = [f"{len(words) - _MOST_CHANGES} more"]
    return words


_FORM = "gradients of embeddings"


def environment(
    model: keras.Model, num_replicas: int, num_processes: int, options: Options
) -> dict[str, Any]:
    """Return what may change numbers besides settings: versions, devices, options of updates."""
    optimizer = getattr(model, "optimizer", None)
    gradients = form_of_gradients(model, optimizer, are_dense=options.dense_gradients)
    form = {} if gradients is GradientForm.ANY else {_FORM: str(gradients)}
    devices = {device.split(":")[0] for device in keras.distribution.list_devices()}
    return {
        **form,
        **_versions("wholestep", "keras", "numpy", keras.backend.backend()),
        "engine": keras.backend.backend(),
        "machine": platform.machine(),
        "devices": ", ".join(sorted(devices)),
        "replicas": num_replicas,
        "processes": num_processes,
        "microbatch size": options.microbatch_size,
        "memory limit": options.memory_limit,
        "XLA": options.jit_compile,
        "float policy": f"{keras.config.dtype_policy().name}, {keras.config.floatx()}",
        "script": Path(sys.argv[0]).name,
    }


def differences(before: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the differences in the environment, and their effect; "" if there are none.

    >>> differences({"replicas": 1, "jax": "0.9"}, {"replicas": 2, "jax": "0.9"})
    'replicas 2 (1 before): from here not bit for bit'
    >>> differences({"script": "a.py"}, {"script": "b.py"})
    'script b.py (a.py before)'
    >>> differences({}, {"gradients of embeddings": "by lookups"})
    'gradients of embeddings by lookups (summed before): from here other steps of the optimizer'
    """
    # without an entry, all gradients were dense
    before = {_FORM: str(GradientForm.SUMMED)} | before
    names = [name for name in here if name in before and before[name] != here[name]]
    words = ", ".join(f"{name} {here[name]} ({before[name]} before)" for name in names)
    if not {*names} - {"script"}:
        return words
    effect = "other steps of the optimizer" if _FORM in names else "not bit for bit"
    return f"{words}: from here {effect}"


# ---- facts that must be equal in all processes of a run ----


def code_facts(
    model: keras.Model, objective: Objective, optimizer: Any, options: Options
) -> dict[str, str]:
    """Describe the program: versions, script, model, objective, optimizer, options."""
    script = Path(sys.argv[0])
    versions = {"python": platform.python_version()}
    versions |= _versions("wholestep", "keras", "jax", "numpy")
    return {
        **{f"the version of {name}": number for name, number in versions.items()},
        "the script": _digest(script.read_bytes()) if script.is_file() else script.name,
        "the model": _digest(str(model_settings(model))),
        "the objective": f"{type(objective).__qualname__} {_code_of_class(type(objective))}",
        "the optimizer": _digest(str([type(optimizer).__qualname__, settings_of(optimizer)])),
        "the options": str(options),
    }


def value_facts(variables: list[keras.Variable]) -> dict[str, str]:
    """Return digests of the values of variables, by their paths."""
    return {
        f"{v.path} ({'x'.join(map(str, v.shape))} {v.dtype})": _digest_of_array(v.value)
        for v in variables
        if getattr(v.value, "is_fully_replicated", True)
    }


def data_facts(batches: Batches) -> dict[str, str]:
    """Describe the data: number of batches, position, next rows, and digests of their content.

    The digests are of full arrays; if rows are loaded, of a first batch.
    """
    facts = {
        "the number of batches": str(batches.num_batches),
        "the place in the data": str(batches.position),
    }
    if not batches.is_ready:
        facts["the order of the rows"] = _digest(batches.rows(*batches.position).tobytes())
    if batches.arrays is None:
        return facts | batch_facts(batches.example())
    return facts | batch_facts(batches.arrays, "data")


def batch_facts(batch: Tree, root: str = "the first batch") -> dict[str, str]:
    """Return digests of the leaves of a batch."""
    return {label: _digest_of_array(leaf) for label, leaf in tree.named_leaves(batch, root)}


# ---- words and digests ----


def _versions(*packages: str) -> dict[str, str]:
    versions = dict.fromkeys(packages, "unknown")
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _digests(settings: Settings) -> Settings:
    """Return a digest of the settings of each object, by the first name of their paths."""
    parts: dict[str, list[tuple[str, Any]]] = {}
    for path, value in settings.items():
        parts.setdefault(path.split("/")[0], []).append((path, value))
    return {
        name: part[0][1] if len(part) == 1 else _digest(str(part)) for name, part in parts.items()
    }


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
        description = f"{value.shape} {value.dtype} {_digest(value.tobytes())}"
        return description if value.ndim else value.item()
    return _word_of_callable(value)


def _word_of_callable(value: Any) -> str:
    if isinstance(value, partial):
        return f"{_word(value.func)} {_digest(str(flat('', [value.args, value.keywords])))}"
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("keras."):
        return f"{function.__name__} {_digest(str(_code(function, set())))}"
    return getattr(value, "__name__", type(value).__name__)


def _code_of_class(kind: type) -> str | None:
    """Return a digest of a user-defined class's methods and constants; None for other classes."""
    ours = ("builtins", "keras", "wholestep")
    user_defined = takewhile(lambda each: each.__module__.split(".")[0] not in ours, kind.__mro__)
    if not (attributes := [vars(each) for each in user_defined]):
        return None
    code = [
        (name, _code(value, set()))
        for of_class in attributes
        for name, value in of_class.items()
        if not name.startswith("__") or callable(value)
    ]
    return _digest(str(code))


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
    read = [*(value.__defaults__ or ())]
    with suppress(ValueError):  # a cell is empty while its name is being defined
        read += [cell.cell_contents for cell in value.__closure__ or ()]
    read += _globals_of(value)
    return _code(value.__code__, seen), [_code(each, seen) for each in read]


def _globals_of(function: FunctionType) -> list[Any]:
    """Return the globals of its module that a function reads."""
    code = function.__code__
    read = {each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    namespace = function.__globals__
    values = [namespace[name] for name in code.co_names if name in read and name in namespace]
    home = function.__module__
    return [value for value in values if getattr(value, "__module__", home) == home]


def _digest_of_array(array: Any) -> str:
    return _digest(np.ascontiguousarray(array).tobytes())


def _digest(text: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode() if isinstance(text, str) else text)[:8]
