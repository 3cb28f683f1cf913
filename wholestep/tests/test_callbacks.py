"""Keras' callbacks work unchanged, and get the same calls and logs as in keras.Model.fit."""

import csv
import threading

import keras
import numpy as np
import pytest
from shares import on
from small import ROWS, X, Y, model, values

import wholestep as ws
from wholestep import engines
from wholestep.callbacks import CallbackRunner

HOW = {"batch_size": 5, "epochs": 3, "shuffle": False, "verbose": 0}


class Notes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []
        self.epochs = []
        self.weights = []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(("end", batch, dict(logs)))
        self.weights.append(self.model.get_weights()[0].copy())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, dict(logs)))


def test_a_callback_sees_what_it_would_in_keras():
    ours = Notes()
    theirs = Notes()
    ws.Trainer(model()).fit(X, Y, callbacks=[ours], **HOW)
    model().fit(X, Y, callbacks=[theirs], **HOW)
    assert [b[:2] for b in ours.batches] == [b[:2] for b in theirs.batches]
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(ours.batches, theirs.batches, strict=True):
        if a[0] == "end":
            assert a[2] == pytest.approx(b[2], rel=1e-5)
    for a, b in zip(ours.epochs, theirs.epochs, strict=True):
        assert a[1] == pytest.approx(b[1], rel=1e-5)


@on("jax")
def test_schedules_and_early_stopping():
    rates = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda e, logs: rates.append(float(made.optimizer.learning_rate))
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=100),
        keras.callbacks.EarlyStopping(
            "loss", min_delta=100.0, patience=1, restore_best_weights=True
        ),
    ]
    made = model()
    history = ws.Trainer(made).fit(X, Y, callbacks=callbacks, **HOW)
    assert rates == pytest.approx([0.1, 0.05])
    assert len(history.history["loss"]) == 2


@on("jax")
def test_files(tmp_path):
    made = model()
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False),
    ]
    history = ws.Trainer(made).fit(X, Y, callbacks=callbacks, **HOW)
    again = model(seed=5)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "3.weights.h5")
    for a, b in zip(made.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with (tmp_path / "log.csv").open() as file:
        logged = [float(row["loss"]) for row in csv.DictReader(file)]
    assert logged == pytest.approx(history.history["loss"])
    resumed = model(seed=5)
    more = ws.Trainer(resumed).fit(
        X,
        Y,
        callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))],
        **HOW | {"epochs": 4},
    )
    assert more.epoch == [3]


@on("jax")
def test_tensor_board(tmp_path):
    pytest.importorskip("tensorflow")
    ws.Trainer(model()).fit(X, Y, callbacks=[keras.callbacks.TensorBoard(str(tmp_path))], **HOW)
    assert list(tmp_path.glob("train/*tfevents*"))


@pytest.mark.parametrize(("row", "updates"), [(7, 1), (0, 0)])  # in the second batch, or the first
def test_terminate_on_nan_ends_the_run_with_good_weights_and_the_loss_that_ended_it(
    row, updates, capsys, tmp_path
):
    x = X.copy()
    x[row] = np.nan
    made = model()
    callbacks = [keras.callbacks.TerminateOnNaN(), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    history = ws.Trainer(made).fit(x, Y, callbacks=callbacks, **HOW)
    (loss,) = history.history["loss"]
    assert np.isnan(loss)
    with open(tmp_path / "log.csv") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["nan"]
    assert "Invalid loss" in capsys.readouterr().out
    assert all(np.isfinite(v).all() for v in values(made))
    assert int(made.optimizer.iterations) == updates


@on("jax")
def test_a_callback_can_stop_in_the_middle_of_an_epoch():
    made = model()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    ws.Trainer(made).fit(X, Y, callbacks=[Stop()], **HOW)
    assert int(made.optimizer.iterations) == 2


@on("jax")
def test_the_progress_bar(capsys):
    ws.Trainer(model()).fit(X, Y, **HOW | {"verbose": 1})
    out = capsys.readouterr().out
    assert "Epoch 3/3" in out
    assert "4/4" in out
    assert "accuracy" in out


def test_who_needs_the_state():
    def watch(*callbacks):
        told = {"verbose": 1, "epochs": 1, "steps": ROWS, "history": True}
        return CallbackRunner(model(), list(callbacks), **told, engine=engines.choose())

    assert not watch().needs_state
    assert not watch(keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping()).needs_state
    assert not watch(keras.callbacks.ModelCheckpoint("x.keras")).needs_state
    assert watch(keras.callbacks.ModelCheckpoint("x.keras", save_freq=2)).needs_state
    assert watch(Notes()).needs_state
    notes = Notes()
    notes.reads_model = False
    assert not watch(notes).needs_state
    assert watch(keras.callbacks.LambdaCallback(on_train_batch_end=print)).needs_state
    assert not watch(keras.callbacks.LambdaCallback(on_epoch_end=print)).needs_state


@pytest.mark.parametrize(
    ("each", "freq", "names"), [(3, 6, ["1-6", "2-6"]), (3, 7, ["2-3"]), (1, 6, ["2-2"])]
)
def test_a_short_last_execution_counts_as_a_full_one_as_in_keras(each, freq, names, tmp_path):
    """Four batches in an epoch, in executions of three, count as six."""
    for run in (lambda made: made, ws.Trainer):
        folder = tmp_path / run.__name__
        made = model()
        folder.mkdir()
        made.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=each)
        path = folder / "{epoch}-{batch}.weights.h5"
        how = {"save_weights_only": True, "save_freq": freq}
        run(made).fit(
            X, Y, callbacks=[keras.callbacks.ModelCheckpoint(path, **how)], **HOW | {"epochs": 2}
        )
        assert sorted(path.name for path in folder.iterdir()) == [
            f"{name}.weights.h5" for name in names
        ]


class SetRate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)


def test_a_rate_set_as_a_batch_begins_is_that_batchs():
    ours = model(optimizer=keras.optimizers.SGD(5.0))
    theirs = model(optimizer=keras.optimizers.SGD(5.0))
    ws.Trainer(ours).fit(X, Y, callbacks=[SetRate()], **HOW)
    theirs.fit(X, Y, callbacks=[SetRate()], **HOW)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_what_a_callback_did_before_it_was_interrupted_stays():
    made = model()

    def change_and_stop(batch, logs=None):
        made.set_weights([np.full_like(w, 9) for w in made.get_weights()])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(made).fit(
            X,
            Y,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=change_and_stop)],
            **HOW,
        )
    assert all((w == 9).all() for w in made.get_weights())


@on("jax")
def test_batches_of_an_evaluation_have_their_logs():
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs=None: seen.append(sorted(logs))
    ws.Trainer(model()).evaluate(X, Y, 10, verbose=0, callbacks=[watch])
    assert seen == [["accuracy", "loss"]] * 2


class Everything(keras.callbacks.Callback):
    """Records the arguments of every hook of a call, an epoch and a batch."""

    def __init__(self):
        super().__init__()
        self.told = []

    def __getattribute__(self, name):
        if not name.startswith("on_") or name in ("on_batch_begin", "on_batch_end"):
            return super().__getattribute__(name)

        def hook(*given, **named):
            *at, logs = [*given, *named.values()]
            numbers = {k: v for k, v in (logs or {}).items() if k != "outputs"}
            params = {k: self.params[k] for k in ("verbose", "epochs", "steps")}
            self.told.append((name, at, logs is None, numbers, params, self.model.name))

        return hook


@on("jax")
def test_every_hook_and_the_progress_bar_say_what_they_do_in_keras(capsys):
    told = []
    texts = []
    for run in (lambda made: made, ws.Trainer):
        keras.backend.clear_session()
        notes = Everything()
        runner = run(model())
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        runner.fit(X, Y, callbacks=[rate, notes], validation_data=(X[:7], Y[:7]), **HOW)
        runner.evaluate(X, Y, 5, verbose=0, callbacks=[notes])
        runner.predict(X, 5, verbose=0, callbacks=[notes])
        capsys.readouterr()
        runner.fit(X, Y, **HOW | {"verbose": 2, "epochs": 1})
        texts.append(
            [
                part
                for part in capsys.readouterr().out.split(" - ")
                if "s/" not in part and part[:1] != "0"
            ]
        )
        told.append(notes.told)
    theirs, ours = told
    assert texts[0] == texts[1]
    assert [each[:3] + each[4:] for each in ours] == [each[:3] + each[4:] for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert list(a[3]) == list(b[3])
        assert a[3] == pytest.approx(b[3], rel=1e-4)


@pytest.mark.parametrize("gather", [lambda callback: callback, lambda callback: [[callback]]])
def test_one_callback_or_a_nested_list_is_called_as_a_list_is(gather):
    class Notes(keras.callbacks.Callback):
        seen = ()

        def on_train_batch_end(self, batch, logs=None):
            self.seen = [*self.seen, (batch, threading.current_thread())]

    notes = Notes()
    ws.Trainer(model()).fit(X, Y, callbacks=gather(notes), **HOW | {"epochs": 1})
    assert notes.seen == [(batch, threading.current_thread()) for batch in range(4)]


class Counting:
    """Records the model's count of updates in a custom hook."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.seen = [*getattr(self, "seen", []), int(np.asarray(self.model.optimizer.iterations))]


class Quiet:
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)


KINDS = {
    keras.callbacks.TensorBoard: ("logs",),
    keras.callbacks.ModelCheckpoint: ("{epoch}.weights.h5", "val_loss", 0, False, True),
    keras.callbacks.TerminateOnNaN: (),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_the_users_in_a_class_of_keras_sees_the_state_of_its_update(kind, tmp_path):
    given = [str(tmp_path / each) if i == 0 else each for i, each in enumerate(KINDS[kind])]
    counting = type("Counts", (Counting, kind), {})(*given)
    trainer = ws.Trainer(model())
    trainer.fit(X, Y, batch_size=1, epochs=3, verbose=0)  # until many go in a dispatch
    trainer.fit(X, Y, batch_size=1, callbacks=[counting], verbose=0)
    assert counting.seen == list(range(3 * ROWS + 1, 4 * ROWS + 1))
    quiet = type("Waits", (Quiet, kind), {})(*given)
    own = kind(*given)
    own.on_train_batch_begin = lambda batch, logs=None: None
    how = {"verbose": 0, "epochs": 1, "steps": 4, "history": True, "engine": engines.choose()}
    assert not CallbackRunner(model(), quiet, **how).needs_state
    assert CallbackRunner(model(), own, **how).needs_state
