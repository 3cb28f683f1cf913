"""The order of the rows, beside equal rows, passes that a batch crosses, and rows that fill up a batch."""

import keras
import numpy as np
import pytest
from small import descend, faults, gradient_of, reasons, square

import stepcheck
from stepcheck.faults import Fault, Quantity, Stage
from stepcheck.values import Reason

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 5)).astype("float32"), RNG.integers(0, 3, 96)
LABELS = X.sum(1)
TWINS = X.copy()
TWINS[[7, 50, 60]] = X[[3, 12, 61]]


def classifier():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def regression(optimizer=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def report_on(x, batches, y=Y, rows="shuffled"):
    """Return the report on updates by these rows, in this order."""
    model = classifier()
    with stepcheck.watch(model, data=(x, y), rows=rows) as report:
        for chosen in batches:
            model.train_on_batch(x[chosen], y[chosen])
    return report


def shuffled(seed):
    return np.random.default_rng(seed).permutation(96)


def cut(orders, size=16):
    return [
        order[start : start + size]
        for order in orders
        for start in range(0, len(order), size)
    ]


NEW, ONE = [shuffled(0), shuffled(1), shuffled(2)], [shuffled(0)] * 3
PADDED = [np.concatenate([order, order[:4]]) for order in NEW]
DRAWN = [np.random.default_rng(seed).integers(0, 96, 96) for seed in range(3)]
BATCHES = [
    np.concatenate(
        [*np.random.default_rng(i).permutation(NEW[0].reshape(6, 16))]
    )
    for i in range(3)
]


@pytest.mark.parametrize(
    ("orders", "rows", "found"),
    [
        (NEW, "shuffled", []),
        (ONE, "shuffled", [Fault.SAME_ORDER_EVERY_PASS]),
        (ONE, "once", []),
        (ONE, None, []),
        ([np.arange(96)] * 2, "shuffled", [Fault.SAME_ORDER_EVERY_PASS]),
        (BATCHES, "shuffled", [Fault.SAME_BATCHES_EVERY_PASS]),
        (BATCHES, "once", []),
        ([order[order < 90] for order in NEW], "once", [Fault.ROWS_NEVER_USED]),
        ([order[order < 90] for order in NEW], None, []),
        ([order[:90] for order in NEW], "once", [Fault.ROWS_TWICE_IN_A_PASS]),
        (PADDED, "once", [Fault.ROWS_TWICE_IN_A_PASS]),
        (PADDED, None, []),
        (DRAWN, "once", [Fault.ROWS_NEVER_USED]),
        (DRAWN, None, []),
        ([np.repeat(shuffled(0), 2)], "once", [Fault.ROWS_TWICE_IN_A_PASS]),
    ],
)
def test_a_stated_use_of_the_rows_is_judged_and_no_other(orders, rows, found):
    report = report_on(X, cut(orders), rows=rows)
    assert faults(report) == found, str(report)
    assert Stage.ROWS in report.judged


@pytest.mark.parametrize(
    ("rows", "found"), [("once", [Fault.WINDOW_CARRIED_OVER]), (None, [])]
)
def test_batches_across_the_ends_of_passes(rows, found):
    report = report_on(X, cut([np.concatenate(NEW)], 20), rows=rows)
    assert faults(report) == found, str(report)


def test_equal_rows_are_used_as_often_as_they_are_there():
    assert report_on(TWINS, cut(NEW)).is_right
    assert faults(report_on(TWINS, cut(ONE))) == [Fault.SAME_ORDER_EVERY_PASS]
    few = report_on(
        TWINS, cut([order[order != 7] for order in NEW]), rows="once"
    )
    assert [each.quantity for each in few.findings] == [Quantity.ROWS], str(few)


def test_updates_of_all_rows_have_no_order():
    assert report_on(X, [np.arange(96)] * 6).is_right


@pytest.mark.parametrize(
    ("orders", "size", "rows", "reason"),
    [
        (NEW[:1], 16, "shuffled", Reason.FEW_PASSES),
        ([shuffled(0)[:80]], 16, "once", Reason.FEW_PASSES),
        (ONE, 48, "shuffled", None),
        (ONE, 95, "shuffled", None),
        (
            [shuffled(0), [*shuffled(0)[94::-1], shuffled(0)[95]]],
            95,
            "shuffled",
            Reason.BY_CHANCE,
        ),
    ],
)
def test_few_batches_show_no_order(orders, size, rows, reason):
    report = report_on(X, cut(orders, size), rows=rows)
    assert reasons(report) == [reason] * (reason is not None), str(report)
    assert (
        bool(report.findings)
        == (Stage.ROWS in report.judged)
        == (reason is None)
    )


def test_inputs_that_are_no_rows_leave_a_stated_use_unjudged():
    model = classifier()
    with stepcheck.watch(model, data=(X, Y), rows="once") as report:
        for rows in cut(NEW):
            model.train_on_batch(X[rows] * (1 if rows[0] % 2 else 2), Y[rows])
    assert report.findings == []
    assert Stage.ROWS not in report.judged


def test_a_use_that_is_no_known_one_is_refused():
    with pytest.raises(
        stepcheck.SpecificationError, match="rows must be 'once'"
    ):
        report_on(X, [], rows="twice")


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
    with stepcheck.watch(model, (X[:60], LABELS[:60]), rows="once") as report:
        for epoch in range(6):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(60), 10
            ):  # each third one makes an update
                sums.append(
                    [np.asarray(g) / 4 for g in gradient(X[rows], LABELS[rows])]
                )
                if len(sums) == 4:
                    handed = [
                        keras.ops.array(sum(each))
                        for each in zip(*sums, strict=True)
                    ]
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
        return keras.ops.sum(w * (out[:, 0] - y) ** 2) / (
            20 if is_of_all else keras.ops.sum(w)
        )

    gradient = gradient_of(model, value)
    with stepcheck.watch(model, (X[:num], LABELS[:num]), rows="once") as report:
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(num)
            for start in range(0, num, 20):
                rows, weights = (
                    np.resize(order[start : start + 20], 20),
                    np.ones(20, "float32"),
                )
                if start + 20 > num:
                    rows[num - start :], weights[num - start :] = (
                        order[: start + 20 - num],
                        weight,
                    )
                grads = gradient(X[rows], LABELS[rows], weights)
                model.optimizer.apply(
                    [*map(keras.ops.array, grads)], model.trainable_variables
                )
    assert faults(report) == found, str(report)


def test_gradients_that_wait_at_the_end_are_no_fault():
    model = regression(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)
    )
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
