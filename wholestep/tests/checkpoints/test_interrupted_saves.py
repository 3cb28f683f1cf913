"""Interrupts of a run, or of its writer, lose no checkpoint and no error."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from runs import (
    BATCHES,
    HOW,
    LAST,
    SIZE,
    X,
    Y,
    check_same_bits,
    leaves,
    small,
    steps_in,
    taken_from,
)
from scripts import HERE, TESTS, lean
from shares import on, share

import wholestep as ws
from wholestep import safety as interrupts
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.writer import CopyBuffers, Writer


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


@pytest.fixture
def handler():
    """Return what handles SIGTERM, in whose place nothing must be left; notes whether it came."""
    came = []

    def note(*_):
        came.append("SIGTERM")

    before = signal.signal(signal.SIGTERM, note)
    yield came
    assert signal.getsignal(signal.SIGTERM) is note
    signal.signal(signal.SIGTERM, before)


class Raises(keras.callbacks.Callback):
    """Raises a signal, or an error, in one hook after a given update of the optimizer."""

    def __init__(self, hook, update, what=signal.SIGTERM):
        super().__init__()
        self.update = update
        self.what = what
        setattr(self, hook, self.look)

    def look(self, *_, **__):
        if int(self.model.optimizer.iterations) == self.update:
            self.update = -1
            if isinstance(self.what, int):
                signal.raise_signal(self.what)
            else:
                raise self.what


# ---- SIGTERM ----

MOMENTS = {  # hook: the update after which it comes, and the step of the checkpoint that is made
    "on_train_begin": (0, None),
    "on_epoch_begin": (BATCHES, BATCHES),
    "on_train_batch_begin": (3, 4),
    "on_train_batch_end": (3, 3),
    "on_test_batch_end": (BATCHES, BATCHES),
    "on_epoch_end": (2 * BATCHES, 2 * BATCHES),
    "on_train_end": (LAST, LAST),
}


@pytest.mark.parametrize("hook", share(MOMENTS))
def test_a_terminated_run_saves_at_the_next_boundary_and_goes_on(hook, tmp_path, handler):
    update, step = MOMENTS[hook]
    how = HOW | {"validation_data": (X[:9], Y[:9])}
    whole = ws.Trainer(small())
    history = whole.fit(X, Y, **how).history
    with pytest.raises(SystemExit) as caught:
        ws.Trainer(small()).fit(X, Y, callbacks=[Raises(hook, update)], checkpoints=tmp_path, **how)
    assert caught.value.code == 143
    assert steps_in(tmp_path) == ([] if step is None else [step])
    other = ws.Trainer(small(seed=0 if step is None else 1))
    assert other.fit(X, Y, checkpoints=tmp_path, **how).history == history
    check_same_bits(leaves(whole.model), leaves(other.model))
    assert not handler


class Terminates(keras.utils.PyDataset):
    """Raises the signal while the first batch of the second epoch is loaded."""

    def __init__(self, come=None):
        super().__init__()
        self.come = come
        self.epoch = 0

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        if self.come is not None and (self.epoch, i) == (1, 0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the main thread notes it before there is a batch
        return X[i * SIZE : (i + 1) * SIZE], Y[i * SIZE : (i + 1) * SIZE]

    def on_epoch_end(self):
        self.epoch += 1


def test_a_run_that_is_terminated_between_an_epochs_beginning_and_its_first_batch_begins_it_once(
    tmp_path, handler
):
    def train(data, checkpoints=None, seed=0):
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        trainer = ws.Trainer(small(seed))
        trainer.fit(
            data, epochs=3, verbose=0, shuffle=False, callbacks=[halves], checkpoints=checkpoints
        )
        return trainer.model

    whole = train(Terminates())
    with pytest.raises(SystemExit):
        train(Terminates("now"), tmp_path)
    assert steps_in(tmp_path) == [BATCHES]
    check_same_bits(leaves(whole), leaves(train(Terminates(), tmp_path, seed=1)))


def test_a_run_that_was_terminated_at_its_end_has_ended_after_the_next(tmp_path, handler):
    seen = []
    how = HOW | {"validation_data": (X[:9], Y[:9]), "epochs": 1}
    with pytest.raises(SystemExit):
        ws.Trainer(small()).fit(
            X, Y, callbacks=[Raises("on_test_begin", BATCHES)], checkpoints=tmp_path, **how
        )
    for _ in range(3):
        counting = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_, **__: seen.append("ended")
        )
        counting.on_test_begin = lambda logs=None: seen.append("validated")
        ws.Trainer(small(1)).fit(X, Y, callbacks=[counting], checkpoints=tmp_path, **how)
    assert seen == ["validated", "ended"]


def loop(asked, body=lambda number: None, trainer=None):
    """Carry out an epoch, and do something after every step."""
    for step in (trainer or ws.Trainer(small())).steps(ws.Batches((X, Y), SIZE), checkpoints=asked):
        body(step.number)


def test_an_epoch_that_was_terminated_in_its_validation_is_judged_after_it(tmp_path, handler):
    how = HOW | {"validation_data": (X[:9], Y[:9]), "epochs": 1}
    asked = ws.Checkpoints(tmp_path, keep_best=("val_loss", 1))
    with pytest.raises(SystemExit):
        ws.Trainer(small()).fit(
            X, Y, callbacks=[Raises("on_test_begin", BATCHES)], checkpoints=asked, **how
        )
    with pytest.raises(ws.CheckpointError, match="The best checkpoint must have been saved"):
        _ = asked.best
    ws.Trainer(small(1)).fit(X, Y, checkpoints=asked, **how)
    assert asked.best == Folder(tmp_path).path(BATCHES)
    assert steps_in(tmp_path) == [BATCHES]


def test_a_terminated_loop_saves_before_its_next_update(tmp_path, handler):
    with pytest.raises(SystemExit):
        loop(tmp_path, lambda number: signal.raise_signal(signal.SIGTERM) if number == 3 else None)
    assert steps_in(tmp_path) == [3]
    for _ in ws.Trainer(small()).steps(ws.Batches((X, Y), SIZE), checkpoints=tmp_path):
        signal.raise_signal(signal.SIGTERM)
        break
    assert handler == ["SIGTERM"]  # nobody would see an error of a loop that has been left


def test_what_is_terminated_in_the_middle_of_a_save_is_written(tmp_path, handler, monkeypatch):
    real = os.fsync
    seen = []

    def fsync(file):
        if not seen:
            seen.append(threading.current_thread().name)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    asked = ws.Checkpoints(tmp_path, every_steps=2, keep=9)
    with pytest.raises(SystemExit):
        loop(asked, lambda number: wait_for_the_writer())
    assert seen == ["wholestep-writer"]
    assert 2 in steps_in(tmp_path)
    assert not handler


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_second_signal_is_not_waited_for_unless_it_is_the_first_told_twice(
    seconds, tmp_path, handler, monkeypatch
):
    monkeypatch.setattr(interrupts, "_ONE", seconds)
    callbacks = [Raises("on_train_batch_begin", 2), Raises("on_train_batch_begin", 2)]
    with pytest.raises(SystemExit):
        ws.Trainer(small()).fit(X, Y, callbacks=callbacks, checkpoints=tmp_path, **HOW)
    assert handler == ([] if seconds else ["SIGTERM"])


def test_other_threads_and_other_calls_leave_the_signal_alone(tmp_path, handler):
    def train():
        ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    ws.Trainer(small()).fit(X, Y, callbacks=[Raises("on_train_batch_end", 3)], **HOW)
    assert handler == ["SIGTERM"]
    assert steps_in(tmp_path) == [LAST]


def test_an_interrupt_saves_nothing_but_leaves_what_was_saved(tmp_path, handler):
    asked = ws.Checkpoints(tmp_path, every_steps=4, keep=9)
    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(small()).fit(
            X,
            Y,
            callbacks=[Raises("on_train_batch_end", 6, signal.SIGINT)],
            checkpoints=asked,
            **HOW,
        )
    assert steps_in(tmp_path) == [4]


# ---- the writer ----


def failing(monkeypatch, call="fsync", after=0, number=errno.ENOSPC):
    """Let a call of the operating system fail from its so-many-th time on; return the times."""
    real = getattr(os, call)
    seen = []

    def fails(*arguments, **options):
        seen.append(arguments)
        if len(seen) > after:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, fails)
    return seen


FAULTS = [
    (call, number) for call in ("write", "fsync", "rename") for number in (errno.ENOSPC, errno.EIO)
]


@pytest.mark.parametrize(("call", "number"), share(FAULTS))
@pytest.mark.slow
def test_an_error_of_the_writer_is_raised_at_the_next_boundary(call, number, tmp_path, monkeypatch):
    trainer = ws.Trainer(small())
    first = ws.Checkpoints(tmp_path, every_steps=2, keep=9)
    for step in trainer.steps(ws.Batches((X, Y), SIZE), checkpoints=first):
        if step.number == 3:
            break
    asked = ws.Checkpoints(tmp_path, every_steps=4, keep=9)
    failing(monkeypatch, call, 0, number)
    seen = []

    def body(number):
        seen.append(number)
        wait_for_the_writer()

    with pytest.raises(ws.CheckpointError, match=rf"step 4 .*{os.strerror(number)}"):
        loop(asked, body, trainer)
    assert seen == [3, 4, 5]
    monkeypatch.undo()
    assert steps_in(tmp_path) == [2]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    whole = ws.Trainer(small())
    rest = [step.loss for step in whole.steps(ws.Batches((X, Y), SIZE))]
    assert [
        step.loss for step in trainer.steps(ws.Batches((X, Y), SIZE), checkpoints=first)
    ] == rest[2:]


def wait_for_the_writer():
    for thread in threading.enumerate():
        if thread.name == "wholestep-writer":
            thread.join()


def test_an_error_of_the_last_save_is_raised_before_fit_returns(tmp_path, monkeypatch):
    failing(monkeypatch)
    with pytest.raises(ws.CheckpointError, match=f"step {LAST} "):
        ws.Trainer(small()).fit(X, Y, checkpoints=tmp_path, **HOW)


def test_neither_of_two_errors_is_lost(tmp_path, monkeypatch):
    failing(monkeypatch)
    asked = ws.Checkpoints(tmp_path, every_steps=2)
    steps = ws.Trainer(small()).steps(ws.Batches((X, Y), SIZE), checkpoints=asked)
    for _ in range(3):
        next(steps)
    with pytest.raises(ws.CheckpointError, match="step 2 "):
        steps.close()
    with pytest.raises(ZeroDivisionError) as caught:
        ws.Trainer(small()).fit(
            X,
            Y,
            callbacks=[Raises("on_train_batch_end", 3, ZeroDivisionError())],
            checkpoints=asked,
            **HOW,
        )
    assert "CheckpointError: The checkpoint of step 2" in caught.value.__notes__[0]


def test_a_terminated_run_that_cannot_save_says_why(tmp_path, monkeypatch, handler):
    failing(monkeypatch)
    with pytest.raises(ws.CheckpointError, match="step 3 "):
        ws.Trainer(small()).fit(
            X, Y, callbacks=[Raises("on_train_batch_end", 3)], checkpoints=tmp_path, **HOW
        )
    assert not handler


def test_what_is_saved_is_the_state_of_its_step_whatever_changes_while_it_is_written(
    tmp_path, monkeypatch
):
    goes_on = threading.Event()
    real = Folder.fill
    kept = {}

    def fill(*arguments, **options):
        assert goes_on.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(Folder, "fill", fill)
    trainer = ws.Trainer(small())
    asked = ws.Checkpoints(tmp_path, every_steps=4, keep=9)
    for step in trainer.steps(ws.Batches((X, Y), SIZE), checkpoints=asked):
        kept[step.number] = trainer.model.get_weights()
        if step.number == 6:
            trainer.model.set_weights([np.zeros_like(value) for value in kept[6]])
            goes_on.set()
    assert steps_in(tmp_path) == [4, 6]
    check_same_bits([Folder(tmp_path).read(4)[1][f"params/{i}"] for i in range(2)], kept[4])


def test_the_next_save_waits_for_the_one_before_and_says_so_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("wholestep.checkpoints.writer._SHORT", 0.0)
    writer = Writer()
    goes_on = threading.Event()
    written = []

    def work():
        goes_on.wait(30)
        written.append(1)

    for _ in range(2):
        goes_on.clear()
        writer.start(work)
        threading.Timer(0.05, goes_on.set).start()
        writer.wait(tells=True)
    assert written == [1, 1]
    assert capfd.readouterr().err.count("training waits") == 1


def test_the_room_is_kept():
    room = CopyBuffers()
    first = room.copy("a", np.ones((3, 2)))
    assert room.copy("a", np.full((3, 2), 2.0)) is first
    assert first.tolist() == [[2.0, 2.0]] * 3
    assert room.copy("b", np.ones((3, 2))) is not first
    assert room.copy("a", np.ones(3)) is not first


# ---- whole processes ----

LEAVES = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
import conftest
import random, keras, numpy
import wholestep as ws
from runs import SIZE, X, Y, small
keras.utils.set_random_seed = lambda seed: (random.seed(seed), numpy.random.seed(seed))
import os, time
real = os.fsync
os.fsync = lambda file: (time.sleep(0.2), real(file))  # a slow disk
steps = ws.Trainer(small()).steps(ws.Batches((X, Y), SIZE), checkpoints=ws.Checkpoints({to!r}, every_steps=2))
for _ in range(3):
    next(steps)
sys.exit(5)
"""


@on("jax")
@pytest.mark.slow
def test_a_script_that_ends_without_waiting_loses_no_checkpoint(tmp_path):
    source = LEAVES.format(tests=str(TESTS), to=str(tmp_path))
    assert (
        subprocess.run(
            [sys.executable, "-c", source], env=lean(HERE, TESTS), timeout=120
        ).returncode
        == 5
    )
    assert steps_in(tmp_path) == [2]
    Folder(tmp_path).verify(2)
    assert Path(tmp_path, "lock").exists()


# ---- updates that are not applied ----


def test_a_run_that_fails_has_saved_what_was_before_and_goes_on_with_mended_data(tmp_path):
    bad = X.copy()
    bad[6] = np.nan
    how = HOW | {"shuffle": False}
    asked = ws.Checkpoints(tmp_path, every_steps=1, keep=9)
    with pytest.raises(ws.NonFiniteError, match="Update 2"):
        ws.Trainer(small()).fit(bad, Y, checkpoints=asked, **how)
    assert steps_in(tmp_path) == [1]
    with pytest.raises(ws.SpecificationError, match=r"on corrected data, trainer\.restore\("):
        ws.Trainer(small(1)).fit(X, Y, checkpoints=asked, **how)
    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    history = whole.fit(X, Y, **how).history
    other.restore(tmp_path)
    assert other.fit(X, Y, checkpoints=tmp_path / "mended", **how).history == history
    check_same_bits(leaves(whole.model), leaves(other.model))


LEFT_OUT = {  # what leaves updates out: a loss scale's first value, and whether rows are bad
    "skip": (None, True),
    "skip under a loss scale": (1.0, True),
    "a loss scale, which counts back": (2.0**127, False),
}


def test_an_update_that_fails_before_a_save_leaves_the_data_at_its_batch(tmp_path):
    bad = X.copy()
    bad[6] = np.nan
    data = ws.Batches((bad, Y), SIZE, shuffle=False)
    with pytest.raises(ws.NonFiniteError, match="Update 2"):
        ws.Trainer(small()).fit(
            data, verbose=0, checkpoints=ws.Checkpoints(tmp_path, every_steps=2)
        )
    assert data.position == (0, 1)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("name", share(LEFT_OUT))
@pytest.mark.slow
def test_updates_that_are_left_out_are_counted_after_a_restart(name, tmp_path):
    scale, is_bad = LEFT_OUT[name]
    x = X.copy()
    x[[1, 9]] = np.nan if is_bad else x[[1, 9]]

    def trainer(seed=0):
        model = small(seed)
        if scale is not None:
            inner = keras.optimizers.SGD(0.1)
            model.compile(
                keras.optimizers.LossScaleOptimizer(inner, scale, dynamic_growth_steps=3), "mse"
            )
        return ws.Trainer(model, on_nonfinite="skip" if is_bad else "raise")

    whole = trainer()
    asked = ws.Checkpoints(tmp_path / "whole", every_steps=1, keep=100)
    history = whole.fit(x, Y, checkpoints=asked, **HOW).history
    steps = steps_in(tmp_path / "whole")
    other = trainer(1)
    assert len(steps) >= LAST
    numbers = [Folder(tmp_path / "whole").manifest(step).facts["number"] for step in steps]
    assert (numbers == steps) is is_bad
    for step in (steps[2], steps[BATCHES], steps[-1]):
        own = taken_from(tmp_path / "whole", step, tmp_path / str(step))
        np.testing.assert_equal(other.fit(x, Y, checkpoints=own, **HOW).history, history)
        check_same_bits(leaves(whole.model), leaves(other.model))
        assert other.num_skipped == whole.num_skipped
