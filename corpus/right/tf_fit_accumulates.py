"""fit with an optimizer that accumulates gradients

kind: right
engine: tensorflow
author: suite
says: All microbatches have five rows, and windows fit the epoch.
call: model, data=(x, y), rows="once"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
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
        layers.Dense(1),
    ]
)

model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")

# ---- training ----
model.fit(x, y, epochs=2, batch_size=5, shuffle=False, verbose=0)
