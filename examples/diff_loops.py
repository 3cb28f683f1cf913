"""Two loops of Keras that train worse than `fit`: where do they differ first? Runs on TensorFlow,
in seconds.

The first is the loop of a model for word vectors whose labels have the shape (rows,), and its
outputs (rows, 1). The second makes SGD's steps by hand, and calls a model with BatchNormalization
without training=True.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import stepcheck

NUM = 512
SIZE = 64
WORDS = 40
RATE = 0.01


def pairs():
    """Return the words of each pair, of shape (pairs, 2), and the logarithms of their counts, of
    shape (pairs,).
    """
    draw = np.random.default_rng(0)
    words = draw.integers(0, WORDS, (NUM, 2)).astype("int32")
    return words, np.log(1 + draw.poisson(20, NUM)).astype("float32")


def vectors():
    """Return a model of the vectors and biases of words, as GloVe has it."""
    words = keras.Input((2,), dtype="int32")
    embedded = layers.Embedding(WORDS, 8)(words)
    product = keras.ops.sum(embedded[:, 0] * embedded[:, 1], axis=-1, keepdims=True)
    biases = keras.ops.sum(layers.Embedding(WORDS, 1)(words), axis=1)
    return keras.Model(words, product + biases)


def normalized():
    """Return a model with statistics of its batches."""
    inner = [layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *inner])


def twice(model):
    """Return the model, and a copy with the same weights."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return model, copy


def fitted(model, x, y):
    """Return the trace of `fit`, on all rows in their order."""
    model.compile(keras.optimizers.SGD(RATE), "mse")
    with stepcheck.record() as trace:
        model.fit(x, y, batch_size=SIZE, shuffle=False, verbose=0)
    return trace


def looped(model, x, y, *, by_hand=False):
    """Return the trace of a loop with a tape; `by_hand`: of steps without an optimizer."""
    optimizer = keras.optimizers.SGD(RATE)
    with stepcheck.record() as trace:
        for start in range(0, NUM, SIZE):
            rows = slice(start, start + SIZE)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((y[rows] - model(x[rows])) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            if not by_hand:
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                continue
            for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
                weight.assign_sub(RATE * gradient)
    return trace


def main():
    """Return both comparisons."""
    words, counts = pairs()
    own, other = twice(vectors())
    glove = stepcheck.diff(looped(own, words, counts), fitted(other, words, counts))
    x = words.astype("float32")
    y = counts[:, None]
    own, other = twice(normalized())
    norm = stepcheck.diff(looped(own, x, y, by_hand=True), fitted(other, x, y))
    print(f"Word vectors:\n{glove}\n\nBatchNormalization:\n{norm}")
    print(
        "You have seen: of two runs, the first stage that differs, its update, and what it is in "
        "numbers."
    )
    return glove, norm


if __name__ == "__main__":
    main()
