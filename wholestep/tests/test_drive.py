"""The loop: the order of rows, the end of the data, and the logs for callbacks."""

import threading
import time
import warnings

import keras
import numpy as np
import pytest
from shares import ENGINE, on, share
from small import X, Y, model, same, values

import wholestep as ws
from wholestep import dispatcher
from wholestep.data.feed import Loaded
from wholestep.reports.update_ledger import UpdateLedger

QUIET = {"verbose": 0}
JAX = keras.backend.backend() == "jax"


def batches_of(size, x=X, y=Y):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


class Again:
    """Ready-made batches of unknown number that can be iterated over again."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(batches_of(self.size))


class Numbered(keras.utils.PyDataset):
    """Ready-made batches by number."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return X[5 * i :][:5], Y[5 * i :][:5]


SOURCES = {"resident": lambda: (X, Y), "by number": Numbered, "in passes": lambda: Again(5)}


def over(source):
    """Return batches of 5 rows, in the order of the rows."""
    return ws.Batches(
        SOURCES[source](), shuffle=False, **({"batch_size": 5} if source == "resident" else {})
    )


# ---- the place of a loop ----


@pytest.mark.parametrize("source", SOURCES)
def test_a_loop_within_a_loop_over_the_same_batches_is_refused_by_the_outer(source):
    data = over(source)
    trainer = ws.Trainer(model(optimizer="sgd"))
    numbers = []

    def nested():
        for _ in trainer.steps(data, epochs=2):
            numbers.extend([step.number for step in trainer.steps(data, epochs=1)])

    with pytest.raises(
        ws.SpecificationError,
        match=r"another loop after batch 0 of epoch 0.*Try: end this loop first",
    ):
        nested()
    assert numbers == [2, 3, 4]
    assert data.position == (1, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_seek_within_a_loop_is_refused_when_the_loop_goes_on(source):
    data = over(source)
    trainer = ws.Trainer(model(optimizer="sgd"))

    def seeking():
        for step in trainer.steps(data):
            if step.batch == 2:
                data.seek(0, 1)

    with pytest.raises(
        ws.SpecificationError, match="a seek or another loop after batch 2 of epoch 0"
    ):
        seeking()
    assert data.position == (0, 1)
    assert [step.batch for step in trainer.steps(data)] == [1, 2, 3]


@pytest.mark.parametrize("source", SOURCES)
def test_a_seek_in_a_callback_is_refused_when_the_loop_goes_on(source):
    data = over(source)
    jump = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: data.seek(0))
    with pytest.raises(
        ws.SpecificationError, match=r"a seek or another loop after batch . of epoch 0"
    ):
        ws.Trainer(model(optimizer="sgd")).fit(data, callbacks=[jump], verbose=0)


@pytest.mark.parametrize("source", SOURCES)
def test_after_a_seek_and_a_break_the_next_loop_begins_there(source):
    first = ws.Trainer(model(optimizer="sgd"))
    second = ws.Trainer(model(optimizer="sgd"))
    data = over(source)
    for step in first.steps(data):
        if step.batch == 2:
            data.seek(0, 1)
            break
    assert [step.batch for step in first.steps(data)] == [1, 2, 3]
    rows = [0, 1, 2, 1, 2, 3]
    for i in rows:
        second.update((X[5 * i :][:5], Y[5 * i :][:5]))
    assert same(first.model, second.model)


# ---- numbers ----


def test_a_step_is_numbered_as_the_optimizer_counts_and_no_step_waits_for_that(monkeypatch):
    recounts = []
    recount = UpdateLedger.sync_update_count
    monkeypatch.setattr(
        UpdateLedger,
        "sync_update_count",
        lambda self, run: recount(self, run) or recounts.append(run.number),
    )
    made = model(optimizer="sgd")
    x = np.array(X)
    x[7] = np.nan
    trainer = ws.Trainer(made, on_nonfinite="skip")
    numbers = []
    iterations = []
    for step in trainer.steps(ws.Batches((x, Y), 5, shuffle=False), epochs=2):
        numbers.append(step.number)
        iterations.append(int(made.optimizer.iterations.numpy()))
        if step.batch == 1:
            trainer.update((X[:5], Y[:5]))
    assert numbers == [1, 2, 4, 5, 6, 7, 9, 10]
    assert iterations == [1, 1, 3, 4, 5, 5, 7, 8]
    assert recounts == [0, 2, 5, 7]  # by each epoch and each `update`


@pytest.mark.skipif(ENGINE != "jax", reason="JAX alone branches by device")
@pytest.mark.parametrize("how", [{}, {"microbatch_size": 3}])
def test_an_update_is_left_out_by_a_selection_as_by_a_branch(monkeypatch, how):
    from wholestep.engines import jax as engine

    x = np.array(X)
    x[7] = np.nan
    models = [model(), model()]
    selections = []
    select = engine.select
    monkeypatch.setattr(engine, "select", lambda *parts: selections.append(i) or select(*parts))
    for i, made in enumerate(models):
        monkeypatch.setattr(engine, "_is_on_cpu", lambda i=i: i == 0)
        ws.Trainer(made, on_nonfinite="skip", **how).fit(
            x, Y, batch_size=5, epochs=2, shuffle=False, verbose=0
        )
    assert set(selections) == {1}
    for one, other in zip(*map(values, models), strict=True):
        # XLA fuses a selection with what it selects
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert int(models[1].optimizer.iterations.numpy()) == 6  # of 8 updates, two with the NaN


def test_the_first_update_that_is_left_out_is_told_and_no_other():
    x = np.array(X)
    x[[7, 12, 17]] = np.nan
    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(x, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        list(trainer.steps(ws.Batches((x, Y), 5, shuffle=False)))
    (only,) = [str(each.message) for each in told if "was skipped" in str(each.message)]
    assert only.startswith("Update 2 (in epoch 1) was skipped (on_nonfinite='skip')")
    assert trainer.num_skipped == 9


def test_a_step_after_another_trainers_update_is_numbered_after_it_and_one_that_failed_is_told():
    made = model(optimizer="sgd")
    trainer = ws.Trainer(made)
    other = ws.Trainer(made)
    numbers = []
    for step in trainer.steps(ws.Batches((X, Y), 5), epochs=2):
        numbers.append(step.number)
        if step.batch == 1:
            other.update((X[:5], Y[:5]))
    assert numbers == ([1, 2, 4, 5, 6, 7, 9, 10] if JAX else [1, 2, 3, 4, 6, 7, 8, 9])
    steps = trainer.steps(ws.Batches((X, Y), 5))
    next(steps)
    trainer.update((np.full_like(X[:5], np.nan), Y[:5]))
    with pytest.raises(ws.NonFiniteError, match="Update 12 "):
        next(steps)


@pytest.mark.parametrize("begins", ["update", "fit", "steps"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_failed_unread_ends_what_the_loops_body_begins(begins, goes_on):
    x = np.array(X)
    made = model(optimizer="sgd")
    x[7] = np.nan
    trainer = ws.Trainer(made)
    data = ws.Batches((x, Y), 5, shuffle=False)
    good = (X[:5], Y[:5])
    begin = {
        "update": lambda: trainer.update(good),
        "fit": lambda: trainer.fit(*good, **QUIET),
        "steps": lambda: list(trainer.steps(ws.Batches(good, 5))),
    }[begins]
    steps = trainer.steps(data)
    seen = []
    assert [next(steps).number for _ in range(2)] == [1, 2]
    for _ in range(2):  # also if the body goes on after the error
        with pytest.raises(ws.NonFiniteError, match=r"Update 2 .*rows 7") as error:
            begin()
        assert error.value.rows == (7,)
    if goes_on:
        with pytest.raises(ws.NonFiniteError, match=r"Update 2 .*rows 7"):
            next(steps)
    else:
        steps.close()
    assert (trainer.run.number, int(made.optimizer.iterations), data.position) == (1, 1, (0, 1))
    x[7] = X[7]
    seen += [step.number for step in trainer.steps(data)]
    assert (seen, int(made.optimizer.iterations)) == ([2, 3, 4], 4)


def test_an_update_within_a_loop_is_numbered_after_all_steps_that_were_skipped():
    x = np.array(X)
    numbers = []
    x[[2, 7]] = np.nan
    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in trainer.steps(ws.Batches((x, Y), 5, shuffle=False)):
            numbers.append(step.number)
            if step.batch == 2:
                trainer.update((X[:5], Y[:5]))
    assert numbers == [1, 2, 3, 5]
    assert (trainer.run.number, trainer.num_skipped) == (5, 2)


@pytest.mark.parametrize("skips", [False, True])
def test_a_restored_run_knows_nothing_of_an_update_that_was_not_read(tmp_path, skips):
    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip" if skips else "raise")
    trainer.fit(X, Y, batch_size=5, **QUIET)
    trainer.save(tmp_path / "kept")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.update((np.full_like(X[:5], np.nan), Y[:5]))
        trainer.restore(tmp_path / "kept")
        trainer.update((X[:5], Y[:5]))
        assert (trainer.num_skipped, trainer.run.number) == (0, 5)


# ---- the order goes on ----


def test_steps_go_on_through_the_epochs_as_fit_does():
    x = np.tile(X, (2, 1))
    y = np.tile(Y, 2)
    fitted = model()
    looped = model()
    ws.Trainer(fitted, seed=7).fit(x, y, batch_size=32, epochs=2, **QUIET)
    trainer = ws.Trainer(looped, seed=7)
    places = [(step.epoch, step.batch) for _ in range(2) for step in trainer.steps((x, y))]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert same(fitted, looped)


def test_an_epoch_that_was_begun_is_not_begun_again():
    trainer = ws.Trainer(model())
    epochs = []
    for _ in range(2):
        for step in trainer.steps((np.tile(X, (2, 1)), np.tile(Y, 2))):
            epochs.append(step.epoch)
            break
    trainer.fit(X, Y, batch_size=5, steps_per_epoch=2, **QUIET)
    epochs.append(next(trainer.steps((X, Y))).epoch)
    assert epochs == [0, 1, 3]


@pytest.mark.parametrize("steps_per_epoch", share([None, 3]))
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.slow
def test_a_restart_begins_with_the_rows_of_its_epoch(steps_per_epoch, own):
    def fit(made, **how):
        data = (ws.Batches((X, Y), 5, seed=7),) if own else (X, Y, 5)
        ws.Trainer(made, seed=7).fit(*data, steps_per_epoch=steps_per_epoch, **how, **QUIET)

    whole = model()
    restarted = model()
    fit(whole, epochs=3)
    fit(restarted, epochs=2)
    fit(restarted, epochs=3, initial_epoch=2)
    assert same(whole, restarted)


@on("jax")
def test_a_restart_within_an_epoch_keeps_its_place():
    data = ws.Batches((X, Y), 5)
    data.seek(2, 3)
    made = model()
    ws.Trainer(made).fit(data, epochs=3, initial_epoch=2, **QUIET)
    assert (int(made.optimizer.iterations), data.position) == (1, (3, 0))


# ---- data that end ----


@on("jax")
@pytest.mark.parametrize(("num", "steps_per_epoch", "epochs"), [(4, None, 1), (4, 2, 2), (3, 2, 2)])
def test_a_generator_that_ends_ends_the_run_and_keeps_its_history(num, steps_per_epoch, epochs):
    made = model()
    data = iter(batches_of(5)[:num])
    with pytest.warns(
        UserWarning, match=rf"The data ended in epoch {epochs} of 5: training ends there"
    ):
        history = ws.Trainer(made).fit(data, epochs=5, steps_per_epoch=steps_per_epoch, **QUIET)
    assert len(history.history["loss"]) == epochs
    assert int(made.optimizer.iterations) == num


@on("jax")
def test_a_batch_size_for_ready_made_batches_is_left_out_with_a_warning():
    made = model()
    with pytest.warns(
        UserWarning, match="batch_size=32 has no effect: these batches are ready-made"
    ):
        ws.Trainer(made).fit(Again(5), batch_size=32, **QUIET)
    assert int(made.optimizer.iterations) == 4


# ---- validation ----


@on("jax")
@pytest.mark.parametrize("num", [3, None])
def test_an_iterator_validates_on_the_same_batches_after_every_epoch(num):
    def forever():
        while True:
            yield from batches_of(5)

    made = model(optimizer=keras.optimizers.SGD(0.0))
    trainer = ws.Trainer(made)
    rows = slice(0, 5 * num if num else None)
    expected = made.evaluate(X[rows], Y[rows], verbose=0)[0]
    for wrap in (iter, ws.Batches):
        data = wrap(forever() if num else iter(batches_of(5)))
        history = trainer.fit(X, Y, validation_data=data, validation_steps=num, epochs=3, **QUIET)
        assert history.history["val_loss"] == pytest.approx([expected] * 3, rel=1e-5)


@on("jax")
def test_a_data_set_validates_from_its_beginning_after_every_epoch():
    data = ws.Batches(Again(5))
    made = model(optimizer=keras.optimizers.SGD(0.0))
    history = ws.Trainer(made).fit(
        X, Y, validation_data=data, validation_steps=3, epochs=2, **QUIET
    )
    one, two = history.history["val_loss"]
    assert one == two == pytest.approx(made.evaluate(X[:15], Y[:15], verbose=0)[0], rel=1e-5)


@on("jax")
@pytest.mark.parametrize(
    "data", [ws.Batches((X, Y), 5), ws.Batches(Again(5))], ids=["resident", "stream"]
)
def test_no_row_is_evaluated_twice(data):
    trainer = ws.Trainer(model())
    with pytest.warns(UserWarning, match="The data ended after 4 of 6 batches"):
        logs = trainer.evaluate(data, steps=6, **QUIET)
    assert logs == pytest.approx(trainer.evaluate(X, Y, **QUIET))
    with pytest.warns(UserWarning, match="The data ended after 4 of 6 batches"):
        assert len(trainer.predict(data, steps=6, **QUIET)) == len(X)


# ---- what Keras' settings say ----


class Hooks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.rows = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(("train begins", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("train ends", batch, logs["loss"]))

    def on_test_batch_begin(self, batch, logs=None):
        self.seen.append(("test begins", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test ends", batch))

    def on_predict_batch_begin(self, batch, logs=None):
        self.seen.append(("prediction begins", batch))

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append(("prediction ends", batch))
        self.rows.append(len(logs["outputs"]))


@on("jax")
@pytest.mark.parametrize("data", [(X, Y, 4), (Again(4),)], ids=["resident", "stream"])
def test_callbacks_are_told_once_for_the_batches_of_an_execution(data):
    ours = Hooks()
    theirs = Hooks()
    made, peer = (
        model(steps_per_execution=3, metrics=[], optimizer=keras.optimizers.SGD(0.1))
        for _ in range(2)
    )
    trainer = ws.Trainer(made)
    for who, hooks, x in ((trainer, ours, data), (peer, theirs, (X, Y, 4))):
        who.fit(*x, shuffle=False, callbacks=[hooks], **QUIET)
        who.evaluate(*x, callbacks=[hooks], **QUIET)
        if len(x) == 3:
            who.predict(X, batch_size=4, callbacks=[hooks], **QUIET)
    num = len(ours.seen)
    assert num in (8, 12)
    assert [seen[:2] for seen in ours.seen] == [seen[:2] for seen in theirs.seen[:num]]
    losses = [[seen[2] for seen in each.seen[:4] if len(seen) == 3] for each in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert ours.rows in ([], theirs.rows)


@pytest.fixture
def _limits():
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@on("jax")
@pytest.mark.usefixtures("_limits")
def test_keras_limits_hold():
    made = model()
    trainer = ws.Trainer(made)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(trainer.fit(X, Y, batch_size=4, epochs=9, **QUIET).epoch) == 2
        assert len(trainer.predict(X, batch_size=4, **QUIET)) == 12
        trainer.evaluate(X, Y, batch_size=10, **QUIET)
    # as of Keras: the second epoch has what is left of the pass
    assert int(made.optimizer.iterations) == 5
    said = [str(one.message) for one in told if one.category is UserWarning]
    assert ["epochs to 2" in words for words in said] == [True, False, False]
    assert ["to 3 batches" in words for words in said] == [False, True, True]


@on("jax")
@pytest.mark.usefixtures("_limits")
@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data")
@pytest.mark.parametrize(("size", "data"), [(10, Again), (4, Again), (4, None)])
def test_the_limit_of_an_epoch_is_at_most_so_many_batches_of_one_pass(size, data):
    """Two batches, or five, where an epoch has at most three. Keras tells the same of arrays."""

    def epochs(fits, *given):
        counts = []
        made = getattr(fits, "model", fits)
        count = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: counts.append(int(made.optimizer.iterations))
        )
        fits.fit(*given, epochs=2, callbacks=[count], **QUIET)
        return counts

    expected = epochs(model(), X, Y, size)
    assert (
        epochs(ws.Trainer(model()), *((X, Y, size) if data is None else (data(size),))) == expected
    )
    assert expected == ([2, 4] if size == 10 else [3, 5])


@on("jax")
@pytest.mark.usefixtures("_limits")
@pytest.mark.filterwarnings("ignore:Limiting")
def test_a_restart_under_the_limit_begins_with_the_rows_of_its_epoch():
    data = ws.Batches((X, Y), 4, seed=7)
    ws.Trainer(model()).fit(data, epochs=2, initial_epoch=1, **QUIET)
    assert data.position == (1, 0)  # behind the last two of five


@on("jax")
def test_evaluation_and_prediction_end_where_they_are_told_to():
    def forever():
        while True:
            yield X[:4], Y[:4]

    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 2

    trainer = ws.Trainer(model())
    expected = trainer.evaluate(X[:4], Y[:4], **QUIET)
    assert trainer.evaluate(forever(), callbacks=[Stop()], **QUIET) == pytest.approx(
        expected, rel=1e-5
    )
    assert len(trainer.predict(forever(), callbacks=[Stop()], **QUIET)) == 12


# ---- after a failure, or a change of mind ----

BAD = (np.full_like(X, np.nan), Y)


def left_behind_a_failure(trainer, how):
    """Leave the trainer with an update that was not applied and has not been read."""
    if how == "break":
        for step in trainer.steps(ws.Batches(iter([(X, Y), BAD]))):
            if step.batch == 1:
                return

    def stream():
        yield X, Y
        yield BAD
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(stream(), **QUIET)


@pytest.mark.parametrize("how", share(["break", "error"]))
@pytest.mark.parametrize("then", ["fit", "update", "steps"])
def test_a_failure_that_nobody_saw_stops_nothing_that_begins_anew(how, then):
    trainer = ws.Trainer(model(optimizer="sgd"))
    left_behind_a_failure(trainer, how)
    begin = {
        "fit": lambda: trainer.fit(X, Y, **QUIET).history["loss"][0],
        "update": lambda: trainer.update((X, Y))["loss"],
        "steps": lambda: min(step.loss for step in trainer.steps(ws.Batches((X, Y)))),
    }
    assert np.isfinite(begin[then]())
    assert int(np.asarray(trainer.model.optimizer.iterations)) == 2


def test_steps_behind_a_failed_one_have_no_numbers():
    trainer = ws.Trainer(model(optimizer="sgd"))
    data = iter([(X, Y), BAD, (X, Y), (X, Y), (X, Y)])
    losses = []
    with pytest.raises(ws.NonFiniteError, match="Update 2 "):
        losses.extend(step.loss for step in trainer.steps(ws.Batches(data)))
    assert np.isnan(losses[1:]).all()


def test_skipped_updates_are_counted_where_a_loop_is_left():
    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip")
    for step in trainer.steps(ws.Batches(iter([(X, Y), BAD]))):
        if step.batch == 1:
            break
    assert trainer.num_skipped == 1
    assert [step.number for step in trainer.steps(ws.Batches((X, Y), 10))] == [3, 4]


def test_skipped_updates_are_counted_where_the_data_fail():
    def stream():
        yield X, Y
        yield BAD
        raise OSError("the disk is gone")

    trainer = ws.Trainer(model(optimizer="sgd"), on_nonfinite="skip")
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(stream(), **QUIET)
    assert trainer.num_skipped == 1


@on("jax")
def test_a_model_may_be_compiled_anew_while_it_is_trained():
    def anew(*_, **__):
        made.compile("sgd", made.loss, metrics=["accuracy"])

    made = model()
    look = keras.callbacks.LambdaCallback(on_epoch_end=anew)
    history = (
        ws.Trainer(made)
        .fit(X, Y, validation_data=(X, Y), epochs=3, callbacks=[look], **QUIET)
        .history
    )
    assert len(history["val_loss"]) == 3
    assert history["loss"] == sorted(history["loss"], reverse=True)
    trainer = ws.Trainer(made)
    seen = []
    for step in trainer.steps(ws.Batches((X, Y), 5)):
        if step.batch == 1:
            anew()
            trainer.evaluate(X, Y, **QUIET)
        seen.append(step.loss)
    assert len(seen) == 4
    assert np.isfinite(seen).all()


@pytest.mark.parametrize(
    "fit", [lambda model: model.fit, lambda model: ws.Trainer(model).fit], ids=["keras", "ours"]
)
def test_a_run_that_is_stopped_where_an_epoch_begins_ends_after_one_update(fit):
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(model)(
        np.ones((40, 3)), np.ones((40, 1)), batch_size=4, epochs=3, verbose=0, callbacks=[Stops()]
    )
    assert (int(model.optimizer.iterations), history.epoch) == (11, [0, 1])


def test_a_slow_data_set_is_loaded_in_the_callers_thread_in_every_epoch():
    class Slow(keras.utils.PyDataset):
        threads = []

        def __len__(self):
            return 8

        def __getitem__(self, number):
            self.threads.append(threading.current_thread())
            time.sleep(5e-3)
            return np.ones((4, 3)), np.ones((4, 1))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ws.Trainer(model).fit(Slow(), epochs=2, verbose=0)
    assert set(Slow.threads) == {threading.current_thread()}
    assert len(Slow.threads) >= 16


def convolution():
    """Return a model whose updates are sent one by one on JAX."""
    return model(
        keras.layers.Reshape((8, 1)),
        keras.layers.Conv1D(2, 3),
        keras.layers.Flatten(),
        optimizer="sgd",
    )


def noted_late(monkeypatch):
    """Return a list that gets, for each dispatch that is read, how many updates were sent after its
    first.
    """
    found = []
    note = UpdateLedger.note_failures

    def noting(self, run, report):
        found.append(run.number - report.first)
        return note(self, run, report)

    monkeypatch.setattr(UpdateLedger, "note_failures", noting)
    monkeypatch.setattr(dispatcher, "_SECONDS_PER_DISPATCH", 1e6)
    return found


@pytest.mark.skipif(not JAX, reason="TensorFlow sends several such updates at once")
def test_the_device_has_more_updates_to_do_while_the_numbers_of_one_are_read(monkeypatch):
    late = noted_late(monkeypatch)
    ws.Trainer(convolution()).fit(X, Y, batch_size=1, **QUIET)
    assert max(late) == 16
    late.clear()
    ws.Trainer(convolution()).fit(X, Y, batch_size=1, callbacks=[Reading()], **QUIET)
    assert set(late) == {0}


class Reading(keras.callbacks.Callback):
    """May read the weights after every update."""

    def on_train_batch_end(self, batch, logs=None):
        assert np.isfinite(logs["loss"])


@pytest.mark.parametrize("num", [None, 12])
def test_ready_made_batches_after_a_failed_update_come_again(num, monkeypatch):
    noted_late(monkeypatch)
    x = np.array(X)
    x[3] = np.nan
    drawn = []
    batches = ws.Batches(drawn.append(i) or (x[i : i + 1], Y[i : i + 1]) for i in range(20))
    with pytest.raises(ws.NonFiniteError, match="Update 4"):
        ws.Trainer(convolution()).fit(batches, steps_per_epoch=num, **QUIET)
    assert batches.position == (0, 3)
    assert [batch.start for batch in batches.unused] == [(0, i) for i in drawn[3:]]


def test_a_callback_that_raises_at_a_failed_update_leaves_data_and_run_before_it():
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if np.isnan(logs["loss"]):
                raise OSError("the loss is not finite")

    x = np.array(X)
    x[12] = np.nan
    batches = ws.Batches((x, Y), batch_size=4, shuffle=False)
    trainer = ws.Trainer(model())
    with pytest.raises(OSError, match="not finite"):
        trainer.fit(batches, callbacks=[Raises()], **QUIET)
    assert (trainer.run.number, batches.position) == (3, (0, 3))


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_update_that_is_not_read_when_the_data_raise_comes_again(error):
    class Rows(keras.utils.PyDataset):
        is_good = False

        def __len__(self):
            return 20

        def __getitem__(self, i):
            if i == 8 and not self.is_good:
                raise error("from the data")
            return X[i : i + 1] * (np.nan if i == 6 and not self.is_good else 1), Y[i : i + 1]

    rows = Rows()
    built = model()
    batches = ws.Batches(rows, shuffle=False)
    trainer = ws.Trainer(built)
    with pytest.raises(error, match="from the data"):
        trainer.fit(batches, **QUIET)
    assert (trainer.run.number, batches.position, int(built.optimizer.iterations)) == (6, (0, 6), 6)
    rows.is_good, twin = True, model()
    batches.unused.clear()
    trainer.fit(batches, **QUIET)
    ws.Trainer(twin).fit(ws.Batches(rows, shuffle=False), **QUIET)
    assert same(built, twin)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_an_interrupt_while_the_next_batches_are_drawn_loses_no_outcome(how, monkeypatch):
    """The block that was just sent holds an update that is not finite: the run and the data are
    before it.
    """
    x = np.ones((32, X.shape[1]), "float32")
    x[12:16] = np.nan  # batch 3
    data = ws.Batches(Rows(x), batch_size=4, shuffle=False)
    trainer = ws.Trainer(model(), on_nonfinite=how)
    note_sent = Loaded.note_sent

    def interrupted(feed, block):
        note_sent(feed, block)
        if block.start[1] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loaded, "note_sent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in trainer.steps(data):
            pass
    assert (data.position, trainer.num_skipped) == (((0, 3), 0) if how == "raise" else ((0, 4), 1))


class Rows:
    """Rows that are read one by one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], Y[0]
