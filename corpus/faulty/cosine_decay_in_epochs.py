"""CosineDecay with decay_steps=epochs

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: RATE
says: The schedule is given in epochs, the optimizer counts updates: the rate is zero after 5
    updates.
call: model, data=(x, y), loss=loss_fn, learning_rate=keras.optimizers.schedules.CosineDecay(1e-2, 10 * EPOCHS)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

EPOCHS = 5
x = np.random.default_rng(52).normal(size=(320, 6)).astype("float32")
y = (x[:, 0] > 0).astype("int32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
schedule = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=EPOCHS)  # fault
optimizer = keras.optimizers.Adam(schedule)
ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320).batch(32)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = loss_fn(yb, model(xb, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(EPOCHS):
    for xb, yb in ds:
        loss = train_step(xb, yb)
    print(epoch, float(loss))
