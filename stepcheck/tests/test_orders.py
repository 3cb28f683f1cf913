"""The order of the rows, beside equal rows, passes that a batch crosses, and rows that fill up a batch."""

import keras
import numpy as np
import pytest
from small import descend, faults, gradient_of, reasons, square

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 5)).astype("float32"), RNG.integers(0, 3, 96)
LABELS = X.sum(1)
TWINS = X.copy()
TWINS[[7, 50, 60]] = X[[3, 12, 61]]


def classifier():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def regression(optimizer=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def report_on(x, batches, y=Y):
    """Return the report on updates by these rows, in this order."""
    model = classifier()
    with stepcheck.watch(model, data=(x, y)) as report:
        for rows in batches:
            model.train_on_batch(x[rows], y[rows])
    return report


def shuffled(seed):
    return np.random.default_rng(seed).permutation(96)


def test_equal_rows_with_other_labels_hide_no_order():
    new = report_on(TWINS, [rows for seed in range(4) for rows in np.split(shuffled(seed), 6)])
    assert new.is_right, str(new)
    same = report_on(TWINS, [rows for _ in range(4) for rows in np.split(shuffled(0), 6)])
    assert faults(same) == [Fault.SAME_ORDER_EVERY_PASS], str(same)


def test_rows_that_are_equal_with_their_labels_have_no_order():
    x, y = X.copy(), Y.copy()
    x[:32], y[:32] = x[32:64], y[32:64]
    report = report_on(x, [rows for seed in range(2) for rows in np.split(shuffled(seed), 6)], y)
    assert report.findings == []
    assert Stage.ROWS not in report.judged
    assert Stage.GRADIENT in report.judged


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda i: shuffled(i), []),
        (lambda i: shuffled(0), [Fault.SAME_ORDER_EVERY_PASS]),
        (lambda i: np.random.default_rng(i).integers(0, 96, 96), []),
    ],
)
def test_batches_across_the_ends_of_passes_are_not_drawn_with_replacement(draw, found):
    rows = np.concatenate([draw(i) for i in range(5)])
    report = report_on(X, [rows[start : start + 20] for start in range(0, 460, 20)])
    assert faults(report) == found, str(report)


@pytest.mark.parametrize(("num", "found"), [(84, [Fault.ROWS_NEVER_USED]), (48, [])])
def test_the_last_rows_may_be_held_out_if_they_are_more_than_a_batch(num, found):
    """Less is the remainder of a division."""
    passes = (np.random.default_rng(seed).permutation(num) for seed in range(3))
    report = report_on(
        X, [rows for order in passes for rows in np.split(order, 4 if num == 84 else 6)]
    )
    assert faults(report) == found, str(report)


def test_rows_that_are_sorted_by_few_classes_are_found():
    x, y = X, np.repeat([0, 1, 2], 32)
    report = report_on(x, [*np.split(np.arange(96), 12)] * 2, y)
    assert Fault.BATCHES_OF_FEW_LABELS in faults(report), str(report)


def test_updates_of_all_rows_have_no_order():
    assert report_on(X, [np.arange(96)] * 6).is_right


def test_one_pass_has_no_order():
    report = report_on(X, np.split(shuffled(0), 6))
    assert (report.findings, reasons(report)) == ([], [Reason.FEW_PASSES])
    assert Stage.ROWS not in report.judged


def test_a_fit_of_a_model_around_the_watched_one_orders_the_rows():
    class Around(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=False):
            return self.inner(x, training=training)

    model = regression()
    outer = Around(model)
    outer.compile("sgd", "mse")
    with stepcheck.watch(model, data=(X, LABELS), loss="mse") as report:
        outer.fit(X, LABELS, batch_size=16, epochs=3, verbose=0)
    assert report.findings == [], str(report)


def test_a_window_that_is_carried_over_is_no_batch_with_rows_twice():
    model = regression()
    gradient, sums = gradient_of(model, square), []
    with stepcheck.watch(model, (X[:60], LABELS[:60])) as report:
        for epoch in range(6):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(60), 10
            ):  # each third one makes an update
                sums.append([np.asarray(g) / 4 for g in gradient(X[rows], LABELS[rows])])
                if len(sums) == 4:
                    handed = [keras.ops.array(sum(each)) for each in zip(*sums, strict=True)]
                    model.optimizer.apply(handed, model.trainable_variables)
                    sums.clear()
    assert faults(report)[:1] == [Fault.WINDOW_CARRIED_OVER], str(report)
    assert Fault.ROWS_TWICE_IN_A_PASS not in faults(report)


@pytest.mark.parametrize(
    ("weight", "is_of_all", "found"),
    [
        (0.0, False, []),
        (0.0, True, [Fault.PADDING_COUNTED]),
        (1.0, False, [Fault.ROWS_TWICE_IN_A_PASS]),
    ],
)
def test_rows_that_fill_up_the_last_batch(weight, is_of_all, found):
    model, num = regression(), 90

    def value(out, y, w):
        return keras.ops.sum(w * (out[:, 0] - y) ** 2) / (20 if is_of_all else keras.ops.sum(w))

    gradient = gradient_of(model, value)
    with stepcheck.watch(model, (X[:num], LABELS[:num])) as report:
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(num)
            for start in range(0, num, 20):
                rows, weights = np.resize(order[start : start + 20], 20), np.ones(20, "float32")
                if start + 20 > num:
                    rows[num - start :], weights[num - start :] = order[: start + 20 - num], weight
                grads = gradient(X[rows], LABELS[rows], weights)
                model.optimizer.apply([*map(keras.ops.array, grads)], model.trainable_variables)
    assert faults(report) == found, str(report)


def test_gradients_that_wait_at_the_end_are_no_fault():
    model = regression(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4))
    with stepcheck.watch(model, (X, LABELS)) as report:
        model.fit(X, LABELS, batch_size=16, epochs=3, verbose=0)
    assert Fault.PASSES_LEFT_OUT not in faults(report)


W = RNG.uniform(0.2, 1, 96).astype("float32")
TWIN_X = np.concatenate([X[:86], X[:10]])


def test_rows_with_equal_inputs_are_told_apart_by_the_gradient():
    model, labels = regression(), W.copy()
    with stepcheck.watch(model, (TWIN_X, labels)) as report:
        descend(
            model,
            square,
            (TWIN_X, labels),
            20,
            lambda variables, grads: model.optimizer.apply(grads, variables),
        )
    assert faults(report) == [], str(report)
    assert Stage.GRADIENT in report.judged
