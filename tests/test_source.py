"""Whatever a user may pass becomes nested numpy arrays."""

import numpy as np
import pytest

import wholestep as ws
from wholestep.data.class_weight import class_weighted
from wholestep.data.source import (
    Arrays,
    BatchStream,
    IndexedBatches,
    IndexedRows,
    is_nest_of_arrays,
    open_source,
    to_numpy,
    without_none,
)


def test_kinds():
    assert isinstance(open_source(np.zeros(3)), Arrays)
    assert isinstance(open_source((np.zeros(3), {"a": np.zeros(3)}, None)), Arrays)
    assert isinstance(open_source([{"x": 1}, {"x": 2}]), IndexedRows)
    assert isinstance(open_source(iter([np.zeros(3)])), BatchStream)
    assert IndexedBatches.__doc__


def test_floats_become_floatx_and_integers_stay():
    assert to_numpy(np.zeros(2, "float64")).dtype == np.float32
    assert to_numpy(np.zeros(2, "int64")).dtype == np.int64


def test_what_has_to_numpy_or_detach_is_asked():
    class Frame:
        def to_numpy(self):
            return np.arange(3)

    class Tensor:
        def detach(self):
            return self

        def cpu(self):
            return np.arange(2.0)

    assert to_numpy(Frame()).tolist() == [0, 1, 2]
    assert to_numpy(Tensor()).dtype == np.float32
    assert is_nest_of_arrays({"a": Frame()})


def test_none_is_dropped():
    assert without_none((1, 2, None)) == (1, 2)
    with pytest.raises(ws.BatchError, match="labels where it has weights"):
        without_none((1, None, 2))


def test_class_weights_of_numbers_and_one_hot_labels():
    weigh = class_weighted({0: 2.0, 3: 0.5})
    labels = np.array([0, 1, 3])
    for y in (labels, labels[:, None], np.eye(4)[labels]):
        np.testing.assert_array_equal(weigh((np.zeros(3), y))[2], [2, 1, 0.5])


@pytest.mark.parametrize(
    "batch", [(np.zeros(2), np.zeros(2), np.ones(2)), np.zeros(2), (np.zeros(2), np.zeros((2, 3, 4)))]
)
def test_class_weights_that_have_no_meaning(batch):
    with pytest.raises(ws.BatchError, match="class_weight needs"):
        class_weighted({0: 1.0})(batch)


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_a_list_of_numbers_is_an_array_in_every_row():
    batch = open_source(Rows([{"x": [1, 2, 3], "y": 4}, {"x": [5, 6, 7], "y": 8}])).load(np.arange(2))
    assert batch["x"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch["y"].tolist() == [4, 8]


def test_what_is_none_in_every_row_is_none():
    batch = open_source(Rows([({"x": np.ones(2), "mask": None}, 4.0), ({"x": np.zeros(2), "mask": None}, 5.0)]))
    assert isinstance(batch, IndexedRows)
    x, y = batch.load(np.arange(2))
    assert x["mask"] is None
    assert (x["x"].tolist(), y.tolist()) == ([[1, 1], [0, 0]], [4, 5])


def test_a_transform_may_make_numbers_of_strings():
    rows = [{"text": "ab"}, {"text": "abc"}]
    with pytest.raises(ws.BatchError, match=r"batch\['text'\] must hold numbers"):
        open_source(rows).load(np.arange(2))
    counted = open_source(rows, lambda batch: {"num": np.array([len(t) for t in batch["text"]])})
    assert counted.load(np.arange(2))["num"].tolist() == [2, 3]


def test_columns_of_uneven_lists_name_the_row():
    class Columns(Rows):
        def __getitems__(self, numbers):
            return {"x": [self.rows[number] for number in numbers]}

    columns = open_source(Columns([[1], [2], [3, 4]]))
    assert columns.load(np.array([1, 0]))["x"].tolist() == [[2], [1]]
    with pytest.raises(ws.BatchError, match=r"row\['x'\] must have one shape .* \(2,\) in row 2, \(1,\) in row 1"):
        columns.load(np.array([1, 2]))
