"""Without an attribute of Keras' private side, an update is refused by name, or is the same."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep import keras_private

ROWS = np.arange(12) % 5
LABELS = np.arange(12, dtype="float32")[:, None] / 8


def trained(folder):
    """Return the weights after a fit that uses most of Keras' private side."""
    keras.utils.set_random_seed(2)
    layers = keras.layers
    tokens = keras.Input((), dtype="int32")
    hidden = layers.Dropout(0.25)(layers.Embedding(5, 4)(tokens))
    model = keras.Model(tokens, layers.Dense(1)(hidden))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    model.compile(keras.optimizers.Adagrad(rate), "mse", metrics=["mae"], weighted_metrics=["mse"])
    stop = keras.callbacks.EarlyStopping("loss", patience=5)
    ws.Trainer(model, microbatch_size=2).fit(
        ROWS,
        LABELS,
        batch_size=4,
        sample_weight=np.ones(12, "float32"),
        callbacks=[stop],
        checkpoints=ws.Checkpoints(folder, keep_best=("mae", 1)),
        verbose=0,
    )
    return model.get_weights()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", keras_private.USES)
def test_an_attribute_that_keras_lacks_changes_no_update(name, reference, tmp_path, monkeypatch):
    def without(owner, attribute, *default):
        if attribute != name:
            return getattr(owner, attribute, *default)
        if not default:
            raise AttributeError(attribute)
        return default[0]

    monkeypatch.setattr(keras_private, "getattr", without, raising=False)
    try:
        weights = trained(tmp_path / "run")
    except ws.SpecificationError as error:
        # without a metric's direction, `keep_best` needs one
        assert name in str(error) or "keep_best must say" in str(error)  # noqa: PT017
        return
    for ours, theirs in zip(weights, reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)
