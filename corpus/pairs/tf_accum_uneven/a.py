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

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def make_data():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(100, 7)).astype("float32")
    y = np.stack([x[:, 0] * x[:, 1], np.sin(x[:, 2])], axis=1).astype("float32")
    return x, y


def make_optimizer():
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=4, decay_rate=0.8)
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def main():
    keras.utils.set_random_seed(4)
    x, y = make_data()
    model = Regressor()
    model.compile(optimizer=make_optimizer())
    model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
