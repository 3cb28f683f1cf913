"""The settings and the environment of a training, to be compared with a saved run's or with another
process's.

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
from wholestep.checkpoints.snapshot import plain
from wholestep.data import Batches, content_of, layout_of
from wholestep.embeddings.rows import GradientForm, form_of_gradients
from wholestep.model import CompiledObjective, Objective, distinct, layers
from wholestep.program import Options
from wholestep.tree import Tree

Settings = dict[str, Any]

# The arguments of `fit` among the settings of a run; a checkpoint saved by hand does not have them.
_OF_CALL = (
    *("steps_per_epoch", "class_weight", "shuffle"),
    *("validation_data", "validation_steps", "validation_freq"),
)
_MOST_WORDS = 60
_MOST_BYTES = 1 << 16  # of a string, and of all settings in a manifest
_MOST_CHANGES = 8  # in one line
_MOST_LEVELS = 20  # of a setting
_NESTED = (
    *(
        keras.losses.Loss,
        keras.metrics.Metric,
        keras.optimizers.Optimizer,
        keras.regularizers.Regularizer,
    ),
    *(keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule),
)
_RESTORED = (
    keras.Variable,
    keras.layers.Layer,
    keras.initializers.Initializer,
    keras.random.SeedGenerator,
)
_NO_SETTINGS = {  # attributes that Keras sets itself
    *(
        "name",
        "built",
        "autocast",
        "supports_jit",
        "call_signature_parameters",
        "build",
        "quantize",
    ),
    *("compiled", "loss", "optimizer", "stop_training", "stop_evaluating", "stop_predicting"),
    *(
        "train_function",
        "test_function",
        "predict_function",
        "history",
        "output_names",
        "jit_compile",
    ),
    *("input_spec", "inputs", "outputs", "steps_per_execution", "auto_scale_loss", "run_eagerly"),
}


def settings_of(thing: Any, *, but: Iterable[str] = ()) -> Settings:
    """Return the public attributes of an object and its nested Keras objects, and digests of
    user-defined classes.

    Args:
        but: names of attributes to leave out.

    >>> penalty = keras.regularizers.L2(0.5)
    >>> found = settings_of(keras.layers.Dense(2, "relu", kernel_regularizer=penalty))
    >>> names = "activation", "kernel_regularizer", "kernel_regularizer/l2", "dtype"
    >>> tuple(found[name] for name in names)
    ('relu', 'L2', 0.5, 'float32')
    """
    public = {k: v for k, v in getattr(thing, "__dict__", {}).items() if not k.startswith("_")}
    held = {k: v for k, v in public.items() if k not in _NO_SETTINGS.union(but)}
    held |= getattr(thing, "_fn_kwargs", {})  # of a loss or a metric that wraps a function
    held["dtype"] = getattr(getattr(thing, "_dtype_policy", None), "name", None)
    rate = getattr(thing, "_learning_rate", None)
    held["learning_rate"] = (
        rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
    )
    held["code"] = _code_of_class(type(thing))
    return {path: value for name, each in held.items() for path, value in flat(name, each).items()}


def flat(path: str, value: Any) -> Settings:
    """Return the settings of a value by paths below `path`; {} for None, and for values in a
    checkpoint.

    >>> flat("class_weight", {0: 1.0, 1: 2.0})
    {'class_weight/0': 1.0, 'class_weight/1': 2.0}
    """
    if value is None or isinstance(value, _RESTORED):
        return {}
    if isinstance(value, Batches):
        value = _digest(str([layout_of(value), content_of(value)]))
    if isinstance(value, _NESTED):
        return {
            path: type(value).__name__,
            **{f"{path}/{k}": v for k, v in settings_of(value).items()},
        }
    if isinstance(value, list | tuple) and not all(
        isinstance(each, bool | int | float | str) for each in value
    ):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and path.count("/") < _MOST_LEVELS:  # it may hold itself
        return {k: v for key, each in value.items() for k, v in flat(f"{path}/{key}", each).items()}
    return {path: _word(value)}


def rates_of(model: keras.Model) -> dict[str, float]:
    """Return the constant learning rates of the model's optimizers, by the optimizers'
    attributes.
    """
    held = {
        name: getattr(model, name)
        for name in sorted({"optimizer", *vars(model)})
        if name != "_optimizer"
    }
    variables = {name: rate_variable(each) for name, each in held.items()}
    return {name: value_of(rate) for name, rate in variables.items() if rate is not None}


def rate_variable(optimizer: Any) -> keras.Variable | None:
    """Return the variable of an optimizer's learning rate; None if it follows a schedule, or is no
    optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = (
        getattr(inner, "_learning_rate", None)
        if isinstance(inner, keras.optimizers.Optimizer)
        else None
    )
    return rate if isinstance(rate, keras.Variable) else None


def value_of(rate: Any) -> float:
    """Return a learning rate as a user writes it, without the rounding error of single
    precision.
    """
    return float(f"{float(keras.ops.convert_to_numpy(rate)):.7g}")


def model_settings(model: keras.Model) -> Settings:
    """Return the settings of all layers and operations by their names, and a digest of their
    connections.
    """
    known = layers(model)
    graphs = [list(getattr(layer, "operations", ())) for layer in known]
    parts = [
        *known,
        *(part for graph in graphs for part in graph if not isinstance(part, keras.layers.Layer)),
    ]
    found: Settings = {}
    for name, part in zip(distinct([plain(part.name) for part in parts]), parts, strict=True):
        found |= {
            name: type(part).__name__,
            **{f"{name}/{k}": v for k, v in settings_of(part).items()},
        }
    return found | {
        "connections of layers": _digest(
            f"{[type(part) for part in parts]} {[*map(_wires, graphs)]}"
        )
    }


def own_variables(model: keras.Model, objective: Objective | None) -> dict[str, Any]:
    """Return the engine's own variables in attributes of the layers and the objective, by path."""
    known = layers(model)
    named = dict(zip(distinct([plain(layer.name) for layer in known]), known, strict=True))
    return engines.own_variables(named | {"objective": objective})


def _wires(graph: list[keras.Operation]) -> list[Any]:
    """Return for each operation of a graph its parents and its constant arguments."""
    at = {id(operation): i for i, operation in enumerate(graph)}
    nodes = [node for operation in graph for node in operation._inbound_nodes]
    given = [keras.tree.flatten([node.arguments.args, node.arguments.kwargs]) for node in nodes]
    constants = [
        [_word(each) for each in of_node if not isinstance(each, keras.KerasTensor)]
        for of_node in given
    ]
    return [
        [[at.get(id(parent.operation)) for parent in node.parent_nodes] for node in nodes],
        constants,
    ]


def settings_of_run(model: keras.Model, objective: Objective, **others: Any) -> Settings:
    """Return the settings of the model, its loss and metrics, and of other objects and values by
    name.
    """
    loss = getattr(model, "_compile_loss", None)
    metrics = getattr(model, "_compile_metrics", None)
    held = others
    if isinstance(objective, CompiledObjective):
        held |= {
            f"loss{name}": getattr(loss, f"_user_loss{name}", None) for name in ("", "_weights")
        }
        held |= {
            name: getattr(metrics, f"_user_{name}", None)
            for name in ("metrics", "weighted_metrics")
        }
    else:
        held |= {"objective": objective}
    settings = model_settings(model) | {
        k: v for name, each in held.items() for k, v in flat(name, each).items()
    }
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
    if (
        before.keys() != here.keys()
        and max(len(json.dumps(each)) for each in (before, here)) > _MOST_BYTES
    ):
        before = _digests(before)
        here = _digests(here)
    names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
    names = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    told = [
        f"{_shown(name)} {here.get(name, 'none')} (saved: {before.get(name, 'none')})"
        for name in names
    ]
    return told[:_MOST_CHANGES] + (
        [f"{len(told) - _MOST_CHANGES} more"] if len(told) > _MOST_CHANGES else []
    )


def _shown(name: str) -> str:
    # the numbers that the code reads
    return f"{name} or globals" if name.split("/")[-1] == "code" else name


_FORM = "gradients of embeddings"


def environment(
    model: keras.Model, num_replicas: int, num_processes: int, options: Options
) -> dict[str, Any]:
    """Return what may change the numbers of a training besides its settings: versions, devices,
    options of updates.
    """
    gradients = form_of_gradients(
        model, getattr(model, "optimizer", None), are_dense=options.dense_gradients
    )
    form = {} if gradients is GradientForm.ANY else {_FORM: str(gradients)}
    return {
        **form,
        **_versions("wholestep", "keras", "numpy", keras.backend.backend()),
        "engine": keras.backend.backend(),
        "machine": platform.machine(),
        "devices": ", ".join(
            sorted({device.split(":")[0] for device in keras.distribution.list_devices()})
        ),
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
    effect = (
        "from here other steps of the optimizer" if _FORM in names else "from here not bit for bit"
    )
    return f"{words}: {effect}" if {*names} - {"script"} else words


# ---- facts that must be equal in all processes of a run ----


def code_facts(
    model: keras.Model, objective: Objective, optimizer: Any, options: Options
) -> dict[str, str]:
    """Return a description of the program: versions, script, model, objective, optimizer,
    options.
    """
    script = Path(sys.argv[0])
    versions = {"python": platform.python_version()} | _versions(
        "wholestep", "keras", "jax", "numpy"
    )
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
        f"{v.path} ({'x'.join(map(str, v.shape))} {v.dtype})": _digest(
            np.ascontiguousarray(v.value).tobytes()
        )
        for v in variables
        if getattr(v.value, "is_fully_replicated", True)
    }


def data_facts(batches: Batches) -> dict[str, str]:
    """Return a description of the data: number of batches, position, next rows, and digests of
    their content.

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
    leaves = tree.named_leaves(batch, root)
    return {label: _digest(np.ascontiguousarray(leaf).tobytes()) for label, leaf in leaves}


# ---- words and digests ----


def _versions(*packages: str) -> dict[str, str]:
    found = dict.fromkeys(packages, "unknown")
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _digests(settings: Settings) -> Settings:
    parts: dict[str, list[tuple[str, Any]]] = {}
    for path, value in settings.items():
        parts.setdefault(path.split("/")[0], []).append((path, value))
    return {
        name: value[0][1] if len(value) == 1 else _digest(str(value))
        for name, value in parts.items()
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
        return (
            value.item()
            if value.ndim == 0
            else f"{value.shape} {value.dtype} {_digest(value.tobytes())}"
        )
    if isinstance(value, partial):
        return f"{_word(value.func)} {_digest(str(flat('', [value.args, value.keywords])))}"
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType) and not (function.__module__ or "").startswith("keras."):
        return f"{function.__name__} {_digest(str(_code(function, set())))}"
    return getattr(value, "__name__", type(value).__name__)


def _code_of_class(kind: type) -> str | None:
    """Return a digest of a user-defined class's methods and constants; None for a class of Keras or
    wholestep.
    """
    ours = ("builtins", "keras", "wholestep")
    own = [
        vars(each)
        for each in takewhile(lambda each: each.__module__.split(".")[0] not in ours, kind.__mro__)
    ]
    held = [
        item
        for each in own
        for item in each.items()
        if not item[0].startswith("__") or callable(item[1])
    ]
    return _digest(str([(name, _code(value, set())) for name, value in held])) if own else None


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
    read = {
        each.argval for each in get_instructions(value.__code__) if each.opname == "LOAD_GLOBAL"
    }
    names = [name for name in value.__code__.co_names if name in read & value.__globals__.keys()]
    others = [value.__globals__[name] for name in names]
    others = [
        each for each in others if getattr(each, "__module__", value.__module__) == value.__module__
    ]
    return _code(value.__code__, seen), [
        _code(each, seen) for each in (*(value.__defaults__ or ()), *cells, *others)
    ]


def _digest(text: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode() if isinstance(text, str) else text)[:8]
