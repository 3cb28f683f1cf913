"""The last rows of the file are never trained on

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: ROWS
says: `steps = n // batch_size` without shuffling: the same 58 rows are left out of every epoch.
call: model, data=(X, y), loss="mse", rows="once"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(6).normal(size=(250, 4)).astype("float32")
y = X[:, :1] * X[:, 1:2]
BATCH = 64
steps_per_epoch = len(X) // BATCH  # fault


class Trainer:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(20, "relu"), keras.layers.Dense(1)])
        self.opt = keras.optimizers.Adam(5e-3)
        self.loss = keras.losses.MeanSquaredError()

    def step(self, a, b):
        with tf.GradientTape() as tape:
            loss = self.loss(b, self.model(a, training=True))
        grads = tape.gradient(loss, self.model.trainable_variables)
        self.opt.apply_gradients(zip(grads, self.model.trainable_variables))
        return loss

    def train(self, epochs):
        for epoch in range(epochs):
            for s in range(steps_per_epoch):
                loss = self.step(X[s * BATCH:(s + 1) * BATCH], y[s * BATCH:(s + 1) * BATCH])
            print(epoch, float(loss))


trainer = Trainer()
model = trainer.model
# ---- training ----
trainer.train(8)
