"""A model of two inputs of one shape

kind: right
engine: tensorflow
author: suite
says: The inputs are given in the model's order.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
both = draw.normal(size=(20, 6)).astype("float32")
x = [both[:, :3], both[:, 3:]]
y = draw.normal(size=(20, 3)).astype("float32")

keras.utils.set_random_seed(3)
inputs = [keras.Input((3,)), keras.Input((3,))]
joined = layers.Concatenate()([layers.Dense(4, "tanh")(inputs[0]), inputs[1]])
model = keras.Model(inputs, layers.Dense(3)(joined))
model.compile(keras.optimizers.Adam(0.01), "mse")

loss_fn = keras.losses.MeanSquaredError()


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(y))
    for start in range(0, len(y), 8):
        rows = order[start : start + 8]

        with tf.GradientTape() as tape:
            loss = loss_fn(y[rows], model([x[0][rows], x[1][rows]], training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
