"""What one would write by hand in TensorFlow: resident data, one `tf.while_loop` over an epoch's updates, under XLA."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def loop(model: keras.Model, data: dict, batch_size: int) -> Callable[[int], None]:
    """Return a function that trains for so many epochs, and waits for the end."""
    x, y = tf.constant(data["x"]), tf.constant(data["y"])
    model.optimizer.build(model.trainable_variables)
    random, num = np.random.default_rng(1), len(data["y"]) // batch_size

    def update(i: tf.Tensor, loss: tf.Tensor, right: tf.Tensor, rows: tf.Tensor) -> tuple:
        batch, labels = tf.gather(x, rows[i]), tf.gather(y, rows[i])
        with tf.GradientTape() as tape:
            logits = model(batch, training=True)
            total = tf.reduce_sum(keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True))
            mean = total / batch_size
        model.optimizer.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)
        hits = tf.reduce_sum(tf.cast(tf.argmax(logits, -1, tf.int32) == labels, tf.float32))
        return i + 1, loss + total, right + hits, rows

    @tf.function(jit_compile=True, autograph=False)
    def epoch(rows: tf.Tensor) -> tuple:
        begin = tf.constant(0), tf.constant(0.0), tf.constant(0.0), rows
        _, loss, right, _ = tf.while_loop(lambda i, *_: i < num, update, begin)
        return loss / (num * batch_size), right / (num * batch_size)

    def run(epochs: int) -> None:
        for _ in range(epochs):
            rows = random.permutation(len(data["y"])).astype(np.int32).reshape(num, batch_size)
            [float(part) for part in epoch(tf.constant(rows))]

    return run
