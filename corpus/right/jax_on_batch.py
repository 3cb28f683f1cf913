"""train_on_batch in a new order each epoch

kind: right
engine: jax
author: suite
says: Each epoch has an order of its own.
call: model, data=(x, y), rows="shuffled"
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
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        model.train_on_batch(x[rows], y[rows])
