"""Evaluation is exact over all rows, for any batch size."""

import keras
import numpy as np
import pytest
from shares import on, share
from small import ROWS, X, Y, count_calls, model

import wholestep as ws
from wholestep.evaluation import Evaluation, join


@pytest.mark.parametrize("size", share([1, 7, ROWS]))
def test_a_weighted_mean_does_not_depend_on_the_batches(size):
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    made = model(loss=loss)
    weight = np.random.default_rng(3).random(ROWS).astype("float32")
    logits = made.predict(X, verbose=0).astype("float64")
    each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(ROWS), Y]
    found = ws.Trainer(made).evaluate(X, Y, size, sample_weight=weight, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx((each * weight).sum() / weight.sum(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(axis=1) == Y).mean())


def uneven(case):
    """Return a model whose batches weigh unevenly, and its x, y and sample weights."""
    weight = (
        np.linspace(0, 1, ROWS).astype("float32") if case == "mean_with_sample_weight" else None
    )
    if case == "mask":
        layers = [keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.Dense(4)]
        made = keras.Sequential([keras.Input((3,)), *layers])
        made.compile("sgd", "mse")
        return made, np.triu(np.ones((ROWS, 3), int)), np.ones((ROWS, 3, 4)), None
    reduction = "sum_over_batch_size" if weight is None else case
    ignored = 0 if case == "ignore_class" else None
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )
    return model(loss=loss, metrics=[]), X, Y, weight


@pytest.mark.parametrize("case", share(["mask", "ignore_class", "mean_with_sample_weight"]))
def test_keras_means_the_means_of_uneven_batches_and_ours_divides_once(case):
    made, x, y, weight = uneven(case)
    ours = ws.Trainer(made).evaluate(x, y, 4, sample_weight=weight, verbose=0)
    whole, parts = (
        made.evaluate(x, y, size, sample_weight=weight, verbose=0) for size in (ROWS, 4)
    )
    assert ours == pytest.approx(whole, rel=1e-5)
    assert ours != pytest.approx(parts, rel=1e-4)


def test_a_model_of_several_outputs_predicts_them_all():
    x = keras.Input((6,))
    made = keras.Model(x, {"a": keras.layers.Dense(2)(x), "b": [keras.layers.Dense(3)(x)]})
    made.compile("sgd", {"a": "mse", "b": ["mse"]})
    outputs = ws.Trainer(made).predict(X, batch_size=8, verbose=0)
    assert outputs["a"].shape == (ROWS, 2)
    assert outputs["b"][0].shape == (ROWS, 3)


@on("jax")
def test_callbacks_of_evaluation_and_prediction():
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs=None: seen.append(("test", batch))
    watch.on_predict_batch_end = lambda batch, logs=None: seen.append(("predict", batch))
    trainer = ws.Trainer(model())
    trainer.evaluate(X, Y, 10, verbose=0, callbacks=[watch])
    trainer.predict(X, 10, verbose=0, callbacks=[watch])
    assert seen == [("test", 0), ("test", 1), ("predict", 0), ("predict", 1)]


def test_join():
    joined = join([{"a": np.ones((2, 1))}, {"a": np.zeros((1, 1))}])
    np.testing.assert_array_equal(joined["a"], [[1], [1], [0]])


def test_prediction_builds_a_model_that_has_not_seen_data():
    made = keras.Sequential([keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    assert ws.Trainer(made).predict(X, batch_size=8, verbose=0).shape == (ROWS, 2)


def test_a_row_that_a_table_does_not_have():
    """Said of evaluation and of tables that are updated as a whole; of rows, see
    test_embeddings.
    """
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 2), keras.layers.Flatten()]
    )
    model.compile("adam", "mse")
    trainer = ws.Trainer(model)
    data = (np.array([[1, 2], [3, 9]], "int32"), np.zeros((2, 4), "float32"))
    if keras.backend.backend() == "jax":
        assert np.isnan(trainer.evaluate(*data, verbose=0))
        with pytest.raises(ws.NonFiniteError, match="rows 1"):
            trainer.update(data)["loss"]
        return
    for compute in (lambda: trainer.evaluate(*data, verbose=0), lambda: trainer.update(data)):
        with pytest.raises(
            Exception, match=r"\[1,1\] = 9 is not in \[0, 9\)|indices.* = 9 is not in \[0, 9\)"
        ):
            compute()


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="on JAX no program writes variables"
)
def test_an_evaluation_writes_the_metrics_of_the_model_in_its_program(monkeypatch):
    made = model()
    trainer = ws.Trainer(made)
    trainer.test_on_batch(X, Y)
    assigned = count_calls(monkeypatch, type(trainer.executor.engine.variables), "assign")
    logs = trainer.test_on_batch(X[:7], Y[:7], return_dict=True)
    trainer.test_on_batch(X, Y)
    num = len(assigned)  # of the traces
    assert trainer.test_on_batch(X[:7], Y[:7], return_dict=True) == logs
    assert len(assigned) == num
    assert {k: float(v) for k, v in made.get_metrics_result().items()} == pytest.approx(logs)


class Counts(keras.layers.Layer):
    """Multiplies by how often it was called: state that moves in every mode."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * self.count


def check_state_moves_as_in_keras(make, x, y, size):
    ours = make()
    theirs = make()
    theirs.set_weights(ours.get_weights())
    trainer = ws.Trainer(ours)
    for _ in range(2):
        outputs = (m.predict(x, batch_size=size, verbose=0) for m in (trainer, theirs))
        np.testing.assert_allclose(*outputs, rtol=1e-6)
        numbers = [m.evaluate(x, y, batch_size=size, verbose=0) for m in (trainer, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return ours


def test_state_that_moves_in_prediction_and_evaluation_is_kept():
    def make():
        layers = [
            keras.Input((3,)),
            Counts(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1, use_bias=False),
        ]
        made = keras.Sequential(layers)
        made.compile("sgd", "mse")
        return made

    ours = check_state_moves_as_in_keras(make, np.ones((8, 3)), np.ones((8, 1)), 4)
    assert float(np.asarray(ours.layers[0].count)) == 8


class Always(keras.layers.Dropout):
    def call(self, x, training=False):
        return super().call(x, training=True)


def test_draws_in_evaluation_go_on():
    def make():
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), Always(0.5, seed=1)])
        made.compile("sgd", "mse")
        return made

    ours = check_state_moves_as_in_keras(make, np.ones((8, 3)), np.ones((8, 4)), 4)
    first, second = (ws.Trainer(ours).predict(np.ones((8, 3)), verbose=0) for _ in range(2))
    assert np.any(first != second)


def test_a_recurrent_layer_carries_its_state_from_batch_to_batch():
    # keras.Model.predict loses it on JAX, where the layer's states are none of the model's
    # variables.
    def make(size, stateful):
        x = keras.Input(batch_shape=(2, size, 3))
        return keras.Model(x, keras.layers.GRU(2, stateful=stateful)(x))

    whole = make(6, False)
    parts = make(3, True)
    parts.set_weights(whole.get_weights())
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")
    halves = np.concatenate([x[:, :3], x[:, 3:]])
    for made in (whole, parts):
        made.compile("sgd", "mse")
    found = ws.Trainer(parts).predict(halves, batch_size=2, verbose=0)[2:]
    np.testing.assert_allclose(found, whole(x), rtol=1e-5, atol=1e-6)


@on("jax")
def test_prediction_leaves_the_numbers_of_an_evaluation():
    made = model()
    trainer = ws.Trainer(made)
    trainer.evaluate(X, Y, verbose=0)
    before = {name: float(value) for name, value in made.get_metrics_result().items()}
    trainer.predict(X, verbose=0)
    assert {name: float(value) for name, value in made.get_metrics_result().items()} == before
    assert before["loss"] > 0


class Lasting(keras.metrics.Metric):
    """Counts the rows of all epochs."""

    def __init__(self):
        super().__init__(name="lasting")
        self.count = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return keras.ops.convert_to_tensor(self.count)

    def reset_state(self):
        pass


@on("jax")
def test_a_metric_may_keep_what_it_has_when_an_epoch_begins():
    made = model()
    made.compile("sgd", made.loss, metrics=[Lasting()])
    assert ws.Trainer(made).fit(X, Y, epochs=3, batch_size=20, verbose=0).history["lasting"] == [
        20,
        40,
        60,
    ]


def test_outputs_may_hold_nothing():
    inputs = keras.Input((6,))
    made = keras.Model(inputs, [keras.layers.Dense(2)(inputs), inputs[:, :0]])
    made.compile("sgd", ["mse", None])
    assert [part.shape for part in ws.Trainer(made).predict(X, batch_size=8, verbose=0)] == [
        (20, 2),
        (20, 0),
    ]


@on("jax")
def test_the_progress_bar_does_not_make_batches_go_one_by_one(capsys):
    made = model()
    trainer = ws.Trainer(made)
    whole = trainer.predict(X, batch_size=2, verbose=1)
    np.testing.assert_allclose(whole, made.predict(X, verbose=0), rtol=1e-5)
    (program,) = trainer.executor.evaluation.programs.values()
    assert program.most == 10
    assert "10/10" in capsys.readouterr().out


class Looks(keras.callbacks.Callback):
    """Has hooks of a batch: each batch is a dispatch."""

    def on_test_batch_end(self, batch, logs=None):
        pass

    def on_predict_batch_end(self, batch, logs=None):
        pass


@pytest.fixture
def sent(monkeypatch):
    """Return how many batches went in each dispatch."""
    nums = []
    send = Evaluation.send
    monkeypatch.setattr(
        Evaluation,
        "send",
        lambda self, run, feed, block: nums.append(block.num) or send(self, run, feed, block),
    )
    return nums


def test_batches_of_a_stream_go_together_and_have_the_numbers_of_those_that_go_alone(sent):
    trainer = ws.Trainer(model(keras.layers.BatchNormalization()))
    batches = [*((np.roll(X, i, axis=0)[:8], np.roll(Y, i)[:8]) for i in range(20)), (X[:3], Y[:3])]
    together = trainer.evaluate(iter(batches), verbose=0), trainer.predict(iter(batches), verbose=0)
    assert sent == 2 * [16, 4, 1]
    alone = (
        trainer.evaluate(iter(batches), verbose=0, callbacks=[Looks()]),
        trainer.predict(iter(batches), verbose=0, callbacks=[Looks()]),
    )
    assert sent[6:] == 42 * [1]
    assert together[0] == alone[0]
    np.testing.assert_array_equal(together[1], alone[1])
    rows = [np.concatenate(part) for part in zip(*batches, strict=True)]
    assert together[0] == pytest.approx(trainer.evaluate(*rows, 8, verbose=0), rel=1e-6)


def test_a_batch_alone_has_a_program_without_room_for_more():
    trainer = ws.Trainer(model())
    for steps in (1, 3):
        trainer.evaluate(iter(8 * [(X, Y)]), steps=steps, verbose=0)
    assert [program.num_stacked for program in trainer.executor.evaluation.programs.values()] == [
        1,
        16,
    ]


@pytest.mark.parametrize("epochs", [0, 1])
def test_an_evaluation_begins_with_empty_metrics_whatever_was_before(epochs):
    trainer = ws.Trainer(model())
    trainer.fit(X, Y, batch_size=4, epochs=epochs, verbose=0)
    first = trainer.evaluate(X, Y, verbose=0)
    trainer.evaluate(X[:3], 1 + Y[:3] * 0, verbose=0)
    assert trainer.evaluate(X, Y, verbose=0) == first
    assert trainer.test_on_batch(X, Y) == pytest.approx(first)


def test_numbers_by_name_are_in_the_order_of_keras():
    made = model(metrics=["sparse_top_k_categorical_accuracy", "accuracy"])
    trainer = ws.Trainer(made)
    for name in ("evaluate", "test_on_batch", "train_on_batch"):
        how = {"verbose": 0} if name == "evaluate" else {}
        ours, theirs = (
            list(getattr(each, name)(X, Y, return_dict=True, **how)) for each in (trainer, made)
        )
        assert ours == theirs


def test_no_thread_is_started_to_tell_nobody(monkeypatch):
    trainer = ws.Trainer(model())

    def refuse(*given):
        raise AssertionError("a callback is called")

    monkeypatch.setattr(keras.callbacks.CallbackList, "_async_dispatch", refuse)
    for told in (trainer.fit, trainer.evaluate):
        told(X, Y, verbose=0)
    trainer.predict(X, verbose=0)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_data_without_a_batch_are_an_error(call):
    with pytest.raises(ws.BatchError, match="at least one batch"):
        getattr(ws.Trainer(model()), call)(iter([]), verbose=0)
