"""Loops by hand in JAX: `scan`, resident data and one dispatch for an epoch; `single`, one jitted
call for a batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

Tree = Any


def scan(model: keras.Model, data: dict, batch_size: int, parts: int) -> Callable[[int], None]:
    """Return a function that trains for so many epochs, each update in so many parts, and waits for
    the end.
    """
    x, y = jax.device_put((data["x"], data["y"]))
    held = [_state(model)]
    epoch = jax.jit(partial(_epoch, model), donate_argnums=0)
    random = np.random.default_rng(1)

    def run(epochs: int) -> None:
        for _ in range(epochs):
            rows = (
                random.permutation(len(x)).astype(np.int32).reshape(-1, parts, batch_size // parts)
            )
            held[0], report = epoch(held[0], x, y, rows)
            jax.device_get(report)

    return run


def single(model: keras.Model, batches: list) -> Callable[[], None]:
    """Return a function that makes an update on each batch (x, y), which comes from the host, and
    waits for the end.
    """
    held = [_state(model)]
    rows = np.arange(len(batches[0][1]), dtype=np.int32).reshape(1, 1, -1)
    update = jax.jit(partial(_epoch, model), donate_argnums=0)

    def run() -> None:
        for batch in batches:
            held[0], report = update(held[0], *jax.device_put(batch), rows)
        jax.device_get(report)

    return run


def _state(model: keras.Model) -> Tree:
    model.optimizer.build(model.trainable_variables)
    return [
        [jnp.array(v.value) for v in group]
        for group in (model.trainable_variables, model.optimizer.variables)
    ]


def _epoch(
    model: keras.Model, state: Tree, x: jax.Array, y: jax.Array, rows: jax.Array
) -> tuple[Tree, Tree]:
    """Return the state after the updates of rows: (updates, parts, size), and the mean loss and
    accuracy.
    """

    def update(state: Tree, rows: jax.Array) -> tuple[Tree, Tree]:
        params, slots = state
        part = jax.value_and_grad(partial(_sums, model), has_aux=True)

        def add(total: Tree, rows: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, part(params, x[rows], y[rows])), None

        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(part, params, x[rows[0]], y[rows[0]]))
        (sums, grads) = (
            add(nothing, rows[0])[0] if len(rows) == 1 else jax.lax.scan(add, nothing, rows)[0]
        )
        grads = [g / rows.size for g in grads]
        return list(model.optimizer.stateless_apply(slots, grads, params)), sums

    state, sums = jax.lax.scan(update, state, rows)
    return state, jax.tree.map(lambda s: s.sum() / rows.size, sums)


def _sums(
    model: keras.Model, params: list, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits = model.stateless_call(params, [], x, training=True)[0]
    losses = keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return losses.sum(), (logits.argmax(-1) == y).sum()
