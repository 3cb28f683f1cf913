"""Losses of a whole batch, what is trained in stages, and what is shown while a loop is judged."""

import time
from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import X, Y, by, descend, faults, gradient_of, network, reasons

import stepcheck
from stepcheck import progress
from stepcheck.faults import Fault, Stage
from stepcheck.keras.meaning import meant
from stepcheck.values import Reason
from wholestep.model import ScalarTerm

ENGINE = keras.backend.backend()
CLASSES = np.tile(np.arange(3, dtype="int32"), 8)


# ---- losses of whole batches ----


def contrastive(labels, features):
    """The supervised contrastive loss of a batch, as one number."""
    features = features / ops.norm(features, axis=1, keepdims=True)
    logits = ops.matmul(features, ops.transpose(features)) / 0.5
    labels = ops.reshape(labels, (-1, 1))
    same = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32")
    shares = same / ops.sum(same, axis=1, keepdims=True)
    return ops.mean(-ops.sum(shares * ops.log_softmax(logits), axis=1))


def triplet(labels, features):
    """The batch-hard triplet loss: of rows of one class it is the margin, a constant."""
    distances = ops.sum((features[:, None] - features[None]) ** 2, -1)
    labels = ops.reshape(labels, (-1,))
    same = ops.cast(ops.equal(labels[:, None], labels[None]), "float32")
    farthest = ops.max(distances * same, axis=1)
    nearest = ops.min(ops.where(same > 0, 1e3, distances), axis=1)
    return ops.mean(ops.relu(farthest - nearest + 1.0))


def squared(labels, outputs):
    return ops.mean(
        (ops.cast(ops.reshape(labels, (-1, 1)), "float32") - outputs) ** 2
    )


def as_class(function, name):
    """Return a loss with its own `call` or `__call__`, as the examples of Keras have it."""

    def own(self, y_true, y_pred, sample_weight=None):
        return function(y_true, y_pred)

    return type("Own", (keras.losses.Loss,), {name: own})()


LOSSES = {
    "a class that is called": as_class(contrastive, "__call__"),
    "a class with call": as_class(contrastive, "call"),
    "a function": contrastive,
    "triplet": triplet,
    "a mean in a class": as_class(squared, "call"),
}


def compiled(loss, order=slice(None), **others):
    """Return the report of a right `fit` of a compiled loss."""
    x, y = X[order], CLASSES[order]
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.05, **others), loss)
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return report


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_of_a_whole_batch_is_judged_as_a_whole(name):
    report = compiled(LOSSES[name])
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


def test_a_loss_of_a_batch_is_known_where_the_first_rows_have_one_class():
    assert compiled(triplet, np.argsort(CLASSES, kind="stable")).findings == []


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_a_masked_mean_of_a_new_model_is_taken_whole(spread):
    """Its rows' losses are nearly alike, and so are the means of any divisor."""
    tokens = np.random.default_rng(1).integers(1, 6, (24, 5))
    tokens[np.arange(5)[None] > np.arange(24)[:, None] % 5] = 0

    def masked(labels, outputs):
        each = keras.losses.sparse_categorical_crossentropy(
            labels, outputs, from_logits=True
        )
        mask = ops.cast(labels > 0, each.dtype)
        return ops.sum(each * mask) / ops.sum(mask)

    keras.utils.set_random_seed(0)
    head = layers.Dense(6)
    model = keras.Sequential([keras.Input((5,)), layers.Embedding(6, 4), head])
    head.kernel.assign(spread * head.kernel)
    model.compile(keras.optimizers.SGD(0.1), masked)
    with stepcheck.watch(model, data=(tokens, tokens)) as report:
        model.fit(tokens, tokens, batch_size=6, epochs=2, verbose=0)
    assert report.is_right, str(report)


def test_microbatches_of_a_loss_of_a_batch_are_not_judged():
    report = compiled(
        LOSSES["a class that is called"], gradient_accumulation_steps=3
    )
    assert report.findings == [], str(report)
    assert Reason.COUPLED in reasons(report)
    assert Stage.GRADIENT not in report.judged


def test_microbatches_of_a_mean_in_a_class_are_judged():
    report = compiled(
        LOSSES["a mean in a class"], gradient_accumulation_steps=3
    )
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_loss_of_all_pairs_of_a_batch_is_taken_whole(is_swapped):
    def contrast(_, both):
        scores = 5 * ops.matmul(both[0], ops.transpose(both[1]))
        return -ops.mean(ops.diagonal(ops.log_softmax(scores)))

    def move(variables, gradients):
        by(optimizer)(
            variables,
            gradients[2:] + gradients[:2] if is_swapped else gradients,
        )

    keras.utils.set_random_seed(3)
    left, right = keras.Input((5,)), keras.Input((5,))
    model = keras.Model(
        [left, right],
        [
            layers.Dense(3, name="left")(left),
            layers.Dense(3, name="right")(right),
        ],
    )
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    gradient = gradient_of(model, lambda both: contrast(None, both))
    with stepcheck.watch(
        model, data=((X, X + 1), np.zeros(len(X), "float32")), loss=contrast
    ) as report:
        for start in range(0, 24, 6):
            rows = slice(start, start + 6)
            move(model.trainable_variables, gradient([X[rows], X[rows] + 1]))
    assert faults(report) == [Fault.GRADIENT_UNLIKE] * is_swapped, str(report)


@pytest.mark.parametrize(
    ("function", "is_coupled"),
    [
        (lambda y, out: ops.mean((y - out) ** 2), False),
        (lambda y, out: ops.sum((y - out) ** 2), False),
        (lambda y, out: ops.sum(y * out) / ops.sum(y), True),
        (lambda y, out: ops.sqrt(ops.mean((y - out) ** 2)), True),
        (lambda y, out: ops.std(out), True),
        (
            lambda y, out: ops.mean(ops.reshape(y - out, (2, 3)) ** 2),
            True,
        ),  # of a batch of six alone
    ],
)
def test_only_losses_that_look_at_several_rows_are_taken_whole(
    function, is_coupled
):
    x, labels = X[:6], np.arange(6, dtype="float32")[:, None] + 1
    model = network()
    objective = meant(model, function, x, labels)
    assert (
        objective.kind_of(labels, model(x), None) is ScalarTerm
    ) is is_coupled


# ---- what is trained changes ----


def two_parts():
    keras.utils.set_random_seed(1)
    base = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "relu"), layers.Dense(4, "relu")]
    )
    inputs = keras.Input((5,))
    return base, keras.Model(inputs, layers.Dense(4, "softmax")(base(inputs)))


def fitted(model, rate):
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy"
    )
    model.fit(X, CLASSES, batch_size=8, epochs=2, verbose=0)


def test_a_second_stage_of_as_many_variables_is_judged():
    base, model = two_parts()
    with stepcheck.watch(
        model, (X, CLASSES), "sparse_categorical_crossentropy"
    ) as report:
        base.trainable = False
        fitted(model, 1e-2)
        base.layers[0].trainable = True
        model.layers[-1].trainable = False
        fitted(model, 1e-3)
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )
    assert report.as_json()["updates"] == 6


@pytest.mark.skipif(ENGINE != "tensorflow", reason="a loop of TensorFlow")
def test_what_is_trainable_in_turn_is_not_judged():
    import tensorflow as tf

    judge = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    made = keras.Sequential([keras.Input((5,)), layers.Dense(3), judge])
    optimizers = [keras.optimizers.SGD(0.1) for _ in range(2)]
    with stepcheck.watch(made, data=(X, Y), loss="mse") as report:
        for start in range(0, 24, 8):
            for optimizer, judge.trainable in zip(
                optimizers, (True, False), strict=True
            ):
                variables = (
                    judge.trainable_variables or made.trainable_variables
                )
                with tf.GradientTape() as tape:
                    loss = ops.mean(
                        (
                            made(X[start : start + 8], training=True)
                            - Y[start : start + 8]
                        )
                        ** 2
                    )
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, variables), variables, strict=True)
                )
    assert (report.findings, report.judged) == ([], [])
    assert Reason.THAWED in reasons(report)


def test_a_model_that_is_frozen_at_the_end_is_judged_as_it_was_trained():
    """As the discriminator of a GAN is, while the generator is trained."""
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        for epoch in range(2):
            for rows in (
                np.random.default_rng(epoch).permutation(24).reshape(3, 8)
            ):
                model.trainable = True
                model.train_on_batch(X[rows], Y[rows])
                model.trainable = False
    assert report.is_right, str(report)
    assert not any(layer.trainable for layer in model.layers)


@pytest.mark.skipif(
    ENGINE != "tensorflow", reason="on JAX, Keras refuses to train"
)
def test_fit_trains_the_layers_that_it_was_compiled_for_also_when_it_is_watched():
    """A new training function would train others, or none: the old one is kept, and not judged."""
    ended = []
    for is_watched in (False, True):
        keras.utils.set_random_seed(1)
        model = network()
        model.layers[0].trainable = False
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0, shuffle=False)
        model.layers[0].trainable = True
        watch = stepcheck.watch(model, (X, Y)) if is_watched else nullcontext()
        with watch as report:
            model.fit(X, Y, verbose=0, shuffle=False)
        ended.append([ops.convert_to_numpy(v) for v in model.variables])
    for one, two in zip(*ended, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (report.findings, report.judged) == ([], [])
    assert Reason.OUTLINED in reasons(report)


def test_a_printed_loss_that_is_passed_later_is_judged_by_the_whole_log():
    base, model = two_parts()
    with stepcheck.watch(
        model, (X, CLASSES), "sparse_categorical_crossentropy"
    ) as report:
        base.trainable = False
        fitted(model, 1e-2)
        base.trainable = True
        fitted(model, 1e-3)
    first = str(report)
    report.printed(loss=[1.0, 1.0, 1.0])
    assert str(report) == first


# ---- two optimizers ----


@pytest.mark.parametrize("factor", [1, 3])
def test_two_optimizers_of_other_variables_make_one_update(factor):
    model = network()
    own = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)
    parts = [layer.trainable_variables for layer in model.layers]
    for optimizer, variables in zip(own, parts, strict=True):
        optimizer.build(variables)

    def move(variables, gradients):
        body, head = [factor * g for g in gradients[:2]], gradients[2:]
        for optimizer, held, grads in zip(
            own, parts, (body, head), strict=True
        ):
            optimizer.apply([*map(keras.ops.array, grads)], held)

    with stepcheck.watch(model, (X, Y), loss="mse") as report:
        descend(model, lambda out, y: ops.mean((out - y) ** 2), (X, Y), 8, move)
    assert report.as_json()["updates"] == 6
    assert bool(report.findings) == (factor != 1), str(report)
    assert Stage.GRADIENT in report.judged


@pytest.mark.skipif(ENGINE != "tensorflow", reason="gradients by a tape")
@pytest.mark.parametrize("is_reptile", [False, True])
def test_an_inner_step_of_meta_learning_is_no_fault(is_reptile):
    import tensorflow as tf

    model = network()
    inner, outer, variables = (
        keras.optimizers.SGD(0.1),
        keras.optimizers.Adam(0.01),
        model.trainable_variables,
    )
    for each in (inner, outer):
        each.build(variables)

    def taken(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                (model(X[rows], training=True) - Y[rows]) ** 2
            )
        return tape.gradient(loss, variables)

    with stepcheck.watch(model, (X, Y), optimizer=outer) as report:
        for order in np.random.default_rng(1).permuted(
            [np.arange(24)] * 2, axis=1
        ):
            for rows in order.reshape(3, 2, 4):
                start = [v.numpy() for v in variables]
                inner.apply(taken(rows[0]), variables)
                way = [s - v for v, s in zip(variables, start, strict=True)]
                grads = way if is_reptile else taken(rows[1])
                for variable, value in zip(variables, start, strict=True):
                    variable.assign(value)
                outer.apply(grads, variables)
    assert report.findings == [], str(report)


# ---- time ----


def test_what_is_judged_is_shown_again_and_again():
    lines = []
    with progress.shown(every=0.01, tell=lines.append):
        progress.NOW.stage = "the gradients"
        until = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(lines) >= 3
    assert lines[-1].startswith("stepcheck: judging for 0 s, now the gradients")


def test_judging_shows_its_stages(monkeypatch):
    stages = []
    monkeypatch.setattr(
        progress._Progress,
        "__setattr__",
        lambda self, name, value: stages.append(value),
    )
    assert compiled("sparse_categorical_crossentropy").has_seen
    assert {*stages} >= {Stage.ROWS, Stage.GRADIENT, Stage.STEP}
