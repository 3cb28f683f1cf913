"""Accumulation, and the microbatch's gradient is applied as well

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: ROW_GRADIENTS
says: `apply_gradients` is called for each microbatch and once more for the sum: rows count twice.
call: model, data=(x, y), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(50).normal(size=(320, 6)).astype("float32")
y = x[:, :1]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
mse = keras.losses.MeanSquaredError()
opt = keras.optimizers.SGD(0.02)
ACC = 4


class GradAccumTrainer:
    def __init__(self, model, opt):
        self.model, self.opt = model, opt
        self.buffer = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]
        self.count = 0

    def train_batch(self, xb, yb):
        with tf.GradientTape() as tape:
            loss = mse(yb, self.model(xb, training=True)) / ACC
        grads = tape.gradient(loss, self.model.trainable_variables)
        for b, g in zip(self.buffer, grads):
            b.assign_add(g)
        self.opt.apply_gradients(zip(grads, self.model.trainable_variables))  # fault
        self.count += 1
        if self.count % ACC == 0:
            self.opt.apply_gradients(zip(self.buffer, self.model.trainable_variables))
            for b in self.buffer:
                b.assign(tf.zeros_like(b))
        return loss


trainer = GradAccumTrainer(model, opt)
# ---- training ----
for epoch in range(3):
    for rows in np.random.permutation(320).reshape(20, 16):
        loss = trainer.train_batch(x[rows], y[rows])
    print(epoch, float(loss))
