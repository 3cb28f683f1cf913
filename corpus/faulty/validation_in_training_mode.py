"""The validation pass in the loop runs with training=True

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: STATE
says: Validation batches move BatchNorm's statistics (a leak), as the forward pass is in training
    mode.
call: model, data=(x_train, y_train), loss=loss_fn
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x_all = np.random.default_rng(14).normal(size=(360, 6)).astype("float32")
y_all = (x_all[:, 0] > 0).astype("int32")
x_train, y_train, x_val, y_val = x_all[:300], y_all[:300], x_all[300:] + 4, y_all[300:]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(2)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-3)
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(300).batch(30)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(30)
acc = keras.metrics.SparseCategoricalAccuracy()
# ---- training ----
for epoch in range(3):
    for xb, yb in train_ds:
        with tf.GradientTape() as tape:
            loss = loss_fn(yb, model(xb, training=True))
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights))
    acc.reset_state()
    for xb, yb in val_ds:
        acc.update_state(yb, model(xb, training=True))  # fault
    print(epoch, float(loss), float(acc.result()))
