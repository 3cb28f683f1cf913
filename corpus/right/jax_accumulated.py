"""Sums of microbatches, divided by the rows of the window

kind: right
engine: jax
author: suite
says: The penalty is added once per update, and the last window is short.
call: model, data=(x, y), rows="shuffled"
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers, ops

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


@jax.jit
def gradient(tv, ntv, a, b):
    def loss_at(tv):
        output, new = model.stateless_call(tv, ntv, a, training=True)
        error = (b[:, None] - output) ** 2
        return ops.sum(error), new

    return jax.grad(loss_at, has_aux=True)(tv)


def penalty(tv):
    return sum(
        v.regularizer(value) for v, value in zip(model.trainable_variables, tv) if v.regularizer
    )


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 12):
        rows = order[start : start + 12]
        total = [0 * v for v in tv]
        parts = [rows[i : i + 5] for i in range(0, len(rows), 5)]
        for part in parts:
            grads, ntv = gradient(tv, ntv, x[part], y[part])
            total = [t + g for t, g in zip(total, grads)]
        own = jax.grad(penalty)(tv)
        final = [t / len(rows) + o for t, o in zip(total, own)]
        tv, ov = optimizer.stateless_apply(ov, final, tv)

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
