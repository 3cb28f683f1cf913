"""The model's losses are not added in train_step

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: PENALTY
says: The L2 regularisers' losses (self.losses) are never added to the loss in train_step.
call: model, data=(x, y), loss=None
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers, regularizers


class PriceModel(keras.Model):
    def __init__(self, l2=0.05):
        super().__init__()
        self.h1 = layers.Dense(32, activation="relu", kernel_regularizer=regularizers.L2(l2))
        self.h2 = layers.Dense(32, activation="relu", kernel_regularizer=regularizers.L2(l2))
        self.out = layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x, training=None):
        return self.out(self.h2(self.h1(x)))

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - pred))  # fault
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, pred)
        return {m.name: m.result() for m in self.metrics}


def houses(n=128):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, 9)).astype("float32")
    y = (x @ rng.normal(size=(9, 1)) + 0.1 * rng.normal(size=(n, 1))).astype("float32")
    return x, y


def build():
    keras.utils.set_random_seed(11)
    model = PriceModel()
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    model.build((None, 9))
    return model


if __name__ == "__main__":
    x, y = houses()
    model = build()
    # ---- training ----
    model.fit(x, y, batch_size=32, epochs=3, verbose=2)
