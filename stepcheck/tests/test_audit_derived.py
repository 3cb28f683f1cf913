"""The loss of a loop is solved for, from its derivative by the model's outputs."""

import warnings

import keras
import numpy as np
import pytest
from audit_scripts import script
from keras import ops
from shares import later, on

import stepcheck
from stepcheck.keras import conclusion
from stepcheck.keras.derived import Derived, solved
from stepcheck.keras.families import Function
from stepcheck.keras.hooks import Hooks
from stepcheck.keras.listener import listener
from stepcheck.keras.replay import Replay
from stepcheck.stages.unsolved import by_frequency, normalised, of_other_axis, of_other_labels, of_rows
from stepcheck.trace.log import Log
from wholestep.engines import choose

DRAW = np.random.default_rng(0)
NUM, WIDTH = 24, 4
LABELS = DRAW.permutation(np.arange(NUM) % WIDTH)
OTHERS = np.roll(LABELS, 1)
HOT = np.eye(WIDTH, dtype="float32")[LABELS]
WEIGHTS = DRAW.uniform(0.5, 2, NUM).astype("float32")
OUTPUTS = DRAW.normal(size=(2, NUM // 2, WIDTH)).astype("float32")
ROWS = DRAW.permutation(NUM).reshape(2, -1)
PARTS = [*zip(ROWS, OUTPUTS, strict=True)]


@pytest.fixture(scope="module")
def replay():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(WIDTH)])
    return Replay(model, (np.zeros((NUM, 2), "float32"), LABELS, None))


def derived(loss):
    """Return the derivatives of a loss (rows, outputs) by the outputs, for two batches."""
    differentiate = choose().ops.differentiate
    found = []
    for rows, outputs in PARTS:
        grads, _ = differentiate(lambda given, rows=rows: (loss(rows, given[0]), ()), [ops.convert_to_tensor(outputs)])
        found.append(Derived(rows, outputs, np.asarray(grads[0], "float64")))
    return found


def cross_entropy(rows, outputs, labels=LABELS, factors=1.0):
    picked = ops.sum(np.eye(WIDTH, dtype="float32")[labels[rows]] * ops.log_softmax(outputs), axis=-1)
    return -ops.mean(factors * picked)


def squared(rows, outputs):
    return ops.mean((outputs - HOT[rows]) ** 2)


FOUND = {
    "sparse_categorical_crossentropy of y as labels": cross_entropy,
    "mean_squared_error of hot as labels": squared,
    "sparse_categorical_crossentropy of y as labels by the weights w": lambda rows, outputs: cross_entropy(
        rows, outputs, factors=WEIGHTS[rows]
    ),
    "sparse_categorical_crossentropy of y as labels by the weights the class": lambda rows, outputs: cross_entropy(
        rows, outputs, factors=1.0 + LABELS[rows].astype("float32")
    ),
    "cross entropy of y as labels, smoothed by 0.3": lambda rows, outputs: (
        0.7 * cross_entropy(rows, outputs) - 0.3 * ops.mean(ops.log_softmax(outputs))
    ),
    "log_cosh of hot as labels": lambda rows, outputs: ops.sum(keras.losses.log_cosh(HOT[rows], outputs)),
}


@pytest.mark.own
@pytest.mark.parametrize("told", FOUND)
def test_a_loss_is_found_by_its_derivative(told, replay):
    found = next(solved(replay, derived(FOUND[told]), {"y": LABELS, "hot": HOT}, {"w": WEIGHTS}))
    assert found.told == told
    assert (found.weights is None) == ("weights" not in told)


@pytest.mark.own
def test_a_loss_of_the_script_is_found_in_batches_that_are_as_wide_as_their_longest_row(replay):
    """Each batch is padded to 3 or 4 places, and the rows of the data have 6; the padding does not count."""
    labels = np.where(np.arange(6) < 2 + np.arange(NUM)[:, None] % 3, 1 + LABELS[:, None] % 3, 0)

    def smoothed(y, logits):
        return ops.categorical_crossentropy(0.9 * ops.one_hot(y, WIDTH) + 0.1 / WIDTH, logits, from_logits=True)

    found = []
    for rows, width in ((np.arange(NUM)[np.arange(NUM) % 3 < 2], 3), (np.arange(NUM), 4)):
        y, out = labels[rows, :width], DRAW.normal(size=(len(rows), width, WIDTH)).astype("float32")
        mask = (y != 0).astype("float32")
        (grad,), _ = choose().ops.differentiate(
            lambda given, y=y, mask=mask: (ops.mean(smoothed(y, given[0]) * mask), ()), [ops.convert_to_tensor(out)]
        )
        found.append(Derived(rows, out, np.asarray(grad, "float64")))
    one = next(solved(replay, found, {"y": labels}, {}, [Function(smoothed)]))
    assert one.told == "smoothed of y as labels at the places whose labels are not 0"
    np.testing.assert_array_equal(one.weights, labels != 0)


@pytest.mark.own
@pytest.mark.parametrize("is_clear", [True, False])
@pytest.mark.parametrize("by", [None, "w"])
def test_a_loss_in_which_each_output_meets_all_labels_is_found(by, is_clear, replay):
    y, found = DRAW.normal(size=NUM).astype("float32"), []
    for rows in ROWS:
        out, w = DRAW.normal(size=(len(rows), 1)), WEIGHTS[rows] if by else np.ones(len(rows))
        made = 2 * (out - y[rows]) @ w[:, None] / len(rows) ** 2
        whole = Derived(rows, out.astype("float32"), made)
        found.append(whole if is_clear else Derived(rows[2:], whole.output[2:], made[2:], whole))
    (one,) = [each for each in solved(replay, found, {"y": y}, {"w": WEIGHTS}) if "squared" in each.told]
    assert one.told == f"mean_squared_error of y as labels{', by the weights w' * bool(by)}"
    assert (one.weights is None) == (by is None)


@pytest.mark.own
def test_labels_of_no_array_are_read_from_the_derivative(replay):
    found = next(solved(replay, derived(cross_entropy), {}, {}))
    np.testing.assert_array_equal(found.labels, LABELS)


@pytest.mark.own
def test_names_beside_the_labels_are_no_classes(replay):
    names = np.array([f"row {i}" for i in range(NUM)])
    found = next(solved(replay, derived(cross_entropy), {"name": names}, {}))
    np.testing.assert_array_equal(found.labels, LABELS)


@pytest.mark.own
def test_no_loss_is_found_for_a_derivative_of_none(replay):
    cubed = derived(lambda rows, outputs: ops.mean((outputs - HOT[rows]) ** 2) ** 3 + ops.sum(outputs**4))
    assert not list(solved(replay, cubed, {"y": LABELS, "hot": HOT}, {"w": WEIGHTS}))


@pytest.mark.own
@pytest.mark.parametrize(("axis", "num"), [(1, 1), (2, 1), (-1, 0)])
def test_a_softmax_over_places_is_named_in_a_loss_of_any_form(axis, num, monkeypatch):
    """Here one minus Dice's coefficient of images of 3 x 5 places and 4 classes."""
    monkeypatch.setitem(globals(), "PARTS", [(ROWS[0], DRAW.normal(size=(12, 3, 5, WIDTH)).astype("float32"))])
    classes = DRAW.integers(0, WIDTH, size=(NUM, 3, 5))
    hot = np.eye(WIDTH, dtype="float32")[classes]

    def dice(rows, outputs):
        shares = ops.softmax(outputs, axis=axis)
        return 1 - ops.mean(2 * ops.sum(shares * hot[rows], (1, 2)) / ops.sum(shares + hot[rows], (1, 2)))

    assert [f"along axis {axis}, " in told for told in of_other_axis(derived(dice), classes)] == [True] * num


@pytest.mark.own
def test_outputs_that_are_normalised_over_the_rows_are_named():
    def alike(axis, mean=0.0):
        def loss(rows, outputs):
            centred = outputs - mean * ops.mean(outputs, axis=0)
            unit = centred / ops.sqrt(ops.sum(centred**2, axis=axis, keepdims=True))
            return ops.mean(ops.logsumexp(3 * unit @ ops.transpose(unit), axis=-1))

        return list(normalised(derived(loss)))

    (told,) = alike(0)
    assert "by their length over the rows" in told
    assert alike(-1) == alike(0, mean=1.0) == []


@pytest.mark.own
def test_notes_say_what_differs_in_the_loss(replay):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    (told,) = of_other_labels(derived(lambda *given: cross_entropy(*given, labels=OTHERS)), "y", LABELS)
    assert "of other classes than y has" in told
    assert not list(of_other_labels(derived(cross_entropy), "y", LABELS))
    by_rows = derived(lambda rows, outputs: -ops.mean(ops.sum(HOT[rows] * ops.log_softmax(outputs, axis=0), axis=-1)))
    (told,) = of_other_axis(by_rows, LABELS)
    assert "over the rows of the batch" in told
    assert not list(of_other_axis(derived(cross_entropy), LABELS))

    def by_prediction(rows, outputs):
        return cross_entropy(rows, outputs, factors=1.0 + np.argmax(outputs, axis=-1).astype("float32"))

    chosen = [by_prediction, lambda *given: cross_entropy(*given, factors=(LABELS[given[0]] == 0).astype("float32"))]
    wanted = "depends on the class that the model predicts", "the mask is inverted"
    for factors, part in zip(chosen, wanted, strict=True):
        if factors is by_prediction:
            made = [Derived(rows, out, _plain(rows, out) * (1.0 + out.argmax(-1))[:, None]) for rows, out in PARTS]
        else:
            made = derived(factors)
        (told,) = of_rows(replay, made, loss, LABELS)
        assert part in told
    assert not list(of_rows(replay, derived(cross_entropy), loss, LABELS))


def _plain(rows, outputs):
    """Return the derivative of the cross entropy of each row."""
    shares = np.exp(outputs - outputs.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) - np.eye(WIDTH)[LABELS[rows]]


@pytest.mark.own
def test_the_gradient_by_outputs_is_watched_and_changes_nothing():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    x, y = DRAW.normal(size=(6, 3)).astype("float32"), DRAW.normal(size=(6, 2)).astype("float32")
    log, bare = Log(), gradient(model, x, y)
    with Hooks(model, listener(), log).on():
        watched = gradient(model, x, y)
    (called,) = log.called
    np.testing.assert_allclose(called.derivatives[0][0], 2 * (called.outputs[0] - y) / y.size, rtol=1e-5)
    for one, two in zip(bare, watched, strict=True):
        np.testing.assert_array_equal(one, two)


def gradient(model, x, y):
    """Return the gradients of the mean squared error, as a loop of the engine takes them."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return [np.array(g) for g in tape.gradient(loss, model.trainable_variables)]
    import jax

    def loss(params):
        outputs, _ = model.stateless_call(params, [v.value for v in model.non_trainable_variables], x)
        return ((outputs - y) ** 2).mean()

    return [np.array(g) for g in jax.jit(jax.grad(loss))([v.value for v in model.trainable_variables])]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="transformations of JAX")
@pytest.mark.own
def test_transformations_of_jax_go_through_a_watched_value():
    import jax
    import jax.numpy as jnp

    heard = []

    def loss(w, x):
        return jnp.sum(listener().watch_gradient(w * x, lambda order, replica, both: heard.append(both)) ** 2)

    w, x = jnp.ones(3), jnp.arange(3.0)
    for transform in (jax.grad, jax.hessian, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        np.testing.assert_array_equal(transform(loss)(w, x), transform(lambda w, x: jnp.sum((w * x) ** 2))(w, x))
    assert jax.jvp(lambda w: loss(w, x), (w,), (w,)) == (5.0, 10.0)
    rows = jax.vmap(jax.grad(loss), (None, 0))(w, jnp.stack([x, x]))
    np.testing.assert_array_equal(rows[1], 2 * x * x)
    jax.effects_barrier()
    np.testing.assert_array_equal(heard[0], [x, 2 * x])


UNCOMPILED = '"adam", "mse"', '"adam"'
OWN = "keras.ops.mean((model(a, training=True) - b[:, None]) ** 2)"
CUBED = "keras.ops.mean(keras.ops.abs(model(a, training=True) - b[:, None]) ** 3)"


def by_hand(value):
    """Return the edits that let the loss be the result of these lines, of three outputs."""
    lines = "\n".join(f"    {line}" for line in value.splitlines())
    return [
        ("num=1", "num=3"),
        (f"lambda model, a, b: {OWN}", "value"),
        ("step = ", f"def value(model, a, b):\n{lines}\n\n\nstep = "),
    ]


NOISY = "step(x[rows], y[rows])", 'step(x[rows], y[rows] + rng.normal(size=8).astype("float32"))'
SOME = "y = x.sum(1)\n", "y = np.where(rng.random((24, 3)) < 0.3, np.nan, x[:, :3])\n"
KNOWN = """known = keras.ops.cast(keras.ops.logical_not(keras.ops.isnan(b)), "float32")
return keras.ops.sum(known * (model(a) - keras.ops.nan_to_num(b)) ** 2) / keras.ops.sum(known)"""
CLASSES = "y = x.sum(1)\n", 'y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)\n'
TEACHER = "model = network()", "teacher, model = network(), network()"
TAUGHT = """soft, out = keras.ops.softmax(teacher(a) / 2), model(a)
hard = keras.ops.one_hot(b, 3) * keras.ops.log_softmax(out)
return -keras.ops.mean(keras.ops.sum(0.5 * hard + soft * keras.ops.log_softmax(out / {}), -1))"""
ONE = """index = keras.ops.one_hot(keras.ops.cast(b > 0, "int32"), 3)
return keras.ops.mean((keras.ops.sum(model(a) * index, -1) - b) ** 2)"""
FOLLOWED = """goal = keras.ops.stop_gradient(teacher(a + 1))
return keras.ops.mean((model(a) - goal) ** 2)"""
FORMS = {  # what the report says of the loss, and the edits of the script
    "mean_squared_error of b as labels": [NOISY],
    "mean_squared_error at the places whose labels are no NaN": [SOME, *by_hand(KNOWN)],
    "mean_squared_error of goal as labels": [TEACHER, *by_hand(FOLLOWED)],
    "mean_squared_error of b as labels, by one output of each row": [NOISY, *by_hand(ONE)],
    "before it / 2 by the outputs / 2": [CLASSES, TEACHER, *by_hand(TAUGHT.format(2))],
    "/ 1, and the loss takes the outputs / 2: one temperature": [
        *(CLASSES, TEACHER),
        *by_hand(TAUGHT.format(2).replace("(a) / 2", "(a)")),
    ],
    "one temperature is meant for both": [CLASSES, TEACHER, *by_hand(TAUGHT.format(1))],
}


@pytest.mark.parametrize("told", [*list(FORMS)[::2], *later(list(FORMS)[1::2])])
@pytest.mark.slow
def test_the_form_of_a_loss_of_other_labels_than_the_rows_have_is_found(told, report_of):
    code, out = report_of(script("by hand", UNCOMPILED, *FORMS[told]), "--updates", 6)
    is_fault = "one temperature" in told
    assert (code, told in out, "Nothing found in" in out) == (is_fault, True, not is_fault), out


@on("tensorflow")
@pytest.mark.parametrize("edits", [[], *later([[NOISY]])])
@pytest.mark.slow
def test_the_gradient_of_a_loss_without_a_known_form_is_judged_and_the_trials_warn_nobody(
    edits, report_of, caplog, monkeypatch
):
    """Keras warns of a softmax of a single number, and TensorFlow of functions that are traced often."""
    monkeypatch.setattr(conclusion, "_SECONDS", 5)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        code, out = report_of(script("by hand", UNCOMPILED, (OWN, CUBED), *edits), "--updates", 6)
    assert code == 2, out
    assert "Not judged: the form of the loss is not known. Nothing found in " in out
    assert ": rows, mode, backward pass, step, state were judged." in out
    assert "(a penalty or clip" not in out
    assert [*(str(each) for each in heard if each.category is UserWarning), *caplog.messages] == []


REGULAR = (
    "model = network()",
    ("model = network()\nmodel.trainable_variables[0].regularizer = keras.regularizers.L2(0.1)"),
)


@on("tensorflow")
@pytest.mark.parametrize(("penalty", "code"), [("", 1), (" + sum(model.losses)", 2)])
def test_a_penalty_of_the_model_that_is_forgotten_is_found_beside_a_loss_without_a_known_form(
    penalty, code, report_of, monkeypatch
):
    monkeypatch.setattr(conclusion, "_SECONDS", 1)
    got, out = report_of(script("by hand", UNCOMPILED, REGULAR, (OWN, CUBED + penalty)), "--updates", 6)
    first = "Not judged: the form of the loss is not known. Nothing found" if penalty else "Penalty forgotten."
    assert (got, f"\n{first}" in out) == (code, True), out


HALVED = "share = 1.0\nfor epoch in range(2):\n    share /= 2\n"
READS = ("for epoch in range(2):\n", HALVED), (" ** 2))", " ** 2) * share)")


@pytest.mark.own
@pytest.mark.slow
def test_a_number_that_a_traced_step_reads_once_is_named(report_of):
    is_eager = keras.backend.backend() == "tensorflow"
    traced = [("    def step(a, b):", "    @tf.function\n    def step(a, b):")] * is_eager
    code, out = report_of(script("by hand", *READS, *traced), "--updates", 6)
    assert code == 1
    assert "`share` is 0.5 in each call of `" in out
    assert "and 0.25 by now" in out


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="ragged tensors are TensorFlow's")
@pytest.mark.own
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.slow
def test_a_model_with_ragged_outputs_runs_as_before(is_traced):
    import tensorflow as tf

    class Ragged(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return tf.RaggedTensor.from_tensor(self.dense(inputs))

    model, optimizer = Ragged(), keras.optimizers.SGD(0.1)
    model.dense.build((None, 3))
    model.built = True
    before = model.dense.kernel.numpy()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x).flat_values ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(step) if is_traced else step
    with stepcheck.watch(model, data=(np.ones((4, 3), "float32"), np.zeros(4)), loss="mse") as report:
        step(tf.ones((4, 3)))
    assert not np.array_equal(before, model.dense.kernel.numpy())
    assert "ragged or sparse" in str(report)


COUNTS = np.array([60, 30, 10])


@pytest.mark.parametrize(
    ("weights", "is_said"),
    [(COUNTS / 100, True), (np.sqrt(COUNTS), True), (1 / COUNTS, False), (np.ones(3), False), (COUNTS[::-1], False)],
)
def test_weights_that_grow_with_the_size_of_their_class_are_said(weights, is_said):
    y = np.repeat(np.arange(3), COUNTS)
    assert sum("divide by the counts" in note for note in by_frequency(y, weights[y].astype("float32"))) == is_said
    assert not list(by_frequency(y, np.random.default_rng(0).uniform(1, 2, 100)))
