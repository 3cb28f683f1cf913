"""The rate is set before each update

kind: right
engine: tensorflow
author: suite
says: The schedule is read at the number of the update, not of the microbatch.
call: model, data=(x, y), learning_rate=schedule
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

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


optimizer, step = keras.optimizers.SGD(0.05), 0

# ---- training ----
for epoch in range(2):
    for start in range(0, len(x), 12):
        optimizer.learning_rate = rate(step)
        step += 1
        total = [tf.zeros_like(v) for v in model.trainable_variables]
        rows = np.arange(len(x))[start : start + 12]
        for part in np.array_split(rows, 3):
            with tf.GradientTape() as tape:
                error = (y[part][:, None] - model(x[part], training=True)) ** 2
                loss = ops.sum(error) / len(rows) + sum(model.losses) / 3
            grads = tape.gradient(loss, model.trainable_variables)
            total = [t + g for t, g in zip(total, grads)]
        optimizer.apply_gradients(zip(total, model.trainable_variables))
