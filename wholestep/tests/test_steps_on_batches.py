"""The methods of `keras.Model` for a single batch."""

import gc

import keras
import numpy as np
import pytest
import scipy.sparse
from shares import share

import wholestep as ws
from wholestep.evaluation import PassRun

draw = np.random.default_rng(0)
X = draw.normal(size=(8, 3)).astype("float32")
Y = draw.integers(0, 3, 8)
W = draw.uniform(0.5, 2, 8).astype("float32")


def network(metrics=("accuracy",)):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile(
        keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=list(metrics)
    )
    return model


def loop(model, owner, how, **given):
    """Return the logs of a loop that was written for a model, and the values after it."""
    told = []
    for i in range(4):
        rows = slice(0, 8 - i % 2 * 3)  # batches of two sizes
        parts = (X[rows], Y[rows], *([W[rows]] if how == "weights" else []))
        told += [
            owner.train_on_batch(*parts, **given),
            owner.test_on_batch(*parts),
            owner.predict_on_batch(X[rows]),
        ]
        told += [
            owner.train_on_batch(*parts, **given, return_dict=True),
            owner.test_on_batch(*parts, return_dict=True),
        ]
    return told, model.get_weights()


GIVEN = {"plain": {}, "weights": {}, "classes": {"class_weight": {0: 0.5, 2: 3.0}}}


@pytest.mark.parametrize("how", share(GIVEN))
@pytest.mark.slow
def test_a_loop_written_for_a_model_runs_with_the_trainer(how):
    ours = network()
    theirs = network()
    (told, weights), (expected, wanted) = (
        loop(ours, ws.Trainer(ours), how, **GIVEN[how]),
        loop(theirs, theirs, how, **GIVEN[how]),
    )
    for one, other in zip(told, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            one, other = list(one.values()), [other[name] for name in one]
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loss_alone_is_a_number():
    model = network(metrics=())
    trainer = ws.Trainer(model)
    loss = trainer.train_on_batch(X, Y)
    assert isinstance(loss, float)
    assert trainer.test_on_batch(X, Y) < loss


def test_weights_of_rows_and_of_classes_multiply():
    classes = np.where(Y.reshape(-1) == 0, 3.0, 1.0).astype("float32")
    both = ws.Trainer(network()).train_on_batch(X, Y, W, class_weight={0: 3.0})
    assert both == ws.Trainer(network()).train_on_batch(X, Y, W * classes)


class Squares(ws.Objective):
    def __call__(self, model, batch, training):
        return ws.Mean((model(batch["x"], training=training)[:, 0] - batch["w"]) ** 2)


def test_a_batch_of_an_objective_is_what_the_objective_takes():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trainer = ws.Trainer(model, Squares(), optimizer=keras.optimizers.SGD(0.1))
    batch = {"x": X, "w": W}
    losses = [trainer.train_on_batch(batch) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert trainer.test_on_batch(batch) < losses[-1]


def test_sparse_rows_are_predicted_as_dense_ones():
    trainer = ws.Trainer(network())
    np.testing.assert_array_equal(
        trainer.predict_on_batch(scipy.sparse.csr_matrix(X)), trainer.predict_on_batch(X)
    )


def rows(num):
    return np.resize(X, (num, 3)), np.resize(Y, num)


@pytest.mark.slow
def test_single_batches_after_a_restore_are_filled_as_in_a_fresh_trainer(tmp_path):
    """The sizes of a run are saved with it: those of a run that was left count no more."""
    found = []
    for is_fresh in (True, False):
        trainer = ws.Trainer(network(()))
        dict(trainer.update(rows(10)))
        trainer.save(tmp_path / str(is_fresh))
        dict(trainer.update(rows(100)))
        trainer = ws.Trainer(network(())) if is_fresh else trainer
        trainer.restore(tmp_path / str(is_fresh))
        dict(trainer.update(rows(60)))
        found.append(trainer.run.findings.sizes)
    assert found[0] == found[1]
    assert [*found[0].values()] == [[10, 64]]


def test_a_restored_model_that_is_not_built_predicts_with_the_restored_weights(tmp_path):
    def unbuilt():
        model = keras.Sequential([keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return ws.Trainer(model)

    trainer = unbuilt()
    trainer.train_on_batch(X, Y)
    trainer.save(tmp_path)
    again = unbuilt()
    again.restore(tmp_path)
    np.testing.assert_allclose(again.predict_on_batch(X), trainer.predict_on_batch(X), rtol=1e-6)


def test_a_schedule_that_is_assigned_between_two_batches_counts():
    trainer = ws.Trainer(network())
    trainer.train_on_batch(X, Y)
    trainer.model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.0, 1, 0.5)
    before = trainer.model.get_weights()
    trainer.train_on_batch(X, Y)
    for one, other in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_no_weights_are_kept_after_a_single_evaluation():
    gc.collect()
    others = {id(each) for each in gc.get_objects() if isinstance(each, PassRun)}
    trainer = ws.Trainer(network())
    first = trainer.test_on_batch(X, Y)
    runs = [
        each for each in gc.get_objects() if isinstance(each, PassRun) and id(each) not in others
    ]
    assert [each for each in runs if each.state is not None] == []
    assert trainer.test_on_batch(X, Y) == first
