"""Comparisons with Keras' fit are fair: no seed makes its epochs repeat one order."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import digits
import keras
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOP = ROOT.parent
COMPARING = sorted([*TOP.glob("examples/*.py"), *TOP.glob("benchmarks/*.py")])


@pytest.mark.parametrize("path", COMPARING, ids=lambda path: path.stem)
def test_nothing_sets_the_seed_under_which_keras_repeats_an_order(path):
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names.isdisjoint({"set_random_seed", "set_seed"})


def test_keras_takes_another_order_each_epoch_on_the_benchmarks_models(monkeypatch):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.random.set_seed(None)  # the tests themselves set one
    monkeypatch.syspath_prepend(TOP)
    from benchmarks.works import WORKS

    work = replace(WORKS["A"], quick_rows=32)
    model = work.model()
    again = work.model()
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.compile(keras.optimizers.SGD(0.0), model.loss)
    losses = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(logs["loss"])
    )
    model.fit(**work.data(quick=True), batch_size=4, epochs=2, callbacks=[note], verbose=0)
    first, second = np.reshape(losses, (2, 8))
    assert first[-1] == pytest.approx(second[-1], rel=1e-5)  # the same rows
    assert not np.allclose(first[:-1], second[:-1], rtol=1e-3)


def test_keras_takes_another_order_each_epoch_in_the_example():
    seen = []
    peer = SimpleNamespace(
        compile=lambda *_: None, loss=None, fit=lambda x, *_, **__: seen.append(x[:, 0].tolist())
    )
    digits._keras(60)(peer, (np.arange(90)[:, None],) * 3, 2, digits.Diary())
    first, second = seen
    assert first != second
    assert sorted(first) == sorted(second) == list(range(90))


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(TOP)
    from benchmarks import table

    return table


def test_a_comparison_is_worse_only_beyond_the_noise_of_both_runs(table):
    def rows(ours, more):
        other = "Keras", [4.0, 4.0, 4.0]
        return [
            table.by_ratio("A", "jax", ("wholestep", ours), other, bar=1.0),
            table.by_difference(
                "import, s", "jax", ("wholestep", [4 + each for each in more]), other, bar=0.3
            ),
        ]

    before = rows([1.0, 1.25, 2.0], [0.25, 0.5, 0.25])
    assert [row.results for row in before] == [[4.0, 3.2, 2.0], [0.25, 0.5, 0.25]]
    assert [row.is_met for row in before] == [True, True]
    told = table.lines(before, ["a quiet machine"])
    assert table.worse(before, told) == []
    # one pair as good as the worst before
    assert table.worse(rows([1.9, 3.0, 3.0], [0.5, 0.75, 1.0]), told) == []
    slower, later = table.worse(rows([2.5, 3.0, 4.0], [0.75, 0.75, 1.0]), told)
    assert slower == "A (jax): wholestep against Keras: 1.33 now, 3.2 then"
    assert later == "import, s (jax): wholestep against Keras: 0.75 now, 0.25 then"
    with pytest.raises(ValueError, match="must hold a comparison"):
        table.worse([before[0]._replace(work="B")], told)


def test_the_table_says_which_bars_are_met(table):
    rows = [
        table.by_ratio("A", "jax", ("ours", [2.0, 2.0]), ("Keras", [4.0, 6.0]), bar=bar)
        for bar in (2, 3, None)
    ]
    assert [row.cells()[-4:-1] for row in rows] == [
        ("2.5 (2 to 3)", ">= 2", "met"),
        ("2.5 (2 to 3)", ">= 3", "missed"),
        ("2.5 (2 to 3)", "", ""),
    ]
    assert "| A    | jax    | ours | 2   |" in table.markdown(rows, [])


@pytest.mark.parametrize(
    ("name", "first"), [("benchmarks", "A, s/epoch"), ("gpu", "P, fit, arrays, us/batch")]
)
def test_a_page_on_speed_has_the_figures_of_its_run(table, name, first):
    from benchmarks import page

    text = (ROOT / "docs" / f"{name}.md").read_text()
    lines = (ROOT / "docs" / f"{name}.jsonl").read_text()
    assert page.written(text, lines) == text
    assert page.rows_of(lines)[0].work == first
    assert page.written(text, lines.replace(first, "B, s/epoch")) != text
