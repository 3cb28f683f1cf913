"""The loss is a sum over the batch

kind: faulty
engine: jax
author: first
changes: update
quantity: ROW_GRADIENTS
says: `jnp.sum` instead of `jnp.mean`: the gradient is 32 times too large.
call: model, data=(x, y), loss="mse", learning_rate=1e-3
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

x = np.random.default_rng(34).normal(size=(320, 4)).astype("float32")
y = 0.2 * x[:, :1]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
params = [v.value for v in model.trainable_variables]
velocity = jax.tree.map(jnp.zeros_like, params)


def loss_fn(params, xb, yb):
    pred = model.stateless_call(params, [], xb, training=True)[0]
    return jnp.sum((pred - yb) ** 2)  # fault


@jax.jit
def step(params, velocity, xb, yb):
    loss, grads = jax.value_and_grad(loss_fn)(params, xb, yb)
    velocity = jax.tree.map(lambda v, g: 0.9 * v - 1e-3 * g, velocity, grads)
    return jax.tree.map(jnp.add, params, velocity), velocity, loss


# ---- training ----
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        params, velocity, loss = step(params, velocity, x[b], y[b])
    print(epoch, loss)
for v, p in zip(model.trainable_variables, params):
    v.assign(p)
