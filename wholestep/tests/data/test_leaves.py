"""Leaves become numpy arrays of numbers; what cannot be trained on is refused by its name."""

import numpy as np
import pytest

import wholestep as ws
from wholestep.data.kinds import is_nest_of_arrays
from wholestep.data.leaves import (
    by_leaf,
    numpy_batch,
    stack_column,
    to_numpy,
    with_arrays,
    without_none,
)


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


def test_a_batch_that_is_a_list_is_a_tuple_of_numbers():
    x, y = numpy_batch([np.zeros(2), np.array([1, 2]), None])
    assert (x.dtype, y.tolist()) == (np.float32, [1, 2])


@pytest.mark.parametrize(
    ("leaf", "way"),
    [
        (np.array(["a", None], object), "encode strings"),
        (np.array([1j]), "real and the imaginary"),
        (np.array([None]), "leave out"),
    ],
)
def test_what_is_no_number_is_refused_with_a_way_out(leaf, way):
    with pytest.raises(ws.BatchError, match=rf"batch\['a'\] must hold .*{way}"):
        numpy_batch({"a": leaf, "b": np.zeros(1)})


def test_lists_of_numbers_are_leaves_and_lists_of_others_are_not():
    row = with_arrays({"a": [1, 2], "b": [(3,), "c"]})
    assert row["a"].tolist() == [1, 2]
    assert row["b"] == [(3,), "c"]


def test_rows_are_taken_apart_by_leaf():
    (_, numbers), (path, vectors) = by_leaf(
        [(1, [2, 3]), (4, [5, 6])], np.array([7, 8]), (0, [0, 0])
    )
    assert (numbers, path) == ([1, 4], (1,))
    assert [v.tolist() for v in vectors] == [[2, 3], [5, 6]]
    with pytest.raises(ws.BatchError, match=r"row\['b'\] in row 8, row\['a'\] in others"):
        by_leaf([{"a": 1}, {"b": 1}], np.array([7, 8]), {"a": 0})


def test_a_leaf_has_one_shape_in_all_rows():
    rows = np.array([7, 8])
    assert stack_column(("a",), rows, [[1], [2]], "").tolist() == [[1], [2]]
    assert stack_column(("a",), rows, [None, None], "") is None
    with pytest.raises(
        ws.BatchError,
        match=r"row\['a'\] must have one shape.*\(2,\) in row 8, \(1,\) in row 7.*Try: pad",
    ):
        stack_column(("a",), rows, [[1], [2, 3]], "pad them.")


def test_a_nest_of_anything_else_is_no_nest_of_arrays():
    assert is_nest_of_arrays((np.zeros(1), [np.zeros(1), None]))
    assert not is_nest_of_arrays([np.zeros(1), 3])
    assert not is_nest_of_arrays([None])
    assert not is_nest_of_arrays("text")


class Table:
    """As much of a pandas DataFrame, or of a Series, as is asked for."""

    def __init__(self, *columns):
        self.columns, self.ndim = columns, 1 if len(columns) == 1 else 2
        self.dtypes = [column.dtype for column in columns]

    def to_numpy(self, dtype=None):
        columns = (
            self.columns[0]
            if self.ndim == 1
            else np.stack([c.astype(object) for c in self.columns], 1)
        )
        return columns if dtype is None else columns.astype(dtype)


Table.__module__ = "pandas"


def test_a_table_is_an_array_and_a_column_has_an_axis():
    mixed = numpy_batch(Table(np.array([1, 2]), np.array([True, False])))
    assert (mixed.dtype, mixed.tolist()) == (np.float32, [[1, 1], [2, 0]])
    assert numpy_batch(Table(np.arange(3))).shape == (3, 1)


@pytest.mark.parametrize(
    "column", [[1, 2.5], [True, 1], [[1, 2], [3, 4]], [np.float32(1), np.int64(2)]]
)
def test_an_object_column_of_numbers_is_refused_with_the_way_out(column):
    with pytest.raises(
        ws.errors.BatchError,
        match=r"must hold numbers. Received: dtype object. Try: .*\.astype\(.float32.\)",
    ):
        numpy_batch((np.array(column, object), np.ones(2)))


@pytest.mark.parametrize(
    ("column", "attempt"), [([1, None], "leave out what is None"), ([1, "2"], "encode strings")]
)
def test_an_object_column_of_more_than_numbers_has_another_way_out(column, attempt):
    with pytest.raises(ws.errors.BatchError, match=f"must hold numbers. .*Try: {attempt}"):
        numpy_batch((np.array(column, object), np.ones(2)))
