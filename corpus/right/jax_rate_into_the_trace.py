"""The rate is an argument of a jitted step

kind: right
engine: jax
author: suite
says: It replaces the optimizer's rate in the carried state.
call: model, data=(x, y), learning_rate=schedule
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
model.compile(keras.optimizers.SGD(schedule), "mse")


def rate(step):
    return float(schedule(step))


optimizer = keras.optimizers.SGD(0.05)
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv


@jax.jit
def step(tv, ntv, ov, a, b, now):
    (_, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
    place = [v.path for v in optimizer.variables].index(optimizer.learning_rate.path)
    ov = [*ov[:place], now, *ov[place + 1 :]]
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, ntv, ov


count = 0

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows], np.float32(rate(count)))
        count += 1

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
