"""Nothing of ours warns where every warning is an error, as `keras.Model.fit` does not."""

import inspect
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from scripts import lean
from shares import on
from small import ROWS, X, Y, model

import wholestep as ws


class Named(keras.Sequential):
    """A model that says itself what its metrics are called."""

    def get_metrics_result(self):
        return {f"own_{name}": value for name, value in super().get_metrics_result().items()}


@pytest.fixture
def strictly():
    """Every warning is an error, also those that the test configuration ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_whatever_a_trainer_does_warns_of_nothing(strictly):
    made = model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    trainer = ws.Trainer(made)
    history = trainer.fit(X, Y, batch_size=10, epochs=2, validation_data=(X, Y), verbose=0).history
    assert sorted(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert len(trainer.evaluate(X, Y, batch_size=10, verbose=0)) == 2
    assert trainer.predict(X, batch_size=10, verbose=0).shape == (ROWS, 4)
    assert np.isfinite(trainer.update((X[:10], Y[:10]))["loss"])
    assert len([step.loss for step in trainer.steps(ws.Batches((X, Y), 10))]) == 2
    assert "10 rows" in trainer.explain()


LOGS = """
import keras
import numpy as np
import wholestep as ws

x = np.ones((64, 3), "float32")
made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
made.compile("adam", "mse")
trainer = ws.Trainer(made)
trainer.update((x, x[:, :1]))  # without XLA
trainer.fit(x, x[:, :1], verbose=0)
trainer.evaluate(x, x[:, :1], verbose=0)
"""


@on("tensorflow")
@pytest.mark.slow
def test_tensorflow_logs_no_errors_of_its_own():
    ended = subprocess.run(
        [sys.executable, "-c", LOGS],
        env=lean(TF_CPP_MIN_LOG_LEVEL="1"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0
    assert [line for line in ended.stderr.splitlines() if line.startswith(("E0000", "W0000"))] == []


def test_results_of_a_models_own_warn_of_nothing(strictly):
    made = Named(model().layers)
    made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = ws.Trainer(made).fit(X, Y, batch_size=10, epochs=1, verbose=0).history
    assert sorted(history) == ["own_accuracy", "own_loss"]


def test_a_warning_points_at_the_line_of_the_user():
    """However deep in the library, and through whose frames, it is found out."""
    made = model()
    here = inspect.currentframe()
    line = here.f_lineno + 2
    with pytest.warns(UserWarning, match="shuffle=False has no effect") as found:
        ws.Trainer(made).fit(ws.Batches((X, Y), 10), shuffle=False, verbose=0)
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)]

    def short():
        yield X[:10], Y[:10]

    line = here.f_lineno + 2
    with pytest.warns(UserWarning, match="The data ended") as found:
        ws.Trainer(made).fit(short(), epochs=2, steps_per_epoch=1, verbose=0)
    assert [(each.filename, each.lineno) for each in found] == [(__file__, line)]


@pytest.mark.parametrize("more", [(None,), (None, None), (Y, None)])
def test_a_batch_has_three_parts_at_most(more):
    trainer = ws.Trainer(model())
    with pytest.raises(ws.BatchError, match=r"\(x, y, sample_weight\)"):
        trainer.update((X[:10], Y[:10], None, *more))
    with pytest.raises(ws.WholestepError, match=r"\(x, y, sample_weight\)"):
        trainer.fit(iter([(X[:10], Y[:10], None, *more)]), verbose=0)
