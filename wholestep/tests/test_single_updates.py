"""A single update: few programs for any number of rows, no thread, and only read values are
fetched.
"""

import threading
from functools import partial

import keras
import numpy as np
import pytest
from small import X, Y, count_calls, model, same

import wholestep as ws
from wholestep.data import SingleBatches
from wholestep.reports.update_ledger import UpdateLedger


def sizes(trainer):
    return sorted(program.cut.rows for program in trainer.executor.planner.programs.values())


@pytest.mark.slow
def test_batches_of_ever_other_sizes_are_few_programs():
    made = model(optimizer=keras.optimizers.SGD(0.1))
    plain = model(optimizer=keras.optimizers.SGD(0.1))
    trainer = ws.Trainer(made)
    for count in (10, 9, 12, 15, 2, 1):
        loss = trainer.update((X[:count], Y[:count]))["loss"]
        assert loss == pytest.approx(plain.train_on_batch(X[:count], Y[:count])[0], rel=1e-5)
    assert sizes(trainer) == [2, 10, 16]
    for a, b in zip(made.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_the_sizes_in_a_checkpoint_are_named_by_shapes_and_dtypes():
    trainer = ws.Trainer(model())
    for count in (10, 3):
        trainer.update((X[:count], Y[:count]))
    assert trainer.run.findings.sizes == {"[((6,), 'float32'), ((), 'int64')]": [10, 4]}


def test_a_batch_is_made_before_the_last_update_is_waited_for(monkeypatch):
    trainer = ws.Trainer(model())
    trainer.update((X, Y))
    made = count_calls(monkeypatch, SingleBatches, "block")
    waits = count_calls(monkeypatch, type(trainer.executor.engine.devices), "fetch")
    seen = []
    settle = UpdateLedger.raise_pending_failure
    monkeypatch.setattr(
        UpdateLedger,
        "raise_pending_failure",
        lambda *given: seen.append((len(made), len(waits))) or settle(*given),
    )
    trainer.update((X, Y))
    assert seen == [(1, 0)]
    assert len(waits) == 1


def test_rows_that_see_each_other_keep_their_own_shape():
    trainer = ws.Trainer(model(keras.layers.BatchNormalization()))
    for count in (10, 9):
        trainer.update((X[:count], Y[:count]))
    assert sizes(trainer) == [9, 10]


def test_nothing_is_fetched_that_nobody_reads(monkeypatch):
    trainer = ws.Trainer(model())
    trainer.update((X, Y))["loss"]
    waits = count_calls(monkeypatch, type(trainer.executor.engine.devices), "fetch")
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started")
    )
    logs = trainer.update((X, Y))
    assert len(waits) == 0
    assert logs["loss"] == dict(logs)["loss"]
    assert repr(logs) == repr(dict(logs))
    assert len(waits) == 1


def test_an_update_that_was_not_applied_is_told_where_it_is_read_or_by_the_next_call():
    bad = np.full_like(X, np.nan)
    made = model()
    trainer = ws.Trainer(made)
    before = made.get_weights()
    logs = trainer.update((bad, Y))
    for _ in range(2):  # and again
        with pytest.raises(ws.NonFiniteError, match="Update 1 "):
            logs["loss"]
    for ask in (
        lambda: trainer.update((X, Y)),
        lambda: trainer.evaluate(X, Y, verbose=0),
        lambda: trainer.num_skipped,
    ):
        trainer.update((bad, Y))
        with pytest.raises(ws.NonFiniteError, match="Update 1 "):
            ask()
    for a, b in zip(before, made.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert trainer.update((X, Y))["loss"] > 0
    assert int(np.asarray(made.optimizer.iterations)) == 1


def told(made):
    return {name: float(value) for name, value in made.get_metrics_result().items()}


def test_the_models_own_metrics_say_what_the_last_update_does():
    made = model(optimizer="sgd")
    trainer = ws.Trainer(made)
    logs = dict(trainer.update((X, Y)))
    assert told(made) == pytest.approx(logs)
    first = trainer.update((X, Y))
    second = trainer.update((X, Y))
    assert told(made) == pytest.approx(dict(second))
    first["loss"]
    assert told(made) == pytest.approx(dict(second))


def test_steps_leave_the_numbers_of_the_epoch_in_the_models_metrics():
    made = model(optimizer="sgd")
    trainer = ws.Trainer(made)
    steps = list(trainer.steps(ws.Batches((X, Y), 5), epochs=2))
    at_the_end = told(made)
    trainer.evaluate(X[:5], Y[:5], verbose=0)
    evaluated = told(made)
    assert steps[-1].logs == pytest.approx(at_the_end)
    assert told(made) == evaluated != pytest.approx(at_the_end)
    for step in trainer.steps(ws.Batches((X, Y), 5)):
        logs = step.logs
        assert told(made) == pytest.approx(logs)


def test_skipped_updates_are_counted():
    trainer = ws.Trainer(model(), on_nonfinite="skip")
    trainer.update((np.full_like(X, np.nan), Y))
    assert trainer.num_skipped == 1


def train_elsewhere(made, *_, num=1, **__):
    for _ in range(num):
        made.train_on_batch(X, Y)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_updates_of_other_code_are_counted_in_a_snapshot(how, tmp_path):
    made = model()
    trainer = ws.Trainer(made, on_nonfinite=how)
    trainer.update((X, Y))
    train_elsewhere(made, num=2)
    facts = trainer.run.snapshot().facts
    assert (facts["number"], facts["num_skipped"]) == (3, 0)
    train_elsewhere(made)
    assert trainer.save(tmp_path).name.endswith("4")
    other = ws.Trainer(model())
    other.update((X, Y))
    train_elsewhere(other.model, num=3)
    with pytest.raises(ws.CheckpointError, match="step 4, which exists"):
        other.save(tmp_path)
    trainer.update((np.full_like(X, np.nan), Y))
    train_elsewhere(made)
    if how == "skip":
        facts = trainer.run.snapshot().facts
        assert (facts["number"], facts["num_skipped"]) == (6, 1)
    else:
        with pytest.raises(ws.NonFiniteError, match="Update 5"):
            trainer.run.snapshot()


@pytest.mark.parametrize("call", ["fit", "steps"])
def test_a_run_whose_callback_trains_elsewhere_is_saved(call, tmp_path):
    made = model()
    trainer = ws.Trainer(made)
    asked = ws.Checkpoints(tmp_path, every_steps=1)
    if call == "fit":
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=partial(train_elsewhere, made))
        trainer.fit(X, Y, batch_size=5, callbacks=[callback], checkpoints=asked, verbose=0)
    else:
        for _ in trainer.steps(ws.Batches((X, Y), 5), checkpoints=asked):
            train_elsewhere(made)
    assert trainer.run.number == int(np.asarray(made.optimizer.iterations)) == 8
    other = ws.Trainer(model(seed=4))
    other.restore(tmp_path)
    assert (other.run.number, same(made, other.model)) == (8, True)


def test_a_model_that_only_other_code_has_trained_has_no_run_to_save(tmp_path):
    made = model()
    train_elsewhere(made)
    trainer = ws.Trainer(made)
    trainer.evaluate(X, Y, verbose=0)
    with pytest.raises(ws.SpecificationError, match="needs a run that has begun"):
        trainer.save(tmp_path)
