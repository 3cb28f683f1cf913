"""The last batch begins earlier, and its first rows have weight zero

kind: right
engine: tensorflow
author: suite
says: Rows that came before do not count again.
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
        layers.Dense(4, "tanh"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.05), "mse")

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        first = min(start, len(x) - 8)  # as lax.dynamic_slice has it
        rows, weight = order[first : first + 8], (first + np.arange(8) >= start).astype("float32")

        total = [tf.zeros_like(v) for v in model.trainable_variables]
        for part in (np.arange(4), np.arange(4, 8)):
            with tf.GradientTape() as tape:
                error = (model(x[rows[part]], training=True)[:, 0] - y[rows[part]]) ** 2
                loss = tf.reduce_sum(error * weight[part]) / tf.reduce_sum(weight)
            grads = tape.gradient(loss, model.trainable_variables)
            total = [t + g for t, g in zip(total, grads)]
        model.optimizer.apply_gradients(zip(total, model.trainable_variables))
