import keras
import numpy as np


def make_data():
    rng = np.random.default_rng(23)
    x = rng.normal(size=(104, 10)).astype("float32")
    y = np.argmax(x[:, :3] + x[:, 3:6] ** 2, axis=1).astype("int32")
    return x, y


def build():
    inputs = keras.Input((10,))
    h = keras.layers.Dense(32, use_bias=False)(inputs)
    h = keras.layers.BatchNormalization(momentum=0.8)(h)
    h = keras.layers.Activation("silu")(h)
    h = keras.layers.Dropout(0.3, seed=5)(h)
    h = keras.layers.Dense(16, activation="tanh")(h)
    return keras.Model(inputs, keras.layers.Dense(3)(h))


def make_optimizer():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, decay_steps=16, warmup_steps=4, warmup_target=1e-2))


def main():
    keras.utils.set_random_seed(2)
    x, y = make_data()
    model = build()
    model.compile(optimizer=make_optimizer(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=2)
    return model


if __name__ == "__main__":
    main()
