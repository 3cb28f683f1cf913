"""The descriptions of two runs are equal if and only if the runs are."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from scripts import HERE, lean

import wholestep as ws
from wholestep.checkpoints import code_facts, data_facts, value_facts


def make(activation="relu", rate=0.1, units=3):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units, activation), keras.layers.Dropout(rate)]
    )
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse")
    return model


def code(model, optimizer=None):
    return code_facts(model, None, optimizer or model.optimizer, ("auto", None))


def differing(one, two):
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


def test_two_of_the_same_are_alike():
    assert differing(code(make()), code(make())) == []
    assert code(make(), optimizer=object())["the optimizer"]


@pytest.mark.parametrize("change", [{"activation": "tanh"}, {"rate": 0.2}, {"units": 2}])
def test_another_model_is_named(change):
    assert differing(code(make()), code(make(**change))) == ["the model"]


def test_another_optimizer_is_named():
    model = make()
    assert differing(code(model), code(model, keras.optimizers.Adam(0.01, clipnorm=2.0))) == [
        "the optimizer"
    ]


def test_values_and_data_are_named():
    one = make()
    two = make()
    two.layers[0].kernel.assign(two.layers[0].kernel * 2.0)
    (path,) = differing(value_facts(one.variables), value_facts(two.variables))
    assert path.startswith("sequential/dense/kernel (4x3 ")
    x = np.arange(12.0).reshape(6, 2)
    facts = data_facts(ws.Batches((x, x), 2))
    other = data_facts(ws.Batches((x, x + (x == 5)), 2, seed=1))
    assert differing(facts, other) == ["the order of the rows", "data[1]"]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="on TensorFlow it is there already")
@pytest.mark.slow
def test_describing_does_not_import_tensorflow():
    look = "import sys; from test_fingerprint import code, make; make; import keras; "
    look += (
        "m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]); m.compile('adam', "
        "'mse'); code(m); "
    )
    look += "print('tensorflow' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", look],
        env=lean(Path(__file__).parent, HERE),
        capture_output=True,
        text=True,
    )
    assert found.stdout == "False\n", found.stderr
