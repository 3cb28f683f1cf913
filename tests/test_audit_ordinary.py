"""Right loops of ordinary scripts, which the audit must neither accuse nor break."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import wholestep as ws

ONLY_TENSORFLOW = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the loop is TensorFlow's")
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = X[:, :1]


class WithPenalty(keras.Sequential):
    """A model that adds a penalty to its compiled loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * ops.mean(y_pred**2)


def network(kind=keras.Sequential, loss="mse", optimizer="sgd", **others):
    """Return a small compiled model."""
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((5,)), layers.Dense(3, "tanh", **others), layers.Dense(1)])
    model.compile(optimizer, loss)
    return model


def fitted(model, x=X, y=Y, **others):
    """Return the report of a `fit`."""
    with ws.audit(model, (x, y), **others) as report:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return report


@pytest.mark.parametrize(("loss", "num"), [("mse", None), (["mse"], 3)])
def test_a_model_with_a_penalty_in_its_compute_loss_is_judged_by_it(loss, num):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=num)
    report = fitted(network(WithPenalty, loss, optimizer, kernel_regularizer="l2"))
    told = f"Nothing found in {6 // (num or 1)} updates: rows, mode, gradient, step, state were judged."
    assert report.first_line == told
