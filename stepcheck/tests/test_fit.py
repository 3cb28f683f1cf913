"""The audit: the first line of a report is a cause, a note that is very likely the fault, or what was judged."""

import re

import keras
import numpy as np
import pytest

import stepcheck
from stepcheck.stages import judge
from stepcheck.trace import log
from stepcheck.trace.log import Line
from stepcheck.user_code.source import line_of_loss

ONLY_TENSORFLOW = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the loop is TensorFlow's")


def trained(**others):
    """Return the report of a right `fit`."""
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1]), **others) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    return report


def test_what_was_judged_is_said():
    report = trained()
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."
    assert str(report).startswith(report.first_line)
    assert report.as_json()["judged"] == ["rows", "mode", "gradient", "step", "state"]


def binary(num=24):
    """Return a compiled model of two classes, and its data."""
    x = np.random.default_rng(0).normal(size=(num, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model, x, (x[:, :1] > 0).astype("float32")


@pytest.mark.parametrize("weights", [{"class_weight": {0: 1.0, 1: 5.0}}, {"sample_weight": np.linspace(0.5, 2, 24)}])
def test_the_weights_that_fit_gets_are_those_that_are_meant(weights):
    model, x, y = binary()
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, **weights)
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."


def test_weights_of_other_rows_than_the_data_are_to_be_stated():
    model, x, y = binary()
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x[::-1], y[::-1], sample_weight=np.linspace(0.5, 2, 24), batch_size=8, verbose=0)
    assert report.first_line.startswith("`fit` got sample weights, and the audit was given none")


def test_a_loop_that_is_interrupted_is_judged_up_to_there():
    model, x, y = binary()

    def interrupt(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(KeyboardInterrupt), stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=2, callbacks=[stop], verbose=0)
    few = ", but not the order of the rows, which takes two whole passes."
    assert report.first_line == f"Nothing found in 3 updates: mode, gradient, step, state were judged{few}"
    assert "the rest of the loop: it ended with KeyboardInterrupt" in report.unseen


def test_a_long_loop_says_how_many_gradients_were_judged(monkeypatch):
    model, x, y = binary()
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=20, verbose=0)
    assert report.first_line.startswith("Nothing found in 60 updates (gradients of 40): ")


def test_the_inputs_of_a_long_loop_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(log, "_MOST_BYTES", 10 * 8 * 5 * 4)  # of ten updates behind the forty
    model, x, y = binary()
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=40, verbose=0)
    assert report.first_line.startswith("Nothing found in 5")
    assert "the rest of the loop: 0 MB of its inputs were kept" in report.unseen


def test_the_order_of_equal_rows_is_not_claimed_to_be_judged():
    model, x, y = binary()
    x[:8], y[:8] = x[8:16], y[8:16]
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert report.first_line == "Nothing found in 6 updates: mode, gradient, step, state were judged."


def test_a_loss_scale_of_keras_is_no_fault():
    model, x, y = binary()
    model.compile(keras.optimizers.Adam(1e-3, loss_scale_factor=1024.0), "binary_crossentropy")
    with stepcheck.watch(model, (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."


def test_updates_of_all_rows_have_no_order():
    model, x, y = binary()
    x, y = x[::-1], y[::-1]
    with stepcheck.watch(model, (x[::-1], y[::-1])) as report:
        model.fit(x, y, batch_size=24, epochs=6, shuffle=False, verbose=0)
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."


@pytest.mark.parametrize("epochs", [1, 6])
def test_a_run_whose_every_step_is_skipped_says_so(epochs):
    x = np.full((24, 5), np.nan, "float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, verbose=0)
    if epochs == 6:
        told = "optimizer steps were skipped: at no loss scale was the gradient finite. Is the loss NaN?"
        assert report.first_line == f"The last 18 {told}"
    else:  # a scale may be too large at first
        assert report.first_line.startswith("Nothing can be said")


class WithArguments(keras.optimizers.SGD):
    """An optimizer whose configuration lacks an argument."""

    def __init__(self, total, **others):
        super().__init__(**others)
        self.total = total


BY_HAND = """
import tensorflow as tf


def train(model, x, y, optimizer, epochs=2, factor=1.0):
    for _ in range(epochs):
        for rows in np.split(np.random.permutation(len(x)), 3):
            with tf.GradientTape() as tape:
                loss = factor * tf.reduce_mean((y[rows] - model(x[rows], training=True)) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""


@ONLY_TENSORFLOW
def test_an_optimizer_without_a_whole_configuration_hides_no_cause():
    model, x, y = binary()
    optimizer, names = WithArguments(100, learning_rate=0.1), {"np": np}
    exec(BY_HAND, names)
    with stepcheck.watch(model, (x, y), loss="mse", optimizer=optimizer) as report:
        names["train"](model, x, y, optimizer, factor=8.0)
    assert [cause.name for cause in report.causes] == ["never divided"]


@ONLY_TENSORFLOW
@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.SGD])
def test_an_optimizer_that_is_made_in_the_loop_loses_its_moments(kind):
    model, x, y = binary()
    names = {"np": np}
    exec(BY_HAND, names)
    with stepcheck.watch(model, (x, y), loss="mse") as report:
        for _ in range(2):
            names["train"](model, x, y, kind(1e-3), epochs=1)
    if kind is keras.optimizers.SGD:  # it has none
        assert report.first_line.startswith("Nothing found in 6 updates")
    else:
        assert report.first_line.startswith("The optimizer begins anew at update 4, with the same rate")


@ONLY_TENSORFLOW
def test_two_passes_of_one_loss_are_no_microbatches():
    import tensorflow as tf

    model, x, y = binary()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with stepcheck.watch(model, (x, y), loss="mse", optimizer=optimizer) as report:
        for rows in np.split(np.random.permutation(24), 4):
            with tf.GradientTape() as tape:
                one, two = tf.reduce_mean((y[rows] - model(x[rows])) ** 2), tf.reduce_mean(model(-x[rows]) ** 2)
                loss = one + two
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    assert "accumulated twice" not in [cause.name for cause in report.causes]


def test_an_unreduced_loss_means_its_mean():
    model, x, y = binary()
    with stepcheck.watch(model, (x, y), loss=keras.losses.BinaryCrossentropy(reduction=None)) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."


class Weighed(keras.losses.BinaryCrossentropy):
    """A loss whose configuration lacks an argument."""

    def __init__(self, alpha, **others):
        super().__init__(**others)
        self.alpha = alpha

    def call(self, y_true, y_pred):
        return self.alpha * super().call(y_true, y_pred)


@ONLY_TENSORFLOW
def test_a_loss_without_a_whole_configuration_hides_no_cause():
    model, x, y = binary()
    optimizer, names = keras.optimizers.SGD(0.1), {"np": np, "loss_fn": Weighed(0.3)}
    wrong = "loss_fn(y[rows], tf.sigmoid(model(x[rows], training=True)))"
    exec(BY_HAND.replace("tf.reduce_mean((y[rows] - model(x[rows], training=True)) ** 2)", wrong), names)
    with stepcheck.watch(model, (x, y), loss=Weighed(0.3), optimizer=optimizer) as report:
        names["train"](model, x, y, optimizer)
    assert [cause.name for cause in report.causes] == ["other outputs"]


class Tokens(keras.layers.Embedding):
    """An embedding that makes its own mask."""

    def compute_mask(self, inputs, mask=None):
        return keras.ops.not_equal(inputs, 0)


@pytest.mark.parametrize(
    ("is_kept", "first"), [(True, "Nothing found in 6 updates: "), (False, "The loss counts the pad")]
)
def test_a_mask_that_a_layer_makes_is_that_of_the_loss(is_kept, first):
    x = np.random.default_rng(0).integers(1, 9, (24, 6)).astype("int32")
    x[np.arange(6) > np.arange(24)[:, None] % 5] = 0
    tokens = Tokens(9, 4)
    tokens.supports_masking = is_kept  # else Keras leaves the mask out
    model = keras.Sequential([keras.Input((6,), dtype="int32"), tokens, keras.layers.Dense(9)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with stepcheck.watch(model, (x, 8 - x)) as report:
        model.fit(x, 8 - x, batch_size=8, epochs=2, verbose=0)
    assert (report.causes, report.first_line[: len(first)]) == ([], first), str(report)


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
def test_inputs_that_a_loop_gives_by_name_are_not_swapped(names):
    one, two = np.random.default_rng(0).normal(size=(2, 24, 5)).astype("float32")
    inputs = [keras.Input((5,), name=name) for name in names]
    outputs = keras.layers.Dense(1)(keras.layers.Subtract()([keras.layers.Dense(4)(each) for each in inputs]))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with stepcheck.watch(model, ((one, two), one[:, :1])) as report:
        model.fit(dict(zip(names, (one, two), strict=True)), one[:, :1], batch_size=8, epochs=2, verbose=0)
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."


def masked_mean(y, outputs):
    """Return the mean over the rows whose label is not below 0.2."""
    kept = keras.ops.cast(y > 0.2, "float32")
    return keras.ops.sum(kept * (y - outputs) ** 2) / keras.ops.sum(kept)


class Unbuilt(keras.Model):
    """A model that its first call builds."""

    def __init__(self):
        super().__init__()
        self.own = keras.layers.Dense(1)

    def call(self, x):
        return self.own(x)


@ONLY_TENSORFLOW
def test_the_weights_in_a_function_are_measured_after_the_loop():
    x = np.random.default_rng(0).uniform(size=(24, 5)).astype("float32")
    model, optimizer, calls = Unbuilt(), keras.optimizers.SGD(0.1), []
    model(x[:1])

    def loss_fn(y, outputs):
        calls.append(y)
        return masked_mean(y, outputs)

    names = {"np": np, "loss_fn": loss_fn}
    right = "loss_fn(y[rows], model(x[rows], training=True))"
    exec(BY_HAND.replace("tf.reduce_mean((y[rows] - model(x[rows], training=True)) ** 2)", right), names)
    with stepcheck.watch(model, (x, x[:, :1]), loss=loss_fn, optimizer=optimizer) as report:
        assert calls == []
        names["train"](model, x, x[:, :1], optimizer)
    assert report.first_line.startswith("Nothing found in 6 updates")


@ONLY_TENSORFLOW  # on JAX, Keras refuses to train
@pytest.mark.parametrize("is_thawed", [False, True])
def test_layers_that_are_frozen_or_thawed_after_compile_are_said_first(is_thawed):
    model, x, y = binary()
    model.layers[0].trainable = not is_thawed
    model.compile("sgd", "binary_crossentropy")
    model.fit(x, y, verbose=0)
    model.layers[0].trainable = is_thawed
    if is_thawed:
        told = "`fit` does not train the layers that were thawed"
        with pytest.raises(stepcheck.SpecificationError, match=told), stepcheck.watch(model, (x, y)):
            model.fit(x, y, verbose=0)
        model.fit(x, y, verbose=0)  # as before
    else:
        with stepcheck.watch(model, (x, y)) as report:
            model.fit(x, y, verbose=0)
        assert report.first_line.startswith("Layers were frozen or thawed after the model was compiled.")


@ONLY_TENSORFLOW
def test_other_loss_weights_are_named_beside_an_output_that_does_not_count():
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two", "three")])
    model.compile("sgd", ["mse"] * 3, loss_weights=[1.0, 0.0, 0.5])
    optimizer, names = keras.optimizers.SGD(0.01), {"np": np}
    wrong = "sum(tf.reduce_mean((y[rows] - out) ** 2) * w for out, w in zip(model(x[rows], training=True), (1, 0, 2)))"
    exec(BY_HAND.replace("tf.reduce_mean((y[rows] - model(x[rows], training=True)) ** 2)", wrong), names)
    with stepcheck.watch(model, (x, [x[:, :1]] * 3), optimizer=optimizer) as report:
        names["train"](model, x, x[:, :1], optimizer)
    assert [cause.name for cause in report.causes] == ["other loss weights"]
    assert "of one_loss, three_loss count 1, 2, and not 1, 0.5" in report.causes[0].explanation


class Twins(keras.Model):
    """A model with two variables of one path."""

    def build(self, shape):
        self.one = self.add_weight(shape=(5, 8), name="w")
        self.two = self.add_weight(shape=(8, 1), name="w")

    def call(self, x):
        return keras.ops.matmul(keras.ops.matmul(x, self.one), self.two)


@ONLY_TENSORFLOW
def test_variables_of_one_name_are_told_apart():
    (_, x, y), model, names = binary(), Twins(), {"np": np}
    model.build((None, 5))
    optimizer = keras.optimizers.SGD(0.01)
    exec(BY_HAND, names)
    with stepcheck.watch(model, (x, y), loss="mse", optimizer=optimizer) as report:
        names["train"](model, x, y, optimizer, factor=8.0)
    assert [cause.name for cause in report.causes] == ["never divided"]


@ONLY_TENSORFLOW
def test_a_layer_that_sets_its_own_weights_is_no_fault():
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    parts = [keras.layers.SpectralNormalization(keras.layers.Dense(8)), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    assert report.causes == []


@pytest.mark.parametrize("has_nan_inputs", [False, True])
def test_a_loss_that_becomes_nan_is_said_first(has_nan_inputs):
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    x[13, 2] = np.nan if has_nan_inputs else 0
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.1 if has_nan_inputs else 1e30), "binary_crossentropy")
    with stepcheck.watch(model, (x, (x[:, :1] > 0).astype("float32"))) as report:
        model.fit(x, (x[:, :1] > 0).astype("float32"), batch_size=8, epochs=2, shuffle=False, verbose=0)
    why = "its inputs hold NaN or infinity." if has_nan_inputs else "is the learning rate too large, or are labels NaN?"
    assert re.match(rf"The gradient is not finite from update 2 on: {re.escape(why)}", report.first_line)
    assert "from_logits" not in str(report)


def test_rows_of_numbers_that_the_loop_makes_columns_are_judged():
    x = np.linspace(-1, 1, 32, dtype="float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, 2 * x)) as report:
        model.fit(x[:, None], 2 * x[:, None], batch_size=8, verbose=0)
    assert report.first_line.startswith("Nothing found in 4 updates")


@ONLY_TENSORFLOW
def test_a_loss_of_rows_of_unknown_number_is_said():
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function(input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])])
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_squared_error(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with stepcheck.watch(model, (x, x[:, :1]), loss="mse") as report:
        for batch in tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8):
            step(*batch)
    assert "A gradient is taken of losses of shape (None,): the engine adds them up." in report.notes
    assert [cause.name for cause in report.causes] == ["never divided"]


def test_a_side_check_that_fails_is_a_line_and_no_traceback(monkeypatch):
    monkeypatch.setattr(judge, "state", lambda *given: divmod(1, 0))
    report = trained()
    (told,) = report.unseen
    assert told.startswith("statistics and seeds: ZeroDivisionError: ")
    assert report.first_line.startswith("Nothing found in 6 updates: ")


DATA = """
x = rng.normal(size=(48, 5)).astype("float32")
y = (x.sum(1) > 0).astype("float32")[:, None]
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
import tensorflow as tf


def taken(a, b):
    with tf.GradientTape() as tape:
        loss = loss_fn(b, model(a, training=True))
    return tape.gradient(loss, model.trainable_variables)

"""
LOOP = """

for epoch in range(3):
    order = rng.permutation(48)
    for start in range(0, 48, 12):
        rows = order[start : start + 12]
        step(x[rows], y[rows])
"""
MOMENTUM = """
model = network()
speed = [tf.zeros_like(v) for v in model.trainable_variables]


def step(a, b):
    for i, (v, g) in enumerate(zip(model.trainable_variables, taken(a, b))):
        speed[i] = 0.9 * speed[i] - 0.05 * g
        v.assign_add(speed[i])
"""
RATE_ZERO = """
model, count = network(), 0


def step(a, b):
    global count
    for v, g in zip(model.trainable_variables, taken(a, b)):
        v.assign_sub(0.1 * min(1, count / 6) * (count % 5 > 0) * g)
    count += 1
"""
SHARPNESS = """
model, optimizer = network(), keras.optimizers.SGD(0.05)


def step(a, b):
    there = [0.05 * g / tf.norm(g) for g in taken(a, b)]
    for v, e in zip(model.trainable_variables, there):
        v.assign_add(e)
    grads = taken(a, b)
    for v, e in zip(model.trainable_variables, there):
        v.assign_sub(e)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""
ON_BOTH = """
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
with strategy.scope():
    model, optimizer = network(), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def one(a, b):
    optimizer.apply_gradients(zip(taken(a, b), model.trainable_variables))


@tf.function
def both(a, b):
    strategy.run(one, args=(a, b))


def step(a, b):
    both(tf.constant(a), tf.constant(b))
"""
OWN_STEP = "Not judged: the optimizer step is your own. Nothing found in "
LOOPS = {
    "momentum by hand": (MOMENTUM, 0, "Nothing found in "),
    "a rate of zero": (RATE_ZERO, 2, OWN_STEP),
    "sharpness": (SHARPNESS, 0, "Nothing found in 12 updates: rows, mode, gradient, step, state were judged."),
    "the same rows on both replicas": (ON_BOTH, 1, "Each of the 2 replicas gets the same rows, so an update is of"),
}


HALF = "zip([g / 2 for g in grads], model"


def test_a_model_that_is_frozen_at_the_end_is_judged_as_it_was_trained():
    """As the discriminator of a GAN is, while the generator is trained."""
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        for start in [*range(0, 24, 8)] * 2:
            model.trainable = True
            model.train_on_batch(x[start : start + 8], x[start : start + 8, :1])
            model.trainable = False
    assert report.first_line == "Nothing found in 6 updates: rows, mode, gradient, step, state were judged."
    assert not any(layer.trainable for layer in model.layers)


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


USED_UP = (
    "for epoch in range(2):\n    for rows in rng.permutation(24).reshape(3, 8):",
    "{made}for epoch in range(3):\n{anew}    for rows in parts:",
)
MADE = "parts = (part for part in rng.permutation(24).reshape(3, 8))\n"


def fitted(x, y, *, order, data=None, num=1):
    """Return the report of a `fit` that takes the rows in this order in each of two epochs."""
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(num)])
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, y) if data is None else data) as report:
        for _ in range(2):
            model.fit(x[order], y[order], batch_size=8, shuffle=False, verbose=0)
    return report


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.slow
def test_rows_that_are_sorted_by_few_classes_are_a_cause(num):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(48, 5)).astype("float32"), np.repeat(np.arange(num), 48 // num)
    report = fitted(x, y, order=np.arange(48))
    assert [cause.name for cause in report.causes] == ["batches of few labels"]
    assert f"hold at most 1 of {num} labels" in report.causes[0].detail
    mixed = draw.permutation(48)
    assert fitted(x[mixed], y[mixed], order=np.arange(48)).causes == []


def test_rows_that_are_changed_on_the_way_are_not_said_to_be_held_out():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(32, 4, 4, 1)).astype("float32"), np.ones((32, 1), "float32")
    flipped = np.where(np.arange(32)[:, None, None, None] % 3 == 0, x[:, :, ::-1], x)
    (note,) = [note for note in fitted(flipped, y, order=draw.permutation(32), data=(x, y)).notes if "rows of" in note]
    assert "they are rows whose numbers stand elsewhere (flipped, rolled, turned?)" in note
    noisy = np.concatenate([x[:16], x[16:] + 1])
    report = fitted(noisy, y, order=np.arange(32), data=(x, y))
    assert report.causes == []
    assert "are rows changed on the way to the model (augmented, normalised)?" in " ".join(report.notes)


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.slow
def test_several_losses_are_taken_as_compile_takes_them(is_dict, is_compiled):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(24, 5)).astype("float32"), [draw.normal(size=(24, 1)).astype("float32") for _ in range(2)]
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")])
    meant = {"a": "mse", "b": "mae"} if is_dict else ["mse", "mae"]
    if is_compiled:
        model.compile("sgd", ["mae", "mae"])
    with stepcheck.watch(model, (x, y), loss=meant) as report:
        model.compile("sgd", ["mse", "mae"])
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert report.first_line.startswith("Nothing found in 6 updates"), str(report)
    with stepcheck.watch(model, (x, y), loss=meant) as report:
        model.compile("sgd", ["mae", "mse"])
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert [cause.explanation for cause in report.causes] == [
        "The loss (output a) is MeanAbsoluteError() instead of mse.",
        "The loss (output b) is MeanSquaredError() instead of mae.",
    ]


def test_losses_that_do_not_fit_the_outputs_are_refused():
    x, model = np.ones((8, 3), "float32"), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with (
        pytest.raises(stepcheck.SpecificationError, match="one for each"),
        stepcheck.watch(model, (x, x[:, :1]), {"none": "mse"}),
    ):
        pass


@pytest.mark.slow
def test_a_loss_that_is_not_known_shows_one_row_with_both_losses():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(24, 5)).astype("float32"), draw.normal(size=(24, 1)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, out: keras.ops.mean(keras.ops.abs(y - out) ** 1.5, -1))
    with stepcheck.watch(model, (x, y), "mse") as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    (cause,) = report.causes
    assert (cause.name, cause.stage) == ("not known", "gradient")
    found = re.search(
        r"On row (\d+) of the data, label (.+), output (.+): the loss that was meant is (.+), with derivative (.+) by "
        r"the output in this batch; the loop's has (.+)\.$",
        cause.detail,
    )
    label, output, loss, own, other = map(float, found.groups()[1:])
    assert label == pytest.approx(y[int(found[1]), 0], rel=1e-3)
    error = output - label
    assert loss == pytest.approx(error**2, rel=1e-2)
    assert own == pytest.approx(2 * error / 8, rel=1e-2)
    assert other == pytest.approx(1.5 * np.sign(error) * abs(error) ** 0.5 / 8, rel=1e-2)


def test_inputs_that_are_no_rows_of_the_data_stand_beside_the_nearest_row():
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    report = fitted(x + np.float32([1e-3, 2e-3]), x[:, :1], order=np.arange(16), data=(x, x[:, :1]))
    got, own = re.search(
        r"the model got \((.+)\), and row 0 of `data`, the nearest, is \((.+)\)", report.unseen[0]
    ).groups()
    assert [float(number) for number in own.split(", ")] == pytest.approx(x[0].tolist(), rel=1e-3)
    assert [float(n) for n in got.split(", ")] == pytest.approx((x[0] + [1e-3, 2e-3]).tolist(), rel=1e-3)


OWN_LOSS = """
model, optimizer = network(), keras.optimizers.SGD(0.01)


def own_loss(labels, out):
    return tf.reduce_mean(tf.abs(labels - out) ** 1.5 + tf.random.normal((1,)) * out)


def step(a, b):
    with tf.GradientTape() as tape:
        out = model(a, training=True)
        loss = own_loss(b, out)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
"""


CLIPPED = """
model, optimizer = network(), keras.optimizers.SGD(0.01)


@tf.function
def step(a, b):
    grads = taken(a, b)
    {} = tf.clip_by_global_norm(grads, 0.1)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""


STALE = """
model, optimizer = network(), keras.optimizers.SGD(0.01)
for epoch in range(3):
    order = rng.permutation(48)
    held = [taken(x[order[i : i + 12]], y[order[i : i + 12]]) for i in range(0, 48, 12)]
    for grads in held:
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
"""


class Pooled(keras.layers.Layer):
    """The mean of the places, by shares along an axis; or one row after the other, as if it were time."""

    def __init__(self, axis):
        super().__init__()
        self.axis, self.rows = axis, keras.layers.GRU(4, return_sequences=True)

    def build(self, shape):
        if self.axis is None:
            self.rows.build((1, *shape))

    def call(self, x):
        if self.axis is None:
            return self.rows(x[None])[0]
        return keras.ops.sum(keras.ops.softmax(x, axis=self.axis) * x, axis=1, keepdims=True)


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.slow
def test_a_row_whose_output_depends_on_the_rows_beside_it_is_said_first(axis):
    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    parts = [keras.layers.BatchNormalization(), Pooled(axis), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    told = "The output of a row depends on the other rows of its batch, in inference too"
    assert report.first_line.startswith("Nothing found" if axis == 1 else told)


class InTime(keras.layers.Layer):
    """Returns the last state of a GRU over the places, which are cut anew if the axes are not moved."""

    def __init__(self, has_moved):
        super().__init__()
        self.has_moved, self.cell = has_moved, keras.layers.GRU(8)

    def build(self, shape):
        self.cell.build((None, shape[1], 1))

    def call(self, x):
        rows, places = keras.ops.shape(x)[0], x.shape[1]
        moved = x if self.has_moved else keras.ops.transpose(keras.ops.reshape(x, (places, rows)))
        return self.cell(keras.ops.reshape(moved, (rows, places, 1)))


@pytest.mark.parametrize("has_moved", [True, False])
def test_rows_that_are_cut_anew_in_place_of_a_transpose_are_said_first(has_moved):
    x = np.random.default_rng(0).normal(size=(96, 80)).astype("float32")
    model = keras.Sequential([keras.Input((80,)), InTime(has_moved), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with stepcheck.watch(model, (x, x[:, -1:])) as report:
        model.fit(x, x[:, -1:], batch_size=32, epochs=2, verbose=0)
    assert report.first_line.startswith("Nothing found" if has_moved else "The output of a row depends on the other")


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize(("num_alike", "is_frozen"), [(8, True), (40, False), (1, False)])
def test_noise_that_is_the_same_in_each_update_is_said_first(num_alike, is_frozen, is_dropped):
    rng = np.random.default_rng(0)
    clean, noise = rng.uniform(1, 2, size=(40, 5)).astype("float32"), rng.uniform(-1, 1, size=(40, 5)).astype("float32")
    noise = np.tile(noise[:num_alike], (40 // num_alike, 1))
    x = clean * (noise > 0) if is_dropped else clean + noise
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with stepcheck.watch(model, (x, clean)) as report:
        model.fit(x, clean, batch_size=8, epochs=1, shuffle=False, verbose=0)
    told = "The inputs are the labels with noise, and the noise is the same in every update"
    assert report.first_line.startswith(told if is_frozen else "Nothing found")
