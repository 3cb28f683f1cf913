"""The engines: the same handful of verbs on JAX and on TensorFlow. Only modules in this folder import either.

| verb | what it does |
|---|---|
| read_variables, write_variables, write_metrics | Keras variables to the values of a State, and back |
| read_captured | the values of variables that the trainer does not own, not to be spent |
| place, fetch | host to device, at once; device to numpy, the only place that waits |
| numbers | small host arrays, as a program takes them soonest |
| shard, batch | loaded rows to the replicas that work on them; the rows of a (micro)batch, each on its replica |
| traced, inlined, shapes | a function, traced once for each shape; the same where it is called; what it would return |
| frame, is_traced_in | what stands for the function being traced, or the body of a loop in it; whether a value is its |
| resident | the same as place, for rows that are used again and again |
| replica_slice, replica_start | in a replica: its slice of a vector over rows, and where that begins |
| replica_params | in a replica: its parameters |
| total | a function over the rows of all replicas, and what it found summed over them |
| gather, lookup | rows of device-resident arrays; rows of a table, NaN where it has none |
| differentiate | gradients of a scalar function, with its auxiliary result |
| fold | a function over microbatches, carrying its result |
| repeat | several updates in one dispatch, a number known only at run time |
| for_evaluation | the engine for evaluation |
| loss_scale, apply | the optimizer's loss scale; the new state after one optimizer update, if it is to be |
| apply_to_rows | the same, for the rows of tables that were looked up |
| compile, describe | the program that the loop calls, its first argument is spent; how it is carried out, in words |
| memory | the bytes that a compiled program needs beside its arguments |
"""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from wholestep.errors import SpecificationError, message


def choose(
    optimizer: Any = None, model: Any = None, replicas: int | str | None = None, jit_compile: bool | str = "auto"
) -> Any:
    """Return the engine of the running Keras backend, for the replicas and the compiler that were asked for.

    Raises:
        SpecificationError: the backend is neither jax nor tensorflow, or there are not so many devices.
    """
    backend = keras.backend.backend()
    if backend not in ("jax", "tensorflow"):
        raise SpecificationError(
            message(
                "The Keras backend must be jax or tensorflow.",
                backend,
                "set the environment variable KERAS_BACKEND before importing keras.",
            )
        )
    return importlib.import_module(f"wholestep.engines.{backend}").Engine(optimizer, model, replicas, jit_compile)


def scope(model: keras.Model) -> AbstractContextManager:
    """Return the context in which the variables of a model are made, as `keras.Model.fit` makes them."""
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()
