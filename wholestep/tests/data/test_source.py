"""Whatever a user may pass becomes nested numpy arrays."""

import numpy as np
import pytest

import wholestep as ws
from wholestep.arguments import split
from wholestep.data import classify
from wholestep.data.source import Arrays, IndexedBatches, IndexedRows, open_source
from wholestep.data.stream import BatchStream


def opened(source, transform=None):
    return open_source(classify(source), transform)


def test_kinds():
    assert isinstance(opened(np.zeros(3)), Arrays)
    assert isinstance(opened((np.zeros(3), {"a": np.zeros(3)}, None)), Arrays)
    assert isinstance(opened([{"x": 1}, {"x": 2}]), IndexedRows)
    assert isinstance(opened(iter([np.zeros(3)])), BatchStream)
    assert IndexedBatches.__doc__


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_a_list_of_numbers_is_an_array_in_every_row():
    batch = opened(Rows([{"x": [1, 2, 3], "y": 4}, {"x": [5, 6, 7], "y": 8}])).load(np.arange(2))
    assert batch["x"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch["y"].tolist() == [4, 8]


def test_what_is_none_in_every_row_is_none():
    batch = opened(
        Rows([({"x": np.ones(2), "mask": None}, 4.0), ({"x": np.zeros(2), "mask": None}, 5.0)])
    )
    assert isinstance(batch, IndexedRows)
    x, y = batch.load(np.arange(2))
    assert x["mask"] is None
    assert (x["x"].tolist(), y.tolist()) == ([[1, 1], [0, 0]], [4, 5])


def test_a_transform_may_make_numbers_of_strings():
    rows = [{"text": "ab"}, {"text": "abc"}]
    counted = opened(rows, lambda batch: {"num": np.array([len(t) for t in batch["text"]])})
    assert counted.load(np.arange(2))["num"].tolist() == [2, 3]


def test_columns_of_uneven_lists_name_the_row():
    class Columns(Rows):
        def __getitems__(self, numbers):
            return {"x": [self.rows[number] for number in numbers]}

    columns = opened(Columns([[1], [2], [3, 4]]))
    assert columns.load(np.array([1, 0]))["x"].tolist() == [[2], [1]]
    with pytest.raises(
        ws.BatchError, match=r"row\['x'\] must have one shape .* \(2,\) in row 2, \(1,\) in row 1"
    ):
        columns.load(np.array([1, 2]))


def test_inputs_that_are_arrays_and_nests_are_one_nest():
    x = np.arange(12.0).reshape(4, 3)
    source = opened([{"a": x}, x[:, :1]])
    assert isinstance(source, Arrays)
    assert source.num_rows == 4
    assert isinstance(opened([{"a": x}, {"a": x}]), IndexedRows)
    assert isinstance(opened([(x[0], 1.0), (x[1], 2.0)]), IndexedRows)


class Column:
    """A stand-in for `datasets.arrow_dataset.Column`, which gives its content for `[:]` alone."""

    __module__ = "datasets.arrow_dataset"

    def __getitem__(self, rows):
        return [[1.0, 2.0], [3.0, 4.0]][rows]

    def __len__(self):
        return 2


def test_columns_of_a_data_set_are_arrays():
    source = opened((Column(), np.zeros(2)))
    assert source.arrays[0].dtype == "float32"
    np.testing.assert_array_equal(source.load(np.array([1]))[0], [[3.0, 4.0]])


class Table:
    """A stand-in for a pandas table whose index holds floats, by which it is sliced."""

    shape = (2, 2)
    dtype = np.dtype("float32")

    def __getitem__(self, rows):
        raise KeyError(rows)

    def to_numpy(self):
        return np.array([[1.0, 2.0], [3.0, 4.0]], "float32")


@pytest.mark.parametrize("x", [Column(), Table()], ids=["column", "table"])
def test_rows_are_split_off_by_their_number(x):
    first, last = split(classify(x), np.array([0.0, 1.0]), None, 0.5)
    np.testing.assert_array_equal(first[0], [[1.0, 2.0]])
    np.testing.assert_array_equal(last[0], [[3.0, 4.0]])
    assert (first[1].tolist(), last[1].tolist()) == ([0.0], [1.0])


class BatchMapDataset:
    """A stand-in for grain's, whose items are batches."""

    __module__ = "grain.python"
    parents = ()

    def __getitem__(self, number):
        if number > 1:
            raise IndexError
        return np.full((2, 3), number)

    def __len__(self):
        return 2

    def __iter__(self):
        return map(self.__getitem__, range(2))


class MapDataset(BatchMapDataset):
    """A stand-in for what makes something of each of another's items."""

    __module__ = "grain.python"
    parents = (BatchMapDataset(),)


class RowMapDataset(BatchMapDataset):
    """A stand-in for a grain.MapDataset of rows."""

    __module__ = "grain.python"


@pytest.mark.parametrize("make", [BatchMapDataset, MapDataset])
def test_items_of_a_grain_data_set_that_batches_are_batches(make):
    batches = list(ws.Batches(make()))
    assert [batch.shape for batch in batches] == [(2, 3), (2, 3)]
    assert isinstance(opened(RowMapDataset()), IndexedRows)


@pytest.mark.parametrize("text", [np.array([b"a", None], object), np.array(["a", 2], object)])
def test_text_is_named_as_such(text):
    with pytest.raises(ws.BatchError, match="TextVectorization"):
        next(ws.Batches(iter([text])))


@pytest.mark.parametrize("how", ["dataset", "function"])
def test_data_that_a_strategy_has_shared_out_are_refused(how):
    tf = pytest.importorskip("tensorflow")
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    data = tf.data.Dataset.from_tensors(np.zeros((4, 3)))
    if how == "dataset":
        shared = strategy.experimental_distribute_dataset(data)
    else:
        shared = strategy.distribute_datasets_from_function(lambda context: data)
    with pytest.raises(
        ws.BatchError, match=r"must be whole.*a Distributed\w+, which a strategy has shared out"
    ):
        opened(shared)
