"""The line of a finding: one that has run, of the loss or of the step."""

import runpy

import keras
import numpy as np
import pytest

import stepcheck
from stepcheck.faults import Fault
from stepcheck.user_code.source import line_of_loss
from stepcheck.values import Line

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
FAULTS = {"ascent": Fault.ASCENT, "minus": Fault.ASCENT, "means": Fault.MEAN_OF_MEANS}

ON_JAX = """
import jax, keras

def train(model, x, y, how):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    def one(tv, a, b):
        values = (model.stateless_call(tv, [], a, training=True)[0] - b) ** 2
        if how == "mean": return values.mean()
        if how == "sum": return values.sum()
        if how == "minus": return -values.mean()
        if how == "means": return values.mean() / 2
        return values.mean()
    def other(tv, a, b):
        values = (model.stateless_call(tv, [], a, training=True)[0] - b) ** 2
        if how == "branch of the mean":
            loss = values.mean()
        elif how == "branch of the sum":
            loss = values.sum()
        else:
            loss = values.mean() - 0
        return loss
    value = other if "branch" in how else one
    @jax.jit
    def step(tv, slots, a, b):
        if how == "means":
            parts = [jax.grad(value)(tv, a[part], b[part]) for part in (slice(5), slice(5, 8))]
            return optimizer.stateless_apply(slots, [g + h for g, h in zip(*parts)], tv)
        loss, grads = jax.value_and_grad(value)(tv, a, b)
        if how == "ascent": norm = sum((g * g).sum() for g in grads)
        if how == "ascent": return [w + 0.1 * g for w, g in zip(tv, grads)], slots
        return optimizer.stateless_apply(slots, grads, tv)
    tv, slots = ([v.value for v in each] for each in (model.trainable_variables, optimizer.variables))
    for start in [*range(0, 48, 8)] * 2:
        tv, slots = step(tv, slots, x[start : start + 8], y[start : start + 8])
"""
ON_TENSORFLOW = """
import keras, tensorflow as tf

def train(model, x, y, how):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    def step(a, b):
        with tf.GradientTape() as tape:
            values = (model(a, training=True) - b) ** 2
            if how == "mean": loss = tf.reduce_mean(values)
            if "sum" in how: loss = tf.reduce_sum(values)
            if how == "ascent": loss = tf.reduce_mean(values)
            if how == "minus": loss = -tf.reduce_mean(values)
        grads = tape.gradient(loss, model.trainable_variables)
        if how == "ascent": norm = sum(tf.reduce_sum(g * g) for g in grads)
        if how == "ascent":
            for v, g in zip(model.trainable_variables, grads): v.assign_add(0.1 * g)
        else:
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
    def accumulate(a, b):
        total = [tf.zeros_like(v) for v in model.trainable_variables]
        for part in (slice(5), slice(5, 8)):
            with tf.GradientTape() as tape:
                values = (model(a[part], training=True) - b[part]) ** 2
                if how == "right": loss = tf.reduce_sum(values) / 8
                if how == "means": loss = tf.reduce_mean(values) / 2
            total = [t + g for t, g in zip(total, tape.gradient(loss, model.trainable_variables))]
        optimizer.apply_gradients(zip(total, model.trainable_variables))
    step = accumulate if how == "means" else step
    step = tf.function(step) if "traced" in how else step
    for start in [*range(0, 48, 8)] * 2:
        step(x[start : start + 8], y[start : start + 8])
"""
LINES = {
    "jax": {
        "sum": 'if how == "sum": return values.sum()',
        "minus": 'if how == "minus": return -values.mean()',
        "means": 'if how == "means": return values.mean() / 2',
        "branch of the sum": "loss = values.sum()",
        "ascent": 'if how == "ascent": return [w + 0.1 * g for w, g in zip(tv, grads)], slots',
    },
    "tensorflow": {
        "sum": 'if "sum" in how: loss = tf.reduce_sum(values)',
        "minus": 'if how == "minus": loss = -tf.reduce_mean(values)',
        "means": 'if how == "means": loss = tf.reduce_mean(values) / 2',
        "traced sum": 'if "sum" in how: loss = tf.reduce_sum(values)',
        "ascent": "for v, g in zip(model.trainable_variables, grads): v.assign_add(0.1 * g)",
    },
}[keras.backend.backend()]


@pytest.mark.parametrize("how", LINES)
def test_the_line_of_a_finding_has_run(how, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(ON_JAX if keras.backend.backend() == "jax" else ON_TENSORFLOW)
    train = runpy.run_path(str(path))["train"]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with stepcheck.watch(model, data=(X, Y), loss="mse", optimizer=keras.optimizers.SGD(0.1)) as report:
        train(model, X, Y, how)
    (found,) = report.findings
    assert (found.where.line.text, found.fault) == (LINES[how], FAULTS.get(how, Fault.NEVER_DIVIDED))


TEXT = """
def train(model, x, y):
    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            output = model(a, training=True)
            loss = mean((b - output) ** 2)
            full = loss + sum(model.losses)
        grads = tape.gradient(full, model.trainable_variables)
        return loss
    for i in range(3):
        step(x, y)
    return model

def value_at(tv, ntv, a, b):
    output, ntv = model.stateless_call(tv, ntv, a)
    error = mean((b - output) ** 2)
    error += sum(model.losses)
    return error, ntv

def direct(tv, a, b):
    output = model.stateless_call(tv, [], a)[0]
    return mean((b - output) ** 2)

def by_layers(model, x):
    for part in x:
        output = model(part)
    return output
"""


@pytest.mark.parametrize(
    ("called", "is_penalty", "found"),
    [
        ("output = model(a, training=True)", False, "loss = mean((b - output) ** 2)"),
        ("output = model(a, training=True)", True, "full = loss + sum(model.losses)"),
        ("step(x, y)", False, "loss = mean((b - output) ** 2)"),
        ("output, ntv = model.stateless_call(tv, ntv, a)", False, "error = mean((b - output) ** 2)"),
        ("output, ntv = model.stateless_call(tv, ntv, a)", True, "error += sum(model.losses)"),
        ("output = model.stateless_call(tv, [], a)[0]", False, "return mean((b - output) ** 2)"),
        ("output = model(part)", False, ""),
    ],
)
def test_the_line_of_a_loss_is_read_off_the_source(called, is_penalty, found, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(TEXT)
    number = [line.strip() for line in TEXT.splitlines()].index(called) + 1
    line = line_of_loss(Line(str(path), number), is_penalty=is_penalty)
    assert (line.text if line else "") == found
    assert line_of_loss(Line(str(tmp_path / "none.py"), 3)) is None


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
