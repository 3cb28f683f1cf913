"""A restore assigns values once, and a restore or a call that fails leaves a run that trains on."""

import itertools
import sys

import keras
import numpy as np
import pytest
from runs import BATCHES, SIZE, Takes, X, Y, carried, check_same_bits, leaves, small

import wholestep as ws

HOW = {"batch_size": SIZE, "epochs": 3, "verbose": 0}


def unbuilt(seed=0):
    """Return a model that has no variables before its first batch."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy")
    return model


def rate_of(trainer):
    return float(np.asarray(trainer.model.optimizer.learning_rate))


def on(hook, call):
    """Return a callback with one hook."""
    callback = keras.callbacks.Callback()
    setattr(callback, hook, lambda *_, **__: call())
    return callback


@pytest.fixture(scope="module")
def taken():
    """Snapshots in the middle of an epoch and at its beginning, of each model."""
    found = {}
    for make in (small, unbuilt):
        trainer = ws.Trainer(make())
        takes = Takes(trainer.run, 2, epochs=(0,))
        trainer.fit(X, Y, callbacks=[takes], **HOW | {"epochs": 1})
        found[make] = [snapshot for _, snapshot in takes.taken]
    return found


@pytest.mark.parametrize("hook", ["between", "on_train_begin", "on_epoch_begin"])
@pytest.mark.slow
def test_what_is_assigned_after_a_restore_stands(hook, taken):
    for make, snapshots in taken.items():
        for is_new, snapshot in enumerate(snapshots):
            other = ws.Trainer(make(1))
            other.run.restore(snapshot)
            rate = other.model.optimizer.learning_rate
            seen = []
            callbacks = [
                on(
                    "on_train_batch_begin",
                    lambda seen=seen, other=other: seen.append(rate_of(other)),
                )
            ]
            if hook == "between":
                rate.assign(0.25)
            else:
                callbacks.append(on(hook, lambda rate=rate: rate.assign(0.25)))
            other.fit(X, Y, callbacks=callbacks, **HOW | {"epochs": 2})
            # which acted already when the half of the epoch was trained
            stands = is_new or hook != "on_epoch_begin"
            assert seen[0] == np.float32(0.25 if stands else 0.1), (make, is_new)


def test_weights_that_are_set_after_a_restore_stand(taken):
    other = ws.Trainer(small(1))
    other.run.restore(taken[small][0])
    other.model.set_weights([np.zeros_like(w) for w in other.model.get_weights()])
    seen = []
    callback = on("on_train_batch_begin", lambda: seen.append(other.model.get_weights()[0]))
    other.fit(X, Y, callbacks=[callback], **HOW | {"epochs": 1})
    assert not seen[0].any()
    assert seen[-1].any()


def test_a_schedule_of_epochs_acts_once_on_an_epoch_that_was_left(taken):
    def callbacks(run, *batches):
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        return [halve, on("on_epoch_begin", lambda: None), Takes(run, *batches)]

    whole = ws.Trainer(small())
    other = ws.Trainer(small(1))
    watching = callbacks(whole.run, 2, BATCHES + 1)
    history = whole.fit(X, Y, callbacks=watching, **HOW).history
    for _, snapshot in watching[-1].taken:
        other.run.restore(carried(snapshot))
        assert other.fit(X, Y, callbacks=callbacks(other.run), **HOW).history == history
        check_same_bits(leaves(whole.model), leaves(other.model))
    assert rate_of(other) == np.float32(0.1 / 8)


# ---- a restore, or the beginning and end of a call, that fails ----


def fails(call, n, inside=""):
    """Raise at the n-th call of a function of the library (called by the function `inside`);
    whether it was reached.
    """
    num = 0

    def enter(frame, event, _):
        nonlocal num
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        # a generator may be closed at any time
        if "wholestep" not in file or "tests" in file or name.startswith("<"):
            return
        if file.endswith("safety.py"):  # it restores the signals' handlers
            return
        callers = {inside} if not inside else set()
        while inside and (frame := frame.f_back) is not None:
            callers.add(frame.f_code.co_name)
        num += inside in callers
        if num == n:
            num += 1
            raise MemoryError("as on a full machine")

    sys.settrace(enter)
    try:
        call()
    except MemoryError:
        return True
    finally:
        sys.settrace(None)
    return False


def trained_from(trainer, snapshot, how):
    """Return all leaves after a fit that resumes from a snapshot."""
    trainer.run.restore(snapshot)
    trainer.fit(X, Y, **how)
    return leaves(trainer.model)


@pytest.mark.slow
def test_a_restore_that_fails_is_no_restore_or_is_finished_by_the_next_call(taken):
    trainer = ws.Trainer(small(1))
    how = HOW | {"epochs": 1}
    trainer.fit(X, Y, **how)
    home = trainer.run.snapshot()
    untouched = trained_from(trainer, home, how)
    restored = trained_from(trainer, taken[small][0], how)
    outcomes = set()
    for n in itertools.count(1, 3):
        trainer.run.restore(home)
        if not fails(lambda: trainer.run.restore(taken[small][0]), n):
            break
        is_pending = trainer.run.restored is taken[small][0]
        outcomes.add(is_pending)
        trainer.fit(X, Y, **how)
        check_same_bits(leaves(trainer.model), restored if is_pending else untouched)
    assert outcomes == {True, False}


@pytest.mark.slow
def test_a_call_that_fails_as_it_begins_or_ends_leaves_the_run_between_calls(taken):
    trainer = ws.Trainer(small(1))
    how = HOW | {"epochs": 1}
    trainer.run.restore(taken[small][0])
    trainer.fit(X, Y, **how)
    restored = leaves(trainer.model)
    fields = []
    for n in itertools.count(1):
        trainer.run.restore(taken[small][0])
        before = dict(vars(trainer.run))
        if not fails(lambda: trainer.fit(X, Y, **how), n, inside="during_call"):
            break
        assert not trainer.run.is_in_call
        if trainer.run.restored is not None:
            fields.append(
                [name for name, value in vars(trainer.run).items() if value != before[name]]
            )
            trainer.fit(X, Y, **how)
            check_same_bits(leaves(trainer.model), restored)
        trainer.fit(X, Y, **how)
    assert len(fields) > 5
    assert not any(fields)


def test_a_restored_run_is_planned_by_its_own_findings():
    trainer = ws.Trainer(small(), microbatch_size=2)
    trainer.fit(X, Y, **HOW)
    snapshot = trainer.run.snapshot()
    snapshot.facts["findings"]["coupling"]["couples"] = True
    trainer.run.restore(snapshot)
    with pytest.warns(
        UserWarning, match="microbatch_size=2 .* not give the weights of whole batches"
    ):
        trainer.fit(X, Y, **HOW)
