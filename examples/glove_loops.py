"""The usual hand-written loop in Keras 3 on either engine: for glove.py and audit.py."""

import keras


def by_hand(loss):
    """Return a training function: a hand-written loop that minimises `loss(model, pair, count)`."""

    def train(model, batches, epochs, note):
        step = {"jax": jax_step, "tensorflow": tape_step}[keras.backend.backend()](model, loss)
        for _ in range(epochs):
            for pair, count in batches:
                step(pair, count)
            note(model)

    return train


def tape_step(model, loss):
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def step(pair, count):
        with tf.GradientTape() as tape:
            value = loss(model, pair, count)
        gradients = tape.gradient(value, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def jax_step(model, loss):
    import jax

    variables = model.trainable_variables
    optimizer = model.optimizer
    optimizer.build(variables)

    def value_at(values, pair, count):
        with keras.StatelessScope(zip(variables, values, strict=True)):
            return loss(model, pair, count)

    @jax.jit
    def update(values, slots, pair, count):
        return optimizer.stateless_apply(slots, jax.grad(value_at)(values, pair, count), values)

    def step(pair, count):
        held = variables + optimizer.variables
        values, slots = update(
            [v.value for v in variables], [v.value for v in optimizer.variables], pair, count
        )
        for variable, value in zip(held, [*values, *slots], strict=True):
            variable.assign(value)

    return step
