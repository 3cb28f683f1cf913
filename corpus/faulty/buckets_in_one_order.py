"""Bucketed sequences whose shuffle has one seed in every pass

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: ROWS
says: The shuffle has one seed: every pass has the same order.
call: model, data=padded(items),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
    optimizer=optimizer, rows="shuffled"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

VOCAB, TAGS = 40, 5


def sentences(n=96, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for length in rng.integers(3, 15, n):
        ids = rng.integers(1, VOCAB, length).astype("int32")
        out.append((ids, (ids % (TAGS - 1) + 1).astype("int32")))
    return out


def pipeline(items):
    ds = tf.data.Dataset.from_generator(
        lambda: iter(items),
        output_signature=(tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None,), tf.int32)))
    ds = ds.shuffle(len(items), seed=1)  # fault
    return ds.bucket_by_sequence_length(lambda a, b: tf.shape(a)[0], bucket_boundaries=[6, 10],
                                        bucket_batch_sizes=[16, 12, 8])


def padded(items, length=14):
    x = np.zeros((len(items), length), "int32")
    y = np.zeros((len(items), length), "int32")
    for i, (a, b) in enumerate(items):
        x[i, :len(a)], y[i, :len(b)] = a, b
    return x, y, (x > 0).astype("float32")


def build():
    inp = keras.Input((None,), dtype="int32")
    h = layers.Embedding(VOCAB, 12, mask_zero=True)(inp)
    h = layers.LSTM(12, return_sequences=True)(h)
    return keras.Model(inp, layers.Dense(TAGS)(h))


def train(model, opt, items, epochs=2):
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @tf.function(reduce_retracing=True)
    def step(x, y):
        real = tf.cast(y > 0, tf.float32)
        with tf.GradientTape() as tape:
            nll = ce(y, model(x, training=True))
            loss = tf.math.divide_no_nan(tf.reduce_sum(nll * real), tf.reduce_sum(real))
        opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    for e in range(epochs):
        print(e, np.mean([float(step(x, y)) for x, y in pipeline(items)]))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    items = sentences()
    model, optimizer = build(), keras.optimizers.SGD(0.5)
    # ---- training ----
    train(model, optimizer, items)
