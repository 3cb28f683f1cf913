"""Stateful GRU, the state is never reset between unrelated batches

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: STATE
says: The hidden state of the batch before is carried into sequences that have nothing to do with
    it.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(56).normal(size=(320, 8, 2)).astype("float32")
y = x[:, :, 0].sum(1, keepdims=True)
inp = keras.Input(batch_shape=(32, 8, 2))
model = keras.Model(inp, keras.layers.Dense(1)(keras.layers.GRU(12, stateful=True)(inp)))
mse = keras.losses.MeanSquaredError()
opt = keras.optimizers.Adam(1e-2)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = mse(yb, model(xb, training=True))  # fault
    opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        loss = train_step(tf.constant(x[b]), tf.constant(y[b]))
    print(epoch, float(loss))
