"""A softmax before from_logits=True, whose logits Keras recovers

kind: right
engine: tensorflow
author: second
says: Keras takes the logits behind the softmax: the gradient is the same to the bit.
call: model, data=(x, y), loss=None
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

model = keras.Sequential([
    layers.Input((15,)),
    layers.Dense(32, activation="relu"),
    layers.Dense(3, activation="softmax"),
])
model.compile(optimizer=keras.optimizers.RMSprop(1e-3), loss="sparse_categorical_crossentropy",
              metrics=["accuracy"])


def customers(n=100):
    rng = np.random.default_rng(9)
    x = rng.normal(size=(n, 15)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0.5)


@tf.function
def update(x, y):
    with tf.GradientTape() as tape:
        out = model(x, training=True)
        nll = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        loss = tf.reduce_mean(nll)
    grads = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


def run(x, y, epochs=3, batch=20):
    order = np.arange(len(x))
    rng = np.random.default_rng(0)
    for e in range(epochs):
        rng.shuffle(order)
        losses = []
        for i in range(0, len(x), batch):
            idx = order[i:i + batch]
            losses.append(float(update(tf.constant(x[idx]), tf.constant(y[idx]))))
        print(e, np.mean(losses))


if __name__ == "__main__":
    x, y = customers()
    # ---- training ----
    run(x, y)
