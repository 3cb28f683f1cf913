"""Only the last layer is trained

kind: right
engine: tensorflow
author: suite
says: The gradient of the last layer alone is meant.
call: model, data=(x, y)
printed: loss=printed
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

printed = []

# ---- training ----
for epoch in range(2):
    total, count = 0.0, 0
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            output = model(x[rows], training=True)
            loss = tf.reduce_mean((y[rows][:, None] - output) ** 2)
            full = loss + sum(model.losses)
        grads = tape.gradient(full, model.layers[-1].trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.layers[-1].trainable_variables))
        total, count = total + float(full) * len(rows), count + len(rows)
    printed.append(total / count)
print(printed)
