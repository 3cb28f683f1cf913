"""The optimizer's new state is not put into the loop's state

kind: faulty
engine: jax
author: second
changes: update
quantity: STEP
says: The new optimizer state is not put in the state: Adam starts from zero moments at every step.
call: model, data=(x, y), loss=keras.losses.BinaryCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
from typing import Any, NamedTuple

import jax
import numpy as np
import keras
from keras import layers


class State(NamedTuple):
    params: Any
    buffers: Any
    opt: Any


def two_moons(n=128):
    rng = np.random.default_rng(0)
    t = rng.uniform(0, np.pi, n)
    c = rng.integers(0, 2, n)
    x = np.stack([np.cos(t) * (1 - 2 * c) + c, np.sin(t) * (1 - 2 * c) + 0.5 * c], 1)
    return (x + 0.1 * rng.normal(size=x.shape)).astype("float32"), c.astype("float32")[:, None]


def net():
    return keras.Sequential([layers.Input((2,)), layers.Dense(32, activation="relu"),
                             layers.Dense(32, activation="relu"), layers.Dense(1)])


def make_step(model, optimizer):
    bce = keras.losses.BinaryCrossentropy(from_logits=True)

    def loss_fn(params, buffers, x, y):
        logits, buffers = model.stateless_call(params, buffers, x, training=True)
        return bce(y, logits), buffers

    @jax.jit
    def step(state, batch):
        (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, state.buffers, *batch)
        params, opt = optimizer.stateless_apply(state.opt, grads, state.params)
        return state._replace(params=params, buffers=buffers), loss  # fault

    return step


def init_state(model, optimizer):
    optimizer.build(model.trainable_variables)
    values = lambda vs: [v.value for v in vs]
    return State(values(model.trainable_variables), values(model.non_trainable_variables), values(optimizer.variables))


def train(model, optimizer, x, y, epochs=3, batch=32):
    step = make_step(model, optimizer)
    state = init_state(model, optimizer)
    rng = np.random.default_rng(0)
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        for chunk in order.reshape(-1, batch):
            state, loss = step(state, (x[chunk], y[chunk]))
        print("epoch", epoch, float(loss))
    for v, p in zip(model.trainable_variables, state.params):
        v.assign(p)
    return state


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = two_moons()
    model, optimizer = net(), keras.optimizers.Adam(1e-2)
    # ---- training ----
    train(model, optimizer, x, y)
