"""The start of a run's epoch in data with longer or shorter epochs."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shares import on
from small import X, Y, model

import wholestep as ws
from wholestep.data import seek_epoch


def batches(num, position=(0, 0)):
    data = ws.Batches(np.arange(num), 1)
    data.seek(*position)
    return data


def went(data, *given, once):
    seek_epoch(data, *given, once=once)
    return data.position


@pytest.mark.parametrize("once", [True, False])
def test_without_a_number_of_steps_an_epoch_is_a_pass(once):
    assert went(batches(5), 3, None, once=once) == (3, 0)
    assert went(batches(5, (3, 2)), 3, None, once=once) == (3, 2)


def test_a_pass_may_be_several_epochs_the_last_of_them_shorter():
    assert [went(batches(5), epoch, 2, once=True) for epoch in range(4)] == [
        (0, 0),
        (0, 2),
        (0, 4),
        (1, 0),
    ]
    assert went(batches(5, (0, 3)), 1, 2, once=True) == (0, 3)
    assert went(batches(5, (1, 3)), 1, 2, once=True) == (0, 2)


def test_else_epochs_go_on_in_the_next_pass():
    assert [went(batches(5), epoch, 2, once=False) for epoch in range(4)] == [
        (0, 0),
        (0, 2),
        (0, 4),
        (1, 1),
    ]
    assert went(batches(5, (1, 0)), 2, 2, once=False) == (1, 0)
    assert went(batches(5, (1, 1)), 2, 2, once=False) == (0, 4)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 20))
def test_epochs_that_go_on_leave_nothing_out(num, steps, epoch):
    at, step = went(batches(num), epoch, steps, once=False)
    assert at * num + step == epoch * steps
    assert step < num


def test_data_that_do_not_tell_their_length_stand_at_an_epoch_of_their_own():
    data = ws.Batches(np.zeros((1, 1)) for _ in range(5))
    assert data.num_batches is None
    assert went(data, 2, 3, once=True) == (2, 0)


@on("jax")
def test_an_iterator_of_validation_data_is_kept():
    def growing():
        for i in itertools.count():
            yield X, np.full(len(X), i % 4)

    losses = []
    for fit in (
        ws.Trainer(model(optimizer=keras.optimizers.SGD(0.0))).fit,
        model(optimizer=keras.optimizers.SGD(0.0)).fit,
    ):
        history = fit(
            X, Y, validation_data=growing(), validation_steps=3, epochs=2, verbose=0
        ).history
        losses.append(history["val_loss"])
    assert losses[0][0] == losses[0][1]
    assert losses[1][0] != losses[1][1]
