"""Right loops of ordinary scripts, which the audit must neither accuse nor break."""

import threading
import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops

import stepcheck
import wholestep as ws
from stepcheck.keras.hooks import Hooks
from stepcheck.keras.listener import listener
from stepcheck.stages import judge
from stepcheck.trace import log
from stepcheck.trace.measure import are_shares

ONLY_TENSORFLOW = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the loop is TensorFlow's")
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = X[:, :1]


class WithPenalty(keras.Sequential):
    """A model that adds a penalty to its compiled loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * ops.mean(y_pred**2)


def network(kind=keras.Sequential, loss="mse", optimizer="sgd", **others):
    """Return a small compiled model."""
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((5,)), layers.Dense(3, "tanh", **others), layers.Dense(1)])
    model.compile(optimizer, loss)
    return model


def fitted(model, x=X, y=Y, **others):
    """Return the report of a `fit`."""
    with stepcheck.watch(model, (x, y), **others) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return report


@pytest.mark.parametrize(("loss", "num"), [("mse", None), (["mse"], 3)])
def test_a_model_with_a_penalty_in_its_compute_loss_is_judged_by_it(loss, num):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=num)
    report = fitted(network(WithPenalty, loss, optimizer, kernel_regularizer="l2"))
    told = f"Nothing found in {6 // (num or 1)} updates: rows, mode, gradient, step, state were judged."
    assert report.first_line == told


class Several(keras.Model):
    """A model that returns numbers beside its output; `more` makes further ones."""

    def __init__(self, more=lambda scale: {}):
        super().__init__()
        self.dense, self.more = layers.Dense(1), more
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, x, training=None):
        return {"out": self.dense(x) * self.scale, **self.more(self.scale)}


def stepper(model, optimizer, *, is_traced=False):
    """Return a step of a loop by hand, on this engine; the loss is the mean of the squared errors."""
    if keras.backend.backend() == "jax":
        return _stepper_on_jax(model, optimizer)
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((_out(model(x, training=True)) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return tf.function(step) if is_traced else step


def _out(outputs):
    return outputs["out"] if isinstance(outputs, dict) else outputs


def _stepper_on_jax(model, optimizer):
    import jax

    def loss(tv, ntv, x, y):
        outputs, ntv = model.stateless_call(tv, ntv, x, training=True)
        return ops.mean((_out(outputs) - y) ** 2), ntv

    taken = jax.jit(jax.value_and_grad(loss, has_aux=True))
    state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]

    def step(x, y):
        nonlocal state
        tv, ov = state
        (_, _), grads = taken(tv, [v.value for v in model.non_trainable_variables], x, y)
        state = optimizer.stateless_apply(ov, grads, tv)

    return step


def looped(model, *, num=2, data=(X, Y), loss="mse", is_traced=False, **others):
    """Return the report of a right loop by hand."""
    optimizer = keras.optimizers.SGD(0.1)
    if model.built:
        optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, data, loss, **others) as report:
        step = stepper(model, optimizer, is_traced=is_traced)
        for order in np.random.default_rng(1).permuted([np.arange(24)] * num, axis=1):
            for rows in order.reshape(3, 8):
                step(X[rows], Y[rows])
    return report


class OfOut(ws.Objective):
    """The squared error of the first output."""

    def __call__(self, model, batch, training):
        x, y = batch
        return ws.Mean((model(x, training=training)["out"] - y) ** 2)


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("is_traced", [False, pytest.param(True, marks=ONLY_TENSORFLOW)])
def test_what_a_model_returns_beside_tensors_breaks_no_loop(is_text, is_traced):
    model = Several(lambda scale: {"name": "a", "of": object()} if is_text else {"scale": scale, "one": 1.0})
    model(X)
    report = looped(model, loss=OfOut(), is_traced=is_traced)
    assert report.causes == []
    assert report.is_judged, str(report)


@ONLY_TENSORFLOW
def test_a_model_that_its_first_call_builds_has_the_room_of_its_weights(monkeypatch):
    monkeypatch.setattr(log, "_ROOM", 4 * 40)  # of one weight, as it has before
    net = Several()
    assert looped(net, loss=OfOut(), num=3).first_line.startswith("Nothing found in 9 updates (gradients of 5): ")


FOCAL = """
class Power(keras.losses.Loss):
    def __init__(self, power):
        super().__init__(name="power")
        self.power = power

    def call(self, y, out):
        return keras.ops.mean(keras.ops.abs(y - out) ** self.power, -1)
{}

def value(model, a, b):
    out = model(a, training=True)
    return Power(2.0)(b, out) + Power(4.0)(0 * b, out)


x = rng.normal(size=(24, 5)).astype("float32")
y = x.sum(1, keepdims=True)
model = network()
step = update(model, keras.optimizers.SGD(0.01), value)
for epoch in range(2):
    for rows in rng.permutation(24).reshape(3, 8):
        step(x[rows], y[rows])
"""


WITHOUT_CONFIG = """
    def get_config(self):
        raise NotImplementedError
"""


class Eager(keras.Model):
    """A model that reads numbers while it runs."""

    def __init__(self):
        super().__init__()
        self.dense, self.num_positive = layers.Dense(1), 0

    def call(self, x):
        self.num_positive += bool(ops.mean(x) > 0)
        return self.dense(x)


def squared(y, out):
    return ops.mean((y - out) ** 2)


@ONLY_TENSORFLOW
@pytest.mark.parametrize("loss", [squared, ["mse"]])
def test_a_model_that_runs_eagerly_alone_can_be_audited(loss):
    model = Eager()
    model(X)
    report = looped(model, loss=loss)
    assert report.causes == []
    assert report.has_seen


def test_inputs_of_different_lengths_are_no_error_of_the_report():
    """As the one time step beside the rows of a diffusion model is."""
    inputs = [keras.Input((5,)), keras.Input(batch_shape=(1,))]
    model = keras.Model(inputs, layers.Dense(1)(inputs[0]) + inputs[1][:, None])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, ([X, X[:, 0]], Y), "mse") as report:
        step = stepper(model, optimizer)
        for start in range(0, 24, 8):
            step([X[start : start + 8], X[:1, 0]], Y[start : start + 8])
    assert not report.has_seen
    assert "IndexError" not in str(report)


def broken(*given, **others):
    raise ZeroDivisionError


def test_no_check_raises_out_of_a_report(monkeypatch):
    monkeypatch.setattr(judge, "altered", broken)
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.fit(X + 1, Y, batch_size=8, verbose=0)
    assert "the inputs: ZeroDivisionError:" in report.unseen


def test_a_stage_that_fails_was_not_judged(monkeypatch):
    monkeypatch.setattr(judge, "of_steps", broken)
    monkeypatch.setattr(judge, "state", broken)
    monkeypatch.setattr(judge, "order", broken)
    assert fitted(network()).first_line == "Nothing found in 6 updates: mode, gradient were judged."


def test_a_printed_loss_that_is_passed_later_is_judged_by_the_whole_log():
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.layers[0].trainable = False
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=8, verbose=0)
        model.layers[0].trainable = True
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    first = str(report)
    report.printed(loss=[1.0, 1.0, 1.0])
    assert str(report) == first


@ONLY_TENSORFLOW
@pytest.mark.parametrize("shape", [(), (1,)])
def test_rows_of_text_are_found(shape):
    import tensorflow as tf

    words = ["one", "two", "three", "four"]
    texts = np.array([f"{words[i % 4]} {words[i // 8]} w{i}" for i in range(24)], object)
    split = layers.TextVectorization(output_mode="multi_hot", vocabulary=words)
    model = keras.Sequential([keras.Input(shape, dtype="string"), split, layers.Dense(1)])
    model.compile("sgd", "mse")
    texts = texts.reshape(24, *shape)
    with stepcheck.watch(model, (texts, Y)) as report:
        for _ in range(2):
            order = np.random.permutation(24)
            parts = tf.data.Dataset.from_tensor_slices((texts[order], Y[order])).batch(8)
            model.fit(parts, shuffle=False, verbose=0)
    assert report.first_line.startswith("Nothing found in 6 updates: rows, mode, gradient"), str(report)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_softmax_of_half_precision_is_one(dtype):
    out = ops.softmax(ops.convert_to_tensor(np.random.default_rng(0).normal(size=(64, 10)) * 3, dtype))
    assert are_shares(np.asarray(ops.convert_to_numpy(out)))
    assert not are_shares(np.asarray(ops.convert_to_numpy(out * 0.95)))


def test_rows_that_are_tested_after_the_audit_are_not_forgotten():
    """More than a batch of the last rows may be held out; less is the remainder of a division."""
    for num, causes in ((12, []), (20, ["rows never used"])):
        model = network()
        with stepcheck.watch(model, (X, Y)) as report:
            model.fit(X[:num], Y[:num], batch_size=5 if num == 20 else 6, epochs=2, shuffle=False, verbose=0)
        assert [cause.name for cause in report.causes] == causes
        assert any("Held out, or forgotten?" in note for note in report.notes) != bool(causes)


@ONLY_TENSORFLOW
@pytest.mark.parametrize("is_reptile", [False, True])
def test_an_inner_step_of_meta_learning_is_no_fault(is_reptile):
    import tensorflow as tf

    model = network()
    inner, outer, variables = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01), model.trainable_variables
    for each in (inner, outer):
        each.build(variables)

    def taken(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X[rows], training=True) - Y[rows]) ** 2)
        return tape.gradient(loss, variables)

    with stepcheck.watch(model, (X, Y), optimizer=outer) as report:
        for order in np.random.default_rng(1).permuted([np.arange(24)] * 2, axis=1):
            for rows in order.reshape(3, 2, 4):
                start = [v.numpy() for v in variables]
                inner.apply(taken(rows[0]), variables)
                way = [s - v for v, s in zip(variables, start, strict=True)]
                grads = way if is_reptile else taken(rows[1])
                for variable, value in zip(variables, start, strict=True):
                    variable.assign(value)
                outer.apply(grads, variables)
    assert report.causes == [], str(report)


@ONLY_TENSORFLOW
def test_outputs_whose_gradient_was_taken_are_not_kept():
    import tensorflow as tf

    model, optimizer, kept, record = network(), keras.optimizers.SGD(0.1), [], log.Log()
    optimizer.build(model.trainable_variables)
    with Hooks(model, listener(), record).on():
        for rows in np.random.default_rng(1).permutation(24).reshape(6, 4):
            with tf.GradientTape() as one, tf.GradientTape() as two:
                out = model(X[rows], training=True)
                loss = tf.reduce_mean((out - Y[rows]) ** 2)
            kept.append(weakref.ref(out))
            grads = [tape.gradient(loss, model.trainable_variables) for tape in (one, two)]
            optimizer.apply([(a + b) / 2 for a, b in zip(*grads, strict=True)], model.trainable_variables)
        del one, two, out, loss
        assert sum(each() is not None for each in kept) <= 1
    assert [len(called.derivatives[0]) for called in record.called] == [2] * 6


def test_a_prediction_in_another_thread_hides_no_update():
    model, are_begun, may_end = network(), threading.Event(), threading.Event()
    model.predict = lambda x: (are_begun.set(), may_end.wait(60))
    with stepcheck.watch(model, (X, Y)) as report:
        actor = threading.Thread(target=lambda: model.predict(X))
        actor.start()
        assert are_begun.wait(60)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        may_end.set()
        actor.join()
    assert report.first_line.startswith("Nothing found in 6 updates: rows, mode, gradient")


READ = """
class Counted:
    num = 0

    def __getitem__(self, rows):
        Counted.num += 1
        return self.y[rows]

    @property
    def all(self):
        Counted.num += 1
        return self.y


def own_loss(labels, out):
    return keras.ops.mean((labels - out) ** 2)


x = rng.normal(size=(24, 5)).astype("float32")
labels, model = Counted(), network()
labels.y = x.sum(1, keepdims=True)
optimizer = keras.optimizers.SGD(0.01)
for start in range(0, 24, 8):
    now = slice(start, start + 8)
    with tf.GradientTape() as tape:
        out = model(x[now], training=True)
        loss = own_loss({}, out)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
print("reads", Counted.num)
"""


def test_later_models_have_the_names_that_they_have_without_an_audit():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(1)(inputs), name="own")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with stepcheck.watch(model, (X, Y), loss=["mse"]) as report:
        for start in range(0, 24, 8):
            model.train_on_batch(X[start : start + 8], 2 * Y[start : start + 8])
    assert report.causes
    names = keras.Model(inputs, layers.Dense(1)(inputs)).name, keras.Variable(0.0).name, layers.Dense(1).name
    assert names == ("functional", "variable", "dense_2")


@ONLY_TENSORFLOW
@pytest.mark.slow
def test_a_fit_on_two_replicas_that_validates_is_right():
    import tensorflow as tf

    reduction = tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction).scope():
        model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.evaluate(X, Y, verbose=0)
        model.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0)
    assert report.first_line.startswith("Nothing found in 6 updates: rows, mode, gradient")
