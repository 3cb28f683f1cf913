"""The trainer: fit, steps, update, evaluate, predict; bad input changes nothing."""

import copy
import pickle
import warnings

import keras
import numpy as np
import pytest
from shares import on, share
from small import ROWS, X, Y, model, same, values

import wholestep as ws


def fit(made, x=X, y=Y, *, trainer=None, **how):
    trainer = trainer or ws.Trainer(made, seed=7)
    return trainer.fit(x, y, **{"batch_size": 6, "epochs": 2, "verbose": 0} | how)


# ---- one compiled step for `fit` and for custom loops ----


def test_steps_equal_fit_to_the_bit():
    fitted = model(keras.layers.Dropout(0.5, seed=1))
    looped = model(keras.layers.Dropout(0.5, seed=1))
    history = fit(fitted)
    steps = list(ws.Trainer(looped).steps(ws.Batches((X, Y), 6, seed=7), epochs=2))
    assert same(fitted, looped)
    assert [s.number for s in steps] == list(range(1, 9))
    assert [(s.epoch, s.batch) for s in steps] == [(e, b) for e in range(2) for b in range(4)]
    assert [s.logs["loss"] for s in steps if s.batch == 3] == history.history["loss"]
    assert steps[0].loss == pytest.approx(steps[0].logs["loss"])


def test_watching_every_update_changes_no_bit():
    plain = model()
    watched = model()
    fit(plain)
    fit(
        watched,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)],
    )
    assert same(plain, watched)


def test_epochs_in_one_fit_or_in_two_are_the_same():
    one = model()
    two = model()
    fit(one, epochs=3)
    trainer = ws.Trainer(two, seed=7)
    fit(two, trainer=trainer, epochs=1)
    fit(two, trainer=trainer, epochs=2)
    assert same(one, two)


def test_a_run_that_begins_at_a_later_epoch_sees_that_epochs_order():
    whole = model(optimizer=keras.optimizers.SGD(0.1))
    resumed = model(optimizer=keras.optimizers.SGD(0.1))
    fit(whole, epochs=2)
    fit(resumed, epochs=1)
    ws.Trainer(resumed, seed=7).fit(X, Y, batch_size=6, epochs=2, initial_epoch=1, verbose=0)
    assert same(whole, resumed)


def test_data_that_are_loaded_train_as_resident_ones():
    resident = model()
    loaded = model()
    streamed = model()
    how = {"batch_size": 5, "shuffle": False}
    fit(resident, **how)
    rows = [(x, y) for x, y in zip(X, Y, strict=True)]
    ws.Trainer(loaded).fit(ws.Batches(rows, 5, shuffle=False), epochs=2, verbose=0)
    batches = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, ROWS, 5)]
    ws.Trainer(streamed).fit(iter(batches * 2), epochs=2, steps_per_epoch=4, verbose=0)
    for other in (loaded, streamed):
        for a, b in zip(values(resident), values(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_update_returns_its_own_numbers():
    made = model()
    trainer = ws.Trainer(made)
    before = trainer.evaluate(X, Y, verbose=0, return_dict=True)
    logs = trainer.update((X, Y))
    assert logs["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert trainer.update((X, Y))["loss"] < logs["loss"]
    assert int(made.optimizer.iterations) == 2


def test_a_model_may_be_changed_between_steps():
    made = model(optimizer=keras.optimizers.SGD(0.1))
    frozen = None
    for step in ws.Trainer(made).steps(ws.Batches((X, Y), 5)):
        if step.number == 2:
            made.optimizer.learning_rate = 0.0
            frozen = made.get_weights()
    for a, b in zip(frozen, made.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Squared(ws.Objective):
    def __call__(self, model, batch, training):
        error = model(batch["x"], training=training) - batch["y"]
        return ws.Mean(error**2, batch["weight"]), {
            "bias": ws.Mean(error),
            "seen": (batch["y"], batch["y"]),
        }


def test_an_objective_of_ones_own():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    seen = keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.ones_like(y), name="seen")
    trainer = ws.Trainer(
        made, Squared(), optimizer=keras.optimizers.SGD(0.1), metrics=[seen], microbatch_size=3
    )
    weight = np.arange(ROWS, dtype="float32")
    data = {"x": X, "y": Y[:, None].astype("float32"), "weight": weight}
    before = made.predict(X, verbose=0)
    logs = trainer.evaluate(data, verbose=0, return_dict=True)
    error = before - data["y"]
    assert logs["loss"] == pytest.approx(
        float((error**2 * weight[:, None]).sum() / weight.sum()), rel=1e-5
    )
    assert logs["bias"] == pytest.approx(float(error.mean()), rel=1e-4)
    assert logs["seen"] == 1
    history = trainer.fit(ws.Batches(data, 7), epochs=30, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert trainer.predict(X, verbose=0).shape == (ROWS, 1)


# ---- what Keras users expect ----


@on("jax")
def test_validation_and_its_history():
    made = model()
    history = fit(made, validation_split=0.25, epochs=4, validation_freq=2).history
    assert set(history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert (len(history["loss"]), len(history["val_loss"])) == (4, 2)
    assert history["val_loss"][-1] == pytest.approx(
        made.evaluate(X[15:], Y[15:], verbose=0)[0], rel=1e-5
    )


@on("jax")
def test_evaluation_does_not_touch_the_training_metrics():
    plain = model()
    validated = model()
    one = fit(plain).history
    two = fit(validated, validation_data=(X[:3], Y[:3])).history
    assert one["accuracy"] == two["accuracy"]
    assert one["loss"] == two["loss"]


@pytest.mark.parametrize("size", share([3, 7, 50]))
def test_predict_and_evaluate_are_kerases(size):
    made = model(keras.layers.BatchNormalization())
    trainer = ws.Trainer(made)
    np.testing.assert_allclose(
        trainer.predict(X, batch_size=size, verbose=0), made.predict(X, verbose=0), atol=1e-6
    )
    np.testing.assert_allclose(
        trainer.evaluate(X, Y, size, verbose=0), made.evaluate(X, Y, verbose=0), rtol=1e-5
    )


@on("jax")
def test_a_recompiled_model_is_trained_as_it_is_now():
    made = model()
    trainer = ws.Trainer(made)
    fit(made, trainer=trainer, epochs=1)
    made.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    before = made.get_weights()
    fit(made, trainer=trainer, epochs=1)
    for a, b in zip(before, made.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_trainer_without_an_optimizer_trains_with_the_compiled_one_beside_others():
    made = model()
    own = made.optimizer
    given = keras.optimizers.SGD(0.1)
    one = ws.Trainer(made)
    two = ws.Trainer(made, optimizer=given)
    for trainer in (one, two, one):
        trainer.update((X, Y))
        assert made.optimizer is (given if trainer is two else own)
    assert [int(own.iterations), int(given.iterations)] == [2, 1]
    made.compile("adagrad", "sparse_categorical_crossentropy")
    later = made.optimizer
    two.update((X, Y))
    one.update((X, Y))
    assert made.optimizer is later
    assert int(later.iterations) == 1


def test_a_given_optimizer_for_other_variables_asks_for_a_new_trainer():
    made = model()
    trainer = ws.Trainer(made, optimizer="sgd")
    trainer.update((X, Y))
    made.layers[0].trainable = False
    with pytest.raises(ws.SpecificationError, match="make a new Trainer"):
        trainer.update((X, Y))


def test_a_frozen_model_that_trains_is_a_warning_and_thawing_it_trains_it():
    """The generative adversarial networks of Keras 2: what was trainable at `compile` does not
    count in Keras 3.
    """
    layers = keras.layers
    critic = keras.Sequential([keras.Input((3,)), layers.Dense(1, "sigmoid")], name="critic")
    critic.compile("sgd", "binary_crossentropy")
    critic.trainable = False
    noise = keras.Input((2,))
    both = keras.Model(noise, critic(layers.Dense(3)(noise)))
    both.compile("sgd", "binary_crossentropy")
    x = np.ones((4, 3), "float32")
    y = np.zeros((4, 1), "float32")
    before = critic.get_weights()
    trainer = ws.Trainer(critic)
    with pytest.warns(
        UserWarning, match=r"none of the 2 variables of 'critic' is trainable now.*'critic'"
    ):
        trainer.train_on_batch(x, y)
    trainer.update((x, y))  # any further warning is an error
    trainer.fit(x, y, verbose=0)
    for kernel, was in zip(critic.get_weights(), before, strict=True):
        np.testing.assert_array_equal(kernel, was)

    critic.trainable = True
    critic.compile("sgd", "binary_crossentropy")  # its optimizer knew no variable
    ws.Trainer(critic).train_on_batch(x, y)
    trained = critic.get_weights()
    assert np.any(trained[0] != before[0])
    critic.trainable = False
    ws.Trainer(both).train_on_batch(x[:, :2], 1 - y)
    np.testing.assert_array_equal(critic.get_weights()[0], trained[0])


@on("jax")
def test_layers_frozen_after_compile_are_refused_until_compiled_again():
    made = model()
    trainer = ws.Trainer(made)
    fit(made, trainer=trainer, epochs=1)
    made.layers[0].trainable = False
    with pytest.raises(ws.SpecificationError, match="compile the model again"):
        fit(made, trainer=trainer, epochs=1)


@on("jax")
def test_explain_says_how():
    made = model()
    trainer = ws.Trainer(made, microbatch_size=4)
    assert "No update" in trainer.explain()
    fit(made, trainer=trainer, epochs=1)
    assert "6 rows in 2 microbatches" in trainer.explain()
    assert "weight 0" in trainer.explain()


# ---- what must not happen ----


def check_unchanged(made, error, message, run):
    before = values(made)
    with pytest.raises(error, match=message):
        run()
    for a, b in zip(before, values(made), strict=False):
        assert a.tobytes() == b.tobytes()


@on("jax")
@pytest.mark.parametrize(
    ("x", "y", "how", "message"),
    [
        (X, Y[:-1], {}, "same number of rows"),
        (X[:0], Y[:0], {}, "at least one row"),
        (X.astype(str), Y, {}, r"(must hold|takes) numbers"),
        (X, Y, {"sample_weight": np.full(ROWS, np.nan)}, "must be finite"),
        (X, Y, {"sample_weight": np.zeros(ROWS)}, "weigh at least one row"),
        (X, Y, {"sample_weight": np.ones(ROWS - 1)}, "same number of rows"),
        (X, Y + 1, {}, r"lie in 0\.\.3"),
        (X, Y, {"validation_split": 1.5}, "between 0 and 1"),
        (X, Y, {"batch_size": 0}, "at least 1"),
        (X[:, :5], Y, {}, r"x of shape \(rows, 5\)"),
        (iter([]), None, {"batch_size": None}, "at least one batch"),
        (iter([(X, Y)]), Y, {"batch_size": None}, "a data set must contain them"),
        (X, Y.tolist(), {}, r"y must hold arrays.*np\.asarray\(y\)"),
        (X, Y, {"steps_per_epoch": 0}, "steps_per_epoch must be a whole number"),
        (
            X,
            Y,
            {"validation_data": (X, Y), "validation_steps": 1.5},
            "validation_steps must be a whole number",
        ),
    ],
)
def test_bad_data(x, y, how, message):
    made = model()
    made.optimizer.build(made.trainable_variables)
    check_unchanged(made, ValueError, message, lambda: fit(made, x, y, **how))


@on("jax")
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_no_steps_at_all_are_refused(method):
    with pytest.raises(ws.SpecificationError, match="steps must be a whole number of at least 1"):
        getattr(ws.Trainer(model()), method)(X, steps=0, verbose=0)


class Broadcast(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return (y_true - y_pred) ** 2


def test_labels_that_broadcast_are_refused():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    made.compile("sgd", Broadcast())
    made.optimizer.build(made.trainable_variables)
    run = lambda: fit(made, X, Y.astype("float32"))  # noqa: E731
    check_unchanged(made, ws.SpecificationError, r"labels of shape \(rows,\)", run)


def test_a_missing_key_is_named():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    trainer = ws.Trainer(
        made, Squared(), optimizer="sgd", metrics=[keras.metrics.Mean(name="seen")]
    )
    with pytest.raises(ws.BatchError, match="the objective reads, and 'weight' is missing"):
        trainer.update({"x": X, "y": Y.astype("float32")})


def poisoned(row):
    x = X.copy()
    x[row, 0] = np.nan
    return x


@pytest.mark.parametrize("microbatch_size", ["auto", 2])
def test_a_non_finite_loss_stops_before_the_update(microbatch_size):
    made = model()
    good = model()
    trainer = ws.Trainer(made, microbatch_size=microbatch_size)
    how = {"batch_size": 5, "epochs": 1, "shuffle": False, "verbose": 0}
    with pytest.raises(ws.NonFiniteError, match=r"Update 3 .*not finite in rows 12") as caught:
        trainer.fit(poisoned(12), Y, **how)
    assert (caught.value.update, caught.value.rows) == (3, (12,))
    ws.Trainer(good, microbatch_size=microbatch_size).fit(X[:10], Y[:10], **how)
    assert same(made, good)
    trainer.fit(X, Y, **how)  # and the trainer goes on
    assert int(made.optimizer.iterations) == 6


def test_a_non_finite_update_can_be_skipped_whole():
    made = model()
    good = model()
    trainer = ws.Trainer(made, on_nonfinite="skip")
    how = {"batch_size": 5, "epochs": 1, "shuffle": False, "verbose": 0}
    trainer.fit(poisoned(12), Y, **how)
    assert trainer.num_skipped == 1
    without = [i for i in range(ROWS) if not 10 <= i < 15]
    ws.Trainer(good).fit(X[without], Y[without], **how)
    assert same(made, good)


def test_a_non_finite_update_stops_a_loop_of_ones_own():
    made = model()
    steps = ws.Trainer(made).steps(ws.Batches((poisoned(7), Y), 5, shuffle=False))
    with pytest.raises(ws.NonFiniteError, match="Update 2"):
        list(steps)
    assert int(made.optimizer.iterations) == 1


def test_a_gradient_that_is_not_finite_stops_it_too():
    made = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    made.compile("sgd", lambda y, p: keras.ops.sqrt(keras.ops.abs(p[:, 0])))
    with pytest.raises(ws.NonFiniteError, match="gradient is not finite"):
        ws.Trainer(made).fit(np.ones((4, 1)), np.zeros((4, 1)), verbose=0)
    assert np.isfinite(made.get_weights()[0]).all()


@on("jax")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatch_size": 0}, "at least 1"),
        ({"microbatch_size": "all"}, "at least 1"),
        ({"on_nonfinite": "ignore"}, '"raise", "skip" or a wholestep.Skip'),
        ({"memory_limit": -1}, "number of bytes"),
        ({"objective": len}, "must be a wholestep.Objective"),
        ({"model": 3}, "must be a keras.Model"),
        ({"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=4)}, "microbatch_size"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ws.SpecificationError, match=message):
        ws.Trainer(**{"model": model()} | arguments)


def test_a_model_that_is_not_compiled_predicts_and_is_told_what_else_needs_a_loss():
    bare = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    trainer = ws.Trainer(bare)
    np.testing.assert_allclose(
        trainer.predict(X, 6, verbose=0), bare.predict(X, verbose=0), rtol=1e-5
    )
    calls = (
        trainer.fit,
        trainer.evaluate,
        trainer.train_on_batch,
        lambda x, y: next(trainer.steps((x, y))),
    )
    for call in calls:
        with pytest.raises(
            ws.SpecificationError,
            match="To train and to evaluate, a trainer needs a compiled model",
        ):
            call(X, Y)
    bare.compile("sgd", "mse")
    labels = np.zeros((ROWS, 2), "float32")
    trainer.fit(X, labels, epochs=1, verbose=0)
    np.testing.assert_allclose(
        trainer.predict(X, 6, verbose=0), bare.predict(X, verbose=0), rtol=1e-5
    )


def test_batches_say_everything_themselves():
    with pytest.raises(ws.SpecificationError, match="batch_size as well"):
        ws.Trainer(model()).fit(ws.Batches((X, Y)), batch_size=3)
    with pytest.warns(UserWarning, match="shuffle=False has no effect: Batches say"):
        ws.Trainer(model()).fit(ws.Batches((X, Y)), shuffle=False, verbose=0)


def test_a_size_of_validation_batches_that_are_ready_made_has_no_effect():
    ready = keras.utils.PyDataset()
    ready.__class__ = type(
        "Ready", (keras.utils.PyDataset,), {"num_batches": 2, "__getitem__": lambda self, i: (X, Y)}
    )
    for data in (ready, ws.Batches((X, Y), 5)):
        with pytest.warns(UserWarning, match="validation_batch_size=4 has no effect"):
            ws.Trainer(model()).fit(X, Y, validation_data=data, validation_batch_size=4, verbose=0)


@on("jax")
def test_a_source_that_is_spent_is_said_so():
    made = model()
    batches = ws.Batches(iter([(X, Y)]))
    ws.Trainer(made).fit(batches, verbose=0)
    with pytest.raises(ws.BatchError, match="must have at least one batch"):
        ws.Trainer(made).fit(batches, verbose=0)
    assert int(made.optimizer.iterations) == 1


# ---- found by a cold reading ----


def test_an_update_leaves_the_moving_average_of_the_weights_alone():
    make = lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)  # noqa: E731
    ours = model(optimizer=make())
    theirs = model(optimizer=make())
    trainer = ws.Trainer(ours)
    for _ in range(3):
        trainer.update((X, Y))
        theirs.train_on_batch(X, Y)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    fit(ours, trainer=trainer)
    fit(ours, trainer=trainer)  # after the first, weights and averages are the same arrays


def test_weights_without_labels_are_refused():
    made = model()
    with pytest.raises(ws.BatchError, match="labels where it has weights"):
        ws.Trainer(made).fit(X, sample_weight=np.ones(ROWS), verbose=0)


@on("jax")
def test_prediction_is_in_the_order_of_the_rows_whatever_the_batches():
    made = model()
    batches = ws.Batches((X, Y), 6, seed=3)
    batches.seek(0, 2)
    trainer = ws.Trainer(made)
    np.testing.assert_allclose(
        trainer.predict(batches, verbose=0), made.predict(X, verbose=0), atol=1e-6
    )
    trainer.evaluate(batches, verbose=0)
    assert batches.position == (0, 2)


@on("jax")
def test_a_stream_left_early_goes_on_where_it_was_left():
    seen = []

    class Spy(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Mean(model(batch, training=training)[:, 0] + batch[:, 0])

    trainer = ws.Trainer(model(optimizer=keras.optimizers.SGD(0.0)), Spy())
    batches = ws.Batches(np.full((2, 6), i, "float32") for i in range(8))
    for step in trainer.steps(batches):
        seen.append(step.batch)
        if len(seen) == 3:
            break
    seen += [step.batch for step in trainer.steps(batches)]
    assert seen == list(range(8))


SOURCES = ("resident", "stream", "last of a stream")


@pytest.mark.parametrize(
    ("how", "kind"),
    share((how, SOURCES[(i + j) % 3]) for i, how in enumerate(("fit", "steps")) for j in range(3)),
)
def test_a_failed_update_is_the_next_one(how, kind):
    x = poisoned(9)[:12] if kind == "last of a stream" else poisoned(9)
    y = Y
    stream = ((x[i : i + 4], y[i : i + 4]) for i in range(0, len(x) - 3, 4))
    batches = ws.Batches((x, y), 4, shuffle=False) if kind == "resident" else ws.Batches(stream)
    trainer = ws.Trainer(model())
    for _ in range(2):
        with pytest.raises(ws.NonFiniteError, match="Update 3"):
            trainer.fit(batches, verbose=0) if how == "fit" else list(trainer.steps(batches))
        assert batches.position == (0, 2)
    assert trainer.num_skipped == 0


def test_labels_that_were_forgotten():
    with pytest.raises(ws.BatchError, match="compiled with a loss needs labels"):
        ws.Trainer(model()).fit(X, verbose=0)


@on("jax")
def test_two_trainers_of_one_model_keep_their_optimizers():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    data = {"x": X, "y": Y[:, None].astype("float32"), "weight": np.ones(ROWS, "float32")}
    seen = keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.ones_like(y), name="seen")
    moving = ws.Trainer(made, Squared(), optimizer=keras.optimizers.SGD(0.1), metrics=[seen])
    ws.Trainer(made, Squared(), optimizer=keras.optimizers.SGD(0.0), metrics=[seen])
    before = made.get_weights()[0].copy()
    moving.update(data)
    assert np.abs(made.get_weights()[0] - before).max() > 0


@on("jax")
def test_a_metric_that_is_one_number_is_kerases():
    def rms(y, p):
        return keras.ops.sqrt(keras.ops.mean(p**2))

    ours = model(metrics=[rms])
    theirs = model(metrics=[rms])
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    one = ws.Trainer(ours).fit(X, Y, **how).history
    assert one["rms"] == pytest.approx(theirs.fit(X, Y, **how).history["rms"], rel=1e-5)
    with pytest.warns(UserWarning, match="one number instead of one per row"):
        ws.Trainer(ours, microbatch_size=2).fit(X, Y, **how)


def test_a_loss_and_a_metric_may_be_a_number_of_python():
    x = keras.Input((6,))
    made = keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(1, name="b")(x)])
    made.compile("sgd", {"a": "mse", "b": lambda y, p: 0.0}, metrics={"a": [lambda y, p: 1.0]})
    targets = [X[:, :1], X[:, 1:2]]
    before = made.get_weights()
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings(action="ignore"):  # the second layer has no gradient
        theirs = made.fit(X, targets, **how).history
    after = made.get_weights()
    made.set_weights(before)
    ours = ws.Trainer(made).fit(X, targets, **how).history
    for one, two in zip(made.get_weights(), after, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    assert ours["a_loss"] == pytest.approx(ours["loss"])
    # where Keras' graph does not know how many rows the last batch has
    if keras.backend.backend() == "tensorflow":
        assert theirs.pop("a_loss") != pytest.approx(theirs["loss"], rel=1e-3)
        del ours["a_loss"]
    assert ours == {name: pytest.approx(value, rel=1e-5) for name, value in theirs.items()}


def test_an_empty_batch_is_refused():
    with pytest.raises(ws.BatchError, match="at least one row"):
        ws.Trainer(model()).update((X[:0], Y[:0]))


def test_training_without_an_optimizer_is_refused():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    seen = keras.metrics.Mean(name="seen")
    with pytest.raises(ws.SpecificationError, match="needs an optimizer"):
        ws.Trainer(made, Squared(), metrics=[seen]).update({"x": X})


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_trainer_is_not_copied_and_says_what_to_do(copied):
    trainer = ws.Trainer(model())
    trainer.fit(X, Y, epochs=1, verbose=0)
    with pytest.raises(ws.SpecificationError, match=r"clone_model.*restore\(path\)"):
        copied(trainer)
    trainer.fit(X, Y, epochs=1, verbose=0)


def test_what_is_printed_says_in_one_line_what_it_is():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    trainer = ws.Trainer(model)
    data = ws.Batches((np.ones((8, 3)), np.ones((8, 1))), batch_size=4)
    assert repr(data) == "<Batches: 2 batches an epoch; next: batch 0 of epoch 0>"
    assert repr(trainer) == "<Trainer of small: 0 updates, 0 epochs of data begun>"
    assert [repr(step) for step in trainer.steps(data)] == [
        f"<Step {i + 1}: batch {i} of epoch 0>" for i in (0, 1)
    ]
    assert repr(trainer) == "<Trainer of small: 2 updates, 1 epochs of data begun>"
    assert repr(ws.Batches(iter([np.ones((8, 3))]))).startswith(
        "<Batches: an unknown number of batches an epoch"
    )
    term = ws.Mean(keras.ops.ones((8, 2)), keras.ops.ones((8,)))
    assert repr(term).endswith("float32 of shape (8,), coefficient=1.0)")
    assert "\n" not in repr(term)


class Stops(keras.callbacks.Callback):
    """Stops at the first batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


@pytest.mark.parametrize("how", ["fit no epochs", "steps no epochs", "skip", "stop"])
def test_weights_without_an_update_are_not_replaced_by_their_moving_average(how):
    made = model(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    trainer = ws.Trainer(made, on_nonfinite="skip" if how == "skip" else "raise")
    before = made.get_weights()

    def call():
        if how == "steps no epochs":
            list(trainer.steps((X, Y), epochs=0))
        elif how == "fit no epochs":
            fit(made, trainer=trainer, epochs=0)
        else:
            fit(
                made,
                np.full_like(X, np.nan),
                trainer=trainer,
                callbacks=[Stops()] if how == "stop" else [],
            )

    call()
    check_equal(before, made.get_weights())
    if "no epochs" in how:
        fit(made, trainer=trainer)
        made.set_weights(before)
        call()
        check_equal(before, made.get_weights())


def check_equal(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
