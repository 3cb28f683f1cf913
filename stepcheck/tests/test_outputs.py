"""Models with several outputs: an error of one output's loss is found in that loss."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import by, descend, faults

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Detail

RNG = np.random.default_rng(0)
NUM = 48
TOKENS = RNG.integers(1, 9, (NUM, 5)) * (
    np.arange(5) < RNG.integers(1, 6, (NUM, 1))
)
TOKENS[:, 0] = np.arange(NUM) % 8 + 1
PRICES = RNG.normal(size=NUM).astype("float32")
KINDS = RNG.integers(0, 3, NUM)
TAGS = RNG.integers(0, 4, (NUM, 5))
MEANT = {
    "price": keras.losses.MeanSquaredError(),
    "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "tags": keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    ),
}
COUNTS = {"price": 1.0, "kind": 0.5, "tags": 2.0}


def model_of_three():
    """Return a model of a number, a class, and a tag for each token that is no padding."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    states = layers.Dense(6, "tanh")(
        layers.Embedding(9, 4, mask_zero=True)(inputs)
    )
    pooled = layers.GlobalAveragePooling1D()(states)
    outputs = {
        "price": layers.Dense(1)(pooled),
        "kind": layers.Dense(3)(pooled),
        "tags": layers.Dense(4)(states),
    }
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), MEANT, loss_weights=COUNTS)
    model.optimizer.build(model.trainable_variables)
    return model


def entropy(labels, logits):
    return ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def over_places(logits, labels, tokens):
    there = ops.cast(ops.not_equal(tokens, 0), "float32")
    return ops.sum(entropy(labels, logits) * there) / ops.sum(there)


def softmax(logits):
    return ops.exp(logits) / ops.sum(ops.exp(logits), -1, keepdims=True)


RIGHT = {
    "price": lambda out, y, tokens: ops.mean((out - y[:, None]) ** 2),
    "kind": lambda out, y, tokens: ops.mean(entropy(y, out)),
    "tags": over_places,
}
BROADCAST = {"price": lambda out, y, tokens: ops.mean((out - y) ** 2)}
TWICE = {"kind": lambda out, y, tokens: ops.mean(entropy(y, softmax(out)))}
PADDING = {"tags": lambda out, y, tokens: ops.mean(entropy(y, out))}
UNKNOWN = {"kind": lambda out, y, tokens: ops.mean(entropy(y, out**3))}
HALF = {"kind": lambda out, y, tokens: 0.3 * ops.mean(entropy(y, out))}


def watched(losses):
    """Return the report on a loop whose losses are these, and the right ones of the other outputs."""
    model, of = model_of_three(), RIGHT | losses

    def value(outputs, tokens, price, kind, tags):
        labels = {"price": price, "kind": kind, "tags": tags}
        return sum(
            COUNTS[name] * of[name](outputs[name], labels[name], tokens)
            for name in of
        )

    given = (TOKENS, TOKENS, PRICES, KINDS, TAGS)
    with stepcheck.watch(
        model, data=(TOKENS, {"price": PRICES, "kind": KINDS, "tags": TAGS})
    ) as report:
        descend(model, value, given, 8, by(model.optimizer))
    return report


def test_right_losses_of_three_outputs_are_right():
    assert watched({}).is_right


@pytest.mark.parametrize("wrong", [PADDING, UNKNOWN, BROADCAST | TWICE])
def test_a_wrong_loss_of_one_of_several_outputs_has_no_known_form(wrong):
    (found,) = watched(wrong).findings
    assert (found.stage, found.change.is_known) == (Stage.GRADIENT, False)


def test_other_loss_weights_are_told_by_numbers():
    (found,) = watched(HALF).findings
    assert (found.fault, found.change.detail) == (
        Fault.OTHER_LOSS_WEIGHTS,
        Detail.TERMS_COUNT,
    )
    assert found.change.numbers == pytest.approx(
        (1, 0.15, 2, 1, 0.5, 2), rel=1e-3
    )


@pytest.mark.parametrize("losses", [{"a": "mse", "b": "mae"}, ["mse", "mae"]])
def test_losses_are_stated_as_compile_takes_them(losses):
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(24, 5)).astype("float32"),
        [rng.normal(size=(24, 1)).astype("float32") for _ in range(2)],
    )
    inputs = keras.Input((5,))
    model = keras.Model(
        inputs, [layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
    )
    model.compile("sgd", ["mse", "mae"])
    with stepcheck.watch(model, (x, y), loss=losses) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert report.is_right, str(report)
    with stepcheck.watch(model, (x, y), loss=losses) as report:
        model.compile("sgd", ["mae", "mse"])
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert faults(report) == [Fault.LOSS_UNLIKE]


def test_inputs_that_a_loop_gives_by_name_are_to_be_stated_by_name():
    one, two = (
        np.random.default_rng(0).normal(size=(2, 24, 5)).astype("float32")
    )
    names = ("two", "one")
    inputs = [keras.Input((5,), name=name) for name in names]
    outputs = layers.Dense(1)(
        layers.Subtract()([layers.Dense(4)(each) for each in inputs])
    )
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    named = dict(zip(names, (one, two), strict=True))
    for given, is_judged in ((named, True), ((one, two), False)):
        with stepcheck.watch(model, (given, one[:, :1])) as report:
            model.fit(named, one[:, :1], batch_size=8, epochs=2, verbose=0)
        assert (report.findings, report.is_right) == ([], is_judged), str(
            report
        )
