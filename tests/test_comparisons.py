"""What is compared with Keras' fit is compared fairly: under no seed that makes its epochs repeat one order."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from wholestep import demo

ROOT = Path(__file__).parent.parent
COMPARING = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py"), Path(demo.__file__)])


@pytest.mark.parametrize("path", COMPARING, ids=lambda path: path.stem)
def test_nothing_sets_the_seed_under_which_keras_repeats_an_order(path):
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names.isdisjoint({"set_random_seed", "set_seed"})


def test_keras_takes_another_order_each_epoch_on_the_benchmarks_models(monkeypatch):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.random.set_seed(None)  # the tests themselves set one
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.works import WORKS

    work = replace(WORKS["A"], quick_rows=32)
    model, again = work.model(), work.model()
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.compile(keras.optimizers.SGD(0.0), model.loss)
    losses = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    model.fit(**work.data(quick=True), batch_size=4, epochs=2, callbacks=[note], verbose=0)
    first, second = np.reshape(losses, (2, 8))
    assert first[-1] == pytest.approx(second[-1], rel=1e-5)  # the same rows
    assert not np.allclose(first[:-1], second[:-1], rtol=1e-3)


def test_keras_takes_another_order_each_epoch_in_the_demo():
    seen = []
    peer = SimpleNamespace(compile=lambda *_: None, loss=None, fit=lambda x, *_, **__: seen.append(x[:, 0].tolist()))
    demo._keras(60)(peer, (np.arange(90)[:, None],) * 3, 2, demo.Diary())
    first, second = seen
    assert first != second
    assert sorted(first) == sorted(second) == list(range(90))
