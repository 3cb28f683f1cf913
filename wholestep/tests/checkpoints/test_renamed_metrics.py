"""A run resumes with a model built anew in one process, to whose metrics Keras gives new names."""

import keras
import numpy as np
import pytest
from runs import BATCHES, SIZE, Takes, X, Y, carried, check_same_bits, leaves
from shares import share

import wholestep as ws
from wholestep.checkpoints.snapshot import plain

HOW = {"batch_size": SIZE, "epochs": 3, "verbose": 0, "validation_data": (X[:5], Y[:5])}


class Says(keras.Sequential):
    """A model that says more of its metrics than Keras does."""

    def get_metrics_result(self):
        return {f"my_{name}": value for name, value in super().get_metrics_result().items()}


def auc():
    return keras.metrics.AUC(num_thresholds=5)


def one_output(kind=keras.Sequential):
    model = kind([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(
        "adam", "binary_crossentropy", metrics=[auc(), "accuracy"], weighted_metrics=[auc()]
    )
    return model, Y


def two_outputs():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [keras.layers.Dense(1, "sigmoid")(inputs) for _ in range(2)])
    model.compile("adam", ["binary_crossentropy"] * 2, metrics=[[auc()], [auc()]])
    return model, [Y, 1 - Y]


MODELS = {
    "one output": one_output,
    "two outputs": two_outputs,
    "its own results": lambda: one_output(Says),
}


def numbers(history):
    """Return the numbers of a History; equal names are in the order of their counts."""
    found = {}
    for name in sorted(history.history, key=lambda name: (len(name), name)):
        found.setdefault(plain(name), []).append(history.history[name])
    return found


@pytest.mark.parametrize("name", share(MODELS))
@pytest.mark.slow
def test_a_model_that_is_built_anew_goes_on_under_its_own_names(name):
    keras.utils.set_random_seed(0)
    model, y = MODELS[name]()
    how = HOW | {"validation_data": (X[:5], keras.tree.map_structure(lambda leaf: leaf[:5], y))}
    whole = ws.Trainer(model)
    takes = Takes(whole.run, BATCHES + 2, epochs=(1,))
    history = whole.fit(X, y, callbacks=[takes], **how)
    for _, snapshot in takes.taken:
        other = ws.Trainer(MODELS[name]()[0])
        other.run.restore(snapshot)
        resumed = other.fit(X, y, callbacks=[Takes(other.run)], **how)
        assert not set(history.history) >= set(resumed.history)
        assert numbers(resumed) == numbers(history)
        check_same_bits(leaves(whole.model), leaves(other.model))


@pytest.mark.slow
def test_a_model_that_is_compiled_anew_goes_on_under_its_own_names():
    keras.utils.set_random_seed(0)
    whole = ws.Trainer(one_output()[0])
    other = ws.Trainer(one_output()[0])
    takes = Takes(whole.run, epochs=(1,))
    history = whole.fit(X, Y, callbacks=[takes], **HOW)
    other.fit(X, Y, **HOW)
    other.run.restore(takes.only())
    other.model.compile(
        "adam", "binary_crossentropy", metrics=[auc(), "accuracy"], weighted_metrics=[auc()]
    )
    resumed = other.fit(X, Y, callbacks=[Takes(other.run)], **HOW)
    assert numbers(resumed) == numbers(history)


def test_another_order_of_metrics_is_refused():
    """Names of the same words that the user gave are no numbers of Keras."""

    def made(*names):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
        metrics = [
            keras.metrics.BinaryAccuracy(name, threshold=0.1 * int(name[-1])) for name in names
        ]
        model.compile("adam", "binary_crossentropy", metrics=metrics)
        return ws.Trainer(model)

    whole = made("above_1", "above_5")
    other = made("above_5", "above_1")
    takes = Takes(whole.run, 2)
    whole.fit(X, Y, callbacks=[takes], **HOW)
    other.run.restore(carried(takes.only()))
    with pytest.raises(ws.SpecificationError, match="the same terms and metrics"):
        other.fit(X, Y, callbacks=[Takes(other.run)], **HOW)
    assert np.isfinite(leaves(other.model)[0]).all()
