"""The kind of a user's data is asked once for each call, and known from then on."""

import copy

import keras
import numpy as np
import pytest
from small import X, Y, model

import wholestep as ws
from wholestep.data import classify, kinds, open_batches


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return X[:4], Y[:4]


class Rows:
    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return X[row], Y[row]


CALLS = {
    "fit": lambda trainer: trainer.fit(X, Y, epochs=2, validation_split=0.25, verbose=0),
    "evaluate": lambda trainer: trainer.evaluate(X, Y, verbose=0),
    "predict": lambda trainer: trainer.predict(X, verbose=0),
    "steps": lambda trainer: list(trainer.steps((X, Y), epochs=2)),
    "update": lambda trainer: trainer.update((X, Y)),
    "Batches": lambda trainer: ws.Batches((X, Y), 4),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_asks_once_for_the_kind_of_its_data(monkeypatch, call):
    asked = []
    ask = kinds.is_nest_of_arrays
    monkeypatch.setattr(
        kinds, "is_nest_of_arrays", lambda source: asked.append(type(source)) or ask(source)
    )
    CALLS[call](ws.Trainer(model()))
    # of `fit`: the data, and the two parts that are split
    assert len(asked) == {"fit": 3, "update": 0}.get(call, 1)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (X, "ARRAYS"),
        (["a", "b"], "ARRAYS"),
        ([{"x": X}, {"x": X}], "ARRAYS"),
        ([{"x": 1}, {"x": 2}], "ROWS"),
        (Rows(), "ROWS"),
        (iter([X]), "STREAM"),
        (Numbered(), "NUMBERED"),
        (ws.Batches(X, 4), "BATCHES"),
        (None, "UNKNOWN"),
    ],
)
def test_kinds(source, kind):
    data = classify(source)
    assert data.kind.name == kind
    assert classify(data) is data
    assert data.are_ready == (kind in ("STREAM", "NUMBERED", "BATCHES"))
    assert data.keeps_position == (kind == "BATCHES")


def test_labels_make_a_tuple_of_arrays_alone():
    data = classify(X)
    assert [
        data.with_labels(*labels).are_arrays
        for labels in ((Y, None), (None, None), (iter([Y]), None))
    ] == [*(True, True, False)]
    with pytest.raises(ws.BatchError, match="labels where it has weights"):
        data.with_labels(None, Y)


def test_prepared_batches_share_the_position_and_are_not_resident():
    batches = ws.Batches(np.arange(8.0), 4, shuffle=False)
    doubled = open_batches(classify(batches), prepare=lambda batch: 2 * batch)
    assert doubled.arrays is None
    assert next(doubled).tolist() == [0, 2, 4, 6]
    assert batches.position == (0, 1)
    assert next(batches).tolist() == [4, 5, 6, 7]
    assert doubled.position == (1, 0)
    assert doubled.in_order().load(0, 1).tolist() == [8, 10, 12, 14]
    assert batches.arrays is not None
    other = copy.copy(batches)
    assert next(other).tolist() == [0, 1, 2, 3]
    assert batches.position == (1, 0)
