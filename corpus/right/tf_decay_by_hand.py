"""Weights that decay by hand after each step

kind: right
engine: tensorflow
author: suite
says: The decay is no part of the gradient.
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
        layers.BatchNormalization(),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")


@tf.function(reduce_retracing=True)
def step(a, b):
    with tf.GradientTape(persistent=True) as tape:
        output = model(a, training=True)
        loss = tf.reduce_mean((b - tf.squeeze(output, -1)) ** 2)
        loss = loss + tf.add_n(model.losses)
    model.optimizer.apply_gradients(
        [(tape.gradient(loss, v), v) for v in model.trainable_variables]
    )
    for v in model.trainable_variables:
        v.assign(v * 0.999)


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 6):
        rows = order[start : start + 6]
        step(tf.constant(x[rows]), tf.constant(y[rows]))
