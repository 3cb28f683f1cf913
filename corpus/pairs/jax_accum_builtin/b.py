import keras
import numpy as np


def main():
    keras.utils.set_random_seed(19)
    rng = np.random.default_rng(19)
    x = rng.normal(size=(128, 11)).astype("float32")
    y = (x[:, :2] * x[:, 2:4] + 0.1 * rng.normal(size=(128, 2))).astype("float32")
    model = keras.Sequential([
        keras.Input((11,)), keras.layers.Dense(32, activation="gelu"), keras.layers.LayerNormalization(),
        keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.AdamW(4e-3, weight_decay=0.02, gradient_accumulation_steps=4), loss="mse")
    model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
