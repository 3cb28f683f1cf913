"""A step in tf.function

kind: right
engine: tensorflow
author: suite
says: The loss is the mean over rows and the penalties of the layers.
call: model, data=(x, y), rows="shuffled"
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


@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        output = model(a, training=True)
        loss = tf.reduce_mean(tf.square(b[:, None] - output)) + sum(model.losses)
    grads = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        step(tf.constant(x[rows]), tf.constant(y[rows]))
