"""Keras' callbacks resume with their state, or a message names those without saved state."""

import csv

import keras
import pytest
from runs import BATCHES, SIZE, Tells, X, Y, check_same_bits, leaves, small, taken_from
from shares import on, share

import wholestep as ws
from wholestep.checkpoints.callbacks import put_back, starts_anew, state_of

HOW = {"batch_size": SIZE, "epochs": 3, "verbose": 0}
GOES_ON = {
    *(
        "EarlyStopping",
        "History",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ReduceLROnPlateau",
        "SwapEMAWeights",
    ),
    *("CSVLogger", "TensorBoard"),
}
STATELESS = {
    *("Callback", "LambdaCallback", "LearningRateScheduler", "ProgbarLogger", "RemoteMonitor"),
    "TerminateOnNaN",
}


@on("jax")
def test_every_callback_of_keras_is_known():
    """A release of Keras that has another one must be looked at; until then it is named."""
    kinds = {name: kind for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    kinds = {
        name: kind for name, kind in kinds.items() if issubclass(kind, keras.callbacks.Callback)
    }
    assert set(kinds) == GOES_ON | STATELESS | {"BackupAndRestore", "CallbackList"}
    for name in GOES_ON | STATELESS:
        assert not starts_anew(kinds[name].__new__(kinds[name]))
    assert starts_anew(type("Mine", (keras.callbacks.LambdaCallback,), {})())


def fitted(seed, checkpoints, *callbacks):
    trainer = ws.Trainer(small(seed))
    history = trainer.fit(X, Y, callbacks=list(callbacks), checkpoints=checkpoints, **HOW)
    return trainer, history


def check_saves(tmp_path, steps, make):
    """Fit, and go on from these steps; yield each with what `make(folder)` saved in the whole run,
    and in the rest.
    """
    asked = ws.Checkpoints(tmp_path / "whole", every_steps=1, keep=100)
    folders = [tmp_path / f"saved-{step}" for step in (0, *steps)]
    for folder in folders:
        folder.mkdir(parents=True)
    whole, history = fitted(0, asked, *make(folders[0]))
    for step, folder in zip(steps, folders[1:], strict=True):
        other, again = fitted(
            1, taken_from(asked.folder, step, tmp_path / str(step)), *make(folder)
        )
        assert again.history == history.history
        check_same_bits(leaves(whole.model), leaves(other.model))
        yield step, *({path.name for path in one.iterdir()} for one in (folders[0], folder))


@on("jax")
@pytest.mark.slow
def test_models_are_saved_after_the_same_batches(tmp_path):
    def make(folder):
        return [
            keras.callbacks.ModelCheckpoint(
                folder / "{epoch}-{batch}.weights.h5", "loss", save_freq=4, **how
            )
        ]

    ends = {4: "1-4", 8: "2-2", 12: "2-6", 16: "3-4"}
    for how in (
        {"save_weights_only": True},
        {"save_weights_only": True, "save_best_only": True, "mode": "min"},
    ):
        for step, whole, again in check_saves(tmp_path / str(len(how)), (5, 7, 2 * BATCHES), make):
            assert (
                again
                == {f"{end}.weights.h5" for number, end in ends.items() if number > step} & whole
            )
            assert again or step > 8


@pytest.mark.parametrize("suffix", share([".keras", ".weights.h5"]))
@pytest.mark.slow
def test_only_what_is_better_than_before_is_saved(suffix, tmp_path):
    def make(folder):
        how = {"save_best_only": True, "save_weights_only": suffix == ".weights.h5", "mode": "max"}
        return [
            Tells(0.9, 0.5, 0.95),
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}{suffix}", "good", **how),
        ]

    for step, whole, again in check_saves(tmp_path, (3, BATCHES, 2 * BATCHES), make):
        assert whole == {f"1{suffix}", f"3{suffix}"}
        assert again == (whole if step < BATCHES else {f"3{suffix}"})


class Stops(keras.callbacks.Callback):
    """Ends the run with an error after a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = (epoch, batch)
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise RuntimeError("stopped")


def stop_with_log(checkpoints, log, epoch, batch):
    with pytest.raises(RuntimeError, match="stopped"):
        fitted(0, checkpoints, log, Stops(epoch, batch))
    log.csv_file.close()  # as Keras does only where a run ends well


EARLIER = b"epoch,loss\r\n0,0.5\r\n1,0.4\r\n2,0.3\r\n"


@pytest.mark.parametrize("before", [None, EARLIER], ids=["alone", "after another run"])
@pytest.mark.parametrize(
    ("every", "stop"), [(BATCHES + 2, (2, 1)), (2, (2, 3)), (100, None), (BATCHES, (1, 1))]
)
def test_a_log_of_epochs_is_that_of_a_run_without_a_stop(every, stop, before, tmp_path):
    logs = [tmp_path / "whole.csv", tmp_path / "stopped.csv"]

    def make(log):
        if before is not None and not log.exists():
            log.write_bytes(before)
        return keras.callbacks.CSVLogger(log, append=before is not None)

    fitted(0, ws.Checkpoints(tmp_path / "whole"), make(logs[0]))
    asked = ws.Checkpoints(tmp_path / "stopped", every_steps=every)
    if stop is not None:
        stop_with_log(asked, make(logs[1]), *stop)
        assert logs[1].read_bytes().startswith(before or b"")
    for seed in range(stop is not None, 4):  # the last of them have nothing left to train
        fitted(seed, asked, make(logs[1]))
        assert logs[1].read_bytes() == logs[0].read_bytes()
    assert logs[1].read_bytes().count(b"\n") == (4 if before is None else 7)


def test_a_file_that_is_not_the_log_of_the_run_is_not_cut(tmp_path):
    asked = ws.Checkpoints(tmp_path / "run", every_steps=2, keep=100)
    log = tmp_path / "log.csv"
    other = tmp_path / "other.csv"
    stop_with_log(asked, keras.callbacks.CSVLogger(log), 1, 2)
    kept = log.read_bytes()
    other.write_bytes(EARLIER)
    fitted(1, taken_from(asked.folder, 2, tmp_path / "a"), keras.callbacks.CSVLogger(other))
    assert other.read_bytes().startswith(EARLIER)
    log.write_bytes(EARLIER * 9)
    fitted(1, taken_from(asked.folder, BATCHES + 2, tmp_path / "b"), keras.callbacks.CSVLogger(log))
    assert log.read_bytes().startswith(EARLIER * 9)
    log.unlink()
    fitted(1, taken_from(asked.folder, BATCHES + 2, tmp_path / "c"), keras.callbacks.CSVLogger(log))
    assert log.read_bytes().startswith(kept.split(b"\r\n")[0])  # the names of the columns


@on("jax")
def test_orbax_has_every_step_once(tmp_path):
    pytest.importorskip("orbax.checkpoint")

    def make(folder):
        return [keras.callbacks.OrbaxCheckpoint(tmp_path / "orbax", save_freq=4, max_to_keep=None)]

    for _ in check_saves(tmp_path, (5, 7, 2 * BATCHES), make):  # in one folder, as after a kill
        names = {path.name for path in (tmp_path / "orbax").iterdir()}
        assert names == {"4", "8", "12", "16"}


@on("jax")
def test_tensor_board_counts_on(tmp_path):
    events = pytest.importorskip("tensorflow").compat.v1.train.summary_iterator

    def make(folder):
        return [keras.callbacks.TensorBoard(folder, update_freq=1, write_graph=False)]

    def steps(folder):
        (file,) = folder.glob("train/*tfevents*")
        return [
            event.step
            for event in events(str(file))
            for value in event.summary.value
            if value.tag == "batch_loss"
        ]

    for step, *_ in check_saves(tmp_path, (7,), make):
        assert steps(tmp_path / "saved-0") == list(range(1, 3 * BATCHES + 1))
        assert steps(tmp_path / f"saved-{step}") == list(range(step + 1, 3 * BATCHES + 1))


def test_each_callback_has_its_own_state_again(tmp_path):
    """Callbacks in another order are paired; one with another metric starts anew."""

    def stops(*names):
        return [keras.callbacks.EarlyStopping(name, patience=9) for name in names]

    asked = ws.Checkpoints(tmp_path, keep=100)
    best = {}
    made = stops("loss", "val_loss")
    trainer = ws.Trainer(small(0))
    held = {"validation_data": (X[:8], Y[:8])}
    trainer.fit(X, Y, callbacks=made, checkpoints=asked, **HOW, **held)
    best = {one.monitor: one.best for one in made}
    again = stops("val_loss", "mae", "loss")
    ws.Trainer(small(1)).fit(X, Y, callbacks=again, checkpoints=asked, **HOW, **held)
    assert [one.best for one in again] == [best["val_loss"], None, best["loss"]]


def test_a_forged_state_changes_no_other_attribute(tmp_path):
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "a.keras")
    put_back(
        saver, state_of(saver) | {"best": 0.5, "filepath": "elsewhere.keras", "_save_model": 1}
    )
    assert saver.best == 0.5
    assert saver.filepath == str(tmp_path / "a.keras")
    assert callable(saver._save_model)


class Sees(keras.callbacks.Callback):
    """Notes the hooks of epochs that it receives."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(("begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append(("end", epoch))


class First(Sees): ...


class Second(Sees): ...


class Third(Sees): ...


class OwnList(keras.callbacks.CallbackList):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)


LISTS = {
    "the same": ((First, Second), (First, Second)),
    "more at the end": ((First,), (First, Second)),
    "more at the beginning": ((First,), (Second, First)),
    "the first": ((), (First,)),
    "fewer": ((First, Second, Third), (Second,)),
    "none": ((First, Second), ()),
    "in another order": ((First, Second, Third), (Third, First, Second)),
    "another": ((First,), (Second,)),
}


def seen(folder, kinds, *, epochs, is_own=False, verbose=0):
    """Fit with callbacks of these kinds; return the History, and the hooks of each."""
    trainer = ws.Trainer(small())
    callbacks = [kind() for kind in kinds]
    given = OwnList(callbacks, add_history=True, model=trainer.model) if is_own else callbacks
    how = HOW | {"epochs": epochs, "verbose": verbose}
    history = trainer.fit(X, Y, callbacks=given, checkpoints=folder, **how)
    return history, [callback.hooks for callback in callbacks]


@pytest.mark.parametrize("is_own", [False, True], ids=["a list", "a user-defined list"])
@pytest.mark.parametrize("name", share(LISTS))
def test_other_callbacks_receive_the_epochs_that_follow_and_no_epoch_twice(name, is_own, tmp_path):
    before, after = LISTS[name]
    whole, _ = seen(None, (), epochs=5)
    seen(tmp_path, before, epochs=3, is_own=is_own)
    for epochs in (4, 5):
        history, hooks = seen(tmp_path, after, epochs=epochs, is_own=is_own)
        assert history.epoch == list(range(epochs))
        assert history.history == {name: held[:epochs] for name, held in whole.history.items()}
        assert hooks == [[("begin", epochs - 1), ("end", epochs - 1)]] * len(after)


@on("jax")
def test_a_progress_bar_that_is_new_shows_no_epoch_of_before(tmp_path, capsys):
    seen(tmp_path, (), epochs=2)
    history, _ = seen(tmp_path, (), epochs=3, verbose=2)
    assert history.epoch == [0, 1, 2]
    assert capsys.readouterr().out.count("Epoch ") == 1


@pytest.mark.parametrize(
    "after", [(First, Second), (Second, First), (Second,), (Third, Second, First)]
)
def test_an_epochs_end_is_received_by_those_that_have_not_had_it(after, tmp_path):
    """A snapshot in the hook of the first of two callbacks: the second, and new ones, receive this
    epoch's end.
    """
    trainer = ws.Trainer(small())
    taken = []

    class Takes(First):
        def on_epoch_end(self, epoch, logs=None):
            taken.append(trainer.run.snapshot())

    Takes.__name__ = "First"
    trainer.fit(X, Y, callbacks=[Takes(), Second()], **HOW | {"epochs": 2})
    other = ws.Trainer(small(1))
    callbacks = {kind: kind() for kind in after}
    other.run.restore(taken[0])
    history = other.fit(X, Y, callbacks=list(callbacks.values()), **HOW)
    assert history.epoch == [0, 1, 2]
    for kind, callback in callbacks.items():
        ends = [epoch for hook, epoch in callback.hooks if hook == "end"]
        assert ends == ([1, 2] if kind is First else [0, 1, 2])


@on("jax")
def test_a_snapshot_of_a_resumed_end_of_an_epoch_knows_who_received_it():
    """In another order than the saved one: the third callback is called before the second."""
    trainer = ws.Trainer(small())
    taken = []

    def taking(kind):
        def on_epoch_end(self, epoch, logs=None):
            kind.on_epoch_end(self, epoch, logs)
            taken.append(trainer.run.snapshot())

        return type(kind.__name__, (kind,), {"on_epoch_end": on_epoch_end})

    trainer.fit(X, Y, callbacks=[taking(First)(), Second(), Third()], **HOW | {"epochs": 1})
    trainer = ws.Trainer(small(1))
    trainer.run.restore(taken.pop(0))
    trainer.fit(X, Y, callbacks=[taking(Third)(), First(), Second()], **HOW | {"epochs": 1})
    trainer = ws.Trainer(small(2))
    trainer.run.restore(taken.pop(0))
    callbacks = [First(), Second(), Third()]
    assert trainer.fit(X, Y, callbacks=callbacks, **HOW | {"epochs": 1}).epoch == [0]
    assert [("end", 0) in callback.hooks for callback in callbacks] == [False, True, False]


RATE = keras.callbacks.LearningRateScheduler
VALIDATION = {"validation_data": (X[:8], Y[:8])}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({}, 0), ({}, 1)),
        (({}, 1), ({}, 0)),
        ((VALIDATION, 1), ({}, 0)),
        (({}, 0), (VALIDATION, 1)),
    ],
    ids=["a rate more", "a rate less", "nothing more", "all more"],
)
def test_a_log_keeps_its_columns_where_other_numbers_are_logged(before, after, tmp_path):
    log = tmp_path / "log.csv"
    told = {}
    for epochs, (how, has_rate) in ((2, before), (4, after)):
        callbacks = [*[RATE(lambda epoch, rate: rate)] * has_rate, keras.callbacks.CSVLogger(log)]
        trainer = ws.Trainer(small())
        told = trainer.fit(
            X,
            Y,
            callbacks=callbacks,
            checkpoints=tmp_path / "run",
            **HOW | how | {"epochs": epochs},
        )
    with log.open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["epoch"]) for line in lines] == told.epoch == [0, 1, 2, 3]
    for name in ("accuracy", "loss"):
        assert [float(line[name]) for line in lines] == told.history[name]
    # no line is longer or shorter
    assert all(None not in line and None not in line.values() for line in lines)
