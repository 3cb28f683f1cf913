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


def main():
    keras.utils.set_random_seed(33)
    x, y = make_data()
    model = build()
    optimizer = keras.optimizers.AdamW(2e-3, weight_decay=0.05)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
