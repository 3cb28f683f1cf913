"""Norm clip by hand, SGD with Nesterov momentum by hand

kind: right
engine: jax
author: first
says: The clipped gradient and Nesterov's rule are those of Keras.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

key = jax.random.PRNGKey(0)
x = np.asarray(jax.random.normal(key, (256, 6)))
y = np.tanh(x @ np.arange(6).reshape(6, 1) / 3).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(20, "relu"), keras.layers.Dense(1)])


def clip(tree, limit):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree_util.tree_leaves(tree)))
    factor = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree_util.tree_map(lambda g: g * factor, tree)


def compute_loss(tv, ntv, xb, yb):
    pred, ntv = model.stateless_call(tv, ntv, xb, training=True)
    return jnp.mean((pred - yb) ** 2), ntv


@jax.jit
def train_step(carry, xb, yb):
    tv, ntv, vel = carry
    (loss, ntv), grads = jax.value_and_grad(compute_loss, has_aux=True)(tv, ntv, xb, yb)
    grads = clip(grads, 0.5)
    vel = jax.tree_util.tree_map(lambda a, g: 0.9 * a + g, vel, grads)
    tv = jax.tree_util.tree_map(lambda p, a, g: p - 0.02 * (0.9 * a + g), tv, vel, grads)
    return (tv, ntv, vel), loss


tv = model.trainable_variables
tv = [w.value for w in tv]
carry = (tv, [w.value for w in model.non_trainable_variables], [jnp.zeros_like(w) for w in tv])
# ---- training ----
for epoch in range(4):
    order = np.random.permutation(256)
    for rows in order.reshape(8, 32):
        carry, loss = train_step(carry, x[rows], y[rows])
    print("epoch", epoch, "loss", float(loss))
for w, value in zip(model.trainable_variables, carry[0]):
    w.assign(value)
