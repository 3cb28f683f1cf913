"""What stays between updates, second passes, and the losses that a loop prints."""

import keras
import numpy as np
import pytest
from keras import layers
from small import (
    X,
    Y,
    by,
    by_hand,
    descend,
    faults,
    gradient_of,
    network,
    reasons,
    square,
)

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason

ENGINE = keras.backend.backend()
LABELS = Y[:, 0]
ADAM = keras.optimizers.Adam


def with_norm():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,)), layers.BatchNormalization(), layers.Dense(1)]
    )


# ---- statistics ----


@pytest.mark.skipif(
    ENGINE != "jax", reason="the statistics are values of the loop"
)
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("is_carried", [True, False])
def test_statistics_that_a_loop_holds_by_hand(is_carried, is_written):
    import jax

    model = with_norm()

    def loss(params, others, x, y):
        out, others = model.stateless_call(params, others, x, training=True)
        return square(out, y), others

    groups = model.trainable_variables, model.non_trainable_variables
    with stepcheck.watch(model, (X, LABELS), loss="mse") as report:
        params, first = ([v.value for v in group] for group in groups)
        others = first
        for epoch in range(2):
            for rows in (
                np.random.default_rng(epoch).permutation(24).reshape(6, 4)
            ):
                grads, new = jax.grad(loss, has_aux=True)(
                    params, others, X[rows], LABELS[rows]
                )
                others = new if is_carried else first
                params = [
                    p - 0.01 * g for p, g in zip(params, grads, strict=True)
                ]
        for variables, values in zip(groups, (params, others), strict=True):
            for variable, value in zip(variables, values, strict=True):
                if is_written or variables is groups[0]:
                    variable.assign(value)
    expected = (
        [Fault.STATISTICS_NEVER_WRITTEN_BACK] * (not is_written)
        if is_carried
        else [Fault.STATISTICS_THROWN_AWAY]
    )
    assert faults(report) == expected, str(report)


@pytest.mark.parametrize("resets", [True, False])
def test_states_of_a_recurrent_layer_that_are_reset_are_no_statistics(resets):
    keras.utils.set_random_seed(0)
    recurrent = layers.LSTM(3, stateful=True)
    model = keras.Sequential(
        [keras.Input(batch_shape=(4, 5, 1)), recurrent, layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (X[..., None], LABELS)) as report:
        for _ in range(3):
            for start in range(0, 24, 4):
                model.train_on_batch(
                    X[start : start + 4, :, None], LABELS[start : start + 4]
                )
            if resets:
                recurrent.reset_states()
    assert Stage.STATE not in {each.stage for each in report.findings}, str(
        report
    )


# ---- weights and the optimizer's state ----


def test_a_decay_by_hand_is_one_per_update():
    def decaying(optimizer):
        def move(variables, gradients):
            for variable in variables:
                variable.assign(0.99 * variable)
            by(optimizer)(variables, gradients)

        return move

    for kind, found in (
        (keras.optimizers.AdamW, [Fault.DECAYED_TWICE]),
        (ADAM, []),
    ):
        model = network(kind(0.01))
        with stepcheck.watch(model, (X, LABELS)) as report:
            descend(model, square, (X, LABELS), 8, decaying(model.optimizer))
        assert faults(report) == found, str(report)
        assert Stage.GRADIENT in report.judged


def test_steps_that_reach_no_variable_are_not_judged():
    model = network()
    with stepcheck.watch(model, (X, LABELS)) as report:
        descend(
            model, square, (X, LABELS), 8, lambda variables, gradients: None
        )
    assert not report.is_right
    assert Reason.NO_UPDATE in reasons(report)


@pytest.mark.parametrize("is_reset", [True, False])
def test_an_optimizer_that_is_made_in_the_loop_loses_its_moments(is_reset):
    model = network()
    with stepcheck.watch(model, (X, LABELS)) as report:
        for number in range(6):
            optimizer = ADAM(0.01) if is_reset or not number else optimizer  # noqa: F821
            optimizer.build(model.trainable_variables)
            rows = (
                np.random.default_rng(number // 3)
                .permutation(24)
                .reshape(3, 8)[number % 3]
            )
            by(optimizer)(
                model.trainable_variables,
                gradient_of(model, square)(X[rows], LABELS[rows]),
            )
    assert faults(report) == [Fault.OPTIMIZER_RE_CREATED] * is_reset, str(
        report
    )


def test_a_constant_rate_in_place_of_the_schedule_that_is_stated():
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.05, 2, 0.7)
    model = network()
    with stepcheck.watch(
        model, (X, LABELS), optimizer=keras.optimizers.SGD(schedule)
    ) as report:
        descend(model, square, (X, LABELS), 8, by(model.optimizer))
    assert faults(report) == [Fault.SCHEDULE_FROZEN], str(report)


def test_the_schedule_of_the_loops_own_optimizer_is_no_fault():
    optimizer = ADAM(keras.optimizers.schedules.CosineDecay(0.01, 64))
    model = network()
    optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, (X, LABELS), loss="mse") as report:
        descend(model, square, (X, LABELS), 8, by(optimizer), passes=8)
    assert report.is_right, str(report)


# ---- printed losses ----


@pytest.mark.parametrize(
    ("divisor", "found"),
    [(3, []), (24, [Fault.PRINTED_MEANS_OVER_ROWS]), (1, [Fault.PRINTED_SUM])],
)
def test_losses_that_are_printed_are_judged_in_the_first_passes_of_a_long_loop(
    divisor, found
):
    model, printed, move = network(), [], by_hand(0.01)
    with stepcheck.watch(model, (X, LABELS)) as report:
        gradient, rng = gradient_of(model, square), np.random.default_rng(1)
        for _ in range(16):  # of 48 updates 40 are kept
            total, order = 0.0, rng.permutation(24)
            for rows in np.split(order, 3):
                total += float(
                    square(model(X[rows], training=True), LABELS[rows])
                )
                move(model.trainable_variables, gradient(X[rows], LABELS[rows]))
            printed.append(total / divisor)
    report.printed(loss=printed)
    assert faults(report) == found, str(report)


# ---- labels ----


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels_of_the_batch_before_are_those_of_other_rows(num_classes):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(num_classes)]
    )
    optimizer, before = ADAM(0.01), []
    optimizer.build(model.trainable_variables)
    labels = np.argmax(X[:, :num_classes], 1)

    def with_those_before(out, y):
        before.append(y)
        own = before[-2:][0]  # the first batch has its own
        return keras.ops.mean(
            keras.ops.sparse_categorical_crossentropy(
                own, out, from_logits=True
            )
        )

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with stepcheck.watch(model, (X, labels), loss=loss) as report:
        descend(model, with_those_before, (X, labels), 6, by(optimizer))
    assert faults(report) == [Fault.LABELS_OF_OTHER_ROWS], str(report)


def test_labels_with_noise_under_an_absolute_error_are_none_of_other_rows():
    model, rng = network(ADAM(0.01)), np.random.default_rng(3)

    def absolute(out, y):
        noise = np.float32(rng.uniform(-1, 1, len(y)))
        return keras.ops.mean(keras.ops.abs(out - (y + noise)[:, None]))

    with stepcheck.watch(model, (X, LABELS), loss="mae") as report:
        descend(model, absolute, (X, LABELS), 8, by(model.optimizer))
    assert Fault.LABELS_OF_OTHER_ROWS not in faults(report), str(report)


def test_printed_losses_that_are_none_known():
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert report.is_right, str(report)
    report.printed(loss=[123, 4])
    assert reasons(report) == [Reason.PRINTED_UNLIKE]
