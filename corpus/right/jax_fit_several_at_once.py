"""fit with two updates per call

kind: right
engine: jax
author: suite
says: steps_per_execution changes no update.
call: model, data=(x, y)
printed: loss=history.history["loss"]
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
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)

model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=2)

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
print(history.history["loss"])
