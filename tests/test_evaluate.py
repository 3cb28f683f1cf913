"""Evaluation is exact over all rows, whatever the batches."""

import keras
import numpy as np
import pytest
from small import ROWS, X, Y, model

import wholestep as ws
from wholestep.evaluate import join


@pytest.mark.parametrize("size", [1, 7, ROWS])
def test_a_weighted_mean_does_not_depend_on_the_batches(size):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    made = model(loss=loss)
    weight = np.random.default_rng(3).random(ROWS).astype("float32")
    logits = made.predict(X, verbose=0).astype("float64")
    each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(ROWS), Y]
    found = ws.Trainer(made).evaluate(X, Y, size, sample_weight=weight, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx((each * weight).sum() / weight.sum(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(axis=1) == Y).mean())


def test_a_model_of_several_outputs_predicts_them_all():
    x = keras.Input((6,))
    made = keras.Model(x, {"a": keras.layers.Dense(2)(x), "b": [keras.layers.Dense(3)(x)]})
    made.compile("sgd", {"a": "mse", "b": ["mse"]})
    outputs = ws.Trainer(made).predict(X, batch_size=8, verbose=0)
    assert outputs["a"].shape == (ROWS, 2)
    assert outputs["b"][0].shape == (ROWS, 3)


def test_callbacks_of_evaluation_and_prediction():
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs=None: seen.append(("test", batch))
    watch.on_predict_batch_end = lambda batch, logs=None: seen.append(("predict", batch))
    trainer = ws.Trainer(model())
    trainer.evaluate(X, Y, 10, verbose=0, callbacks=[watch])
    trainer.predict(X, 10, verbose=0, callbacks=[watch])
    assert seen == [("test", 0), ("test", 1), ("predict", 0), ("predict", 1)]


def test_join():
    joined = join([{"a": np.ones((2, 1))}, {"a": np.zeros((1, 1))}])
    np.testing.assert_array_equal(joined["a"], [[1], [1], [0]])


def test_prediction_builds_a_model_that_has_not_seen_data():
    made = keras.Sequential([keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    assert ws.Trainer(made).predict(X, batch_size=8, verbose=0).shape == (ROWS, 2)


def test_a_row_that_a_table_does_not_have():
    """Said of evaluation and of tables that are updated as a whole; of rows, see test_tables."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 2), keras.layers.Flatten()])
    model.compile("adam", "mse")
    trainer, data = ws.Trainer(model), (np.array([[1, 2], [3, 9]], "int32"), np.zeros((2, 4), "float32"))
    if keras.backend.backend() == "jax":
        assert np.isnan(trainer.evaluate(*data, verbose=0))
        with pytest.raises(ws.NonFiniteError, match="rows 1"):
            trainer.update(data)
        return
    for compute in (lambda: trainer.evaluate(*data, verbose=0), lambda: trainer.update(data)):
        with pytest.raises(Exception, match=r"\[1,1\] = 9 is not in \[0, 9\)|indices.* = 9 is not in \[0, 9\)"):
            compute()
