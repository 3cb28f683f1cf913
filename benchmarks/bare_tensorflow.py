"""Loops by hand in TensorFlow.

`loop`: resident data, one `tf.while_loop` over an epoch's updates, under XLA. `single`: one
function for each batch.
"""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import tensorflow as tf


def loop(model: keras.Model, data: dict, batch_size: int) -> Callable[[int], None]:
    """Return a function that trains for so many epochs, and waits for the end."""
    x = tf.constant(data["x"])
    y = tf.constant(data["y"])
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(1)
    num = len(data["y"]) // batch_size

    def update(i: tf.Tensor, loss: tf.Tensor, right: tf.Tensor, rows: tf.Tensor) -> tuple:
        total, hits = _update(model, tf.gather(x, rows[i]), tf.gather(y, rows[i]))
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


def single(model: keras.Model, batches: list) -> Callable[[], None]:
    """Return a function that makes an update on each batch (x, y), which comes from the host, and
    waits for the end.
    """
    model.optimizer.build(model.trainable_variables)
    update = tf.function(partial(_update, model), autograph=False)

    def run() -> None:
        for x, y in batches:
            sums = update(tf.constant(x), tf.constant(y))
        [float(part) for part in sums]

    return run


def _update(model: keras.Model, batch: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sums of the losses and of the right answers."""
    with tf.GradientTape() as tape:
        logits = model(batch, training=True)
        total = tf.reduce_sum(
            keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        )
        mean = total / labels.shape[0]
    model.optimizer.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)
    return total, tf.reduce_sum(tf.cast(tf.argmax(logits, -1, tf.int32) == labels, tf.float32))
