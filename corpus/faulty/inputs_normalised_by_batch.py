"""Inputs normalised with the statistics of each batch, not of the training set

kind: faulty
engine: tensorflow
author: first
changes: data
says: Mean and std are computed from the batch at hand, so the same row is another input each
    time, and at inference.
call: model, data=(((x - x.mean(0)) / x.std(0)), y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = (np.random.default_rng(1).normal(size=(320, 5)) * 20 + 7).astype("float32")
y = (x[:, :1] / 20).astype("float32")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
opt = keras.optimizers.Adam(1e-2)


def normalize(xb):
    return (xb - xb.mean(axis=0)) / xb.std(axis=0)  # fault


def batches():
    perm = np.random.permutation(len(x))
    for i in range(0, len(x), 16):
        yield normalize(x[perm[i:i + 16]]), y[perm[i:i + 16]]


# ---- training ----
for epoch in range(3):
    for xb, yb in batches():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(yb, model(xb, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
    print(epoch, float(loss))
