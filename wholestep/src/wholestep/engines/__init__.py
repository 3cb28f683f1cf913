"""The engines: JAX and TensorFlow behind one protocol, see `wholestep.engines.protocol`. Other
packages import here.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import keras
import numpy as np

from wholestep.backend import unknown
from wholestep.checkpoints import Numbers
from wholestep.engines.protocol import Compiled, Devices, Engine
from wholestep.errors import warn
from wholestep.processes import Processes, SingleProcess
from wholestep.tree import Tree

__all__ = [
    "Compiled",
    "Devices",
    "Engine",
    "as_function",
    "build_optimizer",
    "choose",
    "connect",
    "held_dtype",
    "make_deterministic",
    "make_variables",
    "makes_variables",
    "num_replicas",
    "placed",
    "scope",
]


def _module(suffix: str = "") -> ModuleType:
    """Return a module of the running Keras backend.

    Raises:
        SpecificationError: the backend is neither jax nor tensorflow.
    """
    backend = keras.backend.backend()
    if backend not in ("jax", "tensorflow"):
        raise unknown(backend)
    return import_module(f"wholestep.engines.{backend}{suffix}")


def choose(
    optimizer: keras.optimizers.Optimizer | None = None,
    model: keras.Model | None = None,
    replicas: int | str | None = None,
    jit_compile: bool | str = "auto",
) -> Engine:
    """Return the engine of the running Keras backend, for the requested replicas and compiler.

    Raises:
        SpecificationError: the backend is neither jax nor tensorflow, or there are too few devices.
    """
    make_engine = _module().make_engine
    if getattr(model, "run_eagerly", False):
        engine = make_engine(optimizer, model, replicas, "auto", is_eager=True)
        if engine.devices.num_replicas == 1 and engine.processes.count == 1:
            return engine
        text = (
            "run_eagerly has no effect: on several devices, or in several processes, an update "
            "is always compiled."
        )
        warn(text)
    return make_engine(optimizer, model, replicas, jit_compile, is_eager=False)


def scope(model: keras.Model) -> AbstractContextManager:
    """Return the context in which to create the variables of a model, as `keras.Model.fit` does."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def build_optimizer(optimizer: keras.optimizers.Optimizer, params: list[keras.Variable]) -> None:
    """Create the variables of an optimizer."""
    _module("_variables").build_optimizer(optimizer, params)


def make_deterministic() -> bool:
    """Let operations on a GPU repeat to the bit; False if the engine is in use already."""
    return _module("_devices").make_deterministic()


def num_replicas(model: keras.Model, replicas: int | str | None = None) -> int:
    """Return the number of devices that share the rows of a batch: as requested, or as set by the
    model and Keras.
    """
    return int(_module("_devices").find_replicas(model, replicas).count)


def makes_variables() -> bool:
    """Whether a custom step may create variables in its first trace."""
    return keras.backend.backend() == "tensorflow"


def as_function(step: Callable) -> Callable:
    """Return a custom step in the form that the engine runs."""
    return _module("_variables").as_function(step) if makes_variables() else step


def make_variables(function: Callable, batch: Tree) -> None:
    """Create the variables of a custom step, `as_function`, for such a batch. Nothing is
    computed.
    """
    _module("_variables").make_variables(function, batch)


def own_variables(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's own variables in the attributes of objects, by paths that begin with the
    objects' names.
    """
    return _module("_variables").own_variables(owners) if makes_variables() else {}


def held_dtype(dtype: str) -> str:
    """Return the dtype in which the running Keras backend holds an array of this dtype: JAX narrows
    64 bits to 32.
    """
    return _module("_devices").held_dtype(dtype) if keras.backend.backend() == "jax" else dtype


def connect() -> Processes:
    """Return the processes of the run, which compute every update together; there may be only
    one.
    """
    if keras.backend.backend() != "jax":
        return SingleProcess()
    from wholestep.processes import group

    return group.connect()


def placed(variable: keras.Variable, numbers: Numbers) -> Any:
    """Return numbers in the placement of a variable; of one sharded over processes, only the local
    shards are read.
    """
    if getattr(variable.value, "is_fully_addressable", True):
        return numbers if isinstance(numbers, np.ndarray) else numbers[...]
    return _module("_devices").spread_like(variable.value, numbers)
