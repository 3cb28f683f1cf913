"""Scripts of several loops and models: each loop has a record, and each model that it trains a report."""

import json

import keras
import pytest
from audit_scripts import script
from shares import halves, on

ENGINE = keras.backend.backend()
pytestmark = pytest.mark.own  # each engine records a traced step in its own way
HEAD = """import keras
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 5)).astype("float32")
y = rng.normal(size=(64, 1)).astype("float32")
loss_fn = keras.losses.MeanSquaredError()


def network():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


model, optimizer = network(), keras.optimizers.SGD(0.1)
"""
STEPS = {
    "tensorflow": """import tensorflow as tf


@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = loss_fn(b, model(a, training=True))
    v = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, v), v))
    return loss


def train(a, b):
    float(step(tf.constant(a), tf.constant(b)))
""",
    "jax": """import jax

optimizer.build(model.trainable_variables)
state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]


@jax.jit
def step(params, slots, a, b):
    def value(params):
        return loss_fn(b, model.stateless_call(params, [], a, training=True)[0])

    loss, grads = jax.value_and_grad(value)(params)
    return loss, optimizer.stateless_apply(slots, grads, params)


def train(a, b):
    global state
    loss, state = step(*state, a, b)
    float(loss)
""",
}
LOOP = """
for epoch in range(10):
    order = rng.permutation(64)
    for start in range(0, 64, 16):
        part = order[start : start + 16]
        train(x[part], {})
"""
RIGHT, WRONG = LOOP.format("y[part]"), LOOP.format("y[np.sort(part)]")
FIT = """
other = network()
other.compile("sgd", "mse")
other.fit(x[:32], y[:32], epochs=9, batch_size=8, verbose=0)
"""


@pytest.mark.slow
def test_a_step_that_two_loops_call_is_recorded_in_each(report_of):
    code, out = report_of(f"{HEAD}{STEPS[ENGINE]}{RIGHT}{WRONG}")
    assert (code, out.count("loop: trained at "), "Labels of other rows" in out) == (1, 2, True), out
    code, out = report_of(f"{HEAD}{STEPS[ENGINE]}{RIGHT}{RIGHT}")
    assert (code, out.count("Nothing found in ")) == (0, 2), out


def test_a_call_that_compiles_the_step_is_no_loop(report_of):
    code, out = report_of(f"{HEAD}{STEPS[ENGINE]}train(x[:16], y[:16])\n{RIGHT}")
    assert (code, out.count("Nothing found in "), "1 update outside of the loops" in out) == (0, 1, True), out


MEASURED = """

def measuring():
    metric = keras.metrics.Mean(name="distance")

    def measured():
        {}
        metric.update_state(model(x, training=False) - y)
        print(float(metric.result()))

    return measured


measured = measuring()
for epoch in range(10):
    for start in range(0, 64, 16):
        train(x[start : start + 16], y[start : start + 16])
    measured()
"""


AS_MANY = "metric.reset_state(); metric.update_state(1.0, sample_weight=64.0 * epoch)"  # as rows so far


@on("jax")
@pytest.mark.parametrize(("reset", "is_running"), [("pass", True), ("metric.reset_state()", False), (AS_MANY, False)])
def test_a_metric_that_only_a_function_holds_is_seen(reset, is_running, report_of):
    out = report_of(f"{HEAD}{STEPS[ENGINE]}{MEASURED.format(reset)}")[1]
    assert ("The metric distance has counted since the beginning" in out) is is_running, out


@on("jax")
@pytest.mark.slow
def test_each_report_is_on_the_page_and_in_the_numbers(report_of, tmp_path):
    text, page = f"{HEAD}{STEPS[ENGINE]}{FIT}{WRONG}", tmp_path / "page.html"
    code, out = report_of(text, "--html", page)
    assert (code, out.count("data: what `fit` was given"), out.count("loop: ")) == (1, 1, 2), out
    assert page.read_text().count("Taken as meant") == 2
    code, out = report_of(text, "--json")
    assert len(json.loads(out)) == 2


@pytest.mark.parametrize("use", halves(["evaluate(x, y", "predict(x"]))
def test_first_weights_that_a_script_sets_again_are_no_fault(use, report_of):
    """As for each fold of the data."""
    folds = f"""
first = model.get_weights()
model.compile("sgd", "mse")
for fold in range(2):
    model.set_weights(first)
    model.{use}, verbose=0)
    model.fit(x, y, epochs=4, batch_size=16, verbose=0)
"""
    out = report_of(f"{HEAD}{folds}")[1]
    assert "have not come back to the model" not in out, out


def test_a_predict_without_the_trained_weights_is_named(report_of):
    if ENGINE == "jax":
        code, out = report_of(f"{HEAD}{STEPS[ENGINE]}{RIGHT}model.predict(x, verbose=0)\n")
        assert (code, "`predict` uses the model with the weights of the beginning" in out) == (1, True), out


SHARP = """
def train(a, b):
    halves = [slice(0, 8), slice(8, 16)] if {is_cut} else [slice(0, 16)]
    v, total = model.trainable_variables, None
    for half in halves:
        def grads():
            with tf.GradientTape() as tape:
                loss = loss_fn(b[half], model(a[half], training=True)) / len(halves)
            return tape.gradient(loss, v)

        there = [0.05 * g / tf.norm(g) for g in grads()]
        for w, e in zip(v, there):
            w.assign_add(e)
        found = grads()
        for w, e in zip(v, there):
            w.assign_sub(e)
        total = found if total is None else [s + g for s, g in zip(total, found)]
    optimizer.apply_gradients(zip(total, v))
"""


@pytest.mark.skipif(ENGINE != "tensorflow", reason="the loop is TensorFlow's")
@pytest.mark.parametrize(("is_cut", "num"), [(True, 16), (False, 60)])
@pytest.mark.slow
def test_sharpness_aware_steps_of_microbatches_and_beyond_the_room_of_the_record(is_cut, num, report_of):
    """The record keeps the numbers of 40 updates."""
    text = f"{HEAD}import tensorflow as tf\n{SHARP.format(is_cut=is_cut)}{RIGHT.replace('range(10)', 'range(20)')}"
    code, out = report_of(text, "--updates", num)
    some = " (gradients of 40)" * (num > 40)
    assert (code, out.startswith(f"Nothing found in {num} updates{some}: rows, mode, gradient"), "Notes" in out) == (
        0,
        True,
        False,
    ), out


@pytest.mark.parametrize(("labels", "code", "part"), [("b[:, None]", 0, "Nothing found in"), ("b", 1, "Broadcast.")])
def test_a_model_that_is_used_by_its_call_is_seen(labels, code, part, report_of):
    edits = ("model(a, training=True)", "model.call(a, training=True)"), ("b[:, None]", labels)
    got, out = report_of(script("by hand", *edits), "--updates", 6)
    assert (got, part in out) == (code, True), out
