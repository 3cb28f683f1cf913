"""Notes that name a likely fault, in scripts and in records."""

import keras
import numpy as np
import pytest

from stepcheck.keras.chain import allied
from stepcheck.keras.scout import Watched
from stepcheck.solve.modes import across
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
