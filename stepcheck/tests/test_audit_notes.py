"""Notes that name a likely fault, in scripts and in records."""

import keras
import numpy as np
import pytest
from audit_scripts import script
from shares import halves

from stepcheck.keras.chain import allied
from stepcheck.keras.scout import Watched
from stepcheck.stages.modes import across
from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Applied, Called, Log, Other

ENGINE = keras.backend.backend()
ONLY_TENSORFLOW = pytest.mark.skipif(ENGINE != "tensorflow", reason="a route of TensorFlow")
CALL = "loss_fn(b, model(a, training=True))"
SIZE = {"tensorflow": "tf.reduce_sum(g**2)", "jax": "(g**2).sum()"}[ENGINE]
LENGTH = f"sum({SIZE} for g in grads)"
CLIP = "[g * keras.ops.minimum(1.0, 0.05 / {}) for g in grads]"
LENGTHENED = CLIP.replace("minimum", "maximum").replace("0.05", "50.0").format(f"({LENGTH}) ** 0.5")
CENTRED = "[g - keras.ops.mean(g, 0) if g.ndim > 1 else g for g in grads]"
TAKEN = {
    "tensorflow": ("        optimizer.apply_gradients(zip(grads,", "        optimizer.apply_gradients(zip({},"),
    "jax": ("jax.grad(value_at)(values, a, b)", "(lambda grads: {})(jax.grad(value_at)(values, a, b))"),
}[ENGINE]


def handed(grads):
    """Return the edit by which the optimizer gets other gradients."""
    return TAKEN[0], TAKEN[1].format(grads)


@pytest.mark.parametrize(
    ("edit", "code", "part"),
    halves(
        [
            ((CALL, CALL), 0, "Nothing found"),
            ((CALL, "loss_fn(model(a, training=True), b[:, None])"), 1, "Are its arguments swapped?"),
            (handed(CLIP.format(LENGTH)), 1, "The gradient"),
            (handed(CLIP.format(f"({LENGTH}) ** 0.5")), 0, "Nothing found"),
            (handed(LENGTHENED), 1, "gradient"),
            (handed("[keras.ops.clip(g, 0, 1) for g in grads]"), 1, "gradient"),
            (handed(CENTRED), 0, "Nothing found"),
        ]
    ),
)
def test_scripts_begin_with_the_likely_fault(edit, code, part, report_of):
    got, out = report_of(script("in main", edit), "--updates", 12)
    assert (got, part in out) == (code, True), out


@pytest.mark.parametrize(("warm", "code"), [(4, 1), (1, 0)])
def test_a_rate_that_stands_at_zero_at_first_is_said(warm, code, report_of):
    rate = ("Adam(0.01)", f"Adam(keras.optimizers.schedules.PiecewiseConstantDecay([{warm - 1}], [0.0, 0.01]))")
    got, out = report_of(script("in main", rate), "--updates", 9)
    told = f"The learning rate is 0 in updates 1 to {warm}, which move no weight"
    assert (got, out.startswith(told)) == (code, bool(code)), out


@ONLY_TENSORFLOW
@pytest.mark.own
@pytest.mark.parametrize(("is_late", "code"), [(True, 1), (False, 0)])
def test_a_clip_after_the_step_is_named(is_late, code, report_of):
    apply, clip = "        optimizer.apply_gradients", "        grads, _ = tf.clip_by_global_norm(grads, 0.05)\n"
    end = "zip(grads, model.trainable_variables))\n"
    got, out = report_of(script("in main", (end, f"{end}{clip}") if is_late else (apply, f"{clip}{apply}")))
    assert (got, "after the optimizer has taken them" in out) == (code, is_late), out


@pytest.mark.skipif(ENGINE != "jax", reason="a script for JAX")
@pytest.mark.own
def test_an_adam_whose_count_stands_still_is_named(report_of):
    code, out = report_of(script("own adam", ("t + 1.0)", "1.0)")))
    assert (code, "the count of updates stands still" in out) == (1, True), out


STATEFUL = """
import numpy as np
import keras

rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 5, 2)).astype("float32"), rng.normal(size=(24, 1)).astype("float32")
inputs = keras.Input(batch_shape=(4, 5, 2))
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GRU(3, stateful=True)(inputs)))
model.compile("sgd", "mse")
for epoch in range(2):
    model.layers[1].reset_state()
    order = ORDER
    for start in range(0, 24, 4):
        rows = order[start : start + 4]
        model.train_on_batch(x[rows], y[rows])
"""


@ONLY_TENSORFLOW  # Keras on JAX begins each batch with states of zeros
@pytest.mark.own
@pytest.mark.parametrize(
    ("order", "code"), [("rng.permutation(24)", 1), ("np.arange(24).reshape(4, 6).T.reshape(-1)", 0)]
)
@pytest.mark.slow
def test_states_that_go_on_to_other_sequences_are_named(order, code, report_of):
    got, out = report_of(STATEFUL.replace("ORDER", order))
    assert (got, "a row begins with another's state" in out) == (code, bool(code)), out
    assert "Not judged" not in out


LOSSES = """
import numpy as np
import keras

rng = np.random.default_rng(0)
x = rng.normal(size=(24, 5)).astype("float32")
y = LABELS
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])
model.compile("sgd", keras.losses.KLDivergence())
for rows in rng.permutation(24).reshape(3, 8):
    model.train_on_batch(x[rows], y[rows])
"""


@pytest.mark.parametrize(
    ("labels", "code"), halves([("rng.normal(size=(24, 3))", 1), ("rng.dirichlet(np.ones(3), 24)", 0)])
)
def test_labels_below_zero_are_no_probabilities(labels, code, report_of):
    got, out = report_of(LOSSES.replace("LABELS", labels))
    assert (got, "gets labels below 0" in out) == (code, bool(code)), out


@pytest.mark.parametrize(("first", "is_told"), halves([(1, True), (0, False)]))
def test_labels_that_one_hot_has_left_empty_are_a_note(first, is_told, report_of):
    labels = f"np.eye(3)[np.clip(np.arange(24) % 3 - {first}, 0, 2)] * (np.arange(24) % 3 >= {first})[:, None]"
    code, out = report_of(LOSSES.replace("LABELS", labels).replace("KLDivergence", "CategoricalCrossentropy"))
    assert (code, "CategoricalCrossentropy gets labels that are all 0 in" in out) == (0, is_told), out


@pytest.mark.own
def test_outputs_that_add_up_over_the_rows_are_named():
    rows = np.random.default_rng(0).dirichlet(np.ones(8), size=4).astype("float32")
    assert across([rows.T] * 2)
    assert across([np.log(rows.T)] * 2)
    assert not across([rows] * 2)


# ---- two models with losses against each other ----

NOISE, ROWS = np.ones((4, 3), "float32"), np.zeros((4, 3), "float32")


def passed(order, inputs, derivative=None):
    """Return a forward pass, with the derivative of a loss by its output."""
    called = Called(order, [inputs], [inputs[:, :1]], [ROWS], [], True, None)
    if derivative is not None:
        called.derivatives[0] = [np.full((4, 1), derivative, "float32")]
    return called


def stepped(order):
    return Applied(order, 7, [ROWS], [ROWS], [], [NOISE], [], 0.1, 0, None)


@pytest.mark.own
@pytest.mark.parametrize(("ways", "num"), [((1.0, 1.0), 1), ((1.0, -1.0), 0)])
def test_a_generator_with_the_labels_of_its_discriminator_is_named(ways, num):
    one, two = (Watched(keras.Sequential(name=name), Log(), []) for name in ("generator", "discriminator"))
    for i in range(5):
        made = (NOISE + i).astype("float32")
        one.log.called.append(Called(10 * i, [ROWS], [made], [ROWS], [], True, None))
        two.log.called += [passed(10 * i + 1, made, ways[0]), passed(10 * i + 3, made, ways[1])]
        two.log.applied.append(stepped(10 * i + 2))
        one.log.applied.append(stepped(10 * i + 4))
    assert len(list(allied(two, [one]))) == num


@pytest.mark.own
def test_passes_of_another_models_step_are_no_microbatches():
    log = Log()
    for event in (passed(1, ROWS), stepped(2), passed(3, NOISE), Other(4), passed(5, ROWS), stepped(6)):
        log.add(event)
    assert [[called.order for called in step.called] for step in steps(log)] == [[1], [5], []]
    log.others.clear()
    assert [[called.order for called in step.called] for step in steps(log)] == [[1], [3, 5], []]
