"""A layer that is unfrozen after the first epoch

kind: right
engine: tensorflow
author: suite
says: The optimizer is made anew for all variables.
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

model.layers[0].trainable = False
variables, optimizer = model.trainable_variables, keras.optimizers.SGD(0.1)


# ---- training ----
for epoch in range(3):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        if (epoch, start) == (1, 0):
            model.layers[0].trainable = True
            variables, optimizer = model.trainable_variables, keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            output = model(x[rows], training=True)
            loss = tf.reduce_mean((y[rows][:, None] - output) ** 2) + sum(model.losses)
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables))
