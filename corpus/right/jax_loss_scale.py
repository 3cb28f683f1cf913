"""Mixed precision with a LossScaleOptimizer

kind: right
engine: jax
author: suite
says: The scale is the optimizer's variable, and is carried on.
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

keras.config.set_dtype_policy("mixed_float16")
keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 1024.0), "mse")

optimizer = model.optimizer
optimizer.build(model.trainable_variables)
groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
tv, ntv, ov = ([v.value for v in group] for group in groups)


def loss_at(tv, ntv, ov, a, b):
    output, ntv, own = model.stateless_call(tv, ntv, a, training=True, return_losses=True)
    loss = jnp.mean((b[:, None] - output.astype("float32")) ** 2) + sum(own)
    with keras.StatelessScope(zip(optimizer.variables, ov)):
        loss = optimizer.scale_loss(loss)
    return loss, ntv


@jax.jit
def step(tv, ntv, ov, a, b):
    (_, ntv), grads = jax.value_and_grad(loss_at, has_aux=True)(tv, ntv, ov, a, b)
    tv, ov = optimizer.stateless_apply(ov, grads, tv)
    return tv, ntv, ov


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 5):
        rows = order[start : start + 5]
        tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])

for variables, values in ((model.trainable_variables, tv), (model.non_trainable_variables, ntv)):
    for variable, value in zip(variables, values):
        variable.assign(value)
