"""The audit of the order of rows beside equal rows and second passes, and of inputs that are mixtures of two rows."""

import keras
import numpy as np
import pytest
from audit_users import train

import stepcheck

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 5)).astype("float32"), RNG.integers(0, 3, 96)
TWINS = X.copy()
TWINS[[7, 50, 60]] = X[[3, 12, 61]]


def report_on(x, order):
    """Return the report on four passes over the rows, in the order of each pass."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    with stepcheck.watch(model, data=(x, Y)) as report:
        for number in range(4):
            for rows in np.split(order(number), 6):
                model.train_on_batch(x[rows], Y[rows])
    return report


def test_equal_rows_with_other_labels_hide_no_order():
    shuffled = report_on(TWINS, lambda number: np.random.default_rng(number).permutation(96))
    once = report_on(TWINS, lambda number: np.random.default_rng(0).permutation(96))

    assert shuffled.first_line.startswith("Nothing found in 24 updates"), str(shuffled)
    assert "rows, mode, gradient" in shuffled.first_line
    assert not shuffled.notes
    assert [cause.name for cause in once.causes] == ["same order every pass"], str(once)


@pytest.mark.parametrize(
    ("kind", "told"), [("whole", ""), ("same", "same order every pass"), ("drawn", "with replacem")]
)
def test_batches_across_the_ends_of_passes_are_not_drawn_with_replacement(kind, told):
    draw = {
        "whole": lambda: RNG.permutation(96),
        "same": lambda: np.random.default_rng(0).permutation(96),
        "drawn": lambda: RNG.integers(0, 96, 96),
    }[kind]
    rows = np.concatenate([draw() for _ in range(5)])
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    with stepcheck.watch(model, data=(X, Y)) as report:
        for start in range(0, 480 - 20, 20):
            model.train_on_batch(X[rows[start : start + 20]], Y[rows[start : start + 20]])
    assert [cause.name for cause in report.causes] == [told] * (kind == "same"), str(report)
    assert ("with replacement" in str(report)) == (kind == "drawn")
    assert report.first_line.endswith("with a note on the rows.") == (kind == "drawn")


def test_a_mask_that_is_inverted_on_its_way_to_the_model_is_said_first():
    mask = np.arange(5) < RNG.integers(1, 6, (96, 1))
    x, m = keras.Input((5,)), keras.Input((5,))
    model = keras.Model([x, m], keras.layers.Dense(1)(x * m))
    model.compile("adam", "mse")
    with stepcheck.watch(model, data=((X, mask.astype("float32")), Y)) as report:
        for rows in np.split(np.concatenate([RNG.permutation(96) for _ in range(3)]), 18):
            model.train_on_batch((X[rows], 1 - mask[rows].astype("float32")), Y[rows])
    assert report.first_line.startswith("Input 2 of the model is inverted: it is 1 where that of `data` is 0"), str(
        report
    )


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the second pass is a call of the model")
def test_a_batch_that_an_update_has_twice_is_not_drawn_with_replacement():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    labels = X.sum(1)

    def twice(outputs, x, y):
        return (square(outputs, y) + square(model(x, training=True), y)) / 2

    def square(outputs, y):
        return keras.ops.mean((outputs - y[:, None]) ** 2)

    with stepcheck.watch(model, data=(X, labels)) as report:
        train(model, twice, (X, X, labels), 12, lambda variables, grads: model.optimizer.apply(grads, variables))

    (note,) = report.notes
    assert note.startswith("Each update makes several forward passes on the same rows.")


MIXED = """
x_train = rng.normal(size=(320, 5)).astype("float32")
y_train = rng.integers(0, 3, 320)
model, loss_fn = network(num=3), keras.losses.CategoricalCrossentropy(from_logits=True)
step = update(model, keras.optimizers.Adam(0.01), lambda model, a, b: loss_fn(b, model(a, training=True)))
for epoch in range(5):
    order = rng.permutation(320)
    for start in range(0, 320, 32):
        rows = order[start : start + 32]
        other = rows[rng.permutation(32)]
        share = np.float32(rng.beta(0.8, 0.8))
        one, two = np.eye(3, dtype="float32")[y_train[rows]], np.eye(3, dtype="float32")[y_train[other]]
        step(share * x_train[rows] + (1 - share) * x_train[other], share * one + (1 - share) * two)
"""
OF_INPUTS = "The model gets mixtures of two rows of the data, in "


APART = """
x_train = rng.normal(size=(96, 5)).astype("float32")
y_train = rng.integers(0, 3, 96)
model, loss_fn = network(num=3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = update(model, keras.optimizers.Adam(0.01), lambda model, a, b: loss_fn(b, model(a, training=True)))
for epoch in range(4):
    order = rng.permutation(96)
    xs, ys = x_train[order], y_train[OTHER]
    for start in range(0, 96, 12):
        step(xs[start : start + 12], ys[start : start + 12])
"""


THAWED = """
base = keras.Sequential([keras.Input((5,)), layers.Dense(6, "relu")], name="base")
base.trainable = False
model = keras.Sequential([keras.Input((5,)), base, layers.Dense(1)])
x, y = rng.normal(size=(64, 5)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
model.compile("adam", "mse")
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
base.trainable = True
COMPILED
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
"""
