"""The arithmetic of steps: against Keras' optimizers, and what a watched loop's steps are found to be."""

import keras
import numpy as np
import pytest
from keras import optimizers
from small import NUM, SIZE, X, Y, by, faults, gradient_of, mean, network, train

import stepcheck
from stepcheck.faults import Fault
from stepcheck.keras.steps import rules
from stepcheck.steps import (
    HALF_EPS,
    StepRule,
    begun,
    clipped,
    precision,
    stepped,
)
from stepcheck.values import Reason

SETTINGS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda: optimizers.Adam(0.01),
    "adam of another epsilon": lambda: optimizers.Adam(
        0.01, beta_1=0.8, beta_2=0.99, epsilon=1e-3
    ),
    "amsgrad": lambda: optimizers.Adam(0.01, beta_2=0.9, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "centered rmsprop": lambda: optimizers.RMSprop(
        0.01, momentum=0.9, centered=True
    ),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "clipped": lambda: optimizers.SGD(0.1, clipnorm=0.5),
    "clipped by all": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipped by number": lambda: optimizers.SGD(0.1, clipvalue=0.3),
}


def watched(compiled, own=None, **meant):
    model = network(compiled)
    with stepcheck.watch(model, (X, Y), **meant) as report:
        own = own or model.optimizer
        gradient = gradient_of(
            model, lambda outputs, labels: mean(labels, outputs)
        )
        for start in [*range(0, NUM, SIZE)] * 3:
            rows = slice(start, start + SIZE)
            by(own)(model.trainable_variables, gradient(X[rows], Y[rows]))
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_rule_makes_the_steps_of_keras(kind, dtype):
    if dtype == "bfloat16" and "ad" in kind:
        pytest.skip("Keras' corrections are 0 there")
    optimizer, rng = SETTINGS[kind](), np.random.default_rng(0)
    variables = [
        keras.Variable(rng.normal(size=size), dtype=dtype) for size in (7, 5)
    ]
    optimizer.build(variables)
    (rule, _) = rules(optimizer, variables, variables)
    rule = StepRule(**{**vars(rule), "rate": float(optimizer.learning_rate)})
    weights = [np.array(v.numpy()).astype("float32") for v in variables]
    slots = [begun(rule, w) for w in weights]
    for _ in range(6):
        grads = [
            keras.ops.cast(rng.normal(size=w.shape), dtype) for w in weights
        ]
        optimizer.apply(grads, variables)
        arrays = [np.asarray(keras.ops.cast(g, "float32")) for g in grads]
        made = [
            stepped(rule, *each)
            for each in zip(
                weights, clipped(arrays, rule.clips), slots, strict=True
            )
        ]
        weights, slots = ([*each] for each in zip(*made, strict=True))
    near = 2e-6 if dtype == "float32" else 3 * HALF_EPS
    for w, v in zip(weights, variables, strict=True):
        own = np.asarray(keras.ops.cast(v, "float32"))
        assert np.allclose(w, own, rtol=near, atol=near), np.max(
            np.abs(w - own)
        )


@pytest.mark.parametrize("kind", SETTINGS)
def test_right_steps_are_right(kind):
    report = watched(SETTINGS[kind]())
    assert report.findings == [], str(report)
    assert "step" in report.judged
    assert report.unjudged == [], str(report)


@pytest.mark.parametrize("number", [0.0, 1.0, 0.37])
def test_the_precision_of_zeros_is_not_taken_for_that_of_bfloat16_where_others_show_it(
    number,
):
    weights = np.array([number, 0.0], "float32")
    assert (precision(weights) == HALF_EPS) == (number in (0.0, 1.0))


@pytest.mark.parametrize(
    ("own", "stated", "is_right"),
    [
        (optimizers.Adam(0.01), optimizers.Adam(0.01), True),
        (optimizers.Adam(0.01), optimizers.AdamW(0.01, weight_decay=0.0), True),
        (
            optimizers.Adam(0.01),
            optimizers.AdamW(0.01, weight_decay=0.1),
            False,
        ),
        (optimizers.Adam(0.01), optimizers.Adam(0.01, beta_1=0.8), False),
        (optimizers.Adam(0.01, epsilon=1e-3), optimizers.Adam(0.01), False),
        (optimizers.SGD(0.01, momentum=0.9), optimizers.SGD(0.01), False),
        (optimizers.RMSprop(0.01), optimizers.Adam(0.01), False),
    ],
)
def test_steps_are_compared_with_those_of_the_stated_optimizer(
    own, stated, is_right
):
    report = watched(
        optimizers.SGD(0.01),
        type(own).from_config(own.get_config()),
        optimizer=stated,
    )
    assert faults(report) == [Fault.ANOTHER_OPTIMIZER] * (not is_right), str(
        report
    )


def changed_after(optimizer, change):
    """Let an optimizer do something else besides, inside of its own `apply`."""
    update = optimizer._backend_update_step

    def other(grads, variables, rate):
        update(grads, variables, rate)
        for variable in variables:
            variable.assign(change(variable))

    optimizer._backend_update_step = other
    return optimizer


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda v: v * 0.99, Fault.STEP_UNLIKE), (lambda v: v * 1.0, None)],
)
def test_weights_that_are_written_inside_of_a_step_are_found(change, found):
    optimizer = changed_after(optimizers.Adam(0.01), change)
    report = watched(optimizer)
    assert faults(report) == [found] * (found is not None), str(report)


@pytest.mark.parametrize(
    ("decay", "found"), [(0.1, [Fault.STEP_UNLIKE]), (0.0, [])]
)
def test_a_decay_that_is_applied_twice_is_found(decay, found):
    optimizer = optimizers.AdamW(0.01, weight_decay=decay)
    once = optimizer._apply_weight_decay
    optimizer._apply_weight_decay = lambda variables: [
        once(variables),
        once(variables),
    ]
    assert faults(watched(optimizer)) == found


def test_the_steps_of_another_optimizer_are_not_judged():
    report = watched(optimizers.Lion(0.01))
    assert (report.findings, "step" in report.judged) == ([], False)
    assert Reason.STEP_UNKNOWN in {each.reason for each in report.unjudged}


@pytest.mark.own
def test_the_steps_of_a_constrained_parameter_are_not_judged():
    model = network(optimizers.Adam(0.1))
    model.trainable_variables[0].constraint = keras.constraints.NonNeg()
    with stepcheck.watch(model, (X, Y)) as report:
        train(model)
    assert (report.findings, "step" in report.judged) == ([], False), str(
        report
    )


@pytest.mark.own
@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.Nadam(1e-2),
        optimizers.RMSprop(1e-2, global_clipnorm=0.1, centered=True),
    ],
    ids=["squares", "norms"],
)
def test_gradients_in_rows_of_a_table_are_not_accused(optimizer):
    keras.utils.set_random_seed(0)
    tokens = np.random.default_rng(0).integers(0, 5, (24, 9))
    table = [
        keras.layers.Embedding(5, 4),
        keras.layers.GlobalAveragePooling1D(),
    ]
    model = keras.Sequential(
        [keras.Input((9,), dtype="int32"), *table, keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    with stepcheck.watch(model, (tokens, Y)) as report:
        model.fit(tokens, Y, batch_size=8, epochs=2, verbose=0)
    assert report.findings == [], str(report)
