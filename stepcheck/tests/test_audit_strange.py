"""Faults that no list has: the audit solves for them, and says what was done to what, by which number."""

import re

import keras
import pytest
from audit_mutants import DIVIDE
from audit_route_mutants import ERROR, QUIET, changed
from audit_routes import LOOPS
from shares import share
from test_audit import audited, edited

IS_TF = keras.backend.backend() == "tensorflow"
LABELS = "y[rows][:, None]" if IS_TF else "b[:, None]"
MEAN = f"{'tf.reduce_mean' if IS_TF else 'jnp.mean'}({ERROR} ** 2)"
PENALTY = " + sum(model.losses)" if IS_TF else " + sum(own)"
SUM = "ops.sum(error)"
ADD = "total = [t + g for t, g in zip(total, grads)]"
WEIGHTED = (
    ("sample_weight=w[rows]", "sample_weight={}") if IS_TF else ("x[rows], y[rows], w[rows])", "x[rows], y[rows], {})")
)
SHORTER = "(g * ops.minimum(1.0, 2 / sum(ops.sum(each**2) for each in grads) ** 0.5) for g in grads)"
BEFORE = ("    printed = []", "    printed, held = [], [[0 * v for v in model.trainable_variables]] * 2")


def loss(text):
    """Return edits that compute another loss."""
    return [(MEAN, text), QUIET]


def weights(text):
    """Return the edit that weighs rows otherwise."""
    return [(WEIGHTED[0], WEIGHTED[1].format(text))]


def counted(text):
    """Return the edit that counts the rows of a microbatch otherwise."""
    return [(SUM, f"ops.sum(error * ops.cast({text}, 'float32')[:, None])")]


ROW = "ops.arange(len(error))"
CASES = {
    "every third row twice": (
        "accumulated",
        counted(f"1 + ops.cast({ROW} % 3 == 0, 'int32')"),
        "2 times what it should for each 3. row, from row 1 on",
    ),
    "first row three times": (
        "accumulated",
        counted(f"1 + 2 * ops.cast({ROW} == 0, 'int32')"),
        "3 times what it should for the first row of each batch",
    ),
    "first row left out": ("accumulated", counted(f"{ROW} > 0"), "counts all but the first row of each batch"),
    "divided by one more": (
        "accumulated",
        [(DIVIDE, "t / (len(rows) + 1) + o")],
        "1 / (the number of rows of the update + 1) instead of 1 / ",
    ),
    "divided by the root": (
        "accumulated",
        [(DIVIDE, "t / len(rows) ** 0.5 + o")],
        "1 / sqrt(the number of rows of the update) instead of 1 / ",
    ),
    "penalty 2.5 times": ("accumulated", [(DIVIDE, "t / len(rows) + 2.5 * o")], "The penalty counts 2.5"),
    "twice as much": ("accumulated", [(DIVIDE, "2 * (t / len(rows) + o)")], "2 times what it should"),
    "second microbatch left out": (
        "accumulated",
        [(ADD, f"{ADD} if part is not parts[1] else total")],
        "not at all for microbatch 2",
    ),
    "each sum clipped": (
        "accumulated",
        [(ADD, ADD.replace(", grads)", f", {SHORTER})"))],
        "The gradient of each microbatch is clipped to the norm",
    ),
    "one layer halved": (
        "deep",
        [changed("[g / 2 if g.shape == (5, 4) else g for g in grads]")],
        "The gradient of kernel counts 0.5 times what it should",
    ),
    "one sign": ("simple", [changed("[*grads[:-1], -grads[-1]]")], "counts -1 times what it should"),
    "signs alone": ("simple", [changed("[ops.sign(g) for g in grads]")], "is replaced by its sign"),
    "centred": ("simple", [changed("[g - ops.mean(g) for g in grads]")], "has its mean taken off"),
    "clipped, without the penalty": (
        "clipped",
        [(PENALTY, "")],
        "The penalty counts not at all instead of once and the gradient is clipped to the norm 0.4",
    ),
    "two updates old": (
        "deep",
        [changed("(held.append(grads), held.pop(0))[1]"), BEFORE],
        "The gradient is that of the update 2 before",
    ),
    "labels two rows on": ("accumulated", [("y[part]", "np.roll(y[part], -2)")], "2 rows after in the batch"),
    "labels moved": (
        "deep",
        loss(f"{'tf.reduce_mean' if IS_TF else 'jnp.mean'}(({LABELS} - 0.3 - output) ** 2)"),
        "The labels have -0.3 added",
    ),
    "outputs smaller": (
        "deep",
        loss(f"{'tf.reduce_mean' if IS_TF else 'jnp.mean'}(({LABELS} - 0.7 * output) ** 2)"),
        "the outputs times 0.7",
    ),
    "Huber": ("deep", loss(f"keras.losses.Huber()({LABELS}, output)"), "The loss is Huber() instead of"),
    "absolute error": (
        "deep",
        loss(f"keras.losses.MeanAbsoluteError()({LABELS}, output)"),
        "The loss is MeanAbsoluteError()",
    ),
    "tanh more": (
        "deep",
        loss(f"keras.losses.MeanSquaredError()({LABELS}, ops.tanh(output))"),
        "The outputs go through one more tanh",
    ),
    "smoothed": (
        "logits",
        [("from_logits=True", "from_logits=True, label_smoothing=0.3")],
        "The labels are smoothed by 0.3 instead of 0",
    ),
    "focal": (
        "logits",
        [("losses.CategoricalCrossentropy(", "losses.CategoricalFocalCrossentropy(")],
        "The loss is CategoricalFocalCrossentropy(from_logits=True)",
    ),
    "root of the weights": ("weighted", weights("w[rows] ** 0.5"), "The sample weights come under a root"),
    "weights inverted": ("weighted", weights("1 / w[rows]"), "The sample weights are inverted"),
}


@pytest.mark.parametrize("name", share(CASES))
@pytest.mark.slow
def test_what_no_list_has_is_said_in_a_sentence(name, tmp_path):
    loop, edits, sentence = CASES[name]
    (cause,) = audited(LOOPS[loop], edited(loop, edits), tmp_path).causes
    told = re.sub(r"sequential_?\d*/dense_?\d*/", "", f"{cause.explanation} {cause.detail}")
    assert sentence in told, told
    assert (cause.stage, cause.is_known) == ("gradient", True)
    assert 3 * cause.with_change <= cause.without
    assert cause.fix
