"""Windows of two microbatches, and a short one at the end of an epoch

kind: right
engine: tensorflow
author: suite
says: The sum of means is divided by the microbatches in the window, which have equal rows.
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
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

variables = model.trainable_variables
total, count = None, 0

# ---- training ----
for epoch in range(3):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 4):
        rows = order[start : start + 4]
        with tf.GradientTape() as tape:
            error = (y[rows][:, None] - model(x[rows], training=True)) ** 2
            loss = ops.mean(error) + sum(model.losses)
        grads = tape.gradient(loss, variables)
        total = grads if total is None else [t + g for t, g in zip(total, grads)]
        count += 1
        if count == 2 or start + 4 >= len(x):
            model.optimizer.apply([t / count for t in total], variables)
            total, count = None, 0
