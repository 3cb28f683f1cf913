"""Steps with momentum by hand, at a rate that falls

kind: right
engine: jax
author: suite
says: The step is that of SGD with momentum 0.9, and the schedule counts updates.
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.SGD(falling, momentum=0.9)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
from keras import layers, ops

draw = np.random.default_rng(0)
x = draw.normal(size=(60, 5)).astype("float32")
y = x.sum(1)

keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(1)])
falling = keras.optimizers.schedules.PolynomialDecay(0.05, 20, 0.0)


def loss_at(params, a, b):
    output, _ = model.stateless_call(params, [], a, training=True)
    return ops.mean((output - b[:, None]) ** 2)


def gradient(a, b):
    params = [v.value for v in model.trainable_variables]
    return [np.asarray(g) for g in jax.grad(loss_at)(params, a, b)]


moves = [np.zeros(v.shape, "float32") for v in model.trainable_variables]
update = 0
# ---- training ----
for epoch in range(4):
    order = draw.permutation(60)
    for start in range(0, 60, 16):
        rows = order[start : start + 16]
        rate = float(falling(update))
        gradients = gradient(x[rows], y[rows])
        for i, (variable, grad) in enumerate(zip(model.trainable_variables, gradients)):
            moves[i] = 0.9 * moves[i] + rate * grad
            variable.assign(variable - moves[i])
        update += 1
