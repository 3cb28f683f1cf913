"""The reported loss is the minimised loss: an epoch's sums are divided once, when read."""

import keras
import numpy as np
import pytest
from keras import ops
from small import ROWS, X, Y, model

import wholestep as ws
from wholestep.reports.report import ReportLayout


@pytest.mark.slow
def test_the_loss_of_an_epoch_is_the_mean_over_its_rows_not_over_its_batches():
    made = model(optimizer="sgd")
    made.optimizer.learning_rate = 0.0
    whole = made.evaluate(X, Y, verbose=0)
    for size in (3, 7, 16):  # none divides the 20 rows: a mean of batches' means would differ
        history = ws.Trainer(made).fit(X, Y, batch_size=size, verbose=0).history
        assert history["loss"][0] == pytest.approx(whole[0], rel=1e-6)
        assert history["accuracy"][0] == pytest.approx(whole[1], rel=1e-6)


def test_a_layout_packs_and_unpacks():
    told = {"a": np.float32(1), "b": np.arange(4, dtype="float32").reshape(2, 2)}
    layout = ReportLayout.of(told)
    packed = layout.pack(told)
    logs = layout.unpack(np.asarray(packed))
    assert logs["a"] == 1
    np.testing.assert_array_equal(logs["b"], [[0, 1], [2, 3]])
    assert ROWS


class Wide(ws.Objective):
    def __call__(self, model, batch, training):
        x, y = batch
        losses = ops.cast(
            ops.square(model(x, training=training) - ops.cast(y, "float32")), "float64"
        )
        return {"mean": ws.Mean(losses), "sum": ws.Sum(losses)}


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="only JAX has to be asked for 64 bits")
@pytest.mark.parametrize("microbatch_size", ["auto", 3])
def test_data_of_64_bits_train_a_model_of_32(microbatch_size):
    """JAX computes in float64 if so asked; the sums of an epoch stay in floatx."""
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3))
    y = rng.integers(0, 4, 12)
    weight = rng.random(12)
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}

    def classifier():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    with jax.enable_x64(True):
        theirs = classifier()
        ours = classifier()
        theirs.fit(x, y, sample_weight=weight, **how)
        trainer = ws.Trainer(ours, microbatch_size=microbatch_size)
        trainer.fit(x, y, sample_weight=weight, **how)
        for kernel, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(kernel, expected, rtol=1e-6, atol=1e-7)
        trainer = ws.Trainer(classifier(), Wide(), optimizer="sgd", microbatch_size=microbatch_size)
        logs = trainer.fit(x, y[:, None], **how).history
        assert logs["loss"][0] == pytest.approx(logs["mean"][0] + logs["sum"][0], rel=1e-6)
        assert trainer.evaluate(x, y[:, None], verbose=0, return_dict=True)["loss"] > 0
