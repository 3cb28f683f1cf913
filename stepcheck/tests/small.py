"""Small loops on either engine, and what is asserted of their reports."""

import keras
import numpy as np

ENGINE = keras.backend.backend()
NUM, SIZE = 24, 8
draw = np.random.default_rng(0)
X = draw.normal(size=(NUM, 5)).astype("float32")
Y = (X[:, :1] - X[:, 1:2]).astype("float32")


def network(optimizer=None):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def mean(labels, outputs):
    return keras.ops.mean((labels - outputs) ** 2)


def train(model, value=mean, y=Y, passes=2):
    """Train by the gradient of a loss of labels and outputs, on all rows in a new order in each pass."""
    step = (_with_tape if ENGINE == "tensorflow" else _stateless)(model, value)
    for epoch in range(passes):
        order = np.random.default_rng(epoch).permutation(NUM)
        for start in range(0, NUM, SIZE):
            rows = order[start : start + SIZE]
            step(X[rows], y[rows])


def _with_tape(model, value):
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = value(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(
            zip(grads, model.trainable_variables, strict=True)
        )

    return step


def _stateless(model, value):
    import jax

    def loss(params, others, x, y):
        outputs, others = model.stateless_call(params, others, x, training=True)
        return value(y, outputs), others

    gradient = jax.grad(loss, has_aux=True)

    def step(x, y):
        params, others, slots = (
            [v.value for v in each]
            for each in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
            )
        )
        grads, others = gradient(params, others, x, y)
        params, slots = model.optimizer.stateless_apply(slots, grads, params)
        for variables, values in (
            (model.trainable_variables, params),
            (model.optimizer.variables, slots),
        ):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    return step


def gradient_of(model, value):
    """Return the function of rows that computes the gradients of `value(outputs, *rows)`."""
    if ENGINE == "tensorflow":
        import tensorflow as tf

        def with_tape(x, *rows):
            with tf.GradientTape() as tape:
                loss = value(model(x, training=True), *rows)
            return [
                tf.convert_to_tensor(g)
                for g in tape.gradient(loss, model.trainable_variables)
            ]

        return with_tape
    import jax

    def loss(params, x, *rows):
        return value(
            model.stateless_call(
                params, model.non_trainable_variables, x, training=True
            )[0],
            *rows,
        )

    gradient = jax.grad(loss)
    return lambda *rows: [
        *map(
            np.asarray,
            gradient([v.value for v in model.trainable_variables], *rows),
        )
    ]


def descend(model, value, data, size, move, passes=2):
    """Train by `move(variables, gradients)`, on all rows of the data in a new order in each pass."""
    gradient, rng = gradient_of(model, value), np.random.default_rng(1)
    for _ in range(passes):
        order = rng.permutation(len(data[0]))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            gradients = gradient(*(part[rows] for part in data))
            move(model.trainable_variables, gradients)


def by(optimizer):
    """Return the step of an optimizer."""
    return lambda variables, gradients: optimizer.apply(
        [*map(keras.ops.array, gradients)], variables
    )


def by_hand(rate):
    """Return a step without an optimizer."""

    def move(variables, gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(variable - rate * gradient)

    return move


def square(outputs, labels):
    """Return the mean squared error of outputs (rows, 1) and labels (rows,)."""
    return keras.ops.mean((outputs - labels[:, None]) ** 2)


def faults(report):
    return [each.fault for each in report.findings]


def reasons(report):
    return [each.reason for each in report.unjudged]
