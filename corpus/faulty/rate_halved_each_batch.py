"""The rate is lowered in the batch loop instead of the epoch loop

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: RATE
says: `learning_rate * 0.5` is assigned after each batch, it should be after each epoch.
call: model, data=(x, y), loss="mse", learning_rate=lambda update: 1e-2 * 0.5 ** (update // 10)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(58).normal(size=(320, 6)).astype("float32")
y = x[:, :1]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
mse = keras.losses.MeanSquaredError()
opt = keras.optimizers.Adam(1e-2)
# ---- training ----
for epoch in range(3):
    for b in np.random.permutation(320).reshape(10, 32):
        with tf.GradientTape() as tape:
            loss = mse(y[b], model(x[b], training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        opt.learning_rate.assign(opt.learning_rate * 0.5)  # fault
    print(epoch, float(loss))
