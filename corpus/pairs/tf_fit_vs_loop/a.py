import keras
import numpy as np


def make_data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(150, 12)).astype("float32")
    y = np.argmax(x[:, :4] + 0.5 * rng.normal(size=(150, 4)), axis=1).astype("int32")
    return x[:110], y[:110], x[110:], y[110:]


def build():
    return keras.Sequential([
        keras.Input((12,)),
        keras.layers.Dense(32, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("relu"),
        keras.layers.Dropout(0.2, seed=11),
        keras.layers.Dense(4),
    ])


def main():
    keras.utils.set_random_seed(21)
    x, y, xv, yv = make_data()
    model = build()
    model.compile(optimizer=keras.optimizers.Adam(3e-3),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=4, shuffle=False, validation_data=(xv, yv), verbose=2)
    return model


if __name__ == "__main__":
    main()
