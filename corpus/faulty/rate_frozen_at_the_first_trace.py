"""The rate of an optimizer by hand is baked into the traced step

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: RATE
says: The Python float lr was baked into the tf.function at its first trace; later decays never
    take effect.
call: model, data=(x, y), loss="mse", optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
    learning_rate=keras.optimizers.schedules.PiecewiseConstantDecay([5, 11, 17], [0.1, 0.03, 0.009, 0.0027])
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers


class Momentum:
    def __init__(self, variables, lr=0.1, momentum=0.9):
        self.variables = variables
        self.lr = lr
        self.momentum = momentum
        self.velocity = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]

    def apply(self, grads):
        for v, m, g in zip(self.variables, self.velocity, grads):
            m.assign(self.momentum * m - self.lr * g)
            v.assign_add(m)


def data(n=96):
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, size=(n, 5)).astype("float32")
    return x, np.cos(2 * x[:, :1]) + x[:, 1:2] ** 2


def build():
    return keras.Sequential([layers.Input((5,)), layers.Dense(20, activation="tanh"), layers.Dense(1)])


def train(model, sgd, x, y, epochs=4, drop_every=1, factor=0.3):
    mse = keras.losses.MeanSquaredError()

    @tf.function
    def step(xb, yb):
        with tf.GradientTape() as tape:
            loss = mse(yb, model(xb, training=True))
        sgd.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    ds = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=0).batch(16)
    for epoch in range(epochs):
        if epoch and epoch % drop_every == 0:
            sgd.lr *= factor  # fault
        losses = [float(step(xb, yb)) for xb, yb in ds]
        print(f"epoch {epoch} lr {sgd.lr:.4f} loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    keras.utils.set_random_seed(5)
    x, y = data()
    model = build()
    sgd = Momentum(model.trainable_variables)
    # ---- training ----
    train(model, sgd, x, y)
