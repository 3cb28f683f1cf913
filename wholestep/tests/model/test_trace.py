"""A trace's properties hold for all batches of its shapes, and are not mixed up with others."""

import keras
import numpy as np
import pytest
from shares import share

import wholestep as ws

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


class ByName(ws.Objective):
    """A term named after the batch's key; `coefficients` count."""

    def __init__(self, **coefficients):
        self.coefficients = coefficients

    def __call__(self, model, batch, training):
        ((name, x),) = batch.items()
        return {
            name: ws.Mean(
                model(x, training=training)[:, 0] ** 2, coefficient=self.coefficients.get(name, 1.0)
            )
        }


def trainer(objective):
    keras.utils.set_random_seed(0)
    return ws.Trainer(
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), objective, optimizer="sgd"
    )


@pytest.mark.parametrize("num", share([40, 1]))
def test_terms_of_other_names_are_not_added_up(num):
    batches = [{"a": X}] * num + [{"b": X}] * 2
    for _ in range(2):
        made = trainer(ByName())
        for attempt in range(2):  # it is no better the second time
            with pytest.raises(
                ws.SpecificationError,
                match=r"same terms and metrics.*\['loss', 'b'\] after \['loss', 'a'\]",
            ):
                made.fit(iter(batches), verbose=0)
            assert made.model.optimizer.iterations == (attempt + 1) * num
    with pytest.raises(ws.SpecificationError, match="same terms and metrics"):
        made.evaluate(iter(batches), verbose=0)


def test_updates_in_hand_may_be_of_different_kinds():
    made = trainer(ByName(b=2.0))
    for name in ("a", "b", "a", "b"):
        assert name in made.update({name: X})
    one = made.update({"a": X})
    two = made.update({"b": X})
    assert one["loss"] == one["a"]
    assert two["loss"] == pytest.approx(2 * two["b"])


@pytest.mark.slow
def test_a_batch_of_another_kind_may_assign_another_variable():
    class Counts(ws.Objective):
        def __init__(self):
            self.counts = {name: keras.Variable(0.0) for name in "ab"}

        def __call__(self, model, batch, training):
            (name,) = set(batch) - {"x"}
            self.counts[name].assign(self.counts[name] + 1.0)
            return ws.Mean(model(batch["x"], training=training)[:, 0] ** 2)

    batches = [{"x": X, name: np.ones((8, 1), "float32")} for name in "aaabbab"]
    made = trainer(objective := Counts())
    other = trainer(again := Counts())
    for step in made.steps(iter(batches)):
        if step.number == 5:
            taken = made.run.snapshot()
    assert [float(np.asarray(v)) for v in objective.counts.values()] == [4, 3]
    other.run.restore(taken)
    assert [step.number for step in other.steps(iter(batches))] == [6, 7]
    assert [float(np.asarray(v)) for v in again.counts.values()] == [4, 3]
    made.fit(iter(batches), verbose=0)
    assert [float(np.asarray(v)) for v in objective.counts.values()] == [8, 6]


def test_evaluations_of_different_kinds_are_told_apart():
    made = trainer(ByName(b=2.0))
    numbers = {}
    for name, rows in (("a", 8), ("b", 8), ("a", 5), ("b", 5), ("a", 8)):
        logs = made.evaluate({name: X[:rows]}, batch_size=8, verbose=0, return_dict=True)
        assert set(logs) == {"loss", name}
        numbers.setdefault((name, rows), logs)
        assert logs == numbers[name, rows]
    assert numbers["b", 5]["loss"] == pytest.approx(2 * numbers["a", 5]["loss"], rel=1e-6)


def test_evaluations_of_other_numbers_of_terms_are_told_apart():
    class Several(ByName):
        def __call__(self, model, batch, training):
            return {
                name: ws.Mean(model(x, training=training)[:, 0] ** 2) for name, x in batch.items()
            }

    made = trainer(Several())
    for names in ("a", "ab", "a", "abc", "ab"):
        logs = made.evaluate(dict.fromkeys(names, X), batch_size=4, verbose=0, return_dict=True)
        assert logs["loss"] == pytest.approx(len(names) * logs["a"], rel=1e-6)
        assert set(made.update(dict.fromkeys(names, X))) == {"loss", *names}
