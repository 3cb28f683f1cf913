"""A loss in a StatelessScope

kind: right
engine: jax
author: suite
says: The scope replaces the variables, and all values are assigned after each step.
call: model, data=(x, y)
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

variables, optimizer = model.trainable_variables, model.optimizer
optimizer.build(variables)


def loss_at(values, a, b):
    with keras.StatelessScope(zip(variables, values)):
        return ops.mean(keras.losses.mean_squared_error(b[:, None], model(a, training=True))) + sum(
            model.losses
        )


@jax.jit
def update(values, slots, a, b):
    return optimizer.stateless_apply(slots, jax.grad(loss_at)(values, a, b), values)


# ---- training ----
for epoch in range(2):
    for start in range(0, len(x), 8):
        held = variables + optimizer.variables
        values, slots = update(
            [v.value for v in variables],
            [v.value for v in optimizer.variables],
            x[start : start + 8],
            y[start : start + 8],
        )
        for variable, value in zip(held, [*values, *slots]):
            variable.assign(value)
    model.predict(x, verbose=0)
