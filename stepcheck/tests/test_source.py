"""The line of a loss is read off the source, from the line on which the model is called."""

import pytest

from stepcheck.user_code.source import line_of_loss
from stepcheck.values import Line

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

def of_several(tv, a, b, is_sum):
    output = model.stateless_call(tv, [], a)
    if is_sum:
        return sum((b - output) ** 2)
    return mean((b - output) ** 2)

def in_branches(tv, a, b, is_sum):
    output = model.stateless_call(tv, [], b)
    if is_sum:
        loss = sum((b - output) ** 2)
    else:
        loss = mean((b - output) ** 2)
    return loss

def of_slopes(a, b):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(a)
            out = model(a)
        slope = inner.gradient(out, a)
        loss = loss_fn(b, out) + tf.reduce_sum(slope**2)
    grads = tape.gradient(loss, model.trainable_variables)
"""


@pytest.mark.parametrize(
    ("called", "is_penalty", "found"),
    [
        (
            "output = model(a, training=True)",
            False,
            "loss = mean((b - output) ** 2)",
        ),
        (
            "output = model(a, training=True)",
            True,
            "full = loss + sum(model.losses)",
        ),
        ("step(x, y)", False, "loss = mean((b - output) ** 2)"),
        (
            "output, ntv = model.stateless_call(tv, ntv, a)",
            False,
            "error = mean((b - output) ** 2)",
        ),
        (
            "output, ntv = model.stateless_call(tv, ntv, a)",
            True,
            "error += sum(model.losses)",
        ),
        (
            "output = model.stateless_call(tv, [], a)[0]",
            False,
            "return mean((b - output) ** 2)",
        ),
        ("output = model(part)", False, ""),
        (
            "output = model.stateless_call(tv, [], a)",
            False,
            "",
        ),  # of two results one came
        ("output = model.stateless_call(tv, [], b)", False, "return loss"),
        (
            "out = model(a)",
            False,
            "loss = loss_fn(b, out) + tf.reduce_sum(slope**2)",
        ),
    ],
)
def test_the_line_of_a_loss(called, is_penalty, found, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(TEXT)
    number = [line.strip() for line in TEXT.splitlines()].index(called) + 1
    line = line_of_loss(Line(str(path), number), is_penalty=is_penalty)
    assert (line.text if line else "") == found


def test_a_source_that_cannot_be_read_has_no_line(tmp_path):
    assert line_of_loss(Line(str(tmp_path / "none.py"), 3)) is None
    assert line_of_loss(None) is None
