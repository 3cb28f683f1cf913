"""The trainer preprocesses data as the fit, evaluate and predict of a model do."""

import keras
import numpy as np
import pytest

import wholestep as ws

WORDS = np.array(["a b", "b", "c c", "a", "b c", "c"])
Y = np.array([[0.0], [1.0], [1.0], [0.0], [1.0], [0.0]], "float32")
HOW = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


def counted(x, y=None, sample_weight=None):
    """Count letters, in place of a tokenizer."""
    rows = np.array(
        [[str(text).count(letter) for letter in "abc"] for text in np.asarray(x)], "float32"
    )
    return keras.utils.pack_x_y_sample_weight(rows, y, sample_weight)


class Task(keras.Model):
    """Preprocesses in `fit`, `evaluate` and `predict`, as the tasks of keras-hub do."""

    preprocessor = staticmethod(counted)

    def fit(self, x=None, y=None, validation_data=None, **how):
        validation_data = None if validation_data is None else counted(*validation_data)
        return super().fit(*counted(x, y), validation_data=validation_data, **how)

    def evaluate(self, x=None, y=None, **how):
        is_validation = "_use_cached_eval_dataset" in how
        return super().evaluate(*((x, y) if is_validation else counted(x, y)), **how)

    def predict(self, x, **how):
        return super().predict(counted(x), **how)


def task(kind=Task):
    keras.utils.set_random_seed(2)
    x = keras.Input((3,))
    made = kind(x, keras.layers.Dense(1)(x))
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


def test_a_models_preprocessor_prepares_every_batch():
    theirs = task()
    ours = task()
    trainer = ws.Trainer(ours, microbatch_size=3)
    validation = (WORDS[:4], Y[:4])
    history = theirs.fit(WORDS, Y, validation_data=validation, **HOW).history
    found = trainer.fit(list(WORDS), Y, validation_data=validation, **HOW).history
    assert {k: pytest.approx(v, rel=1e-5) for k, v in history.items()} == found
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], rtol=1e-5)
    assert trainer.evaluate(WORDS, Y, verbose=0) == pytest.approx(
        theirs.evaluate(WORDS, Y, verbose=0), rel=1e-5
    )
    np.testing.assert_allclose(
        trainer.predict(WORDS, 4, verbose=0), theirs.predict(WORDS, verbose=0), rtol=1e-5
    )


def _codes(words):
    return np.array([[ord(c) for c in word.ljust(3)] for word in words])


class Coded(Task):
    """Takes letters as numbers, which Batches can carry on every engine."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        texts = ["".join(map(chr, row)) for row in np.asarray(x)]
        return counted(texts, y, sample_weight)


@pytest.mark.parametrize("kind", ["stream", "stream of text", "batches"])
def test_streams_and_batches_are_prepared_too(kind):
    one = task(Coded)
    two = task(Task if kind == "stream of text" else Coded)
    ws.Trainer(one).fit(_codes(WORDS), Y, **HOW)
    given = WORDS if kind == "stream of text" else _codes(WORDS)
    parts = [(given[rows], Y[rows]) for rows in (slice(0, 4), slice(4, 6))]
    data = ws.Batches((given, Y), 4, shuffle=False) if kind == "batches" else iter(parts * 2)
    trainer = ws.Trainer(two)
    assert len(list(trainer.steps(data, epochs=2 if kind == "batches" else 1))) == 4
    np.testing.assert_allclose(one.get_weights()[0], two.get_weights()[0], rtol=1e-5)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_own_method_without_a_preprocessor_is_refused(method):
    kind = type("Own", (keras.Model,), {method: lambda self, *a, **k: None})
    trainer = ws.Trainer(task(kind))
    inputs = (np.ones((6, 3)), Y)
    with pytest.raises(
        ws.SpecificationError, match=rf"must not override `{method}`.*model\.preprocessor"
    ):
        getattr(trainer, method)(*(inputs[:1] if method == "predict" else inputs), verbose=0)


def test_a_preprocessor_that_is_set_to_none_does_nothing():
    made = task()
    made.preprocessor = None
    assert np.isfinite(ws.Trainer(made).evaluate(np.ones((6, 3)), Y, verbose=0))
