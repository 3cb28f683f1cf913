"""The rate is an argument of a tf.function

kind: right
engine: tensorflow
author: suite
says: A tensor, so that the trace does not keep its first value.
call: model, data=(x, y), learning_rate=schedule
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
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


optimizer, step = keras.optimizers.SGD(0.05), 0
optimizer.build(model.trainable_variables)


@tf.function
def update(a, b, now):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.learning_rate.assign(now)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))


# ---- training ----
for epoch in range(2):
    for start in range(0, len(x), 8):
        rows = np.random.default_rng(epoch).permutation(len(x))[start : start + 8]
        update(tf.constant(x[rows]), tf.constant(y[rows]), tf.constant(rate(step), "float32"))
        step += 1
