"""A run that is stopped anywhere resumes with the bits of a run without a stop."""

import json
import shutil
import signal
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from runs import (
    BATCHES,
    HOW,
    LAST,
    SIZE,
    Takes,
    Tells,
    X,
    Y,
    check_same_bits,
    leaves,
    made,
    small,
    steps_in,
    taken_from,
)
from shares import on, share
from test_snapshot import SOURCES, rows

import wholestep as ws
from wholestep.checkpoints.folder import Folder


@pytest.fixture(autouse=True)
def no_thread_is_left():
    # another file's tests may have loaders that are not collected yet
    before = {*threading.enumerate()}
    yield
    assert not [
        each
        for each in threading.enumerate()
        if each.name.startswith("wholestep-") and each not in before
    ]


# ---- going on ----


def saved_at_every_step(tmp_path, data, make, **how):
    """Train and save after every update; return the trainer, its History, what its batches were
    told, the folder.
    """
    trainer = ws.Trainer(make())
    takes = Takes(trainer.run)
    asked = ws.Checkpoints(tmp_path / "whole", every_steps=1, keep=100)
    history = trainer.fit(*data(), callbacks=[takes], checkpoints=asked, **how)
    return trainer, history, takes.told, tmp_path / "whole"


@pytest.mark.parametrize("name", share(SOURCES))
@pytest.mark.slow
def test_fit_goes_on_from_every_checkpoint(name, tmp_path):
    data, how = SOURCES[name]
    how = {"epochs": 3, "verbose": 0, **how}
    whole, history, told, folder = saved_at_every_step(tmp_path, data, small, **how)
    assert steps_in(folder) == list(range(1, len(told) + 1))
    other = ws.Trainer(small(seed=1))
    wanted = range(1, len(told) + 1) if name == "arrays" else (2, BATCHES, BATCHES + 1, len(told))
    for step in wanted:
        again = Takes(other.run)
        own = taken_from(folder, step, tmp_path / str(step))
        resumed = other.fit(*data(), callbacks=[again], checkpoints=own, **how)
        check_same_bits(leaves(whole.model), leaves(other.model))
        assert (resumed.history, resumed.epoch) == (history.history, history.epoch)
        assert again.told == told[step:]
        assert steps_in(own)[-1] == len(told)


@pytest.mark.slow
def test_every_piece_of_state_goes_on_also_where_nobody_watches(tmp_path):
    plain = ws.Trainer(made()).fit(X, Y, **HOW)
    whole = ws.Trainer(made())
    asked = ws.Checkpoints(tmp_path / "whole", every_steps=1, keep=100)
    history = whole.fit(X, Y, checkpoints=asked, **HOW)
    # the updates were cut otherwise into dispatches
    check_same_bits(leaves(plain.model), leaves(whole.model))
    other = ws.Trainer(made(seed=1))
    for step in (BATCHES - 1, 2 * BATCHES + 3, LAST):
        own = taken_from(tmp_path / "whole", step, tmp_path / str(step))
        assert other.fit(X, Y, checkpoints=own, **HOW).history == history.history == plain.history
        check_same_bits(leaves(whole.model), leaves(other.model))


@pytest.mark.parametrize("every", share([4, 5]))
def test_checkpoints_come_when_they_are_asked_for(every, tmp_path):
    asked = ws.Checkpoints(tmp_path, every_steps=every, keep=100)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, **HOW)
    assert steps_in(tmp_path) == [*range(every, LAST, every), LAST]


def test_a_clock_may_ask_for_checkpoints(tmp_path, monkeypatch):
    seconds = iter(range(10_000))
    monkeypatch.setattr("wholestep.checkpoints.saver.time.monotonic", lambda: next(seconds))
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(tmp_path, every_seconds=1, keep=100), **HOW
    )
    assert len(steps_in(tmp_path)) > 3


def loop(trainer, folder=None, most=None, **asked):
    """Run a loop that changes the learning rate in its body; return the numbers of its steps."""
    told = []
    checkpoints = None if folder is None else ws.Checkpoints(folder, keep=100, **asked)
    for step in trainer.steps(ws.Batches((X, Y), SIZE), epochs=2, checkpoints=checkpoints):
        told.append((step.number, step.epoch, step.batch, step.loss, step.logs))
        if step.number % 4 == 3:
            trainer.model.optimizer.learning_rate = 0.5 / step.number
        if step.number == most:
            break
    return told


def test_a_loop_goes_on_with_what_its_body_has_changed(tmp_path):
    plain = ws.Trainer(small())
    told = loop(plain)
    whole = ws.Trainer(small())
    assert loop(whole, tmp_path / "whole", every_steps=1) == told
    assert steps_in(tmp_path / "whole") == list(range(1, 2 * BATCHES + 1))
    other = ws.Trainer(small(seed=1))
    for step in steps_in(tmp_path / "whole"):
        assert (
            loop(other, taken_from(tmp_path / "whole", step, tmp_path / str(step))) == told[step:]
        )
        check_same_bits(leaves(plain.model), leaves(other.model))


def test_restarts_may_follow_each_other(tmp_path):
    told = loop(ws.Trainer(small()))
    first = loop(ws.Trainer(small()), tmp_path, most=5, every_steps=2)
    second = loop(ws.Trainer(small(1)), tmp_path, most=8, every_steps=1)
    third = loop(ws.Trainer(small(2)), tmp_path)
    assert [one[0] for one in second] == [5, 6, 7, 8]
    assert [*first[:4], *second[:3], *third] == told


def test_an_epoch_that_is_done_does_not_begin_again(tmp_path, capsys):
    begun = []
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch)),
        Tells(1, 2, 3),
    ]
    for epochs in (2, 3):
        ws.Trainer(small()).fit(
            X,
            Y,
            checkpoints=tmp_path,
            callbacks=callbacks,
            **HOW | {"epochs": epochs, "verbose": 1},
        )
    assert begun == [0, 1, 2]
    assert "Epoch 2/3" not in capsys.readouterr().out


def test_a_run_that_has_ended_goes_on_with_more_epochs(tmp_path):
    history = ws.Trainer(small()).fit(X, Y, **HOW)
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 2})
    more = ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW)
    assert more.history == history.history
    fewer = ws.Trainer(small(2))
    assert fewer.fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 1}).history == history.history
    check_same_bits(leaves(more.model), leaves(fewer.model))


class StopsAt(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epoch


def only_line(capfd):
    (line,) = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("wholestep: ")
    ]
    return line


@pytest.mark.parametrize(
    ("epochs", "how", "where", "way"),
    [
        (3, {}, "epoch 3 of 3", "raise epochs, or use another folder"),
        (2, {}, "epoch 3, with epochs=2", "raise epochs, or use another folder"),
        (3, {"initial_epoch": 1}, "epoch 3 of 3", "raise epochs, or use another folder"),
        (
            5,
            {"callbacks": [StopsAt(2)]},
            "epoch 3 of 5, where a callback stopped it",
            "use another folder",
        ),
    ],
)
def test_a_run_that_is_complete_says_so(epochs, how, where, way, tmp_path, capfd):
    first = ws.Trainer(small()).fit(
        X, Y, checkpoints=tmp_path, **HOW | {"epochs": max(epochs, 3), **how}
    )
    capfd.readouterr()
    again = ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": epochs, **how})
    held = (
        f"wholestep: the run in {tmp_path} is complete ({where}): nothing was trained (to "
        f"train, {way})"
    )
    assert only_line(capfd).partition("; ")[0] == held
    assert again.history == first.history
    by_hand = ws.Trainer(small(2))
    by_hand.restore(tmp_path)
    capfd.readouterr()
    by_hand.fit(X, Y, **HOW | {"epochs": epochs, **how})
    assert only_line(capfd) == held


def test_an_epoch_beyond_the_last_is_not_trained_to_its_end_and_the_line_says_so(tmp_path, capfd):
    asked = ws.Checkpoints(tmp_path, every_steps=2 * BATCHES + 2, keep=9)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, **HOW)
    shutil.rmtree(Folder(tmp_path).path(LAST))
    ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 2})
    assert "is complete (epoch 3, with epochs=2, batch 2): nothing was trained" in only_line(capfd)
    assert len(ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW).epoch) == 3
    assert "resumes from" in only_line(capfd)


def test_a_loop_that_is_complete_says_so(tmp_path, capfd):
    loop(ws.Trainer(small()), tmp_path)
    assert loop(ws.Trainer(small(1)), tmp_path) == []
    assert f"the run in {tmp_path} is complete (epoch 2 of 2): nothing was trained" in only_line(
        capfd
    )


def test_an_initial_epoch_of_a_resumed_run_is_not_used(tmp_path, capfd):
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 1})
    history = ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW, initial_epoch=2)
    assert history.epoch == [0, 1, 2]
    assert only_line(capfd).endswith("; initial_epoch 2, which is not used")
    ws.Trainer(small(1)).fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 4}, initial_epoch=3)
    assert "is not used" not in only_line(capfd)


def test_the_line_says_where_it_goes_on(tmp_path, capfd):
    asked = ws.Checkpoints(tmp_path, every_steps=4, keep=10)
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, **HOW)
    assert "resumes" not in capfd.readouterr().err
    for file in Folder(tmp_path).path(LAST).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")

    class Mine(keras.callbacks.Callback):
        pass

    ws.Trainer(small(), microbatch_size=2).fit(X, Y, checkpoints=asked, callbacks=[Mine()], **HOW)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "resumes" in line]
    assert "step-00000016, after update 16 (epoch 3, batch 4)" in line
    assert (
        f"set aside: bad-{LAST:08d}-1 (00000-of-00001-00.safetensors must have the digest" in line
    )
    assert "microbatch size 2 (auto before): from here not bit for bit" in line
    assert "starts anew: Mine" in line
    why = json.loads((tmp_path / f"bad-{LAST:08d}-1" / "why.json").read_text())
    assert why["step"] == LAST
    assert "digest" in why["why"]


# ---- what is refused, before anything changes ----


def test_no_run_goes_on_from_nothing_but_damage(tmp_path):
    trainer = ws.Trainer(small())
    trainer.fit(X, Y, checkpoints=tmp_path, **HOW)
    before = leaves(trainer.model)
    for file in tmp_path.glob("step-*/*"):
        file.write_bytes(b"")
    for match in ("manifest.json must have the digest", f"bad-{LAST:08d}-1 only"):
        with pytest.raises(ws.CheckpointError, match=match):
            trainer.fit(X, Y, checkpoints=tmp_path, **HOW)
    check_same_bits(before, leaves(trainer.model))


def test_a_new_run_needs_an_empty_folder(tmp_path):
    trainer = ws.Trainer(small())
    asked = ws.Checkpoints(tmp_path, resume=False)
    trainer.fit(X, Y, checkpoints=asked, **HOW)
    with pytest.raises(ws.CheckpointError, match=r"in an empty folder\. Received: 1 checkpoints"):
        trainer.fit(X, Y, checkpoints=asked, **HOW)


OTHERS = {
    "size": ((X, Y), {"batch_size": SIZE + 1}, "4 in a batch"),
    "seed": ((X, Y), {"seed": 1}, r"seed 1 \(saved: 22 rows, 4 in a batch, seed 0\)"),
    "order": ((X, Y), {"shuffle": False}, "in their own order"),
    "rows": ((X[:-1], Y[:-1]), {}, "21 rows"),
    "content": ((X + 1, Y), {}, "Received: other numbers in batch"),
    "kind": (rows(), {"batch_size": None}, r"source: IndexedRows \(saved: Arrays\)"),
}


@pytest.mark.parametrize("name", share(OTHERS))
def test_other_data_are_refused_by_what_differs(name, tmp_path):
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)
    data, how, match = OTHERS[name]
    how = dict(how)
    other = small(seed=1)
    trainer = ws.Trainer(other, seed=how.pop("seed", 0))
    before = leaves(other)
    with pytest.raises(ws.SpecificationError, match=match) as caught:
        trainer.fit(*data, checkpoints=tmp_path, **HOW | how)
    assert str(caught.value).startswith(f"{tmp_path} holds another run: its data")
    assert "Try: another folder; or, to resume that run, its data" in str(caught.value)
    check_same_bits(before, leaves(other))
    assert trainer.run.restored is None
    assert steps_in(tmp_path) == [LAST]


@pytest.mark.parametrize("begins_again", share([False, True]))
def test_a_stream_that_gives_other_batches_is_refused(begins_again, tmp_path):
    def data(change):
        batches = [(X[i : i + 2] + change * (i == 6), Y[i : i + 2]) for i in range(0, 10, 2)]
        return ws.Batches(Again(batches) if begins_again else iter(batches))

    asked = ws.Checkpoints(tmp_path, every_steps=1)
    for step in ws.Trainer(small()).steps(data(0.0), checkpoints=asked):
        if step.number == 5:
            break
    trainer = ws.Trainer(small(1))
    with pytest.raises(ws.BatchError, match="another batch before batch 4 of epoch 0"):
        list(trainer.steps(data(1.0), checkpoints=asked))
    trainer = ws.Trainer(small(1))
    trainer.restore(tmp_path)
    assert [step.number for step in trainer.steps(data(1.0))] == [5]


class Counted:
    """An iterator with a saved position, which counts its reads."""

    def __init__(self, as_bytes):
        self.at = 0
        self.read = 0
        self.as_bytes = as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 10:
            raise StopIteration
        self.at = self.at + 1
        self.read = self.read + 1
        rows = [self.at, self.at + 7]
        return X[rows], Y[rows]

    def get_state(self):
        return str(self.at).encode() if self.as_bytes else {"at": self.at}

    def set_state(self, state):
        self.at = int(state) if self.as_bytes else state["at"]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_stream_that_can_tell_where_it_stands_goes_on_from_there(as_bytes, tmp_path):
    def losses(seed, folder, most=None):
        stream = Counted(as_bytes)
        told = []
        asked = ws.Checkpoints(folder, every_steps=1)
        for step in ws.Trainer(small(seed)).steps(ws.Batches(stream), checkpoints=asked):
            told.append(step.loss)
            if step.number == most:
                break
        return told, stream.read

    whole, _ = losses(0, tmp_path / "whole")
    losses(0, tmp_path / "left", most=5)  # of which four are saved
    assert losses(1, tmp_path / "left") == (whole[4:], 7)  # and one for its shapes


class OwnState:
    """A source that keeps the place of its newest pass itself, as `datasets.IterableDataset`
    does.
    """

    def __init__(self):
        self.begins = 0
        self.at = 0
        self.read = 0

    def __iter__(self):
        for at in range(self.begins + 1, 7):
            self.at = at
            self.read = self.read + 1
            yield X[[at, at + 7]], Y[[at, at + 7]]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begins = self.at = state["at"]


def test_a_source_with_a_state_of_its_own_goes_on_from_there_and_begins_the_next_epochs_at_its_first_batch(
    tmp_path,
):
    def losses(seed, folder, most=None):
        source = OwnState()
        told = []
        asked = ws.Checkpoints(folder, every_steps=1)
        for step in ws.Trainer(small(seed)).steps(ws.Batches(source), epochs=3, checkpoints=asked):
            told.append(step.loss)
            if step.number == most:
                break
        return told, source.read

    whole, read = losses(0, tmp_path / "whole")
    assert read in (18, 19)  # and perhaps one for its shapes
    losses(0, tmp_path / "left", most=10)  # of which nine are saved, three of the second epoch
    found, read = losses(1, tmp_path / "left")
    assert found == whole[9:]
    assert read in (9, 10)


def test_a_stream_that_is_drawn_ahead_goes_on_after_the_batch_that_was_used(tmp_path, monkeypatch):
    large = property(lambda self: 64, lambda self, value: None)
    monkeypatch.setattr("wholestep.dispatcher.DispatchSize.size", large, raising=False)
    asked = ws.Checkpoints(tmp_path / "whole", every_seconds=1e-9, keep=99)
    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    history = whole.fit(Counted(False), verbose=0, checkpoints=asked).history
    steps = steps_in(asked.folder)
    assert steps == [4, 8, 10]
    for step in (4, 8):
        stream = Counted(False)
        own = taken_from(tmp_path / "whole", step, tmp_path / str(step))
        assert other.fit(stream, verbose=0, checkpoints=own).history == history
        assert stream.read == 10 - step + (step == 4)  # one more, from which the model is built
        check_same_bits(leaves(whole.model), leaves(other.model))


class Again:
    """A stream that can be begun again."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_another_model_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)
    other = made()
    before = leaves(other)
    monkeypatch.setattr("wholestep.checkpoints.safetensors.read", None)
    with pytest.raises(ws.SpecificationError, match=r"Received: Adam \(saved: SGD\)"):
        ws.Trainer(other).fit(X, Y, checkpoints=tmp_path, **HOW)
    check_same_bits(before, leaves(other))
    with pytest.raises(
        ws.SpecificationError,
        match=(
            f"{tmp_path} holds another run: it was trained by fit. Received: steps. Try: "
            "another folder"
        ),
    ):
        list(ws.Trainer(small()).steps(ws.Batches((X, Y), SIZE), checkpoints=tmp_path))


@on("jax")
def test_arguments_that_cannot_mean_anything_are_refused(tmp_path):
    wrong = [
        ({"folder": 3}, "folder must be a path"),
        ({"folder": Path("gs://bucket")}, "file system"),
        ({"every_steps": 0}, "every_steps must be a whole number"),
        ({"every_steps": 2.0}, "every_steps must be a whole number"),
        ({"every_seconds": -1}, "every_seconds must be above 0"),
        ({"every_seconds": float("nan")}, "every_seconds"),
        ({"keep": 0}, "keep must be a whole number"),
        ({"keep_best": "val_loss"}, "keep_best must be a name"),
        ({"keep_best": ("val_loss", 1, "least")}, "keep_best must be a name"),
        ({"resume": "yes"}, "resume must be True or False"),
        ({"also": {"mine": 3}}, r"mine must have get_state\(\) and set_state"),
        ({"also": [1]}, "also must be a dict"),
        ({"also": {"callbacks": Keeps()}}, "another name"),
    ]
    for how, match in wrong:
        with pytest.raises(ws.SpecificationError, match=match):
            ws.Checkpoints(**{"folder": tmp_path, **how})
    trainer = ws.Trainer(small())
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    for callbacks in ([backup], keras.callbacks.CallbackList([backup], model=trainer.model)):
        with pytest.raises(ws.SpecificationError, match="leave BackupAndRestore out"):
            trainer.fit(X, Y, checkpoints=tmp_path, callbacks=callbacks, **HOW)
    with pytest.raises(ws.SpecificationError, match="where Keras does not know"):
        trainer.fit(X, Y, checkpoints=ws.Checkpoints(tmp_path, keep_best=("val_thing", 1)), **HOW)
    with pytest.raises(ws.SpecificationError, match="which only fit has"):
        list(trainer.steps((X, Y), checkpoints=ws.Checkpoints(tmp_path, keep_best=("loss", 1))))
    with pytest.raises(ws.SpecificationError, match="no keep_best"):
        _ = ws.Checkpoints(tmp_path).best
    with pytest.raises(ws.SpecificationError, match="only must be"):
        trainer.restore(tmp_path, only="slots")
    for path, error, match in [
        (tmp_path, ws.CheckpointError, f"or a folder with one. Received: none in {tmp_path}"),
        (tmp_path / "new", ws.CheckpointError, f"Received: no such folder: {tmp_path}/new"),
        ("", ws.SpecificationError, "path must be the path of a checkpoint.*Received: ''"),
        (ws.Checkpoints(tmp_path), ws.SpecificationError, r"Try: its folder: checkpoints\.folder"),
    ]:
        with pytest.raises(error, match=match):
            trainer.restore(path)


def test_two_calls_do_not_write_to_one_folder(tmp_path):
    trainer = ws.Trainer(small())
    for step in trainer.steps((X, Y), checkpoints=tmp_path):
        assert step.number == 1
        with pytest.raises(ws.CheckpointError, match="One run at a time"):
            ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)
        with pytest.raises(
            ws.CheckpointError, match=r"this very process is saving\. Try: save elsewhere"
        ):
            trainer.save(tmp_path)
        assert trainer.save(tmp_path / "by hand").name == "step-00000001"
        with pytest.raises(ws.SpecificationError, match="inside of another call"):
            trainer.fit(X, Y, checkpoints=tmp_path / "other", **HOW)
    ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path / "other", **HOW)


# ---- by hand ----


def test_by_hand(tmp_path):
    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    with pytest.raises(ws.SpecificationError, match="has begun"):
        whole.save(tmp_path / "by hand")
    told = []
    for step in whole.steps(ws.Batches((X, Y), SIZE), epochs=2):
        told.append((step.number, step.loss))
        if step.number == 4:
            path = whole.save(tmp_path / "by hand")
    assert path == Folder(tmp_path / "by hand").path(4)
    for named in (path, str(path.parent)):
        other.restore(named)
        rest = [
            (step.number, step.loss) for step in other.steps(ws.Batches((X, Y), SIZE), epochs=2)
        ]
        assert rest == told[4:]
        check_same_bits(leaves(whole.model), leaves(other.model))
    other.restore(path)
    with pytest.raises(
        ws.CheckpointError,
        match=r"first of its step in .*step 4, which exists\. Try: another folder",
    ):
        other.save(path.parent)


def test_a_run_restored_by_hand_saves_where_nothing_newer_is(tmp_path):
    whole = ws.Trainer(small())
    history = whole.fit(
        X, Y, checkpoints=ws.Checkpoints(tmp_path / "a", every_steps=4, keep=9), **HOW
    ).history
    other = ws.Trainer(small(1))
    other.restore(tmp_path / "a" / "step-00000008")
    with pytest.raises(ws.SpecificationError, match=f"update 8, and step {LAST}"):
        other.fit(X, Y, checkpoints=tmp_path / "a", **HOW)
    assert other.fit(X, Y, checkpoints=tmp_path / "b", **HOW).history == history
    check_same_bits(leaves(whole.model), leaves(other.model))
    assert steps_in(tmp_path / "b") == [LAST]


@pytest.mark.slow
def test_weights_alone(tmp_path):
    whole = ws.Trainer(made())
    other = ws.Trainer(made(1))
    whole.fit(X, Y, **HOW)
    whole.save(tmp_path)
    other.fit(X, Y, **HOW | {"epochs": 1})
    before = [np.asarray(v) for v in other.model.optimizer.variables]
    other.restore(tmp_path, only="weights")
    check_same_bits(
        [np.asarray(v) for v in whole.model.variables],
        [np.asarray(v) for v in other.model.variables],
    )
    check_same_bits(before, [np.asarray(v) for v in other.model.optimizer.variables])
    assert other.run.number == BATCHES
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ws.SpecificationError, match="must be built"):
        ws.Trainer(unbuilt).restore(tmp_path, only="weights")
    with pytest.raises(
        ws.SpecificationError, match="its model, built and compiled in the same way"
    ):
        ws.Trainer(small()).restore(tmp_path, only="weights")


def stacked(units, optimizer="sgd"):
    model = keras.Sequential(
        [keras.Input((3,)), *(keras.layers.Dense(units) for _ in range(2)), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


def test_another_model_is_refused_with_the_paths_and_shapes_of_its_variables(tmp_path):
    saved = stacked(4)
    other = stacked(5)
    trainer = ws.Trainer(saved)
    trainer.update((np.ones((2, 3), "float32"), np.ones((2, 1), "float32")))
    trainer.save(tmp_path)
    with pytest.raises(ws.SpecificationError) as caught:
        ws.Trainer(other).restore(tmp_path)
    for a, b in zip(saved.variables[:3], other.variables[:3], strict=True):
        one, two = (f"{v.path} of shape {tuple(v.shape)}" for v in (a, b))
        assert f"{two} (saved: {one})" in str(caught.value)
    assert "only=" not in str(caught.value)
    other = stacked(4, "adam")
    with pytest.raises(
        ws.SpecificationError,
        match=r'its optimizer is not this.*trainer.restore\(".*", only="weights"\)',
    ):
        ws.Trainer(other).fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0, checkpoints=tmp_path)
    ws.Trainer(other).restore(tmp_path, only="weights")
    check_same_bits(leaves(saved)[:6], leaves(other)[:6])


# ---- retention, and further state of a run ----


class Keeps:
    """Counts, and says how often."""

    def __init__(self, count=0):
        self.count = count

    def get_state(self):
        return {"count": self.count, "array": np.arange(self.count)}

    def set_state(self, state):
        assert len(state["array"]) == state["count"]
        self.count = state["count"]


def test_what_else_a_loop_has_goes_with_it(tmp_path):
    for seed, most, expected in ((0, 5, 5), (1, None, 2 * BATCHES)):
        trainer = ws.Trainer(small(seed))
        counts = Keeps()
        asked = ws.Checkpoints(tmp_path, every_steps=1, also={"counts": counts})
        for step in trainer.steps(ws.Batches((X, Y), SIZE), epochs=2, checkpoints=asked):
            counts.count += 1
            if step.number == most:
                break
        assert counts.count == expected


class Remembers(keras.callbacks.Callback):
    """Has a state as the test wants it, from the beginning of the training on."""

    def __init__(self, state):
        super().__init__()
        self.given = state

    def on_train_begin(self, logs=None):
        self.state = self.given

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@on("jax")
@on("jax")
def test_a_stream_whose_state_is_known_after_a_batch_alone_trains_and_resumes(tmp_path):
    class Late(Counted):
        def get_state(self):
            assert self.read, "no batch was drawn"
            return super().get_state()

    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    whole.fit(Late(False), verbose=0)
    asked = ws.Checkpoints(tmp_path, every_steps=4, keep=99)
    for step in other.steps(Late(False), checkpoints=asked):
        if step.number == 6:
            break
    again = ws.Trainer(small(2))
    list(again.steps(Late(False), checkpoints=asked))
    assert other.run.number == 6
    assert again.run.number == whole.run.number


def test_a_state_that_cannot_be_kept_is_refused_before_the_first_update(tmp_path):
    own = []
    own.append(own)
    wrong = [
        ({"seen": own}, r"at most 100 levels of dicts and lists.*Remembers.get_state\(\)/seen/0/0"),
        ({"seen": {3: 1}}, r"must be strings.*\[3\] in Remembers.get_state\(\)/seen"),
        ({"seen": {1, 2}}, r"numbers, strings and arrays.*set as Remembers.get_state\(\)/seen"),
        (
            {"seen": np.array(["word"])},
            r"Remembers.get_state\(\)/seen must be of numbers that a file can hold",
        ),
    ]
    model = small()
    before = leaves(model)
    for state, match in wrong:
        with pytest.raises(ws.WholestepError, match=match):
            ws.Trainer(model).fit(X, Y, callbacks=[Remembers(state)], checkpoints=tmp_path, **HOW)
        also = Remembers(state)
        also.on_train_begin()
        asked = ws.Checkpoints(tmp_path, also={"mine": also})
        match = match.replace("Remembers", "mine")
        with pytest.raises(ws.WholestepError, match=match):
            ws.Trainer(model).fit(X, Y, checkpoints=asked, **HOW)
        with pytest.raises(ws.WholestepError, match=match):
            next(ws.Trainer(model).steps((X, Y), checkpoints=asked))
    stream = Counted(as_bytes=False)
    stream.get_state = lambda: {3: stream.at}
    with pytest.raises(ws.SpecificationError, match="the stream's"):
        ws.Trainer(model).fit(stream, checkpoints=tmp_path, verbose=0)
    check_same_bits(before, leaves(model)[: len(before)])
    assert int(model.optimizer.iterations) == 0
    ws.Trainer(model).fit(X, Y, callbacks=[Remembers({"seen": 1})], checkpoints=tmp_path, **HOW)


def test_a_loop_that_has_ended_carries_out_nothing_more(tmp_path):
    """However its last update falls."""
    for seed, expected in ((0, 2 * BATCHES), (1, 0), (2, 0)):
        trainer = ws.Trainer(small(seed))
        counts = Keeps()
        asked = ws.Checkpoints(tmp_path, every_steps=5, also={"counts": counts})
        steps = trainer.steps(ws.Batches((X, Y), SIZE), epochs=2, checkpoints=asked)
        assert sum(1 for _ in steps) == expected
        assert trainer.run.number == 2 * BATCHES
    with pytest.raises(ws.SpecificationError, match="holds another run: it was trained by steps"):
        ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)


def test_what_is_given_up_is_said(tmp_path, capfd):
    trainer = ws.Trainer(small())
    trainer.fit(X, Y, checkpoints=tmp_path, **HOW)
    trainer.fit(X, Y, **HOW)
    trainer.fit(X, Y, checkpoints=tmp_path, **HOW | {"epochs": 4})
    assert trainer.run.number == LAST + BATCHES
    assert f"discarded: {LAST} later updates" in capfd.readouterr().err


def test_what_else_a_fit_has_goes_with_it(tmp_path):
    counts = Keeps(7)
    ws.Trainer(small()).fit(
        X, Y, checkpoints=ws.Checkpoints(tmp_path, also={"counts": counts}), **HOW
    )
    again = Keeps()
    ws.Trainer(small(1)).fit(
        X, Y, checkpoints=ws.Checkpoints(tmp_path, also={"counts": again}), **HOW
    )
    assert again.count == 7


def test_the_best_epochs_stay(tmp_path):
    numbers = (0.5, 0.9, 0.9, float("nan"), 0.7, 0.1, 0.2)
    asked = ws.Checkpoints(tmp_path, keep=1, keep_best=("good", 2, "max"))
    how = HOW | {"epochs": len(numbers)}
    ws.Trainer(small()).fit(X, Y, checkpoints=asked, callbacks=[Tells(*numbers)], **how)
    assert steps_in(tmp_path) == [2 * BATCHES, 3 * BATCHES, 7 * BATCHES]
    assert asked.best == Folder(tmp_path).path(2 * BATCHES)
    model = ws.Trainer(small(1))
    model.restore(asked.best, only="weights")
    plain = ws.Trainer(small()).fit(X, Y, **HOW | {"epochs": 2})
    check_same_bits(plain.model.get_weights(), model.model.get_weights())


def test_what_is_best_is_known_after_a_restart(tmp_path):
    asked = ws.Checkpoints(tmp_path, keep=1, keep_best=("good", 1, "min"))
    callbacks = [Tells(0.3, 0.1, 0.2, 0.4)]
    for seed, epochs in ((0, 2), (1, 4)):
        how = HOW | {"epochs": epochs}
        ws.Trainer(small(seed)).fit(X, Y, checkpoints=asked, callbacks=callbacks, **how)
    assert asked.best == Folder(tmp_path).path(2 * BATCHES)
    assert steps_in(tmp_path) == [2 * BATCHES, 4 * BATCHES]


class Terminates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_best_one_that_is_saved_again_at_its_end_stays_the_best(tmp_path):
    asked = ws.Checkpoints(tmp_path, keep=1, keep_best=("good", 1, "max"))
    with pytest.raises(SystemExit):
        ws.Trainer(small()).fit(
            X, Y, checkpoints=asked, callbacks=[Tells(0.5, 0.9, 0.2), Terminates()], **HOW
        )
    assert asked.best == Folder(tmp_path).path(BATCHES)


@on("jax")
@pytest.mark.slow
def test_the_way_to_the_best_is_keras_own(tmp_path):
    for name, mode in (
        ("loss", "min"),
        ("val_loss", "min"),
        ("accuracy", "max"),
        ("val_accuracy", "max"),
    ):
        asked = ws.Checkpoints(tmp_path / name, keep_best=(name, 1))
        ws.Trainer(small()).fit(
            X, Y, validation_data=(X[:5], Y[:5]), checkpoints=asked, **HOW | {"epochs": 1}
        )
        assert (
            json.loads((asked.best / "manifest.json").read_text().splitlines()[0])["watched"][
                "mode"
            ]
            == mode
        )


class Caught(keras.callbacks.Callback):
    """Records the warnings so far at the end of each epoch."""

    def __init__(self, caught):
        super().__init__()
        self.caught = caught
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(
            [str(one.message) for one in self.caught if "keep_best" in str(one.message)]
        )


@on("jax")
@pytest.mark.parametrize(
    ("name", "how", "num"),
    [
        ("val_loss", {}, 1),
        ("val_good", {"validation_data": (X, Y)}, 1),
        ("los", {"validation_data": (X, Y)}, 1),
        ("val_loss", {"validation_data": (X, Y), "validation_freq": 2}, 0),
        ("val_good", {"validation_data": (X, Y), "validation_freq": 2}, 0),
    ],
)
def test_a_metric_that_no_epoch_has_is_known_after_the_first(name, how, num, tmp_path):
    asked = ws.Checkpoints(tmp_path, keep_best=(name, 1, "min"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = Caught(caught)
        ws.Trainer(small()).fit(X, Y, checkpoints=asked, callbacks=[seen], **HOW, **how)
        seen.on_epoch_begin(3)
    assert [len(one) for one in seen.seen] == [
        0,
        num,
        num or int(name == "val_good"),
        num or int(name == "val_good"),
    ]
    assert all(f"keep_best needs {name} in the logs of an epoch" in one for one in seen.seen[-1])
    assert "Received: logs with accuracy, loss" in "".join(seen.seen[-1]) or not seen.seen[-1]


def test_an_average_of_weights_takes_their_place_after_the_last_checkpoint(tmp_path):
    whole = ws.Trainer(made())
    whole.fit(X, Y, checkpoints=tmp_path, **HOW)
    held = Folder(tmp_path).read(LAST)[1]
    average = whole.model.get_weights()[0]
    raw = held["params/0"]
    assert not np.array_equal(average, raw)


@pytest.mark.own
@pytest.mark.parametrize("metrics", [["mae"], None])
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("predicts_before", [True, False])
def test_a_restored_trainer_may_predict_first(metrics, is_built, predicts_before, tmp_path):
    """A prediction has no labels, so that neither the loss nor the metrics are built by it."""

    def trainer(is_built=True):
        layers = [keras.Input((X.shape[1],))] * is_built + [keras.layers.Dense(1)]
        made = keras.Sequential(layers)
        made.compile("adam", "mse", metrics=metrics)
        return ws.Trainer(made)

    saved = trainer()
    restored = trainer(is_built)
    saved.fit(X, X[:, 0], batch_size=5, verbose=0)
    saved.save(tmp_path)
    if predicts_before:
        restored.predict(X, verbose=0)
    restored.restore(tmp_path)
    np.testing.assert_array_equal(restored.predict(X, verbose=0), saved.predict(X, verbose=0))
    histories = [
        each.fit(X, X[:, 0], batch_size=5, verbose=0).history for each in (saved, restored)
    ]
    assert histories[0] == histories[1]
    np.testing.assert_array_equal(restored.predict(X, verbose=0), saved.predict(X, verbose=0))


@keras.saving.register_keras_serializable("tests")
class Marked(keras.Model):
    """A model without a `build`: Keras marks it as built, and its layer has no variables yet."""

    def __init__(self):
        super().__init__()
        self.outer = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.outer(x)


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called")
def test_a_model_that_is_only_marked_as_built_resumes(tmp_path):
    def run(folder, num):
        keras.utils.set_random_seed(0)
        model = Marked()
        model.build((None, X.shape[1]))
        model.compile("adam", "mse")
        steps = ws.Trainer(model).steps(
            ws.Batches((X, Y), batch_size=10, seed=1), epochs=2, checkpoints=folder
        )
        for _ in zip(range(num), steps, strict=False):
            pass
        return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    run(ws.Checkpoints(tmp_path / "a", every_steps=2), 5)
    resumed = run(ws.Checkpoints(tmp_path / "a", every_steps=2), 100)
    check_same_bits(run(ws.Checkpoints(tmp_path / "b"), 100), resumed)


@pytest.mark.parametrize("size", ["auto", 3])
def test_restore_says_what_has_changed_since(size, tmp_path, capsys):
    whole = ws.Trainer(made())
    whole.fit(X, Y, **HOW | {"epochs": 1})
    whole.save(tmp_path)
    capsys.readouterr()
    ws.Trainer(made(), microbatch_size=size).restore(tmp_path)
    told = capsys.readouterr().err
    assert told.count(
        "; changed environment: microbatch size 3 (auto before): from here not bit for bit"
    ) == (size == 3)
    assert told.count("changed environment") == (size == 3)


@pytest.mark.parametrize(
    ("saved", "here", "way"),
    [
        ("float32", "mixed_float16", "Adam without the policy mixed_float16"),
        ("mixed_float16", "float32", r"LossScaleOptimizer \(the policy mixed_float16\)"),
    ],
)
def test_a_loss_scale_that_the_policy_makes_is_refused_with_the_policy(saved, here, way, tmp_path):
    def trainer(policy):
        layer = keras.layers.Dense(1, dtype=policy)
        model = keras.Sequential([keras.Input((2,)), layer], name="of_one_layer")
        model.dtype_policy = policy
        model.compile("adam", "mse")
        return ws.Trainer(model)

    x = np.ones((4, 2), "float32")
    y = np.ones((4, 1), "float32")
    trainer(saved).fit(x, y, verbose=0, checkpoints=tmp_path)
    with pytest.raises(ws.SpecificationError, match=rf"its optimizer is not this one.*{way}"):
        trainer(here).fit(x, y, epochs=2, verbose=0, checkpoints=tmp_path)
