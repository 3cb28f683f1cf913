"""fit of a model with two named inputs

kind: right
engine: tensorflow
author: suite
says: Keras matches inputs by name.
call: model, data=(x, y)
printed: loss=history.history["loss"]
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
from keras import layers

draw = np.random.default_rng(0)
x = {
    "left": draw.normal(size=(20, 5)).astype("float32"),
    "right": draw.normal(size=(20, 2)).astype("float32"),
}
y = draw.normal(size=20).astype("float32")

keras.utils.set_random_seed(3)
inputs = {"left": keras.Input((5,), name="left"), "right": keras.Input((2,), name="right")}
joined = layers.Concatenate()([layers.Dense(4, "relu")(inputs["left"]), inputs["right"]])
model = keras.Model(inputs, layers.Dense(1)(joined))
model.compile(keras.optimizers.SGD(0.1), "mse")

# ---- training ----
history = model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y))
print(history.history["loss"])
