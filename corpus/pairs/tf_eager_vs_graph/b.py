import keras
import numpy as np


def make_data():
    rng = np.random.default_rng(14)
    x = rng.normal(size=(96, 8, 8, 1)).astype("float32")
    y = (x[:, :4].mean(axis=(1, 2, 3)) > x[:, 4:].mean(axis=(1, 2, 3))).astype("float32")[:, None]
    return x, y


def build():
    inputs = keras.Input((8, 8, 1))
    h = keras.layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.ReLU()(h)
    h = keras.layers.AveragePooling2D(2)(h)
    h = keras.layers.Flatten()(h)
    h = keras.layers.Dense(16, activation="gelu")(h)
    return keras.Model(inputs, keras.layers.Dense(1)(h))


class Batches(keras.utils.PyDataset):
    """The batches in their order, the rows of each in a random one."""

    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size = x, y, size
        self.rng = np.random.default_rng(99)

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, i):
        rows = self.rng.permutation(np.arange(i * self.size, min((i + 1) * self.size, len(self.x))))
        return self.x[rows], self.y[rows]


def logistic(y, z):
    return keras.ops.mean(keras.ops.softplus(z) - y * z, axis=-1)


def main():
    keras.utils.set_random_seed(33)
    x, y = make_data()
    model = build()
    optimizer = keras.optimizers.AdamW(2e-3, weight_decay=0.05)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.trainable_variables if len(v.shape) < 2])
    model.compile(optimizer=optimizer, loss=logistic, run_eagerly=True)
    model.fit(Batches(x, y, 16), epochs=3, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
