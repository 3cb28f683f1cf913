"""A model of two named inputs

kind: right
engine: tensorflow
author: suite
says: Rows of both inputs are taken by the same index.
call: model, data=(x, y)
printed: loss=printed
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
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

printed = []

# ---- training ----
for epoch in range(2):
    total, count = 0.0, 0
    order = np.random.default_rng(epoch).permutation(len(y))
    for start in range(0, len(y), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            output = model({name: leaf[rows] for name, leaf in x.items()}, training=True)
            loss = tf.reduce_mean((y[rows][:, None] - output) ** 2)
            full = loss + sum(model.losses)
        grads = tape.gradient(full, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
        total, count = total + float(loss) * len(rows), count + len(rows)
    printed.append(total / count)
print(printed)
