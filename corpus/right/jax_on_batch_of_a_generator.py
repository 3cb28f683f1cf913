"""train_on_batch on the batches of a generator

kind: right
engine: jax
author: suite
says: Three batches of seven, seven and six rows.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
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
        layers.Dense(3, "relu"),
        layers.Dense(1),
    ]
)
model.layers[0].trainable = False
model.compile(keras.optimizers.Adam(0.01), "mse")


def batches():
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in np.array_split(order, 3):
            yield x[rows], y[rows]


# ---- training ----
for a, b in batches():
    model.train_on_batch(a, b)
