"""Microbatches whose step is selected by jnp.where

kind: right
engine: jax
author: suite
says: The step is computed for each microbatch, and kept for each second one.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

schedule = keras.optimizers.schedules.InverseTimeDecay(0.05, 2, 0.7)
keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")


def rate(step):
    return float(schedule(step))


optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv


@jax.jit
def step(tv, ntv, ov, total, is_full, a, b):
    grads, ntv = jax.grad(loss_at, has_aux=True)(tv, ntv, a, b)
    total = [t + g / 2 for t, g in zip(total, grads)]
    new = optimizer.stateless_apply(ov, total, tv)
    tv, ov = jax.tree.map(lambda a, b: jnp.where(is_full, a, b), new, (tv, ov))
    return tv, ntv, ov, [jnp.where(is_full, 0.0, t) for t in total]


total = [0 * v for v in tv]

# ---- training ----
for epoch in range(3):
    order = np.random.default_rng(epoch).permutation(len(x))
    for i, start in enumerate(range(0, len(x), 5)):
        rows = order[start : start + 5]
        tv, ntv, ov, total = step(tv, ntv, ov, total, i % 2 == 1, x[rows], y[rows])

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
