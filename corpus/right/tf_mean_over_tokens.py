"""A mean over the tokens that are there

kind: right
engine: tensorflow
author: suite
says: The sum over places is divided by the sum of the mask.
meant: import wholestep as ws
    class Tokens(ws.Objective):
        def __call__(self, model, batch, training):
            tokens, after = batch
            error = model(tokens, training=training)[..., 0] - after[..., 0]
            return ws.Mean(error**2, after[..., 1])
call: model, data=(x, y), loss=Tokens()
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers

draw = np.random.default_rng(0)
x = draw.normal(size=(20, 4, 2)).astype("float32")
is_there = np.arange(4) < draw.integers(1, 5, 20)[:, None]
y = np.stack([x.sum(-1), is_there], -1).astype("float32")

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.Input((4, 2)),
        layers.Dense(4, "tanh", kernel_regularizer="l2"),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse")

# ---- training ----
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(len(x))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        label, mask = y[rows][..., 0], y[rows][..., 1]
        with tf.GradientTape() as tape:
            error = (model(x[rows], training=True)[..., 0] - label) ** 2 * mask
            loss = tf.reduce_sum(error) / tf.reduce_sum(mask) + sum(model.losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
