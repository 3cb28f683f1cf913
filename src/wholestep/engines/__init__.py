"""The engines: JAX and TensorFlow behind one protocol, see `wholestep.engines.protocol`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from wholestep.backend import unknown
from wholestep.checkpoints import Numbers
from wholestep.engines.listener import Listener
from wholestep.engines.protocol import Engine
from wholestep.errors import warn
from wholestep.processes import Processes, SingleProcess
from wholestep.tree import Tree


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
    backend, kinds = keras.backend.backend(), list[Callable[..., Engine]]()
    if backend == "jax":
        from wholestep.engines.jax import JaxEngine
        from wholestep.engines.jax_eager import EagerJaxEngine

        kinds = [JaxEngine, EagerJaxEngine]
    elif backend == "tensorflow":
        from wholestep.engines.tensorflow import TensorflowEngine
        from wholestep.engines.tensorflow_eager import EagerTensorflowEngine

        kinds = [TensorflowEngine, EagerTensorflowEngine]
    else:
        raise unknown(backend)
    compiling, eager = kinds
    if not getattr(model, "run_eagerly", False):
        return compiling(optimizer, model, replicas, jit_compile)
    engine = eager(optimizer, model, replicas, "auto")
    if engine.num_replicas > 1 or engine.processes.count > 1:
        told = "run_eagerly has no effect: on several devices, or in several processes, an update is always compiled."
        warn(told)
        return compiling(optimizer, model, replicas, jit_compile)
    return engine


def scope(model: keras.Model) -> AbstractContextManager:
    """Return the context in which to create the variables of a model, as `keras.Model.fit` does."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


def num_replicas(model: keras.Model) -> int:
    """Return the number of devices that share the rows of a batch, as set by the model and Keras alone."""
    if keras.backend.backend() == "jax":
        from wholestep.engines.mesh import find_layout

        layout = find_layout(None)
        return 1 if layout is None else layout.num_replicas
    from wholestep.engines.strategy import find_replicas

    replicas = find_replicas(model, None)
    return 1 if replicas is None else replicas.count


def makes_variables() -> bool:
    """Whether a custom step may create variables in its first trace."""
    return keras.backend.backend() == "tensorflow"


def as_function(step: Callable) -> Callable:
    """Return a custom step in the form that the engine runs."""
    if not makes_variables():
        return step
    from wholestep.engines import tensorflow_steps

    return tensorflow_steps.as_function(step)


def make_variables(function: Callable, batch: Tree) -> None:
    """Create the variables of a custom step, `as_function`, for such a batch. Nothing is computed."""
    from wholestep.engines import tensorflow_steps

    tensorflow_steps.make_variables(function, batch)


def connect() -> Processes:
    """Return the processes of the run, which compute every update together; there may be only one."""
    if keras.backend.backend() != "jax":
        return SingleProcess()
    from wholestep.processes import group

    return group.connect()


def placed(variable: keras.Variable, numbers: Numbers) -> Any:
    """Return numbers in the placement of a variable; of one sharded over processes, only the local shards are read."""
    if getattr(variable.value, "is_fully_addressable", True):
        return numbers if isinstance(numbers, np.ndarray) else numbers[...]
    from wholestep.engines import mesh

    return mesh.spread_like(variable.value, numbers)


def listener() -> Listener:
    """Return the listener of an audit for the running Keras backend.

    Raises:
        SpecificationError: the backend is neither jax nor tensorflow.
    """
    if keras.backend.backend() == "jax":
        from wholestep.engines.jax_listener import JaxListener

        return JaxListener()
    if keras.backend.backend() == "tensorflow":
        from wholestep.engines.tensorflow_listener import TensorflowListener

        return TensorflowListener()
    raise unknown(keras.backend.backend())
