"""Sums of microbatches in variables, by two tf.functions

kind: right
engine: tensorflow
author: suite
says: The variables are set to zero after each update.
call: model, data=(x, y)
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
model.compile(keras.optimizers.Adam(0.01), "mse")


def rate(step):
    return float(schedule(step))


variables = model.trainable_variables
sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
model.optimizer.build(variables)


@tf.function
def gradient(a, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2) + sum(model.losses)
    for held, grad in zip(sums, tape.gradient(loss, variables)):
        held.assign_add(grad / 2)


@tf.function
def update():
    model.optimizer.apply_gradients(zip([tf.identity(held) for held in sums], variables))
    for held in sums:
        held.assign(tf.zeros_like(held))


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for step, start in enumerate(range(0, len(x), 5), start=1):
        rows = order[start : start + 5]
        gradient(tf.constant(x[rows]), tf.constant(y[rows]))
        if step % 2 == 0:
            update()
