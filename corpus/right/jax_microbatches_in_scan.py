"""Microbatches in lax.scan

kind: right
engine: jax
author: suite
says: The sum over ten rows is divided once.
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

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.05), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b):
    output, new = model.stateless_call(tv, ntv, a, training=True)
    return jnp.sum((b[:, None] - output) ** 2), new


@jax.jit
def step(tv, ntv, ov, a, b):
    def body(carry, part):
        total, ntv = carry
        grads, ntv = jax.grad(loss_at, has_aux=True)(tv, ntv, *part)
        return ([t + g for t, g in zip(total, grads)], ntv), None

    (total, ntv), _ = jax.lax.scan(
        body, ([0 * v for v in tv], ntv), (a.reshape(2, 5, 5), b.reshape(2, 5))
    )
    tv, ov = optimizer.stateless_apply(ov, [t / 10 for t in total], tv)
    return tv, ntv, ov


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for rows in order.reshape(2, 10):
        tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
