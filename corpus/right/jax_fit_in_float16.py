"""fit in mixed precision, with a LossScaleOptimizer

kind: right
engine: jax
author: suite
says: Keras scales the loss.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

keras.config.set_dtype_policy("mixed_float16")
keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 1024.0), "mse")

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
history.history["loss"]
