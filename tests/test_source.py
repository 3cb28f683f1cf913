"""Whatever a user may pass becomes nested numpy arrays."""

import numpy as np
import pytest

import wholestep as ws
from wholestep.source import (
    Arrays,
    Items,
    Ready,
    Stream,
    class_weighted,
    is_nest_of_arrays,
    open_source,
    to_numpy,
    without_none,
)


def test_kinds():
    assert isinstance(open_source(np.zeros(3)), Arrays)
    assert isinstance(open_source((np.zeros(3), {"a": np.zeros(3)}, None)), Arrays)
    assert isinstance(open_source([{"x": 1}, {"x": 2}]), Items)
    assert isinstance(open_source(iter([np.zeros(3)])), Stream)
    assert Ready.__doc__


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
