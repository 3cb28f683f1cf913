"""Accumulated gradients are never set back to zero

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: HANDED_GRADIENT
says: Forgot zero_grad: the accumulators keep the gradients of all updates before.
call: model, data=(x, y), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(38).normal(size=(320, 6)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(0.01)
n_acum_step = 4
acum = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]


@tf.function
def forward_backward(xb, yb):
    with tf.GradientTape() as tape:
        loss = loss_fn(yb, model(xb, training=True)) / n_acum_step
    for a, g in zip(acum, tape.gradient(loss, model.trainable_variables)):
        a.assign_add(g)
    return loss


ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(16, drop_remainder=True)
# ---- training ----
for epoch in range(4):
    for i, (xb, yb) in enumerate(ds):
        loss = forward_backward(xb, yb)
        if (i + 1) % n_acum_step == 0:
            optimizer.apply_gradients(zip(acum, model.trainable_variables))  # fault
    print(epoch, float(loss))
