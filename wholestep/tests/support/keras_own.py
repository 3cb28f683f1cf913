"""Runs Keras' own tests of its training loop and of its data through this library: a plugin of
pytest.

`make keras-own` runs them. Each call of `fit`, `evaluate`, `predict`, `train_on_batch`,
`test_on_batch` and `predict_on_batch` goes to a `Trainer` of the model, and data adapters hand out
what a model's step sees (`keras_own_data.py`). docs/notes/004-keras-own-tests.md has the results of
each case.
"""

import functools
import json
import os
import sys
import types
import unittest
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import layers, testing
from keras_own_data import CLASSES, adapters

import wholestep as ws

METHODS = "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"
OWN = next(
    base
    for base in keras.Model.__mro__[1:]
    if base.__name__.endswith("Trainer") and "fit" in vars(base)
)
OUT = os.environ.get("KERAS_OWN_OUT")
KNOWN = {  # by a part of a case's name, the lines of docs/differences.md that it shows
    "test_fit_flow_steps_per_epoch": "steps_per_epoch is a number of updates",
    "test_steps_per_epoch_not_match": "steps_per_epoch is a number of updates",
    "steps_per_epoch_match_multi_epoch": "steps_per_epoch is a number of updates",
    "steps_per_epoch_not_match": "steps_per_epoch is a number of updates",
    "unknown_data_size_not_match": "steps_per_epoch is a number of updates",
    "test_fit_sparse_": "sparse inputs are made dense, batch by batch",
    "_sparse_float": "sparse inputs are made dense, batch by batch",
    "test_sparse_tensors": "sparse inputs are made dense, batch by batch",
    "test_tf_sparse": "sparse inputs are made dense, batch by batch",
    "test_basic_flow_tf_ragged": "ragged rows are refused on JAX",
    "test_multi_inputs_and_outputs": "one sample weight of several outputs is handed on as given",
    "test_exception_reported": "a data set's own error is raised",
    "test_with_unexpected_shapes": "the shapes of a stream may change",
    "test_distribut": "data that a strategy has shared out are refused",
    "test_trainer_with_raggeds": "ragged labels are refused",
    "test_fit_eval_flow_for_jax_model_weights": "the variables hold arrays inside of callbacks",
    "tensorboard_test.py::TestTensorBoardV2::test_custom_summary": "compile(jit_compile=False) on "
    "JAX",
}
is_as_unittest_has_it = unittest.TestCase.assertIsInstance
outcomes: dict[str, tuple[str, str]] = {}


def trainer_of(model):
    """Return the model's trainer, one for all calls."""
    found = vars(model).get("_wholestep")
    if found is None:
        found = vars(model)["_wholestep"] = ws.Trainer(model)
    return found


def through(name):
    """Return a method of Keras that this library runs."""
    own = getattr(OWN, name)

    @functools.wraps(own)
    def method(self, *arguments, **options):
        if not isinstance(self, keras.Model) or vars(self).get("_is_under_way"):
            return own(self, *arguments, **options)
        vars(self)["_is_under_way"] = True
        try:
            return getattr(trainer_of(self), name)(*arguments, **options)
        finally:
            vars(self)["_is_under_way"] = False

    return method


def as_model(cls):
    """Return a layer that is a trainer, as Keras' tests have some, as a model too."""
    own = {k: v for k, v in vars(layers.Dense).items() if callable(v) and k != "__init__"}
    own = own if issubclass(cls, layers.Dense) else {}
    return type(cls.__name__, (cls, keras.Model), own | {"__module__": cls.__module__})


def is_instance(self, value, cls, *message):
    """Assert, as unittest does, but take an array of the engine for one of NumPy or TensorFlow."""
    if not (cls in (np.ndarray, tf.Tensor) and isinstance(value, type(keras.ops.zeros(())))):
        is_as_unittest_has_it(self, value, cls, *message)


def pytest_configure(config):
    """Take the place of Keras' loop."""
    for name in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", name)
    conftest = types.ModuleType("conftest")  # of Keras' repository, which its package does not hold
    conftest.skip_if_backend = lambda name, why: pytest.mark.skipif(
        keras.backend.backend() == name, reason=why
    )
    sys.modules["conftest"] = conftest
    testing.TestCase.assertIsInstance = is_instance
    for name in METHODS:
        setattr(OWN, name, through(name))


def pytest_collection_modifyitems(items):
    """Make models of the classes of these tests, and leave out what wants an engine that is not
    here.
    """
    for module in {item.module for item in items}:
        for name, value in list(vars(module).items()):
            is_class = isinstance(value, type) and value.__module__ == module.__name__
            if is_class and issubclass(value, OWN) and not issubclass(value, keras.Model):
                setattr(module, name, as_model(value))
            if name in CLASSES and module.__name__.endswith(name + "_test"):
                setattr(module, name, adapters(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep what came of each case: passed, skipped, refused by an error of this library, or
    failed.
    """
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo.value if call.excinfo else None
        is_ours = isinstance(error, ws.WholestepError)
        outcome = "refused" if is_ours else report.outcome
        if isinstance(error, ImportError):
            outcome, report.outcome, report.wasxfail = "not installed", "skipped", str(error)
        name = item.nodeid.split("/")[-1]
        known = next((why for part, why in KNOWN.items() if part in name), None)
        if known and outcome in ("failed", "refused"):
            outcome = "differs"
            report.outcome = "skipped"
            report.wasxfail = known
        outcomes[name] = (
            outcome,
            "" if error is None else f"{type(error).__name__}: {str(error)[:300]}",
        )
    return report


def pytest_sessionfinish():
    """Write what came of all of them."""
    print("\n", dict(Counter(outcome for outcome, _ in outcomes.values())))
    if OUT:
        Path(OUT).write_text(json.dumps(outcomes, indent=1))
