"""A model's own steps run as they are: the numbers of `keras.Model.fit`, inside of our loop."""

from contextlib import contextmanager

import customs
import keras
import numpy as np
import pytest
from customs import X, Y
from shares import halves, on, share

import wholestep as ws

CALMLY = {"batch_size": 5, "shuffle": False, "verbose": 0}
MODELS = {
    "vae": (customs.encoding, (X,)),
    "gan": (customs.adversaries, (X,)),
    "distiller": (customs.distilling, (X, Y)),
    "super": (customs.calling, (X, Y)),
}


def values(model):
    """Return every variable of a model, its optimizers and its metrics."""
    others = [
        getattr(model, name) for name in ("d_optimizer", "g_optimizer") if hasattr(model, name)
    ]
    beside = [v for optimizer in others for v in optimizer.variables]
    held = [*model.variables, *model.optimizer.variables, *model.metrics_variables, *beside]
    return [keras.ops.convert_to_numpy(v) for v in held]


def check_equal(one, two):
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes()


def check_close(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def check_logs(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", share(MODELS))
@pytest.mark.slow
def test_a_models_own_train_step_trains_as_in_keras(name):
    make, data = MODELS[name]
    ours = make()
    theirs = make()
    alone = make()
    trainer = ws.Trainer(ours)
    found = trainer.fit(*data, epochs=3, **CALMLY).history
    check_logs(found, theirs.fit(*data, epochs=3, **CALMLY).history)
    check_close(ours.get_weights(), theirs.get_weights())
    seen: list = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(alone.get_weights()[0].sum())
    )
    # one update in each dispatch
    again = ws.Trainer(alone).fit(*data, epochs=3, callbacks=[look], **CALMLY)
    assert len(set(seen)) == 15
    check_equal(values(ours), values(alone))
    check_logs(again.history, found)
    assert "own train_step is run whole" in trainer.explain()
    assert "cannot be guaranteed" in trainer.explain()


@pytest.mark.parametrize("name", share(["vae", "super"]))
@pytest.mark.slow
def test_a_stream_and_steps_and_batches_in_hand_go_the_same_way(name):
    make, data = MODELS[name]
    whole = make()
    streamed = make()
    stepped = make()
    handed = make()
    ws.Trainer(whole).fit(*data, epochs=2, **CALMLY)
    parts = [tuple(a[i : i + 5] for a in data) for i in range(0, len(X), 5)]
    parts = parts if len(data) > 1 else [x for (x,) in parts]
    ws.Trainer(streamed).fit(
        (part for part in [*parts, *parts]), steps_per_epoch=5, epochs=2, verbose=0
    )
    rows = ws.Batches(data if len(data) > 1 else data[0], 5, shuffle=False)
    steps = [(step.number, dict(step.logs)) for step in ws.Trainer(stepped).steps(rows, epochs=2)]
    trainer = ws.Trainer(handed)
    logs = [dict(trainer.update(part)) for part in [*parts, *parts]]
    assert [number for number, _ in steps] == [*range(1, 11)]
    # the sums begin at each epoch, and at each single update
    assert steps[5][1]["loss"] == pytest.approx(logs[5]["loss"])
    assert steps[6][1]["loss"] != pytest.approx(logs[6]["loss"])
    for other in (streamed, stepped, handed):
        check_equal(whole.get_weights(), other.get_weights())


@on("tensorflow")
@pytest.mark.slow
def test_own_evaluations_and_predictions_are_those_of_keras():
    ours = customs.distilling()
    theirs = customs.distilling()
    trainer = ws.Trainer(ours)
    check_logs(
        trainer.fit(X, Y, epochs=2, validation_data=(X[:7], Y[:7]), **CALMLY).history,
        theirs.fit(X, Y, epochs=2, validation_data=(X[:7], Y[:7]), **CALMLY).history,
    )
    how = {"batch_size": 5, "verbose": 0}
    check_logs(
        trainer.evaluate(X, Y, return_dict=True, **how),
        theirs.evaluate(X, Y, return_dict=True, **how),
    )
    np.testing.assert_allclose(
        trainer.evaluate(X, Y, **how), theirs.evaluate(X, Y, **how), rtol=1e-5
    )
    check_logs(trainer.predict(X, **how), theirs.predict(X, **how))


def test_an_own_test_step_leaves_training_free_to_be_cut():
    class Testing(keras.Sequential):
        test_step = customs.Distilling.test_step

    def make():
        model = Testing([keras.Input((6,)), customs.dense(1, 2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    Testing.test_step = _with_half
    ours = make()
    theirs = make()
    trainer = ws.Trainer(ours, microbatch_size=2)
    how = {"epochs": 2, "validation_data": (X, Y), **CALMLY}
    check_logs(trainer.fit(X, Y, **how).history, theirs.fit(X, Y, **how).history)
    assert "microbatches" in trainer.explain()


def _with_half(self, *given):
    found = keras.Model.test_step(self, *given)
    logs = found[0] if customs.JAX else found
    logs["half"] = logs["mae"] / 2
    return found


def test_own_metrics_and_results_are_told_where_keras_tells_them():
    class Measuring(customs.Calling):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**logs, "largest": keras.ops.max(y_pred)}

        train_step = keras.Model.train_step

    def make():
        image = keras.Input((6,))
        model = Measuring(image, customs.dense(1, 42)(image))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    ours = make()
    theirs = make()
    trainer = ws.Trainer(ours)
    how = {"epochs": 2, "validation_data": (X, Y), **CALMLY}
    check_logs(trainer.fit(X, Y, **how).history, theirs.fit(X, Y, **how).history)
    assert "own compute_metrics is run whole" in trainer.explain()


def test_numbers_that_are_called_as_the_metrics_are_theirs_at_the_end_of_an_epoch_as_in_keras():
    class Telling(customs.Calling):
        def train_step(self, *given):
            found = keras.Model.train_step(self, *given)
            logs = found[0] if customs.JAX else found
            logs["loss"] = keras.ops.zeros(())
            return found

    def make():
        image = keras.Input((6,))
        model = Telling(image, customs.dense(1, 42)(image))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    seen: list = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
    )
    ours = ws.Trainer(make()).fit(X, Y, epochs=2, callbacks=[look], **CALMLY).history
    check_logs(ours, make().fit(X, Y, epochs=2, **CALMLY).history)
    assert ours["loss"][1] > 0
    assert seen == [0] * 10  # each update's are those that the step returned


@pytest.mark.parametrize("name", share(MODELS))
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(name, tmp_path):
    make, data = MODELS[name]
    whole = make()
    first = make()
    second = make()
    how = {"epochs": 3, "batch_size": 5, "verbose": 0}
    found = ws.Trainer(whole).fit(*data, **how).history

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 8:
                raise KeyboardInterrupt

    saved = ws.Checkpoints(tmp_path, every_steps=7)
    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(first).fit(*data, callbacks=[Stop()], checkpoints=saved, **how)
    again = ws.Trainer(second).fit(*data, checkpoints=saved, **how).history
    check_equal(values(whole), values(second))
    check_logs(again, found)


@pytest.mark.parametrize("kind", halves([customs.Untracked, customs.ByName]))
@pytest.mark.slow
def test_a_snapshot_holds_optimizers_that_are_attributes_and_nothing_more(kind):
    model, other, tracked = map(customs.adversaries, (kind, kind, customs.Adversaries))
    rows = [ws.Batches(X, 5, seed=2) for _ in range(3)]
    trainer = ws.Trainer(model)
    second = ws.Trainer(other)
    for step in trainer.steps(rows[0], epochs=2):
        if step.number == 4:
            break
    second.run.restore(trainer.run.snapshot())
    numbers = [step.number for step in second.steps(rows[1], epochs=2)]
    assert numbers == [*range(5, 11)]
    assert len(list(ws.Trainer(tracked).steps(rows[2], epochs=2))) == 10
    check_close(
        [v.numpy() for v in other.g_optimizer.variables],
        [v.numpy() for v in tracked.g_optimizer.variables],
    )
    check_close(
        [v.numpy() for v in other.discriminator.weights],
        [v.numpy() for v in tracked.discriminator.weights],
    )


@on("tensorflow")
def test_an_optimizer_that_takes_anothers_place_in_a_dict_is_kept_too():
    model = customs.adversaries(customs.ByName)
    trainer = ws.Trainer(model)
    trainer.update(X)
    model.by_name["g"] = keras.optimizers.Adam(0.3)
    model.g_optimizer.build(model.generator.trainable_variables)
    trainer.update(X)
    held = {v.path for v in trainer.run.variables.slots}
    assert held >= {v.path for v in model.g_optimizer.variables}
    assert model.g_optimizer.iterations == 1


def test_an_update_that_is_not_finite_is_taken_back():
    spoilt = X.copy()
    spoilt[7] = np.nan
    model = customs.encoding()
    good = customs.encoding()
    trainer = ws.Trainer(model)
    told = r"Update 2 must have a finite loss.*undone.*loss=nan.*not report single rows"
    with pytest.raises(ws.NonFiniteError, match=told):
        trainer.fit(spoilt, **CALMLY)
    ws.Trainer(good).fit(X[:5], **CALMLY)
    check_equal(values(model), values(good))


@on("jax")
@pytest.mark.slow
def test_an_update_that_is_not_finite_is_left_out():
    spoilt = X.copy()
    spoilt[7] = np.nan
    model = customs.encoding()
    good = customs.encoding()
    trainer = ws.Trainer(model, on_nonfinite="skip")
    history = trainer.fit(spoilt, **CALMLY).history
    left = ws.Trainer(good).fit(np.delete(X, range(5, 10), axis=0), **CALMLY).history
    assert trainer.num_skipped == 1
    check_close(values(model), values(good))
    assert history["loss"] == pytest.approx(left["loss"])


def test_what_cannot_be_kept_is_refused_in_words():
    for given in (
        {"microbatch_size": 2},
        {"replicas": "all"},
        {"replicas": 2},
        {"metrics": ["mae"]},
    ):
        with pytest.raises(
            ws.SpecificationError, match=r"own `train_step` is run whole.*leave them out.*Objective"
        ):
            ws.Trainer(customs.calling(), **given)


def test_several_devices_are_refused_before_anything_ran():
    with several_devices():
        model = customs.calling()
        before = model.get_weights()
        trainer = ws.Trainer(model)
        with pytest.raises(ws.SpecificationError, match=r"run whole, on one device.*2 replicas"):
            trainer.fit(X, Y, verbose=0)
        check_equal(before, model.get_weights())


@contextmanager
def several_devices():
    """Let two devices share the rows of every batch."""
    if not customs.JAX:
        import tensorflow as tf

        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            yield
        return
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:2])
    )
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


class Annealing(keras.Model):
    """A loss without labels, times a coefficient that is no part of the model."""

    def __init__(self, beta):
        super().__init__()
        self.head = customs.dense(1, 3)
        self.beta = [beta.assign, lambda: beta.value]  # not tracked

    def call(self, x):
        return self.head(x)

    if customs.JAX:

        def train_step(self, state, data):
            import jax

            params, buffers, slots, metrics = state
            beta = self.beta[1]()
            loss, grads = jax.value_and_grad(
                lambda params: (
                    beta * keras.ops.mean(self.stateless_call(params, buffers, data)[0] ** 2)
                )
            )(params)
            params, slots = self.optimizer.stateless_apply(slots, grads, params)
            return {"size": loss}, (params, buffers, slots, metrics)

    else:

        def train_step(self, data):
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.beta[1]() * keras.ops.mean(self(data) ** 2)
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
            return {"size": loss}


def test_what_a_step_reads_besides_is_read_anew_and_labels_are_its_business():
    beta = keras.Variable(1.0, trainable=False)
    model = Annealing(beta)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    trainer = ws.Trainer(model)
    warm_up = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: beta.assign(epoch))
    first, second, third = trainer.fit(
        X, batch_size=22, epochs=3, callbacks=[warm_up], verbose=0
    ).history["size"]
    assert first == 0
    assert third == pytest.approx(2 * second)
    assert second > 0


@pytest.mark.skipif(not customs.JAX, reason="on TensorFlow a step assigns in place")
@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("name", ["train_step", "test_step"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_assignment_that_would_be_lost_is_refused(name, is_read, run_eagerly):
    count = keras.Variable(0.0, trainable=False, name="count")

    class Counting(keras.Model):
        pass

    def step(self, *given):
        count.assign(count + 1.0 if is_read else 1.0)
        return getattr(keras.Model, name)(self, *given)

    setattr(Counting, name, step)
    image = keras.Input((6,))
    model = Counting(image, customs.dense(1, 42)(image))
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    before = model.get_weights()
    trainer = ws.Trainer(model)
    with pytest.raises(
        ws.SpecificationError,
        match=r"assign only variables that the trainer keeps.*Received: count",
    ):
        trainer.fit(X, Y, **CALMLY) if name == "train_step" else trainer.evaluate(X, Y, verbose=0)
    check_equal(before, model.get_weights())
    model.kept, trainer = count, ws.Trainer(model)  # tracked by Keras
    trainer.fit(X, Y, **CALMLY) if name == "train_step" else trainer.evaluate(
        X, Y, batch_size=5, verbose=0
    )
    assert count == (5.0 if is_read else 1.0)


@pytest.mark.skipif(
    not customs.JAX, reason="on TensorFlow a step makes what it lacks when it is traced"
)
def test_parts_that_are_not_built_are_named():
    model = customs.Lean.__new__(customs.Encoding)
    keras.Model.__init__(model)
    model.encoder = keras.Sequential([customs.dense(2, 1)], name="unready")
    model.compile("sgd")
    with pytest.raises(ws.SpecificationError, match=r"parts that are built.*unready"):
        ws.Trainer(model).fit(X, verbose=0)


class Silent(keras.Model):
    """A step that tells nothing."""

    def train_step(self, *given):
        found = super().train_step(*given)
        return ({}, found[1]) if customs.JAX else {}


def test_a_step_that_tells_nothing_trains_as_in_keras():
    fitted = []
    # Keras fails on TensorFlow
    runs = (lambda model: model, ws.Trainer) if customs.JAX else (ws.Trainer,)
    for run in runs:
        keras.utils.set_random_seed(1)
        image = keras.Input((6,))
        model = Silent(image, keras.layers.Dense(1)(image))
        model.compile("sgd", "mse")
        x = np.ones((8, 6), "float32")
        before = model.get_weights()[0]
        assert run(model).fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history == {}
        fitted.append(model.get_weights())
        assert not np.array_equal(model.get_weights()[0], before)
    check_close(fitted[0], fitted[-1])


@pytest.mark.skipif(customs.JAX, reason="a step on JAX has no variables but Keras'")
def test_variables_of_tensorflow_are_saved_and_restored(tmp_path):
    import tensorflow as tf

    class Adding(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.held["num"].assign_add(1)
            self.held["sum"][0].assign_add(tape.gradient(loss, self.trainable_variables)[0])
            self.noise.normal((2,))
            is_third = tf.cast(self.held["num"] % 3 == 0, "float32")
            self.optimizer.apply([is_third * self.held["sum"][0]], self.trainable_variables)
            self.held["sum"][0].assign((1 - is_third) * self.held["sum"][0])
            return {"loss": loss}

    def made():
        keras.utils.set_random_seed(1)
        image = keras.Input((X.shape[1],))
        model = Adding(image, keras.layers.Dense(1, use_bias=False)(image))
        model.held = {"num": tf.Variable(0), "sum": [tf.Variable(tf.zeros((X.shape[1], 1)))]}
        model.noise = tf.random.Generator.from_seed(1)
        model.compile("sgd", "mse")
        return model

    def numbers(model):
        own = [model.held["num"], *model.held["sum"], model.noise.state]
        return [*map(keras.ops.convert_to_numpy, [*own, *model.trainable_variables])]

    whole = made()
    first = made()
    second = made()
    batches = ws.Batches((X[:16], X[:16, :1]), batch_size=2)
    for _ in ws.Trainer(whole).steps(batches, epochs=1):
        pass
    trainer = ws.Trainer(first)
    for step in trainer.steps(ws.Batches((X[:16], X[:16, :1]), batch_size=2), epochs=1):
        if step.number == 4:
            break
    trainer.save(tmp_path / "saved")
    resumed = ws.Trainer(second)
    resumed.restore(tmp_path / "saved")
    check_equal(numbers(second), numbers(first))
    assert int(second.held["num"]) == 4
    for _ in resumed.steps(ws.Batches((X[:16], X[:16, :1]), batch_size=2), epochs=1):
        pass
    check_equal(numbers(second), numbers(whole))


class Resetting(keras.Model):
    """Has a custom reset of its metrics."""

    num_resets = 0

    def reset_metrics(self):
        super().reset_metrics()
        self.num_resets += 1


def test_own_resets_of_metrics_come_before_every_epoch_and_every_update_in_hand():
    image = keras.Input((6,))
    model = Resetting(image, keras.layers.Dense(1)(image))
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model)
    x = np.ones((8, 6), "float32")
    trainer.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    before = model.num_resets
    assert before >= 2
    for _ in range(2):
        trainer.update((x, x[:, :1]))
    assert model.num_resets == before + 2


class Telling(keras.Model):
    """A step that returns a variable among its numbers."""

    def train_step(self, *given):
        found = super().train_step(*given)
        logs = found[0] if customs.JAX else found
        logs["rate"] = (
            self.optimizer.learning_rate if customs.JAX else self.optimizer.learning_rate.value
        )
        return found


def test_a_variable_among_the_numbers_is_told_as_it_stands():
    image = keras.Input((6,))
    model = Telling(image, keras.layers.Dense(1)(image))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    x = np.ones((8, 6), "float32")
    told = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))
    history = (
        ws.Trainer(model)
        .fit(x, x[:, :1], batch_size=4, epochs=2, callbacks=[told], verbose=0)
        .history
    )
    assert history["rate"] == [0.5, 0.25]


class Weighing(keras.Model):
    """A step that records its sample weights."""

    def train_step(self, *given):
        self.handed = given[-1][2]
        return super().train_step(*given)


def test_one_weight_of_several_outputs_comes_as_it_was_given():
    def model():
        image = keras.Input((6,))
        return Weighing(
            image, [keras.layers.Dense(1, kernel_initializer="ones", name=n)(image) for n in "ab"]
        )

    ours = model()
    theirs = model()
    data = {"y": [Y, Y + 1], "sample_weight": np.arange(len(X), dtype="float32") + 1}
    for model in (ours, theirs):
        model.compile("sgd", ["mse", "mse"])
    found = ws.Trainer(ours).fit(X, **data, **CALMLY).history
    expected = theirs.fit(X, **data, **CALMLY).history
    if keras.backend.backend() == "tensorflow":
        # Keras does not know the rows of a batch there, and averages batches in an output's loss.
        found, expected = {"loss": found["loss"]}, {"loss": expected["loss"]}
    check_logs(found, expected)
    check_close(ours.get_weights(), theirs.get_weights())
    assert keras.tree.is_nested(theirs.handed)
    assert not keras.tree.is_nested(ours.handed)
