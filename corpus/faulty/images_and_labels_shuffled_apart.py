"""Images and labels are shuffled independently

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: LABELS
says: Images and labels are shuffled independently, so rows no longer belong to their labels.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

AUTOTUNE = tf.data.AUTOTUNE


def arrays(n=120):
    rng = np.random.default_rng(4)
    y = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 6, 6, 1)).astype("float32")
    x[np.arange(n), y, y, 0] += 4
    return x, y


def pipeline(x, y, batch=24, augment=False):
    feats = tf.data.Dataset.from_tensor_slices(x).shuffle(len(x))  # fault
    labels = tf.data.Dataset.from_tensor_slices(y).shuffle(len(y))  # fault
    feats = feats.map(lambda im: tf.clip_by_value(im, -10.0, 10.0), num_parallel_calls=AUTOTUNE)
    if augment:
        feats = feats.map(tf.image.random_flip_left_right, num_parallel_calls=AUTOTUNE)
    return tf.data.Dataset.zip((feats, labels)).batch(batch).prefetch(AUTOTUNE)


def cnn():
    return keras.Sequential([layers.Input((6, 6, 1)), layers.Conv2D(8, 3, activation="relu"),
                             layers.Flatten(), layers.Dense(3)])


def train(model, opt, ds, epochs=3):
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as t:
            loss = ce(y, model(x, training=True))
        v = model.trainable_variables
        opt.apply_gradients(zip(t.gradient(loss, v), v))
        return loss

    for e in range(epochs):
        print(e, np.mean([float(step(x, y)) for x, y in ds]))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y = arrays()
    model, optimizer = cnn(), keras.optimizers.Adam(3e-3)
    ds = pipeline(x, y)
    # ---- training ----
    train(model, optimizer, ds)
