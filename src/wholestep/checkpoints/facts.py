"""The environment and settings of a training in its checkpoints, which may change its numbers."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import keras

from wholestep.checkpoints.configuration import Settings, few, flat, model_settings
from wholestep.errors import SpecificationError, message
from wholestep.executor import Executor
from wholestep.model.losses import CompiledObjective

_NO_MATTER = ("script",)


def facts_of(executor: Executor) -> dict[str, Any]:
    """Return versions, engine, devices, replicas and the options of updates."""
    options = executor.options
    packages = ("wholestep", "keras", "numpy", keras.backend.backend())
    return {
        **{package: _version(package) for package in packages},
        "engine": keras.backend.backend(),
        "machine": platform.machine(),
        "devices": ", ".join(sorted({device.split(":")[0] for device in keras.distribution.list_devices()})),
        "replicas": executor.engine.devices.num_replicas,
        "processes": executor.engine.processes.count,
        "microbatch size": options.microbatch_size,
        "memory limit": options.memory_limit,
        "XLA": options.jit_compile,
        "float policy": f"{keras.config.dtype_policy().name}, {keras.config.floatx()}",
        "script": Path(sys.argv[0]).name,
    }


def settings_of_run(executor: Executor, arguments: Mapping[str, Any]) -> Settings:
    """Return the settings of the model, its optimizer, loss and metrics, and of a call's arguments."""
    model, objective = executor.model, executor.objective
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    held = {"optimizer": executor.optimizer, "on_nonfinite": executor.options.on_nonfinite, **arguments}
    if isinstance(objective, CompiledObjective):
        held |= {f"loss{name}": getattr(loss, f"_user_loss{name}", None) for name in ("", "_weights")}
        held |= {name: getattr(metrics, f"_user_{name}", None) for name in ("metrics", "weighted_metrics")}
    else:
        held |= {"objective": objective}
    return few(model_settings(model) | {k: v for name, each in held.items() for k, v in flat(name, each).items()})


def differences(before: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the differences in the environment, and their effect; "" if there are none.

    >>> differences({"replicas": 1, "jax": "0.9"}, {"replicas": 2, "jax": "0.9"})
    'replicas 2 (1 before): from here not bit for bit'
    >>> differences({"script": "a.py"}, {"script": "b.py"})
    'script b.py (a.py before)'
    """
    names = [name for name in here if name in before and before[name] != here[name]]
    words = ", ".join(f"{name} {here[name]} ({before[name]} before)" for name in names)
    return f"{words}: from here not bit for bit" if set(names).difference(_NO_MATTER) else words


def direction(executor: Executor, keep_best: tuple | None) -> str:
    """Return the direction in which the metric of `keep_best` improves: "min" or "max".

    Raises:
        SpecificationError: the direction is unknown.
    """
    name, _, mode = (*(keep_best or ("loss", 1)), "auto")[:3]
    bare = name.removeprefix("val_")
    known = [*executor.metrics, *(m for metric in executor.model.metrics for m in _inside(metric))]
    ways = [metric._direction for metric in known if metric.name == bare and hasattr(metric, "_direction")]
    if mode != "auto":
        return mode
    if bare != "loss" and not ways:
        must = "keep_best must say whether less or more is better, where Keras does not know."
        raise SpecificationError(message(must, name, f'("{name}", 1, "max"), or "min".'))
    return "max" if ways and ways[0] == "up" else "min"


def _inside(metric: keras.metrics.Metric) -> list[keras.metrics.Metric]:
    return [metric, *getattr(metric, "metrics", [])]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
