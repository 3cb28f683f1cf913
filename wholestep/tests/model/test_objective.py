"""The results that an objective may return, and the errors for all others."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.model.objective import read

MEAN = ws.Mean(np.zeros(3, "float32"))


def test_forms():
    assert list(read(MEAN, {}).terms) == [""]
    assert list(read({"a": MEAN, "b": ws.Sum(np.zeros(3))}, {}).terms) == ["a", "b"]
    output = read((MEAN, {"extra": MEAN, "auc": (1, 2)}), {"auc": keras.metrics.AUC()})
    assert list(output.reported) == ["extra"]
    assert (output.metric_updates[0].y_true, output.metric_updates[0].y_pred) == (1, 2)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.float32(3), r"array of shape \(\)"),
        ([MEAN], "list"),
        ({"a": 3}, r"term 'a'"),
        (
            {"loss": MEAN},
            r"'loss' is the name of the total.* Received: \['loss'\]\. Try: rename it; or",
        ),
        (
            ({"a": MEAN}, {"loss": MEAN}),
            r"'loss' is the name of the total.* Received: \['a', 'loss'\]",
        ),
        ((MEAN, {"loss": MEAN}), "'loss' is the name of the total"),
        (({"a": MEAN}, {"a": MEAN}), r"distinct names\. Received: \['a', 'a'\]"),
        ((MEAN, {"auc": (1, 2)}), "Keras metric of that name"),
    ],
)
def test_anything_else_is_said_to_be_wrong(result, message):
    with pytest.raises(ws.SpecificationError, match=message):
        read(result, {})


class Two(ws.Objective):
    """Two terms with different denominators, a mean and a sum."""

    def __call__(self, model, batch, training):
        output = model(batch["x"], training=training)
        first = ws.Mean(output**2, batch["weight"])
        return {"square": first, "size": ws.Sum(keras.ops.abs(output[:, 0]), coefficient=0.5)}


def test_terms_of_different_denominators_are_exact_in_any_cut():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    data = {"x": x, "weight": np.arange(12, dtype="float32")}
    weights = []
    logs = []
    for size in ("auto", 5):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")]
        )
        trainer = ws.Trainer(
            model, Two(), optimizer=keras.optimizers.SGD(0.01), microbatch_size=size
        )
        logs.append(trainer.update(data))
        weights.append(model.get_weights()[0])
    output = x @ np.ones((3, 2))
    expected = (
        (output**2 * data["weight"][:, None]).sum() / (2 * data["weight"].sum()),
        np.abs(output[:, 0]).sum(),
    )
    for said in logs:
        assert (said["square"], said["size"]) == pytest.approx(expected, rel=1e-5)
        assert said["loss"] == pytest.approx(expected[0] + 0.5 * expected[1], rel=1e-5)
    np.testing.assert_allclose(*weights, rtol=2e-6)


def test_a_subclass_of_a_mean_is_a_mean():
    class Squares(ws.Mean):
        pass

    class Own(ws.Objective):
        def __init__(self, kind):
            self.kind = kind

        def __call__(self, model, batch, training):
            return self.kind((batch[1] - model(batch[0], training=training)) ** 2)

    def trained(kind):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        history = ws.Trainer(model, Own(kind), optimizer=keras.optimizers.SGD(0.25)).fit(
            x, x, batch_size=8, verbose=0
        )
        return history.history["loss"], [weight.tolist() for weight in model.get_weights()]

    x = np.ones((8, 1), "float32")
    assert trained(Squares) == trained(ws.Mean) == ([1.0], [[[0.5]], [0.5]])
