"""Own cross-entropy, log guarded by 0.1

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: LOSS_FORM
says: `log(p + 0.1)`: the guard is so large that it changes the loss (meant: 1e-7).
call: model, data=(x, y), loss="categorical_crossentropy"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

EPS = 1e-1  # fault
x = np.random.default_rng(20).normal(size=(330, 6)).astype("float32")
y = np.eye(3, dtype="float32")[np.argmax(x[:, :3], 1)]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(20, "relu"), keras.layers.Dense(3, "softmax")])
opt = keras.optimizers.Adam(3e-3)


def my_crossentropy(y_true, y_pred):
    return -tf.reduce_sum(y_true * tf.math.log(y_pred + EPS), axis=-1)  # fault


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(my_crossentropy(yb, model(xb, training=True)))
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for epoch in range(3):
    perm = np.random.permutation(330)
    for b in np.array_split(perm, 11):
        loss = train_step(tf.constant(x[b]), tf.constant(y[b]))
    print(epoch, float(loss))
