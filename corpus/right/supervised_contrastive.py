"""Supervised contrastive loss over all pairs of the batch

kind: right
engine: tensorflow
author: first
says: The loss is of the batch, not of a row, as in the paper.
call: encoder, data=(x, y), loss=supcon
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(2).normal(size=(256, 10)).astype("float32")
y = (x[:, 0] > 0).astype("int32") + 2 * (x[:, 1] > 0).astype("int32")

encoder = keras.Sequential([
    keras.Input((10,)),
    keras.layers.Dense(32, "relu"),
    keras.layers.Dense(8),
    keras.layers.UnitNormalization(),
])
optimizer = keras.optimizers.Adam(1e-3)


def supcon(y_true, z, temperature=0.2):
    y_true = tf.reshape(y_true, (-1, 1))
    same = tf.cast(tf.equal(y_true, tf.transpose(y_true)), z.dtype)
    eye = tf.eye(tf.shape(z)[0], dtype=z.dtype)
    logits = tf.matmul(z, z, transpose_b=True) / temperature - 1e9 * eye
    log_prob = logits - tf.reduce_logsumexp(logits, axis=1, keepdims=True)
    positives = same - eye
    per_row = -tf.reduce_sum(positives * log_prob * (1 - eye), 1) / tf.maximum(tf.reduce_sum(positives, 1), 1.0)
    return tf.reduce_mean(per_row)


ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256).batch(64, drop_remainder=True)
# ---- training ----
for epoch in range(5):
    for xb, yb in ds:
        with tf.GradientTape() as tape:
            z = encoder(xb, training=True)
            loss = supcon(yb, z)
        grads = tape.gradient(loss, encoder.trainable_weights)
        optimizer.apply_gradients(zip(grads, encoder.trainable_weights))
    print(epoch, float(loss))
