"""Mixed precision with a loss scale by hand

kind: right
engine: tensorflow
author: suite
says: The gradient is divided by the scale before the step.
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

keras.config.set_dtype_policy("mixed_float16")
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

optimizer, scale = keras.optimizers.Adam(0.01), 1024.0

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            output = tf.cast(model(x[rows], training=True), "float32")
            loss = tf.reduce_mean((y[rows][:, None] - output) ** 2) + sum(model.losses)
            scaled = loss * scale
        grads = tape.gradient(scaled, model.trainable_variables)
        grads = [g / scale for g in grads]
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
