"""A new Adam in each epoch to lower the rate

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: STEP
says: The optimizer is made anew every epoch; its moments and step count are lost.
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.Adam(1e-3),
    learning_rate=lambda update: 1e-3 * 0.9 ** (update // 10)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(46).normal(size=(300, 5)).astype("float32")
y = x[:, :1] * x[:, 1:2]
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
mse = keras.losses.MeanSquaredError()


def train_one_epoch(model, lr):
    optimizer = keras.optimizers.Adam(lr)  # fault
    total = 0.0
    for b in np.random.permutation(300).reshape(10, 30):
        with tf.GradientTape() as tape:
            loss = mse(y[b], model(x[b], training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        total += float(loss)
    return total / 10


# ---- training ----
for epoch in range(4):
    print(epoch, train_one_epoch(model, 1e-3 * 0.9**epoch))
