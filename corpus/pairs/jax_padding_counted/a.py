import keras
import numpy as np


def make_data(n=112, longest=12):
    """Sequences sorted by length; each batch of 16 is padded to its own longest."""
    rng = np.random.default_rng(51)
    lengths = np.sort(np.concatenate([np.full(64, 4), rng.integers(5, longest + 1, n - 64)]))
    rows = [rng.integers(1, 30, size=k) for k in lengths]
    labels = np.array([float(np.mean(r) > 15) for r in rows], dtype="float32")[:, None]
    return rows, labels


class Bucketed(keras.utils.PyDataset):
    def __init__(self, rows, labels, batch_size=16):
        super().__init__()
        self.rows, self.labels, self.batch_size = rows, labels, batch_size

    def __len__(self):
        return len(self.rows) // self.batch_size

    def __getitem__(self, i):
        rows = self.rows[i * self.batch_size:(i + 1) * self.batch_size]
        x = np.zeros((len(rows), max(map(len, rows))), dtype="int32")
        for k, row in enumerate(rows):
            x[k, :len(row)] = row
        return x, self.labels[i * self.batch_size:(i + 1) * self.batch_size]


def main():
    keras.utils.set_random_seed(52)
    model = keras.Sequential([
        keras.Input((None,), dtype="int32"),
        keras.layers.Embedding(30, 16, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(Bucketed(*make_data()), epochs=2, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
