"""The loss is not scaled, and the optimizer divides by the scale

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: HANDED_GRADIENT
says: The loss is not multiplied by scale_loss, but the optimizer divides the gradients by the
    loss scale (1024): updates 1024 times too small.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=keras.optimizers.SGD(0.1)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers


def net():
    keras.mixed_precision.set_global_policy("mixed_float16")
    inp = keras.Input((20,))
    h = layers.Dense(32, activation="relu")(inp)
    h = layers.Dense(32, activation="relu")(h)
    out = layers.Dense(5, dtype="float32")(h)
    return keras.Model(inp, out)


def digits(n=96):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 20)).astype("float32")
    return x, rng.integers(0, 5, n)


def make_optimizer():
    return keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=1024.0)


def train(model, optimizer, x, y, epochs=2, batch=16):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    acc = keras.metrics.SparseCategoricalAccuracy()
    ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(batch).prefetch(2)

    @tf.function
    def train_step(xb, yb):
        with tf.GradientTape() as tape:
            pred = model(xb, training=True)
            loss = loss_fn(yb, pred)
        grads = tape.gradient(loss, model.trainable_variables)  # fault
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        acc.update_state(yb, pred)
        return loss

    for epoch in range(epochs):
        acc.reset_state()
        for xb, yb in ds:
            loss = train_step(xb, yb)
        print("epoch", epoch, "loss", float(loss), "acc", float(acc.result()))


if __name__ == "__main__":
    keras.utils.set_random_seed(4)
    model, optimizer = net(), make_optimizer()
    x, y = digits()
    # ---- training ----
    train(model, optimizer, x, y)
