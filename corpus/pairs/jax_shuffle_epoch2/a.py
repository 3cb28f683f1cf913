import keras
import numpy as np

SHUFFLE_SEED = 100


class Shuffled(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size):
        super().__init__()
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return len(self.x) // self.batch_size

    def set_epoch(self, epoch):
        self.order = np.random.default_rng(SHUFFLE_SEED + epoch).permutation(len(self.x))

    def __getitem__(self, i):
        rows = self.order[i * self.batch_size:(i + 1) * self.batch_size]
        return self.x[rows], self.y[rows]


def main():
    keras.utils.set_random_seed(27)
    rng = np.random.default_rng(27)
    x = rng.normal(size=(96, 8)).astype("float32")
    y = (x[:, :1] > x[:, 1:2]).astype("float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(24, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(optimizer=keras.optimizers.Adam(5e-3), loss="binary_crossentropy")
    data = Shuffled(x, y, 16)
    for epoch in range(3):
        data.set_epoch(epoch)
        model.fit(data, initial_epoch=epoch, epochs=epoch + 1, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
