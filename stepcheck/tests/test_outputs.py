"""The audit of models with several outputs: an error of one output's loss is found in that loss."""

import keras
import numpy as np
import pytest
from audit_users import train
from keras import layers, ops

import stepcheck

RNG = np.random.default_rng(0)
NUM = 48
TOKENS = RNG.integers(1, 9, (NUM, 5)) * (np.arange(5) < RNG.integers(1, 6, (NUM, 1)))
TOKENS[:, 0] = np.arange(NUM) % 8 + 1
PRICES = RNG.normal(size=NUM).astype("float32")
KINDS = RNG.integers(0, 3, NUM)
TAGS = RNG.integers(0, 4, (NUM, 5))
MEANT = {
    "price": keras.losses.MeanSquaredError(),
    "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
}
COUNTS = {"price": 1.0, "kind": 0.5, "tags": 2.0}


def model_of_three():
    """Return a model of a number, a class, and a tag for each token that is no padding."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    states = layers.Dense(6, "tanh")(layers.Embedding(9, 4, mask_zero=True)(inputs))
    pooled = layers.GlobalAveragePooling1D()(states)
    outputs = {"price": layers.Dense(1)(pooled), "kind": layers.Dense(3)(pooled), "tags": layers.Dense(4)(states)}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), MEANT, loss_weights=COUNTS)
    return model


def entropy(labels, logits):
    return ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def over_places(logits, labels, tokens):
    there = ops.cast(ops.not_equal(tokens, 0), "float32")
    return ops.sum(entropy(labels, logits) * there) / ops.sum(there)


RIGHT = {
    "price": lambda out, y, tokens: ops.mean((out - y[:, None]) ** 2),
    "kind": lambda out, y, tokens: ops.mean(entropy(y, out)),
    "tags": over_places,
}
BROADCAST = {"price": lambda out, y, tokens: ops.mean((out - y) ** 2)}
TWICE = {"kind": lambda out, y, tokens: ops.mean(entropy(y, ops.exp(out) / ops.sum(ops.exp(out), -1, keepdims=True)))}
WRONG = {
    "broadcast": (BROADCAST, "Broadcast. Each output (price) meets the labels of all rows"),
    "softmax": (TWICE, "Softmax twice. The outputs (kind) go through one more softmax."),
    "sum": (
        {"kind": lambda out, y, tokens: ops.sum(entropy(y, out))},
        "Never divided. Each row's gradient (output kind) counts 1 instead of 1 / 8, as the update has 8 rows.",
    ),
    "padding": (
        {"tags": lambda out, y, tokens: ops.mean(entropy(y, out))},
        "Mask ignored. The mask (output tags) is left out.",
    ),
    "smoothed": (
        {"kind": lambda out, y, tokens: ops.mean(ops.categorical_crossentropy(smooth(y), out, from_logits=True))},
        "The labels (output kind) are smoothed by 0.3 instead of 0.",
    ),
    "classes": (
        {"kind": lambda out, y, tokens: ops.mean(ops.categorical_crossentropy(hot(y + 1), out, from_logits=True))},
        "The labels (output kind) are one class higher, as if the classes of the loss were counted from 1.",
    ),
    "other rows": (
        {"price": lambda out, y, tokens: ops.mean((out - ops.roll(y, 1)[:, None]) ** 2)},
        "Labels shifted. The labels (output price) are those of the row before in the batch.",
    ),
    "half": (
        {"kind": lambda out, y, tokens: 0.3 * ops.mean(entropy(y, out))},
        "Other loss weights. The losses of price_loss, kind_loss, tags_loss count 1, 0.15, 2, and not 1, 0.5, 2.",
    ),
    "unknown": (
        {"kind": lambda out, y, tokens: ops.mean(entropy(y, out**3))},
        "so it is in the loss of output kind: its derivative by the outputs is",
    ),
}


def hot(labels):
    return ops.one_hot(labels, 3)


def smooth(labels):
    return 0.7 * hot(labels) + 0.1


def audited(losses):
    """Return the report on a loop whose losses are these, and the right ones of the other outputs."""
    model, of = model_of_three(), RIGHT | losses

    def value(outputs, tokens, price, kind, tags):
        labels = {"price": price, "kind": kind, "tags": tags}
        return sum(COUNTS[name] * of[name](outputs[name], labels[name], tokens) for name in of)

    data = TOKENS, {"price": PRICES, "kind": KINDS, "tags": TAGS}
    with stepcheck.watch(model, data=data) as report:
        train(
            model,
            value,
            (TOKENS, TOKENS, PRICES, KINDS, TAGS),
            8,
            lambda variables, grads: model.optimizer.apply(grads, variables),
        )
    return report


def test_right_losses_of_three_outputs_are_right():
    report = audited({})

    assert not report.causes
    assert str(report).startswith("Nothing found in 12 updates")


@pytest.mark.parametrize("case", WRONG)
def test_the_output_whose_loss_is_wrong_is_named(case):
    losses, told = WRONG[case]

    report = audited(losses)

    assert len(report.causes) == 1
    assert told in str(report)


def test_two_wrong_losses_are_two_causes():
    report = audited(BROADCAST | TWICE)

    assert [cause.name for cause in report.causes] == ["broadcast", "softmax twice"]
    assert all(cause.without > 0.01 and cause.with_change < 1e-4 for cause in report.causes)


def test_one_error_of_two_losses_is_one_cause():
    pair = {name: lambda out, y, tokens, own=RIGHT[name]: 8 * own(out, y, tokens) for name in ("price", "kind")}

    report = audited(pair)

    assert [cause.name for cause in report.causes] == ["never divided"]
    assert "Each row's gradient (outputs price, kind) counts" in str(report)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a tape gives several gradients of one pass")
def test_losses_that_are_applied_in_turn_are_no_output_that_is_left_out():
    import tensorflow as tf

    model = model_of_three()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    labels = {"price": PRICES, "kind": KINDS, "tags": TAGS}
    with stepcheck.watch(model, data=(TOKENS, labels)) as report:
        for start in [*range(0, NUM, 8)] * 2:
            rows = slice(start, start + 8)
            with tf.GradientTape(persistent=True) as tape:
                outputs = model(TOKENS[rows], training=True)
                losses = [COUNTS[n] * RIGHT[n](outputs[n], labels[n][rows], TOKENS[rows]) for n in RIGHT]
            for loss in losses:
                grads = tape.gradient(loss, model.trainable_variables)
                pairs = zip(grads, model.trainable_variables, strict=True)
                optimizer.apply_gradients([(tf.convert_to_tensor(g), v) for g, v in pairs if g is not None])

    assert not report.causes, str(report)
    assert report.first_line.startswith("Each batch makes several steps of one optimizer, with another gradient each")
