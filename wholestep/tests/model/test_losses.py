"""The compiled losses as an objective: each match of Keras is a call, and Keras is unchanged."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.context import build_compiled as build
from wholestep.model.losses import CompiledObjective

ROWS = 4
X = np.ones((ROWS, 3), "float32")
Y = {"a": np.zeros((ROWS, 2), "float32"), "b": np.array([0, 1, 1, 0])}


def compiled(**losses):
    x = keras.Input((3,))
    model = keras.Model(x, {name: keras.layers.Dense(2, "softmax", name=name)(x) for name in "ab"})
    model.compile(
        loss={"a": "mse", "b": "sparse_categorical_crossentropy"} | losses,
        loss_weights={"a": 3.0, "b": 1.0},
    )
    build(model, (X, Y))
    return model


def test_every_loss_is_a_term_under_keras_name_with_its_coefficient():
    model = compiled()
    terms = CompiledObjective([])(model, (X, Y), training=False).terms
    assert {name: term.coefficient for name, term in terms.items()} == {
        "a_loss": 3.0,
        "b_loss": 1.0,
    }
    assert all(tuple(term.values.shape) == (ROWS,) for term in terms.values())


def test_a_reading_tells_labels_and_the_weights_that_divide():
    model = compiled(a=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    weight = {"a": np.ones(ROWS, "float32"), "b": np.ones(ROWS, "float32")}
    reading = CompiledObjective([])(model, (X, Y, weight), training=True)
    assert [(found.leaf, found.num_classes) for found in reading.label_ranges] == [(1, 2)]
    assert reading.divisors == (0,)


def test_keras_has_its_losses_back_even_after_an_error():
    model = compiled()
    kept = model._compile_loss._flat_losses, model._compile_loss._metrics
    CompiledObjective([])(model, (X, Y), training=True)
    with pytest.raises((ValueError, KeyError)):
        CompiledObjective([])(model, (X, {"a": Y["a"]}), training=True)
    assert model._compile_loss._flat_losses is kept[0]
    assert model._compile_loss._metrics is kept[1]


def test_of_several_losses_for_one_output_the_first_alone_counts_and_one_is_told_once():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(loss=["mse", "mae"])
    build(model, (X, Y["a"]))
    objective = CompiledObjective([])
    with pytest.warns(UserWarning, match="one output, and 2 losses"):
        (term,) = objective(model, (X, Y["a"]), training=True).terms.values()
    assert isinstance(term, ws.Mean)
    assert list(objective(model, (X, Y["a"]), training=True).terms) == [""]
