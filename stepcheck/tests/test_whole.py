"""The audit of right loops that it once accused or assured: unused passes, losses of whole batches, two stages."""

import time

import keras
import numpy as np
import pytest
from audit_scripts import HEAD, UPDATE
from keras import layers, ops

import stepcheck
from stepcheck.report import progress

ENGINE = keras.backend.backend()
ONLY_TENSORFLOW = pytest.mark.skipif(ENGINE != "tensorflow", reason="the loop is TensorFlow's")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 5)).astype("float32")
CLASSES = np.tile(np.arange(3, dtype="int32"), 16)

# ---- forward passes whose gradient is not taken ----

LAST_ALONE = f"""{HEAD}{UPDATE}
x = rng.normal(size=(96, 5)).astype("float32")
y = x.sum(1, keepdims=True)
model = network()
loss_fn = keras.losses.MeanSquaredError()


def value(model, a, b):
    return loss_fn(b, model(a, training=True))


step = update(model, keras.optimizers.SGD(0.05), value)
for epoch in range(4):
    for i, rows in enumerate(np.split(rng.permutation(96), 6)):
        if i == 5:
            step(x[rows], y[rows])
        else:
            loss = value(model, x[rows], y[rows])
"""
UNUSED = "20 of 24 forward passes in training mode gave no gradient. Nothing else found in 4 updates: mode, gradient"


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
    return ops.mean((ops.cast(ops.reshape(labels, (-1, 1)), "float32") - outputs) ** 2)


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
    "triplet in a class": as_class(triplet, "call"),
    "a mean in a class": as_class(squared, "call"),
}


def compiled(loss, order=slice(None), **others):
    """Return the report of a right `fit` of a compiled loss."""
    x, y = X[order], CLASSES[order]
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05, **others), loss)
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return report


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_of_a_whole_batch_is_judged_as_a_whole(name):
    report = compiled(LOSSES[name])
    assert (report.causes, "gradient" in report.as_json()["judged"]) == ([], True), str(report)


def test_a_loss_of_a_batch_is_known_where_the_first_rows_have_one_class():
    report = compiled(triplet, np.argsort(CLASSES, kind="stable"))
    assert report.causes == [], str(report)


def test_microbatches_of_a_loss_of_a_batch_are_not_judged():
    report = compiled(LOSSES["a class that is called"], gradient_accumulation_steps=3)
    assert report.causes == [], str(report)
    assert report.first_line.startswith("Not judged: no gradient"), str(report)
    assert any("is not the mean of its rows' losses" in told for told in report.unseen)


def test_microbatches_of_a_mean_in_a_class_are_judged():
    report = compiled(LOSSES["a mean in a class"], gradient_accumulation_steps=3)
    assert report.first_line.startswith("Nothing found in 2 updates"), str(report)


# ---- what is trained changes ----


def two_parts():
    base = keras.Sequential([keras.Input((5,)), layers.Dense(4, "relu"), layers.Dense(4, "relu")])
    inputs = keras.Input((5,))
    return base, keras.Model(inputs, layers.Dense(4, "softmax")(base(inputs)))


def by_variable(base, *, trainable):
    for variable in base.variables:
        variable.trainable = trainable


def trained(model, rate):
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    model.fit(X, CLASSES, batch_size=16, epochs=2, verbose=0)


CHANGED = "Which variables are trainable changes inside of the loop; judged is what comes after the last change."


def test_a_second_stage_of_as_many_variables_is_judged():
    base, model = two_parts()
    with stepcheck.watch(model, (X, CLASSES), "sparse_categorical_crossentropy") as report:
        base.trainable = False
        trained(model, 1e-2)
        base.layers[0].trainable = True
        model.layers[-1].trainable = False
        trained(model, 1e-3)
    assert (report.causes, CHANGED in report.notes) == ([], True), str(report)
    assert report.first_line.startswith("Nothing found in 6 updates"), str(report)


STAGES = f"""{HEAD}
x = rng.normal(size=(48, 5)).astype("float32")
y = np.tile(np.arange(3), 16)
model = network(num=3, activation="softmax")


def stage(rate):
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)


FREEZE
stage(1e-2)
THAW
stage(1e-3)
"""
FREEZE = "for variable in model.layers[0].variables: variable.trainable = {}"


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


def test_judging_names_its_stages(monkeypatch):
    stages = []
    monkeypatch.setattr(progress._Progress, "__setattr__", lambda self, name, value: stages.append(value))
    assert compiled("sparse_categorical_crossentropy").has_seen
    assert {"the order of the rows", "the gradients", "the optimizer steps"} <= {*stages}


WITHOUT_SCOPE = f"""{HEAD}
import tensorflow as tf

x = rng.normal(size=(48, 5)).astype("float32")
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
with strategy.scope():
    model = network()
optimizer = keras.optimizers.Adam()


def train_step(a):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(a, training=True) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


@tf.function
def distributed(a):
    strategy.run(train_step, args=(a,))


for a in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(16)):
    distributed(a)
"""
