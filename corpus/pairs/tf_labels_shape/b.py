import keras
import numpy as np
import tensorflow as tf


def make_data():
    rng = np.random.default_rng(17)
    x = rng.normal(size=(80, 5)).astype("float32")
    y = (2 * x[:, 0] - x[:, 1] + 0.1 * rng.normal(size=80)).astype("float32")
    return x, y


@tf.function
def train_step(model, optimizer, xb, yb):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xb, training=True) - yb) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


def main():
    keras.utils.set_random_seed(10)
    x, y = make_data()
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.RMSprop(5e-3)
    optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(80, seed=1).batch(20)
    for epoch in range(3):
        for xb, yb in dataset:
            loss = train_step(model, optimizer, xb, yb)
        print(epoch, f"{float(loss):.5f}")
    return model


if __name__ == "__main__":
    main()
