"""Variables that an objective reads besides its model are inputs: their newest values are used."""

import keras
import numpy as np
import pytest
from exact import spread_over
from keras import ops

import wholestep as ws

X = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
STILL = {"batch_size": 2, "verbose": 0, "shuffle": False}


def dense(outputs=1, *layers):
    return keras.Sequential(
        [keras.Input((2,)), *layers, keras.layers.Dense(outputs, kernel_initializer="ones")]
    )


class Reads(ws.Objective):
    """The value of a function for every row; the model itself counts for nothing."""

    def __init__(self, value):
        self.value = value

    def __call__(self, model, batch, training):
        return ws.Mean(self.value(batch) + 0 * model(batch, training=training)[:, 0])


def reads(value, model=None, **options):
    return ws.Trainer(
        model or dense(), Reads(value), optimizer=keras.optimizers.SGD(0.0), **options
    )


@pytest.mark.parametrize("how", ["update", "fit", "evaluate", "microbatches"])
def test_another_models_newest_weights_are_seen(how):
    critic = dense()
    trainer = reads(
        lambda x: critic(x)[:, 0], microbatch_size=1 if how == "microbatches" else "auto"
    )

    def loss():
        if how == "update":
            return trainer.update(X)["loss"]
        return (
            trainer.evaluate(X, verbose=0)
            if how == "evaluate"
            else trainer.fit(X, **STILL).history["loss"][0]
        )

    assert loss() == pytest.approx(X.sum(axis=1).mean(), abs=1e-6)
    critic.set_weights([2 * w for w in critic.get_weights()])
    assert loss() == pytest.approx(2 * X.sum(axis=1).mean(), abs=1e-6)


def test_a_variable_alone_is_seen_by_every_dispatch():
    beta = keras.Variable(0.0)
    anneal = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: beta.assign(epoch))
    history = reads(lambda x: beta * ops.ones_like(x[:, 0])).fit(
        X, epochs=3, callbacks=[anneal], **STILL
    )
    assert history.history["loss"] == [0.0, 1.0, 2.0]


def test_the_optimizers_own_count_is_seen_by_every_update_of_a_dispatch():
    trainer = reads(
        lambda x: ops.cast(trainer.model.optimizer.iterations, x.dtype) * ops.ones_like(x[:, 0])
    )
    assert trainer.fit(X, epochs=2, **STILL).history["loss"] == [1.5, 5.5]


def test_a_compiled_loss_a_metric_and_a_regulariser_read_anew():
    beta = keras.Variable(1.0)
    model = dense()
    model.layers[-1].kernel.regularizer = lambda w: beta * ops.sum(w * w)
    model.compile(
        keras.optimizers.SGD(0.0),
        lambda y, p: beta * (p[:, 0] * 0 + 1),
        metrics=[lambda y, p: 0 * p + beta],
    )
    trainer = ws.Trainer(model)
    for value in (1.0, 5.0):
        beta.assign(value)
        logs = list(trainer.fit(X, X[:, 0], **STILL).history.values())
        assert [found[0] for found in logs] == [value, 3 * value]
        assert trainer.evaluate(X, X[:, 0], verbose=0) == [3 * value, value]


def test_two_trainers_that_read_each_other_see_the_newest_weights():
    one = dense()
    two = dense()
    first = ws.Trainer(
        one, Reads(lambda x: two(x)[:, 0] - one(x)[:, 0]), optimizer=keras.optimizers.SGD(0.5)
    )
    second = ws.Trainer(
        two, Reads(lambda x: one(x)[:, 0] - 2 * two(x)[:, 0]), optimizer=keras.optimizers.SGD(0.5)
    )
    expected = [np.array([1.0, 1.0, 0.0])] * 2
    ones = np.r_[X.mean(axis=0), 1.0]
    for _ in range(3):
        losses = first.update(X)["loss"], second.update(X)["loss"]
        assert losses[0] == pytest.approx((expected[1] - expected[0]) @ ones, abs=1e-5)
        expected[0] = expected[0] + 0.5 * ones
        assert losses[1] == pytest.approx((expected[0] - 2 * expected[1]) @ ones, abs=1e-5)
        expected[1] = expected[1] + ones


def test_replicas_see_it_too():
    with spread_over(2):
        critic = dense()
        model = dense()
    trainer = reads(lambda x: critic(x)[:, 0], model, microbatch_size=4, **replicas(2))
    for factor in (1, 2):
        assert trainer.update(X)["loss"] == pytest.approx(factor * X.sum(axis=1).mean(), abs=1e-6)
        critic.set_weights([2 * w for w in critic.get_weights()])


def replicas(num):
    return {"replicas": num} if keras.backend.backend() == "jax" else {}


def test_what_an_objective_assigns_is_state():
    critic = dense(1, keras.layers.Dropout(0.5), keras.layers.BatchNormalization(momentum=0.5))
    count = keras.Variable(0, dtype="int32", trainable=False)

    def value(x):
        count.assign_add(1)
        return critic(x, training=True)[:, 0]

    trainer = reads(value)
    before = [np.asarray(v.value).copy() for v in critic.non_trainable_variables]
    trainer.fit(X, epochs=2, **STILL)
    assert int(np.asarray(count)) == 8
    for old, new in zip(before, critic.non_trainable_variables, strict=True):
        assert not np.array_equal(old, np.asarray(new.value)), new.path


def test_the_optimizers_variables_must_not_be_assigned():
    model = dense()

    def value(x):
        model.optimizer.learning_rate = 0.5
        return x[:, 0]

    with pytest.raises(ws.SpecificationError, match="must not assign the optimizer's variables"):
        reads(value, model).update(X)


def test_what_the_forward_pass_assigns_to_a_kernel_is_what_keras_keeps():
    # JAX drops the normalised kernel and TensorFlow keeps it: each engine is followed.
    def make():
        model = dense(3, keras.layers.SpectralNormalization(keras.layers.Dense(3)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    theirs = make()
    y = np.ones((8, 3), "float32")
    how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    weights = theirs.get_weights()
    theirs.fit(X, y, **how)
    batches = ((X[i : i + 4], y[i : i + 4]) for i in (0, 4, 0, 4))
    arrays = ((X, y), how)
    stream = ((batches,), {"epochs": 2, "steps_per_epoch": 2, "verbose": 0})
    for data, options in (arrays, stream):
        ours = make()
        ours.set_weights(weights)
        ws.Trainer(ours).fit(*data, **options)
        for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


class Largest(keras.metrics.Metric):
    """Its result is the value of a variable of another object."""

    def __init__(self, read):
        super().__init__(name="largest")
        self.read = read

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return 1.0 * self.read()


class Shown(keras.Sequential):
    def get_metrics_result(self):
        return super().get_metrics_result() | {"lr": 1.0 * self.optimizer.learning_rate}


@pytest.mark.parametrize("reader", ["regulariser", "metric", "get_metrics_result"])
def test_what_only_one_of_them_reads_is_live_too(reader):
    coefficient = beta = keras.Variable(1.0)
    model = dense() if reader != "get_metrics_result" else Shown(dense().layers)
    model.build((None, 2))
    if reader == "regulariser":
        model.layers[-1].kernel.regularizer = lambda w: coefficient * ops.sum(w * w)
    metrics = [Largest(lambda: coefficient)] if reader == "metric" else []
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: 0 * p[:, 0], metrics=metrics)
    beta = model.optimizer.learning_rate if reader == "get_metrics_result" else beta
    trainer = ws.Trainer(model)
    for value in (0.0, 0.5):
        beta.assign(value)
        shown = {
            "regulariser": ("loss", 2 * value),
            "metric": ("largest", value),
            "get_metrics_result": ("lr", value),
        }
        name, expected = shown[reader]
        evaluated = [
            trainer.evaluate(X, X[:, 0], verbose=0, return_dict=True)[name] for _ in range(2)
        ]
        assert evaluated == pytest.approx([expected] * 2)
        for step in trainer.steps(ws.Batches((X[:4], X[:4, 0]), 2)):
            assert step.logs[name] == pytest.approx(expected)
            break


def test_what_training_assigns_and_evaluation_reads_and_the_other_way_round():
    count = keras.Variable(0.0)

    class Assigns(ws.Objective):
        def __init__(self, when):
            self.when = when

        def __call__(self, model, batch, training):
            if training is self.when:
                count.assign_add(1.0)
            return ws.Mean(count + 0 * model(batch, training=training)[:, 0])

    for when in (True, False):
        count.assign(0.0)
        trainer = ws.Trainer(dense(), Assigns(when), optimizer="sgd")
        for _ in range(2):
            trainer.evaluate(X, batch_size=4, verbose=0)
            trainer.predict(X, batch_size=4, verbose=0)
            trainer.fit(X, batch_size=4, verbose=0)
        assert float(np.asarray(count.value)) == 4
        trainer.fit(
            X, batch_size=4, epochs=2, validation_data=X, validation_batch_size=4, verbose=0
        )
        assert float(np.asarray(count.value)) == 8


def test_a_second_form_of_batch_may_read_more():
    beta = keras.Variable(2.0)

    class Forms(ws.Objective):
        def __call__(self, model, batch, training):
            scale = beta if "w" in batch else 1.0
            return ws.Mean(
                scale * ops.ones_like(batch["x"][:, 0])
                + 0 * model(batch["x"], training=training)[:, 0]
            )

    trainer = ws.Trainer(dense(), Forms(), optimizer="sgd")
    assert trainer.evaluate({"x": X}, verbose=0) == 1.0
    for value in (2.0, 3.0):
        beta.assign(value)
        assert trainer.evaluate({"x": X, "w": X}, verbose=0) == value
        assert trainer.update({"x": X, "w": X})["loss"] == value


def test_a_target_that_was_assigned_the_models_own_weights():
    online = dense()
    target = dense()
    trainer = ws.Trainer(online, Reads(lambda x: target(x)[:, 0]), optimizer="sgd")
    for _ in range(2):
        for theirs, ours in zip(target.variables, online.variables, strict=True):
            theirs.assign(ours)
        expected = np.mean(np.asarray(online(X)))
        assert trainer.update(X)["loss"] == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(np.asarray(target(X))).all()


@pytest.mark.filterwarnings("ignore:microbatch_size")
def test_a_truth_value_that_an_objective_assigns_is_state():
    seen = keras.Variable(False, dtype="bool", trainable=False)

    def value(x):
        seen.assign(ops.logical_not(seen))
        return x[:, 0]

    trainer = reads(value, microbatch_size=2)
    for expected in (True, False):
        trainer.update(X)["loss"]
        assert bool(np.asarray(seen.value)) is expected
