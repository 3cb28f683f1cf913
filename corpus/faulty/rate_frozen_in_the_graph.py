"""The rate is a Python number inside tf.function

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: RATE
says: `lr` is a global Python float, captured when the function was traced: lr *= 0.1 has no effect.
call: model, data=(x, y), loss="mse", learning_rate=lambda update: 0.1 * 0.1 ** (update // 10)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(54).normal(size=(320, 6)).astype("float32")
y = x[:, :1]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
mse = keras.losses.MeanSquaredError()
lr = 0.1


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = mse(yb, model(xb, training=True))
    for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
        v.assign_sub(lr * g)  # fault
    return loss


ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32)
# ---- training ----
for epoch in range(3):
    for xb, yb in ds:
        loss = train_step(xb, yb)
    lr *= 0.1
    print(epoch, float(loss), "lr", lr)
