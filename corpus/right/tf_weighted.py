"""Sample weights in a Keras loss

kind: right
engine: tensorflow
author: suite
says: Keras divides by the number of rows.
call: model, data=(x, y, w)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
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

loss_fn = keras.losses.MeanSquaredError()

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        with tf.GradientTape() as tape:
            output = model(x[rows], training=True)
            loss = loss_fn(y[rows], output, sample_weight=w[rows]) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
