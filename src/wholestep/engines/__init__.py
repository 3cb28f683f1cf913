"""The engines: the same handful of verbs on JAX and on TensorFlow. Only modules in this folder import either.

| verb | what it does |
|---|---|
| take, give, give_metrics | Keras variables to the values of a State, and back |
| read | the values of variables that the trainer does not own, not to be spent |
| place, fetch | host to device, at once; device to numpy, the only place that waits |
| spread, batch | loaded rows to the replicas that work on them; the rows of a (micro)batch, each on its replica |
| traced, inlined, shapes | a function, traced once for each shape; the same where it is called; what it would return |
| frame, is_in | what stands for the function being traced, or the body of a loop in it; whether a value is its |
| resident | the same as place, for rows that are used again and again |
| share, first, own | in a replica: its part of a vector over rows, the place where that begins, its parameters |
| total | a function over the rows of all replicas, and what it found summed over them |
| gather, lookup | rows of device-resident arrays; rows of a table, NaN where it has none |
| differentiate | gradients of a scalar function, with its auxiliary result |
| fold | a function over microbatches, carrying its result |
| repeat | several updates in one dispatch, a number known only at run time |
| alone | the engine for evaluation |
| loss_scale, apply | the optimizer's loss scale; the new state after one optimizer update, if it is to be |
| apply_to_rows | the same, for the rows of tables that were looked up |
| compile, how | the program that the loop calls, its first argument is spent; how it is carried out, in words |
| memory | the bytes that a compiled program needs beside its arguments |
"""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from wholestep.errors import SpecificationError, say


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
            say(
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
