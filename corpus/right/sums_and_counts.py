"""Sums and counts are accumulated and divided once; the rest makes a smaller step

kind: right
engine: tensorflow
author: second
says: Every row of a window counts once, in the last, shorter one, too.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers


def source(n=108):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 8)).astype("float32")
    return x, x[:, :3].argmax(1).astype("int64")


def build():
    return keras.Sequential([layers.Input((8,)), layers.Dense(20, activation="relu"), layers.Dense(3)])


class SumCountAccumulator:
    def __init__(self, model, optimizer, every=4):
        self.model, self.optimizer, self.every = model, optimizer, every
        self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]
        self.count = tf.Variable(0.0, trainable=False)
        self.pending = 0
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function(reduce_retracing=True)
    def add(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.ce(y, self.model(x, training=True))
        for s, g in zip(self.sums, tape.gradient(loss, self.model.trainable_variables)):
            s.assign_add(g)
        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return loss

    def apply(self):
        self.optimizer.apply_gradients(
            [(s / self.count, v) for s, v in zip(self.sums, self.model.trainable_variables)])
        for s in self.sums:
            s.assign(tf.zeros_like(s))
        self.count.assign(0.0)
        self.pending = 0

    def feed(self, x, y):
        loss = self.add(x, y)
        self.pending += 1
        if self.pending == self.every:
            self.apply()
        return loss


def train(acc, x, y, epochs=2):
    ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(8)
    for e in range(epochs):
        total = 0.0
        for xb, yb in ds:
            total += float(acc.feed(xb, yb))
        if acc.pending:
            acc.apply()
        print(e, total / len(x))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = source()
    model, optimizer = build(), keras.optimizers.SGD(0.1)
    accumulator = SumCountAccumulator(model, optimizer)
    # ---- training ----
    train(accumulator, x, y)
