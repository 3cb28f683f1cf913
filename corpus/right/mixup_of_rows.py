"""Mixup in the tf.data pipeline

kind: right
engine: tensorflow
author: first
says: Rows and targets are mixed with the same factor.
call: model, data=(x, y), loss="categorical_crossentropy"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(4).normal(size=(300, 10)).astype("float32")
y = np.eye(3, dtype="float32")[np.argmax(x[:, :3], 1)]


def mixup(xb, yb):
    lam = tf.random.uniform([tf.shape(xb)[0], 1], 0.5, 1.0)
    idx = tf.random.shuffle(tf.range(tf.shape(xb)[0]))
    return lam * xb + (1 - lam) * tf.gather(xb, idx), lam * yb + (1 - lam) * tf.gather(yb, idx)


train_ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(300).batch(30).map(mixup).prefetch(1)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(3, "softmax")])
cce = keras.losses.CategoricalCrossentropy()
opt = keras.optimizers.SGD(0.1)
# ---- training ----
for epoch in range(4):
    for xb, yb in train_ds:
        with tf.GradientTape() as tape:
            loss = cce(yb, model(xb, training=True))
        opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    print(epoch, float(loss))
