"""Language model whose target is its input

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: LABELS
says: Targets are not shifted by one: the model learns to copy the token it sees.
call: model, data=(tokens[:, :-1], tokens[:, 1:]), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

tokens = np.cumsum(np.random.default_rng(26).integers(1, 3, size=(240, 11)), axis=1).astype("int32") % 25
model = keras.Sequential([
    keras.Input((10,), dtype="int32"),
    keras.layers.Embedding(25, 16),
    keras.layers.LSTM(16, return_sequences=True),
    keras.layers.Dense(25),
])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-2)


@tf.function
def train_step(batch):
    source, target = batch[:, :-1], batch[:, :-1]  # fault
    with tf.GradientTape() as tape:
        loss = loss_fn(target, model(source, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(3):
    for batch in tf.data.Dataset.from_tensor_slices(tokens).shuffle(240).batch(24):
        loss = train_step(batch)
    print(epoch, float(loss))
