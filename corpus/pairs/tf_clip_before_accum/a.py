import keras
import numpy as np
import tensorflow as tf

MICRO, ACCUM, CLIP = 8, 4, 6.5


def make_data():
    """Easy rows first, the noise grows."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(12 * MICRO * ACCUM, 6)).astype("float32")
    noise = np.linspace(0.0, 4.0, len(x))[:, None] ** 2 * 0.3
    y = (x[:, :1] * 0.5 + noise * rng.normal(size=(len(x), 1))).astype("float32")
    return x, y


@tf.function
def gradients(model, xm, ym):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(xm, training=True) - ym))
    return loss, tape.gradient(loss, model.trainable_variables)


def train_step(model, optimizer, xb, yb):
    total = [tf.zeros_like(v) for v in model.trainable_variables]
    for i in range(ACCUM):
        loss, grads = gradients(model, xb[i * MICRO:(i + 1) * MICRO], yb[i * MICRO:(i + 1) * MICRO])
        total = [t + g / ACCUM for t, g in zip(total, grads)]
    total, _ = tf.clip_by_global_norm(total, CLIP)
    optimizer.apply_gradients(zip(total, model.trainable_variables))
    return loss


def main():
    keras.utils.set_random_seed(15)
    x, y = make_data()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(20, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    for step in range(12):
        rows = slice(step * MICRO * ACCUM, (step + 1) * MICRO * ACCUM)
        loss = train_step(model, optimizer, tf.constant(x[rows]), tf.constant(y[rows]))
        print(step, f"{float(loss):.5f}")
    return model


if __name__ == "__main__":
    main()
