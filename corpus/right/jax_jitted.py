"""A jitted step with statistics and dropout

kind: right
engine: jax
author: suite
says: All three states come out of the step.
call: model, data=(x, y), rows="shuffled"
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
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    return jnp.mean((b[:, None] - output) ** 2) + sum(own), ntv


@jax.jit
def step(tv, ntv, ov, a, b):
    (_, new), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, a, b)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, new, ov


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
