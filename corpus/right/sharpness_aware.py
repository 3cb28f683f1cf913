"""Sharpness-aware minimisation

kind: right
engine: tensorflow
author: second
says: The weights are moved away and back within the update; the gradient there is meant.
call: model, data=(x, y), loss=loss_fn, optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers


class SAM:
    def __init__(self, model, optimizer, loss_fn, rho=0.05):
        self.model, self.optimizer, self.loss_fn, self.rho = model, optimizer, loss_fn, rho

    def gradient(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self.model(x, training=True))
        return loss, tape.gradient(loss, self.model.trainable_variables)

    @tf.function
    def step(self, x, y):
        loss, grads = self.gradient(x, y)
        scale = self.rho / (tf.linalg.global_norm(grads) + 1e-12)
        offsets = [g * scale for g in grads]
        for v, o in zip(self.model.trainable_variables, offsets):
            v.assign_add(o)
        _, sharp = self.gradient(x, y)
        for v, o in zip(self.model.trainable_variables, offsets):
            v.assign_sub(o)
        self.optimizer.apply_gradients(zip(sharp, self.model.trainable_variables))
        return loss


def data(n=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 8)).astype("float32")
    return x, x[:, :3].argmax(1).astype("int64")


def build():
    return keras.Sequential([layers.Input((8,)), layers.Dense(24, activation="relu"), layers.Dense(3)])


def train(sam, x, y, epochs=2):
    ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=0).batch(16)
    for e in range(epochs):
        print(e, np.mean([float(sam.step(a, b)) for a, b in ds]))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = data()
    model, optimizer = build(), keras.optimizers.SGD(0.1)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sam = SAM(model, optimizer, loss_fn)
    # ---- training ----
    train(sam, x, y)
