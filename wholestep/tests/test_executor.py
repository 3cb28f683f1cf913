"""The executor: errors of failed updates, and the size of dispatches."""

import gc

import keras
import numpy as np
import pytest
from small import X, Y, model

import wholestep as ws
from wholestep.dispatcher import DispatchSize
from wholestep.processes import SingleProcess


class Weighted(ws.Objective):
    def __call__(self, model, batch, training):
        x, weight = batch
        return {"square": ws.Mean(model(x, training=training)[:, 0] ** 2, weight)}


def test_a_batch_that_weighs_nothing_is_named():
    made = model()
    before = made.get_weights()
    with pytest.raises(ws.NonFiniteError, match="the weights of term 'square' sum to zero"):
        ws.Trainer(made, Weighted()).update((X, np.zeros(len(X), "float32")))["loss"]
    for a, b in zip(before, made.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_many_bad_rows_are_counted():
    made = model()
    with pytest.raises(
        ws.NonFiniteError, match=r"rows 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    ) as caught:
        ws.Trainer(made).update((np.full_like(X, np.nan), Y))["loss"]
    assert caught.value.rows == tuple(range(20))


def test_the_pace_grows_with_what_the_device_can_do():
    dispatch_size = DispatchSize(SingleProcess())
    sizes = []
    for _ in range(4):
        dispatch_size.note(dispatch_size.size)
        sizes.append(dispatch_size.size)
    assert sizes == [8, 64, 256, 256]


def test_garbage_is_not_searched_for_during_a_trace_and_is_after_it():
    seen = []

    class Looks(ws.Objective):
        def __call__(self, model, batch, training):
            seen.append(gc.isenabled())
            return ws.Mean(model(batch)[:, 0])

    ws.Trainer(model(), Looks()).update(X)["loss"]
    assert seen
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX compiles a whole update")
@pytest.mark.own
def test_an_optimizers_update_is_traced_once_for_batches_of_several_sizes():
    traced = []

    class Counts(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            traced.append(len(grads))
            return super().apply(grads, trainable_variables)

    trainer = ws.Trainer(model(optimizer=Counts(0.1)))
    for num in (4, 7, 10):
        trainer.update((X[:num], Y[:num]))["loss"]
    assert len(traced) == 1
    assert int(trainer.model.optimizer.iterations) == 3
