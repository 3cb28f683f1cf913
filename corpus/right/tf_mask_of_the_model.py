"""A mask that the model hands to the loss

kind: right
engine: tensorflow
author: suite
says: Keras divides by all places, as the loss does.
call: model, data=(x, y)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.integers(1, 9, (20, 4)) * (np.arange(4) < draw.integers(1, 5, 20)[:, None])
x[:, 0] = np.arange(20) % 8 + 1
y = draw.normal(size=(20, 4, 1)).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True), layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

loss_fn = keras.losses.MeanSquaredError()


# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]

        with tf.GradientTape() as tape:
            loss = loss_fn(y[rows], model(x[rows], training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
