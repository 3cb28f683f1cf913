"""Adam by hand never stores its step count

kind: faulty
engine: jax
author: second
changes: update
quantity: STEP
says: The step counter t is never stored, so the bias correction is always that of step 1 (updates
    3+ times too big/small later).
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.Adam(3e-3)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import keras
from keras import layers


@dataclasses.dataclass(frozen=True)
class Adam:
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-7

    def init(self, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"t": jnp.zeros((), jnp.int32), "m": zeros, "v": zeros}

    def update(self, grads, state, params):
        t = state["t"] + 1
        m = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g * g, state["v"], grads)
        scale = self.lr * jnp.sqrt(1 - self.b2 ** t) / (1 - self.b1 ** t)
        params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + self.eps), params, m, v)
        return params, {**state, "m": m, "v": v}  # fault


def data(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 6)).astype("float32")
    return x, np.tanh(x[:, :1] * 2 + x[:, 1:2]).astype("float32")


def build():
    return keras.Sequential([layers.Input((6,)), layers.Dense(32, activation="relu"), layers.Dense(1)])


@partial(jax.jit, static_argnums=(0, 1))
def step(model, adam, params, ntv, opt_state, x, y):
    def mse(params):
        pred, _ = model.stateless_call(params, ntv, x, training=True)
        return jnp.mean((pred - y) ** 2)
    loss, g = jax.value_and_grad(mse)(params)
    params, opt_state = adam.update(g, opt_state, params)
    return params, opt_state, loss


def train(model, adam, x, y, epochs=3, bs=16):
    params = [v.value for v in model.trainable_variables]
    ntv = [v.value for v in model.non_trainable_variables]
    opt_state = adam.init(params)
    for e in range(epochs):
        for i in range(0, len(x), bs):
            params, opt_state, loss = step(model, adam, params, ntv, opt_state, x[i:i + bs], y[i:i + bs])
        print(e, float(loss))
    for v, p in zip(model.trainable_variables, params):
        v.assign(p)


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model = build()
    # ---- training ----
    train(model, Adam(lr=3e-3), x, y)
