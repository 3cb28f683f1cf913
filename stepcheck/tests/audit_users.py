"""Loops as users have them, on either engine: the gradient of a loss of outputs, and a step made of it."""

import keras
import numpy as np

ENGINE = keras.backend.backend()


def gradient_of(model, value):
    """Return the function that computes the gradients of `value(outputs, *rows)`, and the model's new statistics."""
    if ENGINE == "tensorflow":
        import tensorflow as tf

        def with_tape(x, *rows):
            with tf.GradientTape() as tape:
                loss = value(model(x, training=True), *rows)
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)]

        return with_tape
    import jax

    def loss(params, x, *rows):
        return value(model.stateless_call(params, model.non_trainable_variables, x, training=True)[0], *rows)

    gradient = jax.grad(loss)
    return lambda *rows: [*map(np.asarray, gradient([v.value for v in model.trainable_variables], *rows))]


def train(model, value, data, size, move, passes=2):
    """Train by `move(variables, gradients)`, on all rows of the data in a new order in each pass."""
    gradient, rng = gradient_of(model, value), np.random.default_rng(1)
    for _ in range(passes):
        order = rng.permutation(len(data[0]))
        for start in range(0, len(order), size):
            move(model.trainable_variables, gradient(*(part[order[start : start + size]] for part in data)))


def descend(rate):
    def move(variables, gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(variable - rate * gradient)

    return move
