"""fit of a model that looks up words in a table

kind: right
engine: tensorflow
author: suite
says: Keras' own loop.
call: model, data=(x, y)
printed: loss=history.history["loss"]
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = draw.integers(0, 6, (20, 4))
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [keras.Input((4,)), layers.Embedding(6, 3), layers.Flatten(), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
print(history.history["loss"])
