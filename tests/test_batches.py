"""Every row once an epoch, from any kind of source; a place is two integers."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wholestep as ws
from wholestep.batches import check_weights, in_sequence


def ids(batch):
    return np.asarray(batch["x"]).reshape(len(batch["x"]), -1)[:, 0].tolist()


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
def test_every_row_once_an_epoch(num_rows, batch_size, seed):
    data = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=seed)
    for epoch in range(2):
        assert data.position == (epoch, 0)
        seen = [ids(batch) for batch in data]
        assert sorted(row for rows in seen for row in rows) == list(range(num_rows))
        assert len(seen) == len(data)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 50))
def test_seek_of_position_is_the_identity(num_rows, batch_size, steps):
    data = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=2)
    for _ in range(steps):
        next(data)
    other = ws.Batches({"x": np.arange(num_rows)}, batch_size, seed=2)
    other.seek(*data.position)
    assert [ids(next(data)) for _ in range(3)] == [ids(next(other)) for _ in range(3)]


def test_another_order_each_epoch():
    data = ws.Batches({"x": np.arange(30)}, 30, seed=1)
    assert ids(next(data)) != ids(next(data))


class Rows:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        assert isinstance(i, int)
        return {"x": np.float64(i), "y": np.full(2, i)}


class ManyRows(Rows):
    def __getitems__(self, numbers):
        return [self[n] for n in numbers]


@pytest.mark.parametrize("source", [Rows(), ManyRows()])
def test_a_sequence_of_rows(source):
    batches = list(ws.Batches(source, 4, shuffle=False))
    assert [ids(b) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["x"].dtype == np.float32
    assert batches[0]["y"].shape == (4, 2)


class Ready(keras.utils.PyDataset):
    began = ended = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.full((i + 1, 1), i), np.zeros(i + 1)

    def on_epoch_begin(self):
        self.began += 1

    def on_epoch_end(self):
        self.ended += 1


def test_a_py_dataset_is_shuffled_by_batches():
    source = Ready()
    data = ws.Batches(source, seed=3)
    sizes = [sorted(len(batch[0]) for batch in data) for _ in range(2)]
    assert sizes == [[1, 2, 3, 4]] * 2
    assert (source.began, source.ended) == (2, 2)


def test_a_generator_is_taken_as_it_comes_and_can_be_looked_into():
    data = ws.Batches(np.full((2,), i) for i in range(3))
    assert data.example().tolist() == [0, 0]
    assert [batch.tolist() for batch in data] == [[0, 0], [1, 1], [2, 2]]
    assert data.position == (1, 0)
    with pytest.raises(TypeError):
        len(data)


def test_a_list_of_batches_begins_again_and_can_be_sought_in():
    class Stream:
        def __iter__(self):
            return iter([(np.full((2, 1), i), np.zeros(2)) for i in range(3)])

    data = ws.Batches(Stream())
    assert [int(x[0, 0]) for x, _ in data] == [int(x[0, 0]) for x, _ in data] == [0, 1, 2]
    data.seek(2, 1)
    assert int(next(data)[0][0, 0]) == 1


def test_a_tf_dataset():
    tf = pytest.importorskip("tensorflow")
    source = tf.data.Dataset.from_tensor_slices((np.arange(5.0), np.arange(5))).batch(2)
    batches = list(ws.Batches(source))
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    assert batches[0][0].dtype == np.float32


def test_in_sequence_leaves_ready_batches_their_size():
    assert in_sequence(Ready(), 7).is_ready
    assert in_sequence(np.zeros(9), 7).grouping.size == 7


@pytest.mark.parametrize(
    ("source", "batch_size", "error", "message"),
    [
        (np.zeros((3, 2)), 0, ws.SpecificationError, "at least 1"),
        (np.zeros((3, 2)), 2.5, ws.SpecificationError, "whole number"),
        (Ready(), 4, ws.SpecificationError, "Ready-made batches have their own size"),
        (np.zeros((0, 2)), 4, ws.BatchError, "at least one row"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, 4, ws.BatchError, "same number of rows"),
        (np.array(["a", "b"]), 2, ws.BatchError, "must hold numbers"),
        (np.array([[1], [1, 2]], dtype=object), 2, ws.BatchError, "must hold numbers"),
        (3, 2, ws.BatchError, "Data must be nested arrays"),
        ((i for i in ()), None, None, None),
    ],
)
def test_bad_sources(source, batch_size, error, message):
    if error is None:
        with pytest.raises(ws.BatchError, match="at least one batch"):
            ws.Batches(source).example()
        return
    with pytest.raises(error, match=message):
        ws.Batches(source, batch_size)


@pytest.mark.parametrize(
    ("weight", "message"),
    [([1.0, -1.0], "-1.0 in row 1"), ([np.nan, 1.0], "nan in row 0"), ([0.0, 0.0], "weigh at least one row")],
)
def test_bad_weights(weight, message):
    with pytest.raises(ws.BatchError, match=message):
        check_weights((np.zeros(2), np.zeros(2), np.array(weight)), all_zero=True)
