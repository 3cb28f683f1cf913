import keras
import numpy as np


def rate(step):
    """Constant for 8 updates, then halved every update down to a floor."""
    return max(0.05 * 0.5 ** max(0, step - 7), 0.002)


class Rate(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = rate(self.step)
        self.step += 1


def main():
    keras.utils.set_random_seed(6)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(120, 10)).astype("float32")
    y = (x[:, :1] - np.abs(x[:, 1:2])).astype("float32")
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(rate(0), momentum=0.9), loss="mse")
    model.fit(x, y, batch_size=24, epochs=3, shuffle=False, verbose=2, callbacks=[Rate()])
    return model


if __name__ == "__main__":
    main()
