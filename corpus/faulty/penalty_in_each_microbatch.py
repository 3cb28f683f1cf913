"""Accumulation: the regulariser is added undivided to each microbatch

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: PENALTY
says: `loss / ACCUM + sum(model.losses)`: the penalty counts ACCUM times.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(24).normal(size=(320, 10)).astype("float32")
y = x[:, :1] + x[:, 1:2]
model = keras.Sequential([
    keras.Input((10,)),
    keras.layers.Dense(24, "relu", kernel_regularizer="l2"),
    keras.layers.Dense(1),
])
optimizer = keras.optimizers.Adam(1e-3)
mse = keras.losses.MeanSquaredError()
ACCUM = 4
# ---- training ----
for epoch in range(4):
    accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
    for step, b in enumerate(np.random.permutation(320).reshape(20, 16)):
        with tf.GradientTape() as tape:
            loss = mse(y[b], model(x[b], training=True)) / ACCUM + tf.reduce_sum(model.losses)  # fault
        grads = tape.gradient(loss, model.trainable_variables)
        accumulated = [a + g for a, g in zip(accumulated, grads)]
        if (step + 1) % ACCUM == 0:
            optimizer.apply_gradients(zip(accumulated, model.trainable_variables))
            accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
    print(epoch, float(loss))
