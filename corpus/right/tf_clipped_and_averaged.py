"""Gradients clipped by hand, and a moving average of the weights

kind: right
engine: tensorflow
author: suite
says: The average is kept beside the model and changes nothing.
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

average = [tf.identity(v) for v in model.trainable_variables]

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            output = model(x[rows], training=True)
            loss = tf.reduce_mean((y[rows, None] - output) ** 2) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        grads, _ = tf.clip_by_global_norm(grads, 0.4)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
        average = [0.9 * a + 0.1 * v for a, v in zip(average, model.trainable_variables)]
    model(x, training=False)
