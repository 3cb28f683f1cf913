"""fit with sample weights

kind: right
engine: jax
author: suite
says: Keras divides by the number of rows.
call: model, data=(x, y, w)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")
w = draw.uniform(0.5, 2, 20).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
model.fit(x, y, sample_weight=w, epochs=2, batch_size=8, shuffle=False, verbose=0)
