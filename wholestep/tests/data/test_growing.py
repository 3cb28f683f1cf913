"""Batches that grow: each epoch uses each row once, and every way of training computes the same."""

from functools import partial

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import GROWING, GROWING_LAST, check_same_bits, leaves, made, taken_from
from runs import X as INPUTS
from runs import Y as LABELS
from small import X, Y, model, same

import wholestep as ws

SIZES = [(0, 3), (8, 5), (14, 20)]
SCHEDULES = {
    "list": SIZES,
    "update": lambda update: 3 if update < 8 else 5 if update < 14 else 20,
    "epoch": partial(lambda epoch, by: by * (epoch + 1), by=4),
}


class Rows:
    """Rows that are loaded one by one."""

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return X[row], Y[row]


def sizes_of(data, epochs):
    return [
        [len(data.rows(epoch, step)) for step in range(data.num_batches_in(epoch))]
        for epoch in range(epochs)
    ]


# ---- the rows of an update ----


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("list", [[3, 3, 3, 3, 3, 3, 2], [3, 5, 5, 5, 2], [5, 5, 10], [20]]),
        ("update", [[3, 3, 3, 3, 3, 3, 2], [3, 5, 5, 5, 2], [5, 5, 10], [20]]),
        ("epoch", [[4] * 5, [8, 8, 4], [12, 8], [16, 4], [20], [20]]),
    ],
)
def test_sizes_are_those_of_the_schedule(schedule, expected):
    data = ws.Batches((X, Y), SCHEDULES[schedule])
    assert sizes_of(data, len(expected)) == expected
    seen = [[len(batch[0]) for batch in data] for _ in expected]
    assert seen == expected


CHANGES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=4)


@settings(deadline=None)
@given(st.integers(1, 60), CHANGES, st.booleans())
def test_every_epoch_uses_every_row_once(num_rows, changes, as_function):
    sizes = dict([(0, 5), *changes])
    starts = sorted(sizes)
    schedule = [(start, sizes[start]) for start in starts]
    if as_function:
        schedule = lambda update: sizes[max(at for at in starts if at <= update)]  # noqa: E731
    data = ws.Batches(np.arange(num_rows), schedule, seed=3)
    update = 0
    for epoch in range(4):
        num = data.num_batches_in(epoch)
        rows = [data.rows(epoch, step) for step in range(num)]
        assert sorted(np.concatenate(rows)) == list(range(num_rows))
        planned = [sizes[max(at for at in starts if at <= update + i)] for i in range(num)]
        assert [len(of) for of in rows][:-1] == planned[:-1]
        assert len(rows[-1]) <= planned[-1]
        update += num


def test_a_position_in_any_epoch_can_be_sought():
    data = ws.Batches((X, Y), SIZES)
    data.seek(1, 5)
    assert data.position == (2, 0)
    assert len(data) == 3
    assert len(next(data)[0]) == 5
    with pytest.raises(ws.BatchError, match="step 4 where an epoch has 3 batches"):
        data.seek(2, 4)


# ---- training ----


def by_fit(trainer, sizes):
    trainer.fit(X, Y, batch_size=sizes, epochs=4, verbose=0)


def by_loaded_rows(trainer, sizes):
    trainer.fit(Rows(), batch_size=sizes, epochs=4, verbose=0)


def by_epochs_of_four_steps(trainer, sizes):
    num = sum(map(len, sizes_of(ws.Batches((X, Y), sizes), 4)))
    assert num % 4 == 0
    trainer.fit(X, Y, batch_size=sizes, steps_per_epoch=4, epochs=num // 4, verbose=0)


def by_steps(trainer, sizes):
    for _ in trainer.steps(ws.Batches((X, Y), sizes), epochs=4):
        pass


def by_updates(trainer, sizes):
    """Train by single updates on the rows that the schedule names."""
    data = ws.Batches((X, Y), sizes)
    for epoch in range(4):
        for step in range(data.num_batches_in(epoch)):
            rows = data.rows(epoch, step)
            trainer.update((X[rows], Y[rows]))


def trained(run, sizes):
    classifier = model(optimizer="sgd")
    run(ws.Trainer(classifier), sizes)
    return classifier


@pytest.mark.own
@pytest.mark.parametrize("schedule", ["list", "update"])
def test_every_way_of_training_computes_the_same(schedule):
    sizes = SCHEDULES[schedule]
    whole = trained(by_fit, sizes)
    for run in (by_loaded_rows, by_epochs_of_four_steps, by_steps):
        assert same(trained(run, sizes), whole), run
    # its short batches are not filled up, so it rounds in another way
    alone = trained(by_updates, sizes)
    for one, other in zip(whole.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-7)


def test_microbatches_of_one_size_carry_batches_of_all_sizes():
    whole = trained(by_fit, SIZES)
    cut = model(optimizer="sgd")
    trainer = ws.Trainer(cut, microbatch_size=2)
    by_fit(trainer, SIZES)
    for one, other in zip(whole.get_weights(), cut.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-7)
    assert "20 rows in 10 microbatches" in str(trainer.explain())


def test_callbacks_know_the_number_of_batches_of_each_epoch():
    told = []

    class Tells(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            told.append(self.params["steps"])

    ws.Trainer(model()).fit(
        X, Y, batch_size=SIZES, epochs=4, verbose=0, callbacks=[Tells()], validation_data=(X, Y)
    )
    assert told == [7, 5, 3, 1]


# ---- an interrupted run ----


@pytest.mark.parametrize("kind", ["fit", "steps"])
def test_a_run_goes_on_from_each_of_its_updates(kind, tmp_path):
    def saved(folder, **how):
        run = made()
        trainer = ws.Trainer(run)
        saves = ws.Checkpoints(folder, **how)
        if kind == "fit":
            trainer.fit(INPUTS, LABELS, batch_size=GROWING, epochs=3, verbose=0, checkpoints=saves)
        else:
            data = ws.Batches((INPUTS, LABELS), GROWING)
            for _ in trainer.steps(data, epochs=3, checkpoints=saves):
                pass
        return leaves(run)

    whole = saved(tmp_path / "whole", every_steps=1, keep=100)
    for step in range(1, GROWING_LAST):
        check_same_bits(saved(taken_from(tmp_path / "whole", step, tmp_path / str(step))), whole)


@pytest.mark.parametrize(
    "other", [[(0, 2), (5, 4), (12, 6)], [(0, 2), (6, 4), (12, 8)], lambda update: 5, 2]
)
def test_a_run_does_not_go_on_in_batches_of_other_sizes(other, tmp_path):
    how = {"epochs": 3, "verbose": 0, "checkpoints": tmp_path}

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(made()).fit(
            INPUTS,
            LABELS,
            batch_size=GROWING,
            callbacks=[Stops()],
            **how | {"checkpoints": ws.Checkpoints(tmp_path, every_steps=1)},
        )
    with pytest.raises(ws.SpecificationError, match="rows, 2, 4 from update 5, 8 from update 12"):
        ws.Trainer(made()).fit(INPUTS, LABELS, batch_size=other, **how)


# ---- schedules that are none ----


@pytest.mark.parametrize(
    ("batch_size", "text"),
    [
        ([], "pairs"),
        ([8], "pairs"),
        ([(1, 8)], "the first at update 0"),
        ([(0, 8), (0, 9)], "in the order of the updates"),
        ([(0, 8), (9, 0)], "pairs"),
        (int, r"Received: .*int.* of \(\)"),
        ({0: 4, 10: 8}, "pairs"),
        (lambda rows: 8, r"of \(rows\)"),
        (lambda update: 0, "batch_size must be a whole number of at least 1. Received: 0"),
        (lambda epoch: 2.5, r"batch_size must be .* Received: 2.5.*lambda epoch"),
    ],
)
def test_what_is_no_schedule_is_refused(batch_size, text):
    with pytest.raises(ws.SpecificationError, match=text):
        len(ws.Batches((X, Y), batch_size))


def test_rows_permuted_within_their_batch_need_batches_of_one_size():
    with pytest.raises(ws.SpecificationError, match="needs batches of one size"):
        ws.Batches((X, Y), SIZES, shuffle="batch")


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_only_training_grows(call):
    with pytest.raises(ws.SpecificationError, match="batch_size must be a whole number"):
        getattr(ws.Trainer(model()), call)(X, batch_size=SIZES)


def test_an_epoch_of_some_steps_has_no_place_in_batches_that_grow():
    with pytest.raises(ws.SpecificationError, match="initial_epoch need batches of one size"):
        ws.Trainer(model()).fit(
            X, Y, batch_size=SIZES, steps_per_epoch=2, initial_epoch=1, epochs=3, verbose=0
        )


# ---- the rate by rows ----


def rates(batch_size, schedule, epochs=4):
    """Return the change of one weight by each update, whose gradient is 1: the rates."""
    unit = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    unit.compile(keras.optimizers.SGD(schedule), loss=lambda y, out: out)
    ones = np.ones((20, 1), "float32")
    seen = []
    before = float(unit.get_weights()[0][0, 0])
    data = ws.Batches((ones, ones), batch_size, shuffle=False)
    for _ in ws.Trainer(unit).steps(data, epochs=epochs):
        now = float(unit.get_weights()[0][0, 0])
        seen.append(round(before - now, 4))
        before = now
    return seen


@pytest.mark.own
def test_a_schedule_may_count_rows():
    falling = keras.optimizers.schedules.PiecewiseConstantDecay([9, 23, 41], [1.0, 0.5, 0.25, 0.1])
    by_rows = ws.RowSchedule(falling, SIZES)
    starts = [0, 3, 6, 9, 12, 15, 18, 21, 24, 29, 34, 39, 44, 49, 54, 74]
    expected = [float(falling(start)) for start in starts]
    np.testing.assert_allclose(rates(SIZES, by_rows), expected, atol=2e-4)


def test_a_schedule_of_rows_is_kept_in_a_file_of_keras(tmp_path):
    schedule = ws.RowSchedule(keras.optimizers.schedules.CosineDecay(0.1, 640), SIZES)
    adam = model(optimizer=keras.optimizers.Adam(schedule))
    adam.optimizer.build(adam.trainable_variables)
    adam.save(tmp_path / "a.keras")
    kept = keras.models.load_model(tmp_path / "a.keras").optimizer._learning_rate
    assert isinstance(kept, ws.RowSchedule)
    assert [float(kept(n)) for n in range(20)] == [float(schedule(n)) for n in range(20)]


@pytest.mark.parametrize("given", [(0.1, 64), (None, 64)])
def test_a_schedule_of_rows_needs_a_schedule(given):
    with pytest.raises(ws.SpecificationError, match="needs a schedule of the learning rate"):
        ws.RowSchedule(*given)


@pytest.mark.parametrize("sizes", [lambda update: 4, None, 0])
def test_a_schedule_of_rows_needs_sizes_that_are_known(sizes):
    with pytest.raises(ws.SpecificationError, match=r"sizes that are known|pairs"):
        ws.RowSchedule(keras.optimizers.schedules.CosineDecay(0.1, 640), sizes)
