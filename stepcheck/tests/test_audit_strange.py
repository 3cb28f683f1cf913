"""Faults that no list has: what was done to which quantity is solved for, with its number."""

import re
from dataclasses import replace

import keras
import pytest
from audit_mutants import DIVIDE
from audit_route_mutants import ERROR, QUIET, changed
from audit_routes import LOOPS
from shares import share
from test_audit import audited, edited

from stepcheck.faults import Fault
from stepcheck.values import MEANT, NOTHING, Change, Changed, Count, Detail, Group, Known, Rows

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
WHOLE = Known.WEIGHT_OF_UPDATE
MEAN_OF = Count(below=(WHOLE,))
FIRST_ROW = Rows(Group.FIRST_ROW_OF_BATCH)


def rows(count):
    return Change(Fault.ROWS_COUNTED_OTHERWISE, count=count)


def gradient(detail, *numbers, names=()):
    return Change(Fault.GRADIENT_CHANGED, detail, numbers, names)


def times(number, some=None):
    return Count(number, MEANT.above, rows=some, others=None if some is None else MEANT)


CASES = {
    "every third row twice": (
        "accumulated",
        counted(f"1 + ops.cast({ROW} % 3 == 0, 'int32')"),
        rows(times(2.0, Rows(Group.EACH_NTH_ROW, (3, 1)))),
    ),
    "first row three times": (
        "accumulated",
        counted(f"1 + 2 * ops.cast({ROW} == 0, 'int32')"),
        rows(times(3.0, FIRST_ROW)),
    ),
    "first row left out": ("accumulated", counted(f"{ROW} > 0"), rows(replace(NOTHING, rows=FIRST_ROW, others=MEANT))),
    "divided by one more": (
        "accumulated",
        [(DIVIDE, "t / (len(rows) + 1) + o")],
        rows(Count(below=((WHOLE, Changed.PLUS_ONE),), instead=MEAN_OF)),
    ),
    "divided by the root": (
        "accumulated",
        [(DIVIDE, "t / len(rows) ** 0.5 + o")],
        rows(Count(below=((WHOLE, Changed.ROOT),), instead=MEAN_OF)),
    ),
    "penalty 2.5 times": (
        "accumulated",
        [(DIVIDE, "t / len(rows) + 2.5 * o")],
        Change(Fault.PENALTY_COUNTED_OTHERWISE, count=times(2.5)),
    ),
    "twice as much": ("accumulated", [(DIVIDE, "2 * (t / len(rows) + o)")], rows(times(2.0))),
    "second microbatch left out": (
        "accumulated",
        [(ADD, f"{ADD} if part is not parts[1] else total")],
        rows(replace(NOTHING, rows=Rows(Group.MICROBATCH, (2,)), others=MEANT)),
    ),
    "each sum clipped": (
        "accumulated",
        [(ADD, ADD.replace(", grads)", f", {SHORTER})"))],
        Change(Fault.CLIP_PER_MICROBATCH, Detail.CLIPPED_BY_NORM),
    ),
    "one layer halved": (
        "deep",
        [changed("[g / 2 if g.shape == (5, 4) else g for g in grads]")],
        gradient(Detail.TIMES, 0.5, names=("kernel",)),
    ),
    "one sign": ("simple", [changed("[*grads[:-1], -grads[-1]]")], gradient(Detail.TIMES, -1.0, names=("bias",))),
    "signs alone": ("simple", [changed("[ops.sign(g) for g in grads]")], gradient(Detail.SIGN)),
    "centred": ("simple", [changed("[g - ops.mean(g) for g in grads]")], gradient(Detail.CENTRED)),
    "clipped, without the penalty": (
        "clipped",
        [(PENALTY, "")],
        Change(Fault.PENALTY_FORGOTTEN, count=NOTHING, bound=0.4),
    ),
    "two updates old": (
        "deep",
        [changed("(held.append(grads), held.pop(0))[1]"), BEFORE],
        Change(Fault.STALE_GRADIENTS, Detail.UPDATES_BEFORE, (2,)),
    ),
    "labels two rows on": (
        "accumulated",
        [("y[part]", "np.roll(y[part], -2)")],
        Change(Fault.LABELS_SHIFTED, Detail.OF_ROW_IN_BATCH, (2,)),
    ),
    "labels moved": (
        "deep",
        loss(f"{'tf.reduce_mean' if IS_TF else 'jnp.mean'}(({LABELS} - 0.3 - output) ** 2)"),
        Change(Fault.OTHER_LABELS, Detail.ADDED, (-0.3,)),
    ),
    "outputs smaller": (
        "deep",
        loss(f"{'tf.reduce_mean' if IS_TF else 'jnp.mean'}(({LABELS} - 0.7 * output) ** 2)"),
        Change(Fault.OTHER_OUTPUTS, Detail.SCALED, (0.7, 0.0)),
    ),
    "Huber": (
        "deep",
        loss(f"keras.losses.Huber()({LABELS}, output)"),
        Change(Fault.ANOTHER_LOSS, Detail.OTHER_FUNCTION, names=("Huber()",)),
    ),
    "absolute error": (
        "deep",
        loss(f"keras.losses.MeanAbsoluteError()({LABELS}, output)"),
        Change(Fault.ANOTHER_LOSS, Detail.OTHER_FUNCTION, names=("MeanAbsoluteError()",)),
    ),
    "tanh more": (
        "deep",
        loss(f"keras.losses.MeanSquaredError()({LABELS}, ops.tanh(output))"),
        Change(Fault.OTHER_OUTPUTS, Detail.FUNCTION_AGAIN, names=("tanh",)),
    ),
    "smoothed": (
        "logits",
        [("from_logits=True", "from_logits=True, label_smoothing=0.3")],
        Change(Fault.OTHER_LABELS, Detail.SMOOTHED, (0.3, 0.0)),
    ),
    "focal": (
        "logits",
        [("losses.CategoricalCrossentropy(", "losses.CategoricalFocalCrossentropy(")],
        Change(Fault.ANOTHER_LOSS, Detail.OTHER_FUNCTION, names=("CategoricalFocalCrossentropy(from_logits=True)",)),
    ),
    "root of the weights": ("weighted", weights("w[rows] ** 0.5"), Change(Fault.OTHER_WEIGHTS, Detail.ROOT)),
    "weights inverted": ("weighted", weights("1 / w[rows]"), Change(Fault.OTHER_WEIGHTS, Detail.INVERTED)),
}


def rounded(count):
    """Return a count with numbers of three digits."""
    return None if count is None else replace(count, number=float(f"{count.number:.3g}"))


def bare(name):
    """Return the name of a variable without its layer's."""
    return re.sub(r"sequential_?\d*/dense_?\d*/", "", name)


@pytest.mark.parametrize("name", share(CASES))
@pytest.mark.slow
def test_what_no_list_has_is_solved_for(name, tmp_path):
    loop, edits, meant = CASES[name]
    (cause,) = audited(LOOPS[loop], edited(loop, edits), tmp_path).causes
    change, proof = cause.finding.change, cause.proof
    assert (change.fault, change.detail) == (meant.fault, meant.detail)
    assert rounded(change.count) == meant.count
    assert tuple(map(bare, change.names))[: len(meant.names)] == meant.names
    if meant.numbers:
        assert change.numbers == pytest.approx(meant.numbers, rel=1e-2, abs=1e-3)
    assert change.bound == pytest.approx(meant.bound, rel=1e-2)
    assert cause.stage == "gradient"
    assert change.is_known == (3 * cause.with_change <= cause.without)
    assert proof is not None
    assert cause.fix
