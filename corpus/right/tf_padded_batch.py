"""The last batch is padded with zero rows of weight zero

kind: right
engine: tensorflow
author: suite
says: The sum is divided by the sum of the weights.
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

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        a, b, weight = np.zeros((8, 5), "float32"), np.zeros(8, "float32"), np.zeros(8, "float32")
        a[: len(rows)], b[: len(rows)], weight[: len(rows)] = x[rows], y[rows], 1
        with tf.GradientTape() as tape:
            error = (model(a, training=True)[:, 0] - b) ** 2
            loss = tf.reduce_sum(error * weight) / tf.reduce_sum(weight) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
