import keras
import numpy as np
import tensorflow as tf


class Regressor(keras.Model):
    def __init__(self):
        super().__init__()
        self.h1 = keras.layers.Dense(24, activation="tanh")
        self.h2 = keras.layers.Dense(24, activation="tanh")
        self.out = keras.layers.Dense(2)

    def call(self, x):
        return self.out(self.h2(self.h1(x)))


def make_data():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(100, 7)).astype("float32")
    y = np.stack([x[:, 0] * x[:, 1], np.sin(x[:, 2])], axis=1).astype("float32")
    return x, y


def make_optimizer():
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=4, decay_rate=0.8)
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def micro_gradient(model, xm, ym, rows):
    with tf.GradientTape() as tape:
        error = tf.square(model(xm, training=True) - ym)
        loss = tf.reduce_sum(error) / tf.cast(rows * ym.shape[1], error.dtype)
    return tape.gradient(loss, model.trainable_variables), loss


def train_step(model, optimizer, xb, yb, micro=10):
    """One update, the gradient of the batch summed over microbatches."""
    total, loss = None, 0.0
    for i in range(0, len(xb), micro):
        grads, part = micro_gradient(model, xb[i:i + micro], yb[i:i + micro], len(xb))
        total = grads if total is None else [t + g for t, g in zip(total, grads)]
        loss += float(part)
    optimizer.apply(total, model.trainable_variables)
    return loss


def main():
    keras.utils.set_random_seed(4)
    x, y = make_data()
    model = Regressor()
    model.build((None, 7))
    optimizer = make_optimizer()
    for epoch in range(4):
        for i in range(0, len(x), 32):
            loss = train_step(model, optimizer, x[i:i + 32], y[i:i + 32])
        print(f"epoch {epoch} loss {loss:.5f}")
    return model


if __name__ == "__main__":
    main()
