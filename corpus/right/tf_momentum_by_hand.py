"""Steps with momentum by hand, at a rate that falls

kind: right
engine: tensorflow
author: suite
says: The step is that of SGD with momentum 0.9, and the schedule counts updates.
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.SGD(falling, momentum=0.9)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

draw = np.random.default_rng(0)
x = draw.normal(size=(60, 5)).astype("float32")
y = x.sum(1)

keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(1)])
falling = keras.optimizers.schedules.PolynomialDecay(0.05, 20, 0.0)


def gradient(a, b):
    with tf.GradientTape() as tape:
        loss = ops.mean((model(a, training=True) - b[:, None]) ** 2)
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


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
