"""A generator made once, used for three epochs

kind: faulty
engine: tensorflow
author: first
changes: data
says: The generator is exhausted after the first epoch: epochs 2 and 3 do nothing.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(10).normal(size=(300, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
opt = keras.optimizers.Adam(1e-2)
mse = keras.losses.MeanSquaredError()


def data_generator(batch_size):
    perm = np.random.permutation(len(x))
    for i in range(0, len(x), batch_size):
        yield x[perm[i:i + batch_size]], y[perm[i:i + batch_size]]


train_gen = data_generator(30)  # fault
# ---- training ----
for epoch in range(3):
    epoch_loss = keras.metrics.Mean()
    for xb, yb in train_gen:
        with tf.GradientTape() as tape:
            loss = mse(yb, model(xb, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        epoch_loss.update_state(loss)
    print("Epoch {}: loss {:.4f}".format(epoch, float(epoch_loss.result())))
