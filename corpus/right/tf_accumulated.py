"""Sums of microbatches, divided by the rows of the window

kind: right
engine: tensorflow
author: suite
says: The penalty is added once per update, and the last window is short.
call: model, data=(x, y), rows="shuffled"
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

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 12):
        rows = order[start : start + 12]
        total = [tf.zeros_like(v) for v in variables]
        parts = [rows[i : i + 5] for i in range(0, len(rows), 5)]
        for part in parts:
            with tf.GradientTape() as tape:
                error = (y[part][:, None] - model(x[part], training=True)) ** 2
                loss = ops.sum(error)
            grads = tape.gradient(loss, variables)
            total = [t + g for t, g in zip(total, grads)]
        with tf.GradientTape() as tape:
            penalty = sum(model.losses)
        own = [
            tf.zeros_like(v) if g is None else g
            for g, v in zip(tape.gradient(penalty, variables), variables)
        ]
        final = [t / len(rows) + o for t, o in zip(total, own)]
        optimizer.apply_gradients(zip(final, variables))
