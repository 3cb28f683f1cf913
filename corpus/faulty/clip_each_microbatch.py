"""Each microbatch is clipped, then summed

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: HANDED_GRADIENT
says: Clipping before the sum: the accumulated gradient is another one than the clipped gradient
    of the batch.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(42).normal(size=(320, 6)).astype("float32")
y = 10 * x[:, :1] ** 3
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
mse = keras.losses.MeanSquaredError()
optimizer = keras.optimizers.SGD(1e-2)
ACC = 4


def microbatch_gradients(xb, yb):
    with tf.GradientTape() as tape:
        loss = mse(yb, model(xb, training=True)) / ACC
    grads = tape.gradient(loss, model.trainable_variables)
    grads, _ = tf.clip_by_global_norm(grads, 1.0)  # fault
    return grads, loss


# ---- training ----
for epoch in range(4):
    for rows in np.random.permutation(320).reshape(-1, ACC, 10):
        total = None
        for mb in rows:
            grads, loss = microbatch_gradients(x[mb], y[mb])
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        optimizer.apply_gradients(zip(total, model.trainable_variables))
    print(epoch, float(loss))
