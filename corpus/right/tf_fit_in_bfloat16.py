"""fit in mixed precision of bfloat16

kind: right
engine: tensorflow
author: suite
says: No loss scale is needed.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 5)).astype("float32")
y = draw.normal(size=20).astype("float32")

keras.config.set_dtype_policy("mixed_bfloat16")
keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.4),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
history.history["loss"]
