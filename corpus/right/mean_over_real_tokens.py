"""A tagger on padded sequences, the loss over real tokens only

kind: right
engine: tensorflow
author: first
says: Masked sum over the number of real tokens of the batch.
call: model, data=(tokens, tags, (tokens != 0).astype("float32")), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(20)
tokens = rng.integers(1, 30, size=(240, 12)).astype("int32")
lengths = rng.integers(4, 13, size=240)
tokens[np.arange(12)[None, :] >= lengths[:, None]] = 0
tags = (tokens % 3).astype("int32")

model = keras.Sequential([
    keras.Input((12,), dtype="int32"),
    keras.layers.Embedding(30, 16, mask_zero=True),
    keras.layers.LSTM(16, return_sequences=True),
    keras.layers.Dense(3),
])
optimizer = keras.optimizers.Adam(1e-2)
scce = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train_step(xb, yb):
    mask = tf.cast(tf.not_equal(xb, 0), tf.float32)
    with tf.GradientTape() as tape:
        logits = model(xb, training=True)
        per_token = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=yb, logits=logits)
        loss = tf.reduce_sum(per_token * mask) / tf.reduce_sum(mask)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


ds = tf.data.Dataset.from_tensor_slices((tokens, tags)).shuffle(240).batch(24)
# ---- training ----
for epoch in range(3):
    for xb, yb in ds:
        loss = train_step(xb, yb)
    print(epoch, float(loss))
