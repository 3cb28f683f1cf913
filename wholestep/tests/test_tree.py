"""A leaf is named by its path."""

import numpy as np
import pytest

from wholestep import tree
from wholestep.errors import BatchError


def test_names():
    nested = {"b": [np.zeros(2)], "a": (np.zeros(2), np.zeros(2))}
    names = {label for label, _ in tree.named_leaves(nested)}
    assert names == {"batch['a'][0]", "batch['a'][1]", "batch['b'][0]"}


def test_num_rows():
    assert tree.num_rows({"a": np.zeros((3, 2)), "b": np.zeros(3)}) == 3
    assert tree.num_bytes({"a": np.zeros((3, 2), "float32")}) == 24
    np.testing.assert_array_equal(
        tree.map_leaves(lambda a, b: a + b, [np.ones(2)], [np.ones(2)])[0], [2, 2]
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, r"batch\['a'\]: 3 rows, batch\['b'\]: 4 rows"),
        ({"a": np.float32(3)}, r"batch\['a'\] must be an array with a leading row axis"),
        ({}, "must hold at least one array"),
    ],
)
def test_rows_that_do_not_fit_are_named(data, message):
    with pytest.raises(BatchError, match=message):
        tree.num_rows(data)
