"""`stepcheck run` runs scripts that know nothing of it, and says what is wrong with them by its exit code too."""

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from audit_scripts import HEAD, UPDATE, script
from scripts import lean
from shares import halves, later, share

import stepcheck
import wholestep as ws
from stepcheck import cli
from stepcheck.errors import SpecificationError
from stepcheck.keras import conclusion, scout
from stepcheck.keras.chain import joined
from stepcheck.keras.families import usual
from stepcheck.keras.listener import listener
from stepcheck.report.found import own_fault
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.loops import Watched
from stepcheck.trace.windows import Rows

ENGINE = keras.backend.backend()


WRONG = {
    "in main": ("training=True", "training=False", None),
    "by hand": ("b[:, None]", "b", "broadcast"),
    "augmented": ("loss_fn(b, model", "8 * loss_fn(b, model", "never divided"),
    "dataset": ("keras.ops.mean(", "keras.ops.sum(", "never divided"),
    "fit": ('"adam"', "keras.optimizers.Adam(RATE, gradient_accumulation_steps=3)", "schedule by microbatch"),
    "own": ("b[:, None]", "b", "broadcast"),
}
DATA = {"in main": "x_train, y_train, 40", "by hand": "x, y, 24", "augmented": "were given", "dataset": "Halves"}


@pytest.mark.parametrize("name", share(WRONG))
def test_a_right_script_is_clean_and_a_wrong_one_is_not(name, audit):
    code, out, _ = audit(script(name), "--updates", 6)
    assert (code, "Nothing found in " in out) == (0, True), out
    assert "Looked at 6 updates" in out
    assert DATA.get(name, "") in out
    old, new, cause = WRONG[name]
    if cause is not None:
        code, out, _ = audit(script(name, (old, new)), "--updates", 6)
        assert (code, cause in out.lower()) == (1, True), out


def test_the_order_of_rows_that_are_known_from_the_updates_alone_is_not_said(audit):
    _, out, _ = audit(script("augmented"), "--updates", 6)
    assert ("were given, 48 different rows" in out, "order of the data" in out) == (True, False), out


BUCKETS = f"""{HEAD}{UPDATE}
from keras import ops


def smooth(labels, out):
    return -ops.sum((0.9 * ops.one_hot(labels, 9) + 0.1 / 9) * ops.log_softmax(out), -1)


def value(model, a, b):
    out = model(a, training=True)
    mask = ops.cast(b != 0, "float32")
    return ops.sum(smooth(b, out) * mask) / ops.sum(mask)


model = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(9, 4), layers.Dense(9)])
step = update(model, keras.optimizers.Adam(0.01), value)
rows = [rng.integers(1, 9, size) for size in rng.permutation(np.repeat([3, 4, 5, 6], 12))]
for epoch in range(2):
    draw = np.random.default_rng(epoch)
    for width in draw.permutation([4, 6]):
        for part in np.split(draw.permutation([i for i, row in enumerate(rows) if 0 <= width - len(row) < 2]), 3):
            a = np.stack([np.pad(rows[i], (0, width - len(rows[i]))) for i in part]).astype("int32")
            step(a, 9 * (a > 0) - a)
"""


@pytest.mark.parametrize(("divisor", "told"), [("ops.sum(mask)", ""), ("len(b)", "counts 1 / the number of rows")])
def test_a_loss_by_hand_is_found_in_batches_of_several_widths(divisor, told, audit):
    _, out, _ = audit(BUCKETS.replace("/ ops.sum(mask)", f"/ {divisor}"))
    assert ("mode, gradient, step" in out, "loss: smooth at the places" in out) == (True, True), out
    assert (told in out, "Is that meant?" in out, "Error" in out) == (True, bool(told), False), out


OF_EQUAL_ROWS = f"""{HEAD}{UPDATE}
x = rng.normal(size=(60, 5)).astype("float32")
x[55:] = x[:5]
count = rng.integers(1, 90, 60)
logarithm, weight = np.log(count).astype("float32"), np.minimum(1, count / 50).astype("float32")
model = network()
model.compile("adam", "mse")


def value(model, a, b):
    y, w = b
    return keras.ops.mean(w * (model(a, training=True) - y) ** 2)


step = update(model, model.optimizer, value)
for epoch in range(2):
    for i, others in enumerate(rng.permutation(np.arange(5, 55)).reshape(5, 10)):
        rows = [i, 59 - i, *others]
        step(x[rows], (logarithm[rows], weight[rows]))
"""


@pytest.mark.parametrize("is_right", [True, False])
def test_labels_and_weights_are_found_where_some_rows_have_equal_inputs(is_right, audit):
    right = OF_EQUAL_ROWS.replace("y, w = b", "y, w = b[0][:, None], b[1][:, None]")
    code, out, _ = audit(right if is_right else OF_EQUAL_ROWS)
    first = "Nothing found in 10 updates" if is_right else "Broadcast."
    assert (code, out.startswith(first)) == (int(not is_right), True), out
    assert ("data: x, logarithm, 60 rows" in out, "by the weights weight" in out) == (True, True), out


def test_a_script_is_run_as_python_runs_it(audit, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    more = "import beside\nassert __name__ == '__main__' and __file__.endswith('train.py'), __file__\n"
    more += "assert sys.modules['__main__'].beside is beside\nassert sys.argv[0] == 'train.py'\n"
    before = sys.modules["__main__"], list(sys.argv), list(sys.path)
    code, out, err = audit(script("by hand", ("print(", f"{more}print(")), "--json", "--", "--json", "a b")
    assert "the end ['--json', 'a b']" in err
    told = json.loads(out)
    assert (code, told["has_seen"], told["causes"], told["engine"]) == (0, True, [], ENGINE)
    assert (sys.modules["__main__"], sys.argv, sys.path) == before


def test_json_has_the_proof(audit):
    code, out, _ = audit(script("by hand", ("b[:, None]", "b")), "--json")
    (cause,) = json.loads(out)["causes"]
    assert (code, cause["name"], cause["stage"]) == (1, "broadcast", "gradient")
    assert cause["line"]["file"].endswith("train.py")
    lines = {line["what"]: line for line in cause["proof"]["lines"]}
    length = lines["length of the gradient"]
    assert length["yours"] == pytest.approx(length["changed"], rel=1e-5)
    assert length["yours"] != pytest.approx(length["reference"], rel=1e-2)
    assert len(lines) == 4


def test_what_cannot_be_found_out_is_said_with_what_to_add(audit):
    two = ("x = rng", "y_other = rng.normal(size=24)\nx = rng")
    by_rows = ("b[:, None]", "keras.ops.take(y, b)[:, None]"), ("y[rows])", "rows)")
    code, out, _ = audit(script("by hand", two, *by_rows), "--updates", 4)
    assert code == 2
    assert "which holds the labels" in out
    assert "with stepcheck.watch(model, data=(x, y)" in out


UNCOMPILED = '"adam", "mse"', '"adam"'


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            ([], 0, "loss: mean_squared_error, supposed"),
            ([("b[:, None]", "b")], 1, "1. gradient: broadcast"),
            (
                [(" - b[:, None]) ** 2", ") ** 6"), ("network()", 'network(num=2, activation="softmax")')],
                2,
                "none gives its gradients. Say which is meant: `with stepcheck.watch(model, data=(x, y), loss=...)`",
            ),
            ([("keras.ops.mean(", "keras.ops.sum(")], 0, "The gradient is that of mean_squared_error, but: "),
        ]
    )
    # tests/test_audit_derived.py has another such loss
    + later([([(" ** 2", " ** 6")], 2, "Not judged: the form of the loss is not known. Nothing found in ")]),
)
def test_a_loss_that_the_script_computes_by_itself_is_supposed(edits, code, part, audit):
    got, out, _ = audit(script("by hand", UNCOMPILED, *edits))
    assert (got, part in out) == (code, True), out


LOG_SHARES = "b * keras.ops.log_softmax(model(a, training=True))"


@pytest.mark.parametrize(("value", "code"), [(LOG_SHARES, 1), (f"keras.ops.sum({LOG_SHARES}, -1)", 0)])
def test_a_cross_entropy_that_is_averaged_over_the_classes_is_said_first(value, code, audit):
    edits = [("keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)", f"-keras.ops.mean({value})")]
    edits += [("x.sum(1)", "np.eye(3, dtype='float32')[rng.integers(3, size=24)]"), ("= network()", "= network(num=3)")]
    got, out, _ = audit(script("by hand", UNCOMPILED, *edits))
    told = "That is 1 / 3, the number of classes: is the mean taken over the classes too?"
    assert (got, told in out, "Nothing found" in out) == (code, bool(code), not code), out


def test_a_loss_of_a_part_of_the_outputs_is_not_judged(audit):
    part = ("loss_fn(b, model(a, training=True))", "loss_fn(b, keras.ops.sum(model(a, training=True), -1))")
    code, out, _ = audit(script("in main", part, ("network()", "network(num=2)")), "--updates", 6)
    assert (code, "the script's loss does not take labels and the model's outputs as they are" in out) == (2, True), out


SUMMED = ("MeanSquaredError()", "MeanSquaredError(reduction='sum')"), ("0, 40, 8", "0, 40, 16"), ("+ 8", "+ 16")
CALLED = "loss_fn(b, model(a, training=True))"


@pytest.mark.parametrize(
    ("by", "code", "part"),
    halves(
        [
            (" / a.shape[0]", 0, "the sums of this loss are divided by the rows"),
            ("", 0, "Nothing found in 6 updates"),
            (" / 16", 1, "1. gradient: divided by the full batch"),
        ]
    ),
)
@pytest.mark.slow
def test_a_sum_of_keras_may_be_meant_as_a_mean(by, code, part, audit):
    got, out, err = audit(script("in main", *SUMMED, (CALLED, f"{CALLED}{by}")), "--updates", 6)
    assert (got, part in out) == (code, True), out + err


HEADS = """inputs = keras.Input((5,))
model = keras.Model(inputs, {name: layers.Dense(num)(inputs) for name, num in (("p", 1), ("q", 2))})
"""
OF_HEADS = """def value(model, a, b):
    out = model(a, training=True)
    first = keras.losses.mean_squared_error(b[:, None], out["p"])
    second = keras.losses.sparse_categorical_crossentropy(keras.ops.cast(b > 0, "int32"), out["q"], from_logits=True)
    return keras.ops.mean(first + second)


step = """


@pytest.mark.slow
def test_losses_of_entries_of_the_outputs_are_supposed(audit):
    value = "lambda model, a, b: keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)"
    edits = UNCOMPILED, (value, "value"), ("model = network()\n", HEADS), ("step = ", OF_HEADS)
    code, out, err = audit(script("by hand", *edits))
    is_quiet = "Nothing found in 6 updates: rows, mode, gradient, " in out
    assert (code, is_quiet, "Traceback" in err) == (0, True, False), out


def test_the_search_for_a_loss_has_an_end(audit, monkeypatch):
    monkeypatch.setattr(conclusion, "_SECONDS", 0)
    code, out, _ = audit(script("by hand", UNCOMPILED))
    assert (code, "the search for others was ended after 0 seconds" in out) == (2, True), out


CLASSES = ("b, model(a", "keras.ops.cast(b > 0, 'int32'), model(a")


@pytest.mark.parametrize(
    ("activation", "from_logits", "note"),
    halves(
        [
            ("softmax", True, "gets numbers that add up to 1: is an activation too many?"),
            (None, False, "and gets others: is from_logits=True missing?"),
            (None, True, ""),
            ("softmax", False, ""),
        ]
    ),
)
@pytest.mark.filterwarnings("ignore:.*from_logits=True:UserWarning")  # Keras' own, on TensorFlow
def test_a_cross_entropy_that_gets_other_numbers_than_it_takes_is_said_first(activation, from_logits, note, audit):
    loss = ("MeanSquaredError()", f"SparseCategoricalCrossentropy(from_logits={from_logits})")
    made = ("network(), ", f"network(num=2, activation={activation!r}), ")
    code, out, _ = audit(script("in main", loss, made, CLASSES), "--updates", 6)
    takes_logits = activation and keras.backend.backend() == "tensorflow"  # Keras does, from behind the activation
    is_first = bool(note) and not takes_logits
    assert (code, out.startswith("SparseCategoricalCrossentropy takes")) == (is_first, is_first), out
    assert note in out


@pytest.mark.parametrize(("num", "code"), [(3, 1), (4, 0)])
def test_a_rate_that_has_come_to_zero_is_said_first_if_it_is_so_in_half_of_the_updates(num, code, audit):
    rate = ("Adam(0.01)", f"Adam(keras.optimizers.schedules.CosineDecay(0.01, {num}))")
    got, out, _ = audit(script("in main", rate), "--updates", 6)
    told = f"The learning rate is 0 from update {num + 1} on."
    assert (got, told in out, out.startswith(told)) == (code, True, bool(code)), out


ANEW = "    for rows in rng.permutation(24).reshape(3, 8):\n"
COUNTED = """    for i, rows in enumerate(rng.permutation(24).reshape(3, 8)):
        model.optimizer.learning_rate = 0.01 / ({} + 1)
"""


@pytest.mark.parametrize(("number", "is_anew"), [("i", True), ("3 * epoch + i", False)])
def test_a_rate_that_begins_anew_with_each_pass_is_a_note(number, is_anew, audit):
    code, out, _ = audit(script("by hand", (ANEW, COUNTED.format(number))))
    told = "begins anew with each pass over the data: it goes from 0.01 to 0.003333 in the first"
    assert (code, told in out) == (0, is_anew), out


BY_ITSELF = ("keras.losses.MeanSquaredError()", "(lambda a, b: keras.ops.mean((a - b) ** 2))")
OTHERS = ("x = rng", "others = rng.normal(size=(64, 2))\nx = rng")


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            (
                [],
                0,
                "state were judged.\n\nTaken as meant:\n  - model: 'sequential', 'sequential_1', one after the other,",
            ),
            ([("training=True", "training=False")], 1, "1. forward: inference mode"),
            ([("loss_fn(a,", "8 * loss_fn(a,")], 1, "1. gradient: never divided"),
            (
                [BY_ITSELF],
                0,
                "64 rows\n  - loss: mean_squared_error",
            ),
            (
                [BY_ITSELF, ("loss_fn(a,", "8 * loss_fn(a,")],
                0,
                "The gradient is that of mean_squared_error",
            ),
            ([BY_ITSELF, OTHERS], 0, "loss: mean_squared_error"),
        ]
    ),
)
@pytest.mark.slow
def test_models_one_after_the_other_are_one(edits, code, part, audit):
    got, out, _ = audit(script("in a row", *edits))
    assert (got, part in out) == (code, True), out


def test_a_discriminator_is_not_taken_for_the_end_of_its_generator():
    """It is trained on outputs of the first model, and on rows too."""
    both = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]), keras.Sequential([keras.Input((3,))])
    both[1].add(keras.layers.Dense(1))
    noise, rows = np.ones((4, 3), "float32"), np.zeros((4, 3), "float32")
    first, second = Log(), Log()
    first.add(Called(1, [noise], [2 * noise], [noise], [], True, None))
    second.add(Called(2, [2 * noise], [noise], [rows], [], True, None))
    steps = [Applied(3, 7, [noise], [noise], [], [rows], [], 0.1, 0, None) for _ in both]
    first.add(steps[0])
    second.add(steps[1])
    assert len(joined([Watched(both[0], first, []), Watched(both[1], second, [])])) == 1
    second.add(Called(4, [rows], [noise], [rows], [], False, None))
    assert len(joined([Watched(both[0], first, []), Watched(both[1], second, [])])) == 1
    second.add(Called(5, [rows], [noise], [rows], [], True, None))
    assert len(joined([Watched(both[0], first, []), Watched(both[1], second, [])])) == 2


SEVERAL = ("for epoch in range(1000):\n", "other = keras.losses.MeanAbsoluteError()\n    for epoch in range(1000):\n")
CALL = "loss_fn(b, model(a, training=True))"
READ = ("        order = rng", "        other(y_train[:8, None], model(x_train[:8]))\n        order = rng")


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            ([], 0, "loss: MeanSquaredError, supposed"),
            (
                [(CALL, f"{CALL} ** 3")],
                0,
                "counts 0.375 x the loss x the loss instead of 1 / 8, as the update has 8 rows",
            ),
        ]
    )
    + later([([(CALL, f"{CALL} + keras.ops.sum(model(a, training=True) ** 4)")], 2, "none gives its gradients")]),
)
@pytest.mark.slow
def test_of_several_losses_the_one_with_the_gradients_is_taken(edits, code, part, audit):
    got, out, _ = audit(script("in main", SEVERAL, READ, *edits), "--updates", 12)
    assert (got, part in out) == (code, True), out


PENALTY = "0.1 * keras.ops.sum(model.trainable_variables[0] ** 2)"
OTHER = """other = network()
    step = update(model, keras.optimizers.Adam(0.01), lambda model, a, b: loss_fn(b, model(a) + other(a)))
    step_other = update(other, keras.optimizers.Adam(0.01), lambda other, a, b: loss_fn(b, model(a) + other(a)))
    for epoch in"""
BOTH = ("step(x_train[rows], y_train[rows])", "[s(x_train[rows], y_train[rows]) for s in (step, step_other)]")


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            ([(CALL, f"{CALL} + {PENALTY}")], 0, "Nothing found"),
            ([(CALL, f"{CALL} * keras.ops.mean(b**2)")], 0, "The gradient is that of MeanSquaredError, but: "),
            ([("for epoch in", OTHER), BOTH], 2, "it is not that of MeanSquaredError alone; if nothing else is meant"),
        ]
    ),
)
@pytest.mark.slow
def test_what_else_is_in_the_loss_is_no_cause(edits, code, part, audit):
    got, out, _ = audit(script("in main", *edits), "--updates", 6)
    assert (got, part in out, "\n1. " in out) == (code, True, False), out


TEACHER = """teacher = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dropout(0.5)])
    for epoch in"""
TAUGHT = ("        order = rng", "        teacher(x_train[:8], training=True)\n        order = rng")


@pytest.mark.parametrize(
    "edit",
    [
        ("training=True)\n        order", "training=True)\n        order"),
        ("8], training=True", "8]"),
        ("(0.5)])\n", "(0.5)])\n    teacher.trainable = False\n"),
    ],
)
@pytest.mark.slow
def test_a_model_that_nothing_moves_and_that_draws_is_a_note(edit, audit):
    code, out, _ = audit(script("in main", ("for epoch in", TEACHER), TAUGHT, edit), "--updates", 6)
    is_told = "which no step moves, is called in training mode" in out
    assert (code, is_told) == (0, edit[1] != "8]"), out


BESIDE = ("y = x.sum(1)", "z = x.sum(1)\nlabel_raw, y = 100 * z, z + 0")


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            ([], 0, "loss: mean_squared_error, supposed"),
            ([("b[:, None]", "b")], 1, "1. gradient: broadcast"),
        ]
    ),
)
def test_of_several_arrays_the_one_with_the_gradients_has_the_labels(edits, code, part, audit):
    got, out, _ = audit(script("by hand", UNCOMPILED, BESIDE, *edits))
    assert (got, part in out) == (code, True), out


PAIRS = """class Pairs(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.x[8 * i : 8 * i + 8], self.y[8 * i : 8 * i + 8]


pairs = Pairs(x, x.sum(1))"""


def test_labels_that_only_a_dataset_holds_are_read_from_it(audit):
    """The rows are an array among the script's names, the labels are not."""
    code, out, _ = audit(script("by hand", UNCOMPILED, ("y = x.sum(1)", PAIRS), ("y[rows]", "pairs.y[rows]")))
    assert (code, "data: a Pairs of the script" in out, "loss: mean_squared_error, supposed" in out) == (
        0,
        True,
        True,
    ), out


@pytest.mark.parametrize(
    ("num", "order", "code", "part"),
    [
        (24, "rng.permutation", 0, "Held out, or forgotten? Never used: 16"),
        (36, "rng.permutation", 0, "Held out, or forgotten? Never used: 4"),  # the others are shuffled without them
        (36, "np.arange", 1, "rows never used"),
    ],
)
def test_a_batch_of_rows_or_more_may_be_held_out(num, order, code, part, audit):
    edits = [("rng.permutation(40)", f"{order}({num})"), ("range(0, 40, 8)", f"range(0, {num}, 8)")]
    got, out, _ = audit(script("in main", *edits), "--updates", 16)
    assert (got, part in out) == (code, True), out


WIDTHS = """
rows_of = [np.concatenate([rng.integers(2, 60, num), [1]]) for num in np.tile([4, 5, 6], 16)]
model = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(60, 6), layers.Dense(60)])


def value(model, a, b):
    of_each = keras.ops.sparse_categorical_crossentropy(b, model(a, training=True), from_logits=True)
    return keras.ops.sum(of_each * keras.ops.cast(b > 0, "float32")) / keras.ops.sum(keras.ops.cast(b > 0, "float32"))


step = update(model, keras.optimizers.Adam(0.01), value)
for epoch in range(4):
    order = np.argsort(np.arange(48) % 3 + 0.1 * rng.random(48))  # by length
    order[[0, -1]] = order[[-1, 0]] if epoch > 1 else order[[0, -1]]
    for chosen in order.reshape(12, 4):
        width = max(len(rows_of[i]) for i in chosen)
        batch = np.array([np.pad(rows_of[i], (0, width - len(rows_of[i]))) for i in chosen], "int32")
        step(batch[:, :-1], batch[:, 1:])
"""


def test_rows_that_are_cut_otherwise_in_another_batch_are_not_left_out(audit):
    code, out, _ = audit(HEAD + UPDATE + WIDTHS)
    assert "different rows" in out, out
    assert (code in (0, 2), "ever used" in out, "A pass has" in out) == (True, False, False), out


WEIGHTS = ("y = x.sum(1)", "y, balance = x.sum(1), np.where(np.arange(24) % 3, 0.5, 2.0).astype('float32')")
BY_ROW = ("keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)", "weighed(b, model(a, training=True))")
WEIGHED = """unreduced = keras.losses.MeanSquaredError(reduction=None)


def weighed(b, out):
    return keras.ops.mean(unreduced(b[:, :1], out) * b[:, 1])


for epoch"""


@pytest.mark.slow
def test_weights_that_a_script_multiplies_by_itself_are_found(audit):
    step = ("step(x[rows], y[rows])", "step(x[rows], np.stack([y[rows], balance[rows]], 1))")
    code, out, _ = audit(script("by hand", UNCOMPILED, WEIGHTS, BY_ROW, ("for epoch", WEIGHED), step))
    assert (code, "loss: MeanSquaredError by the weights balance, supposed" in out) == (0, True), out


PADDED = """x = rng.integers(1, 9, size=(24, 6))
x *= np.arange(6) < rng.integers(2, 7, size=(24, 1))
y = (x % 4 + 1) * (x > 0)
"""
TAGS = 'keras.Sequential([keras.Input((6,)), layers.Embedding(9, 4), layers.Dense(6, "softmax")])'
PLACES = "keras.losses.sparse_categorical_crossentropy(b, model(a, training=True))"
OF_PLACES = f"(lambda w: keras.ops.sum(w * {PLACES}) / keras.ops.sum(w))(keras.ops.cast(b != 0, 'float32'))"


@pytest.mark.parametrize(
    ("value", "part"),
    halves(
        [
            (OF_PLACES, "at the places whose labels are not 0, supposed"),
            (f"keras.ops.mean({PLACES})", "The loss counts the padding: 29% of the places"),
        ]
    ),
)
@pytest.mark.filterwarnings("ignore:.*from_logits=True:UserWarning")  # Keras' own, on TensorFlow
@pytest.mark.slow
def test_places_without_a_label_are_told_from_others(value, part, audit):
    edits = [
        ('x = rng.normal(size=(24, 5)).astype("float32")\ny = x.sum(1)\n', PADDED),
        ("model = network()", f"model = {TAGS}"),
    ]
    edits += [("keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)", value)]
    code, out, _ = audit(script("by hand", UNCOMPILED, *edits))
    is_fault = "padding" in part
    assert (code, part in out, "\nThe loss counts the padding" in out) == (is_fault, True, is_fault), out
    assert out.count("loss: ") == 1, out


TOKENS = "rng.integers(9, size=(24, 6))\n"
EMBEDDED = "keras.Sequential([keras.Input((6,)), layers.Embedding(9, 4), "
BY_PLACE = f"{EMBEDDED}layers.Dense(9, 'softmax')])"
FROM_ALL = f"{EMBEDDED}layers.Flatten(), layers.Dense(54), layers.Reshape((6, 9)), layers.Softmax()])"


COPIED = "The labels are the inputs, in every row and at every place, and no output depends on a later place"
SEEN = "The labels are the next inputs, and outputs depend on later places: the model sees what it is to predict."


@pytest.mark.parametrize(
    ("labels", "model", "told"),
    [
        ("x", BY_PLACE, COPIED),
        ("np.roll(x, -1, axis=1)", BY_PLACE, "Nothing found"),
        ("x", FROM_ALL, "Nothing found"),
        ("np.roll(x, -1, axis=1)", FROM_ALL, SEEN),
    ],
)
@pytest.mark.filterwarnings("ignore:.*from_logits=True:UserWarning")  # Keras' own, on TensorFlow
@pytest.mark.slow
def test_labels_that_the_model_can_see_in_the_inputs_are_said_first(labels, model, told, audit):
    edits = [("model = network()", f"model = {model}")]
    edits += [('rng.normal(size=(24, 5)).astype("float32")\ny = x.sum(1)\n', f"{TOKENS}y = {labels}\n")]
    edits += [("keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)", f"keras.ops.mean({PLACES})")]
    code, out, _ = audit(script("by hand", UNCOMPILED, *edits))
    found = [each for each in (COPIED, SEEN, "Nothing found") if each in out]
    assert (found, code) == ([told], int(told != "Nothing found")), out


MIXED = """import keras
import numpy as np
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
for i in range(30):
    x, y = rng.normal(size=(8, 5)), rng.normal(size=(8, 1))
    if i % 9 == 8:
        x[0] = 1.0
    model.train_on_batch(x.astype("float32"), y.astype("float32"))
"""


@pytest.mark.parametrize("num", [9, 1])
@pytest.mark.slow
def test_a_few_rows_of_equal_inputs_may_have_other_labels(num, audit):
    assert "% 9 == 8" in MIXED
    code, out, _ = audit(MIXED.replace("% 9 == 8", f"% {num} == {num - 1}"))
    few, many = "Nothing found in", "Not known, but in the stage: gradient"
    assert (code, few in out, many in out) == ((0, True, False) if num == 9 else (1, False, True)), out


@pytest.mark.parametrize(
    ("edit", "part"),
    halves(
        [
            (("metric.reset_state()", "pass"), "have counted since the beginning"),
            (
                ("[*metrics.values(), val_acc]:", "[metrics['acc'], val_acc]:"),
                "The metric loss has counted since the begin",
            ),
            (("training=False", "training=True"), "A forward pass without a gradient ran in training mode"),
            (("range(6)", "range(6)"), ""),
        ]
    ),
)
@pytest.mark.slow
def test_what_is_read_of_a_loop_is_looked_at(edit, part, audit):
    code, out, _ = audit(script("measured", edit))
    is_ended = "it was ended when enough was seen, so nothing is known of the values that it writes back" in out
    is_noted = "forward passes in training mode gave no gradient" in out
    assert (code, part in out, out.count("  - ")) == (int(bool(part)), True, 3 + is_ended + is_noted), out


ENDS = """import jax
import keras
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype("float32")
y = x[:, :1] * 2
model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
optimizer, loss = keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError()
optimizer.build(model.trainable_variables)
slots = [v.value for v in optimizer.variables]
tv, ntv = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]


def objective(tv, ntv, x, y):
    outputs, ntv = model.stateless_call(tv, ntv, x, training=True)
    return loss(y, outputs), ntv


gradient = jax.value_and_grad(objective, has_aux=True)
for _ in range(2):
    order = rng.permutation(64)
    for rows in np.split(order, 4):
        (_, ntv), gradients = gradient(tv, ntv, x[rows], y[rows])
        tv, slots = optimizer.stateless_apply(slots, gradients, tv)
for v, value in zip(model.trainable_variables, tv):
    v.assign(value)
for v, value in zip(model.non_trainable_variables, ntv):
    v.assign(value)
"""


@pytest.mark.skipif(ENGINE != "jax", reason="on TensorFlow a loop moves the statistics of the model itself")
@pytest.mark.parametrize("num", [8, 30])
@pytest.mark.slow
def test_what_a_script_writes_back_in_its_last_lines_is_judged(num, audit):
    code, out, _ = audit(ENDS, "--updates", num)
    assert (code, "Nothing found in 8 updates" in out, "Not looked at" in out) == (0, True, False), out
    code, out, _ = audit(ENDS[: ENDS.rindex("for v")], "--updates", num)
    assert (code, "Statistics never written back" in out) == (1, True), out


BY_HAND = """count = 0


def step(a, b):
    global count
    count += 1
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model(a, training=True) - b[:, None]) ** 6)
    for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
        variable.assign(variable - (0.0 if count == 3 else 1e-4) * gradient)


for epoch in range(4):"""


@pytest.mark.skipif(ENGINE != "tensorflow", reason="the loop is TensorFlow's, what is concluded is the same on JAX")
@pytest.mark.slow
def test_of_which_window_a_batch_is_cannot_be_told_without_its_gradient(audit):
    """The third step, the last one of the first pass, moves nothing: its rate is zero."""
    code, out, _ = audit(script("by hand", UNCOMPILED, ("for epoch in range(2):", BY_HAND)))
    assert (code, "carried" in out) == (2, False), out


@pytest.mark.skipif(ENGINE != "tensorflow", reason="JAX' grad is asked for the weights of one model alone")
def test_a_model_that_nothing_moves_is_a_note(audit):
    edits = [("model, loss_fn = network()", "first, model, loss_fn = network(num=5), network()")]
    edits += [("model(a,", "model(first(a),")]
    code, out, _ = audit(script("in main", *edits), "--updates", 6)
    assert (code, "moved by no step, and a gradient is taken of a function of its outputs" in out) == (0, True), out


CUT = """with tf.GradientTape() as tape:
            loss = keras.ops.mean((model(first(a).numpy(), training=True) - b[:, None]) ** 2)
        variables = [*first.trainable_variables, *model.trainable_variables]
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients([(g, v) for g, v in zip(grads, variables) if g is not None])

    return step
"""


@pytest.mark.skipif(ENGINE != "tensorflow", reason="a gradient that is cut off is an error or zero on JAX")
def test_a_model_whose_gradient_is_cut_off_is_said_first(audit):
    (old,) = re.findall(r"with tf.GradientTape.*?return step\n", UPDATE, re.DOTALL)
    edits = (old, CUT), ("model = network()", "first, model = network(num=5), network()")
    code, out, _ = audit(script("by hand", *edits, UNCOMPILED, ("model.optimizer", "keras.optimizers.Adam()")))
    assert (code, "though a gradient of them is asked for. There is none" in out) == (1, True), out
    assert "Nothing found" not in out


NAMED = """class Named(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def call(self, inputs):
        return self.inner(inputs["b"] - 2 * inputs["a"])


x = rng"""


def test_inputs_go_by_their_names(audit):
    """A model of its own takes a dict of two arrays, and is called with one again."""
    made = "model = Named()\nmodel({'b': rng.normal(size=(1, 5)), 'a': np.ones((1, 5))})"
    arrays = ("y = x.sum(1)", "z = rng.normal(size=(24, 5)).astype('float32')\ny = x.sum(1)")
    step = ("step(x[rows],", "step({'b': x[rows], 'a': z[rows]},")
    code, out, _ = audit(script("by hand", ("x = rng", NAMED), ("model = network()", made), arrays, step))
    assert (code, "Nothing found in " in out) == (0, True), out


SHARES, LOGITS = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([[2.0, -1.0], [0.5, 3.0]])
SQUARED = ["MeanSquaredError", "MeanAbsoluteError", "Huber"]


@pytest.mark.parametrize(
    ("out", "y", "names", "from_logits"),
    [
        (SHARES, [0, 1], ["SparseCategoricalCrossentropy"], False),
        (LOGITS, [[0], [1]], ["SparseCategoricalCrossentropy"], True),
        (LOGITS, [0, 2], [], None),
        (SHARES, [[1, 0], [0, 1]], ["CategoricalCrossentropy", "BinaryCrossentropy", *SQUARED], False),
        (LOGITS, [[0, 1], [0, 1]], ["CategoricalCrossentropy", "BinaryCrossentropy", *SQUARED], True),
        (SHARES, [[1, 1], [0, 1]], ["BinaryCrossentropy", *SQUARED], False),
        (SHARES[:, :1], [0, 1], ["BinaryCrossentropy", *SQUARED], False),
        (LOGITS[:, 1:], [[0], [1]], ["BinaryCrossentropy", *SQUARED], True),
        (LOGITS, [[0.5, 1.5], [2.0, 1.0]], SQUARED, None),
        (LOGITS, [[0.5], [1.5], [2.0]], [], None),
    ],
)
def test_which_losses_fit(out, y, names, from_logits):
    found = list(usual([out], np.array(y)))
    assert [type(loss).__name__ for loss in found] == names
    asked = {loss.get_config()["from_logits"] for loss in found if "Crossentropy" in type(loss).__name__}
    assert asked == ({from_logits} if from_logits is not None else set())


@pytest.mark.parametrize(
    ("end", "part", "code"),
    halves(
        [
            ("sys.exit()", "Nothing found in ", 0),
            ("sys.exit(3)", "the script left with exit code 3", 2),
            ("raise ValueError('mine')", "the script ended with an error, ValueError", 2),
        ]
    ),
)
def test_scripts_that_end_by_themselves(end, part, code, audit):
    got, out, err = audit(script("by hand", ("print(", f"{end}\nprint(")))
    assert (got, part in out) == (code, True), out
    assert "the end" not in out
    if "ValueError" in end:
        assert "ValueError: mine" in err
        assert "wholestep" not in err


@pytest.mark.parametrize("later", ["model.fit(x, y)", "print(model.predict(x))"])
def test_a_later_loop_that_was_not_reached_is_said_first(later, audit, monkeypatch):
    monkeypatch.setattr(scout, "_PATIENCE", 0.1)
    long = ("for epoch in range(2):", "for epoch in range(10**6):"), ('print("the end"', f'{later}\nprint("the end"')
    code, out, _ = audit(script("by hand", *long), "--updates", 4)
    first, *_ = out.splitlines()
    told = "Not judged: code that may train after "
    assert (code, first.startswith(told)) == ((2, True) if "fit" in later else (0, False)), out
    assert "Nothing found in " in first, out
    assert ("for epoch in range(10**6), which was not reached. Nothing" in first) == (code == 2)


def test_a_script_that_is_no_python_is_not_said_to_be_a_fault_of_this_library(audit):
    code, out, _ = audit("if True\n")
    assert (code, "the script ended with an error, SyntaxError" in out, "please report" in out) == (2, True, False), out


def test_an_interrupt_before_the_first_update_passes(audit):
    with pytest.raises(KeyboardInterrupt):
        audit(script("by hand", ("for epoch in", "raise KeyboardInterrupt\nfor epoch in")))


def test_an_interrupted_loop_is_judged_up_to_there(audit):
    code, out, _ = audit(script("by hand", ("print(", "raise KeyboardInterrupt\nprint(")))
    assert (code, "Nothing found in 6 updates" in out) == (2, True), out
    assert "the script was interrupted" in out


def test_scripts_without_an_update_say_so(audit, capsys):
    code, out, _ = audit(script("by hand", ("range(2)", "range(0)")))
    assert code == 2
    assert "no Keras model was called" in out
    assert cli.main(["run", "missing.py"]) == 2
    assert "must be a file" in capsys.readouterr().err


def test_the_page_is_written(audit, tmp_path):
    assert audit(script("by hand"), "--html", tmp_path / "audit.html")[0] == 0
    text = (tmp_path / "audit.html").read_text()
    assert text.count("data:image/png;base64,") == 4
    assert "Nothing found in " in text
    code, _, err = audit(script("by hand"), "--html", tmp_path / "none" / "audit.html")
    assert (code, "folder of --html" in err) == (2, True)


DEVICES = {  # two, and whoever has used one before cannot say so any more
    "jax": "jax.config.update('jax_num_cpu_devices', 2)",
    "tensorflow": "from tensorflow import config; config.set_logical_device_configuration("
    "config.list_physical_devices('CPU')[0], [config.LogicalDeviceConfiguration()] * 2)",
}


@pytest.mark.parametrize("is_set", [False, *later([True])])
@pytest.mark.slow
def test_the_script_chooses_the_engine(is_set, tmp_path):
    other = "jax" if is_set else ENGINE
    choose = f"import os, importlib.util\nos.environ['KERAS_BACKEND'] = '{ENGINE}'\n"
    choose += f"assert importlib.util.find_spec('keras')\nimport keras, {ENGINE}\n{DEVICES[ENGINE]}\n"
    (tmp_path / "train.py").write_text(choose + script("in main"))
    environment = {k: v for k, v in lean().items() if k != "KERAS_BACKEND"} | (
        {"KERAS_BACKEND": other} if is_set else {}
    )
    command = [sys.executable, "-m", "stepcheck", "run", "train.py", "--updates", "12"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on {ENGINE}" in done.stdout
    assert "Looked at 12 updates" in done.stdout


@pytest.mark.skipif(ENGINE != "tensorflow", reason="what TensorFlow's garbage waits for")
def test_what_a_program_tells_collects_no_garbage():
    import tensorflow as tf

    told, heard = listener(), []
    assert gc.isenabled()
    with told.listening(lambda shape, missing: None):
        tf.function(lambda x: told.tell(lambda order, replica, numbers: heard.append(gc.isenabled()), [x]))(tf.ones(2))
    assert (heard, gc.isenabled()) == ([False], True)


def test_without_a_command_there_is_help(capsys):
    assert cli.main([]) == 0
    assert "run " in capsys.readouterr().out


POSTED = Path(__file__).parent / "posted"  # questions of others, with the least change that Keras 3 needs
_BEFORE = "train_loss ="
QUESTIONS = {
    "glove_loop": (("", ""), "broadcast"),
    "glove_loop, compiled": (
        ("train_loss =", "glove_model.compile(optimizer, loss=glove_model.glove_loss)\ntrain_loss ="),
        "broadcast",
    ),
    "accumulation_in_fit": (("", ""), "summed over microbatches"),
    "sgd_by_hand": (("", ""), "inference mode"),
    "replicas_tutorial": (("", ""), "divided by the full batch"),
    "transformer_on_replicas": (("", ""), "mean of means"),
}
FIXES = {  # what a report must propose, and the line to change
    "glove_loop": ("`y = y[:, None]`", "loss = glove_model.glove_loss(labels, predictions)"),
    "replicas_tutorial": ('all_reduce("SUM", tf.shape(labels)[0])`', "loss = compute_loss(labels, predictions, "),
    "transformer_on_replicas": (
        'all_reduce("SUM", tf.reduce_sum(weights))`',
        "scaled_loss = loss / strategy.num_replicas_in_sync",
    ),
}


LONG = ("glove_loop", "transformer_on_replicas")  # tests/test_audit_questions.py asks the same of their loops


@pytest.mark.skipif(ENGINE == "jax", reason="the loops are TensorFlow's")
@pytest.mark.parametrize("name", [*(name for name in QUESTIONS if name not in LONG), *later(LONG)])
@pytest.mark.slow
def test_a_question_as_it_was_posted_gets_its_cause(name, audit):
    (old, new), cause = QUESTIONS[name]
    post = name.split(",")[0]
    arguments = ("--updates", 9) if "replicas" in post else ()
    code, out, err = audit((POSTED / f"{post}.py").read_text().replace(old, new, 1), *arguments)
    assert code == 1, out + err
    assert cause in out
    assert all(part in out for part in FIXES.get(post, ())), out


OF_ALL = 'tf.distribute.get_replica_context().all_reduce("SUM", {})'
MENDED = {
    "replicas_tutorial": [
        (
            "tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)",
            f"tf.reduce_sum(per_example_loss) / tf.cast({OF_ALL.format('tf.shape(labels)[0]')}, tf.float32)",
        ),
    ],
    "transformer_on_replicas": [
        ("/ tf.reduce_sum(weights)", f"/ {OF_ALL.format('tf.reduce_sum(weights)')}"),
        ("loss / strategy.num_replicas_in_sync", "loss"),
    ],
}


@pytest.mark.large
@pytest.mark.skipif(ENGINE == "jax", reason="the loops are TensorFlow's")
@pytest.mark.parametrize("name", MENDED)
def test_a_question_with_the_fix_of_its_report_has_no_cause(name, audit):
    text = (POSTED / f"{name}.py").read_text()
    for old, new in MENDED[name]:
        assert old in text
        text = text.replace(old, new)
    code, out, _ = audit(text, "--updates", 9)
    assert (code, "Nothing found in " in out) == (0, True), out


def test_an_error_inside_of_this_library_is_no_fault_of_the_script():
    with pytest.raises(IndexError) as ours:
        Rows(None)
    with pytest.raises(ZeroDivisionError) as theirs:
        divmod(1, 0)
    assert "windows.py" in own_fault(ours.value)
    assert own_fault(theirs.value) == ""
    with pytest.raises(RuntimeError) as in_a_text:
        raise RuntimeError(f'in user code:\n  File "{Rows.__init__.__code__.co_filename}", line 3, in f')
    ours.value.add_note("For simplicity, JAX has removed its internal frames from the traceback of this exception.")
    assert own_fault(ours.value).startswith("an error where the audit listens (")
    assert own_fault(in_a_text.value).startswith(
        "an error where the audit listens (RuntimeError: in user code:, windows.py:3)"
    )


def test_a_call_that_the_model_refuses_is_the_script_s():
    class Picky(keras.Model):
        def call(self, inputs):
            return inputs

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.call = Picky().call  # which takes no `training`
    with (
        pytest.raises(TypeError) as raised,
        stepcheck.watch(model, data=(np.ones((4, 2)), np.ones((4, 1))), loss="mse"),
    ):
        model.call(np.ones((4, 2), "float32"), training=True)
    assert raised.traceback[-1].path.name == "hooks.py"
    assert own_fault(raised.value) == ""


TAPED = "Received: a tf.GradientTape, which cannot record a model on the jax engine. Try: KERAS_BACKEND="


@pytest.mark.skipif(ENGINE != "jax", reason="a tape sees what runs on TensorFlow")
@pytest.mark.parametrize("name", ["glove_loop", "accumulation_in_fit", "sgd_by_hand"])
def test_a_tape_around_a_model_of_another_engine_is_said(name, audit):
    code, out, _ = audit((POSTED / f"{name}.py").read_text())
    assert (code, TAPED in out.split("see enough:\n")[1].splitlines()[0]) == (2, True), out


@pytest.mark.skipif(ENGINE != "jax", reason="a tape sees what runs on TensorFlow")
def test_a_tape_around_an_audited_model_of_another_engine_is_an_error():
    import tensorflow as tf

    x, model = np.ones((8, 3), "float32"), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        tape.gradient(loss, model.trainable_variables)

    with (
        pytest.raises(SpecificationError, match="KERAS_BACKEND=tensorflow"),
        stepcheck.watch(model, (x, x[:, :1]), "mse"),
    ):
        train()
    with pytest.raises(ZeroDivisionError), stepcheck.watch(model, (x, x[:, :1]), "mse"):
        divmod(len(model(x)), 0)


def test_rows_of_a_batch_that_is_as_wide_as_its_own_longest_row_are_found():
    rows = Rows(np.array([[1, 2, 0], [1, 2, 3], [4, 0, 0]]))
    assert rows.find([np.array([[4, 0], [1, 2]])]).tolist() == [2, 0]
    assert rows.find([np.array([[1, 2, 3], [1, 2, 0]])]).tolist() == [1, 0]
    assert rows.find([np.array([[1, 2]])]).tolist() == [1]  # without its last token, as a decoder's inputs are
    assert rows.find([np.array([[1], [4]])]).tolist() == [0, 2]
    assert rows.equal(1) == [0, 1]
    assert rows.find([np.array([[5], [4]])]).tolist() == [-1, 2]


BY_TRAINER = """
import stepcheck
import wholestep as ws

x, model = rng.normal(size=(24, 5)).astype("float32"), network()
model.compile("adam", "mse")
{with_audit}ws.Trainer(model).fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0)
"""


EVERY = ["engine", "has_seen", "has_loss", "first_line", "judged", "looked_at", "causes", "notes", "unseen", "taken"]


@pytest.mark.parametrize("with_audit", ["", "with stepcheck.watch(model, (x, x.sum(1))) as report: "])
def test_updates_by_the_trainer_of_this_library_need_no_audit(with_audit, audit):
    text = script("by hand").split("import tensorflow" if ENGINE == "tensorflow" else "import jax")[0]
    code, out, err = audit(text + BY_TRAINER.format(with_audit=with_audit))
    assert (code, out.count("\n")) == (0, 1), out + err
    assert out.startswith("Updates by `wholestep.Trainer` need no audit")
    code, out, _ = audit(text + BY_TRAINER.format(with_audit=with_audit), "--json")
    told = json.loads(out)
    assert (code, set(told) >= set(EVERY), "need no audit" in told["notes"][0]) == (0, True, True)


def test_a_script_without_updates_has_all_fields_as_data(audit):
    code, out, _ = audit("print('nothing')", "--json")
    told = json.loads(out)
    assert (code, set(told), told["first_line"]) == (2, set(EVERY), "The audit could not see enough.")


def test_a_report_on_updates_by_the_trainer_of_this_library_says_so_first():
    x, model = np.ones((8, 3), "float32"), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        ws.Trainer(model).fit(x, x[:, :1], verbose=0)
    assert str(report).startswith("Updates by `wholestep.Trainer` need no audit")


COLUMNS = """
import keras
import numpy as np

random = np.random.default_rng(0)
pairs = np.stack([random.permutation(60), random.permutation(60)], axis=1).astype("int32")
y = random.normal(size=(60, 1)).astype("float32")
one, two = (keras.Input((), dtype="int32") for _ in range(2))
model = keras.Model([one, two], keras.layers.Dot(1)([keras.layers.Embedding(60, 3)(each) for each in (one, two)]))
model.compile("sgd", "mse")
for _ in range(2):
    for rows in np.split(random.permutation(60), 6):
        model.train_on_batch([pairs[rows, 0], pairs[rows, 1]], y[rows])
"""


def test_inputs_may_be_columns_of_one_array(report_of):
    code, report = report_of(COLUMNS)
    assert code == 0, report
    assert "data: pairs[:, 0], pairs[:, 1], y, 60 rows" in report


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_long_audit_says_on_the_error_output_that_it_goes_on(audit, monkeypatch, patience):
    monkeypatch.setattr("stepcheck.command.shell.PATIENCE", patience)
    code, report, said = audit(COLUMNS)
    assert code == 0, report
    assert ("are computed again and judged, which may take minutes" in said) == (patience == 0)


DRAW = "rng.normal(size=5).astype('float32')"


@pytest.mark.parametrize(
    ("draw", "told"),
    halves(
        [
            (DRAW, "`rng.normal` in "),
            ("np.float32(np.random.normal())", "`np.random.normal` in "),
            ("keras.random.normal((5,))", ""),
            ("(rng.normal(size=5).astype('float32') if len(a.shape) > 5 else 0)", ""),
            ("random.gauss(0.0, 1.0)", "`random.gauss` in "),
            ("np.zeros(5, 'float32')", ""),
        ]
    ),
)
def test_numbers_that_a_trace_draws_are_said_first(draw, told, audit):
    traced = {
        "tensorflow": ("    def step(a, b):", f"    @tf.function\n    def step(a, b):\n        a = a + {draw}"),
        "jax": ("    def value_at(values, a, b):", f"    def value_at(values, a, b):\n        a = a + {draw}"),
    }
    _, out, _ = audit(script("by hand", UNCOMPILED, traced[ENGINE], ("import sys\n", "import random\nimport sys\n")))
    assert ("is drawn once, when the function is traced" in out, told in out) == (bool(told), True), out
