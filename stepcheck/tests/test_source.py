"""The line that a report shows: one that has run, of the loss or of the step."""

import importlib.util
import itertools

import keras
import numpy as np
import pytest

import stepcheck

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
COUNT = itertools.count()
NAMES = {"ascent": "ascent", "minus": "ascent", "means": "mean of means"}

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
def test_the_line_that_is_shown_has_run(how, tmp_path):
    path = tmp_path / f"loop_{next(COUNT)}.py"
    path.write_text(ON_JAX if keras.backend.backend() == "jax" else ON_TENSORFLOW)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with stepcheck.watch(model, data=(X, Y), loss="mse", optimizer=keras.optimizers.SGD(0.1)) as report:
        loop.train(model, X, Y, how)
    (cause,) = report.causes
    assert (cause.line.text, cause.name) == (LINES[how], NAMES.get(how, "never divided"))


SWAPPED = {
    "jax": ("stateless_apply(slots, grads, tv)", "stateless_apply(slots, grads[2:] + grads[:2], tv)"),
    "tensorflow": ("zip(grads, model", "zip(grads[2:] + grads[:2], model"),
}[keras.backend.backend()]


def test_swapped_gradients_are_told_in_pairs(tmp_path):
    path = tmp_path / "loop.py"
    text = ON_JAX if keras.backend.backend() == "jax" else ON_TENSORFLOW
    path.write_text(text.replace(*SWAPPED))
    spec = importlib.util.spec_from_file_location("swapped", path)
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    layers = [keras.layers.Dense(3, name="one"), keras.layers.Dense(3, name="two")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="sequential")
    with stepcheck.watch(model, data=(X, X), loss="mse", optimizer=keras.optimizers.SGD(0.1)) as report:
        loop.train(model, X, X, "mean")
    (cause,) = report.causes
    pairs = [("one", "two", "kernel"), ("one", "two", "bias"), ("two", "one", "kernel"), ("two", "one", "bias")]
    told = [f"{a}/{c} is that of {b}/{c}" for a, b, c in pairs]
    assert cause.explanation.replace("sequential/", "") == f"The gradient of {', that of '.join(told)}."
