"""The audit: the first line of a report is a cause, a note that is very likely the fault, or what was judged."""

import keras
import numpy as np
import pytest
from audit_scripts import HEAD, script

import wholestep as ws
from wholestep import cli
from wholestep.audit import judge
from wholestep.audit.log import Line
from wholestep.audit.source import line_of_loss

ONLY_TENSORFLOW = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the loop is TensorFlow's")


@pytest.fixture
def audit(tmp_path, capsys, monkeypatch):
    """Return a function that audits a text, and gives (exit code, the report)."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        (tmp_path / "train.py").write_text(text)
        code = cli.main(["audit", "train.py", *map(str, arguments)])
        return code, capsys.readouterr().out

    return run


def trained(**others):
    """Return the report of a right `fit`."""
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with ws.audit(model, (x, x[:, :1]), **others) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    return report


def test_what_was_judged_is_said():
    report = trained()
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."
    assert str(report).startswith(report.first_line)
    assert report.as_json()["judged"] == ["rows", "mode", "gradient", "step", "state"]


def test_half_of_a_model_that_gets_no_gradient_is_said_first(audit):
    edit = ("model.trainable_variables", "model.trainable_variables[2:]")
    code, out = audit(script("by hand", edit), "--updates", 6)
    said = next(line for line in out.splitlines() if "variables get no gradient" in line)
    assert (code, "Half of the model is never trained: 2 of 4" in said, "\n1. " in out) == (1, True, False), out
    assert out.index(said) < out.index("Taken as meant")


def test_a_side_check_that_fails_is_a_line_and_no_traceback(monkeypatch):
    monkeypatch.setattr(judge, "state", lambda *given: divmod(1, 0))
    report = trained()
    (told,) = report.unseen
    assert told.startswith("statistics and seeds: ZeroDivisionError: ")
    assert report.first_line.startswith("Nothing found in 6 updates: ")


DATA = """
x = rng.normal(size=(48, 5)).astype("float32")
y = (x.sum(1) > 0).astype("float32")[:, None]
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
import tensorflow as tf


def taken(a, b):
    with tf.GradientTape() as tape:
        loss = loss_fn(b, model(a, training=True))
    return tape.gradient(loss, model.trainable_variables)

"""
LOOP = """

for epoch in range(3):
    order = rng.permutation(48)
    for start in range(0, 48, 12):
        rows = order[start : start + 12]
        step(x[rows], y[rows])
"""
MOMENTUM = """
model = network()
speed = [tf.zeros_like(v) for v in model.trainable_variables]


def step(a, b):
    for i, (v, g) in enumerate(zip(model.trainable_variables, taken(a, b))):
        speed[i] = 0.9 * speed[i] - 0.05 * g
        v.assign_add(speed[i])
"""
RATE_ZERO = """
model, count = network(), 0


def step(a, b):
    global count
    for v, g in zip(model.trainable_variables, taken(a, b)):
        v.assign_sub(0.1 * min(1, count / 6) * (count % 5 > 0) * g)
    count += 1
"""
SHARPNESS = """
model, optimizer = network(), keras.optimizers.SGD(0.05)


def step(a, b):
    there = [0.05 * g / tf.norm(g) for g in taken(a, b)]
    for v, e in zip(model.trainable_variables, there):
        v.assign_add(e)
    grads = taken(a, b)
    for v, e in zip(model.trainable_variables, there):
        v.assign_sub(e)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
ON_BOTH = """
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
with strategy.scope():
    model, optimizer = network(), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def one(a, b):
    optimizer.apply_gradients(zip(taken(a, b), model.trainable_variables))


@tf.function
def both(a, b):
    strategy.run(one, args=(a, b))


def step(a, b):
    both(tf.constant(a), tf.constant(b))
"""
OWN_STEP = "Not judged: the optimizer step is your own. Nothing found in "
LOOPS = {
    "momentum by hand": (MOMENTUM, 2, OWN_STEP),
    "a rate of zero": (RATE_ZERO, 2, OWN_STEP),
    "sharpness": (SHARPNESS, 2, "Not judged: no gradient of an update could be computed again. Nothing found in "),
    "the same rows on both replicas": (ON_BOTH, 1, "Each of the 2 replicas gets the same rows, so an update is of"),
}


@ONLY_TENSORFLOW
@pytest.mark.parametrize("name", LOOPS)
def test_no_window_is_carried_that_no_gradient_proves(name, audit):
    text, code, part = LOOPS[name]
    got, out = audit(HEAD + DATA + text + LOOP)
    assert (got, out.startswith(part), "carried over" in out) == (code, True, False), out


def test_a_model_that_is_frozen_at_the_end_is_judged_as_it_was_trained():
    """As the discriminator of a GAN is, while the generator is trained."""
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with ws.audit(model, (x, x[:, :1])) as report:
        for start in [*range(0, 24, 8)] * 2:
            model.trainable = True
            model.train_on_batch(x[start : start + 8], x[start : start + 8, :1])
            model.trainable = False
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."
    assert not any(layer.trainable for layer in model.layers)


PENALTY = """
def step(a, b):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(a)
            out = model(a)
        slope = inner.gradient(out, a)
        loss = loss_fn(b, out) + tf.reduce_sum(slope**2)
    grads = tape.gradient(loss, model.trainable_variables)
"""


def test_the_inner_tape_of_a_gradient_penalty_is_not_that_of_the_loss(tmp_path):
    (tmp_path / "loop.py").write_text(PENALTY)
    line = line_of_loss(Line(str(tmp_path / "loop.py"), 6))
    assert line.text == "loss = loss_fn(b, out) + tf.reduce_sum(slope**2)"
