"""What an update starts from: parameters must be finite; of buffers, what may be infinite on purpose is not blamed."""

import keras
import numpy as np
import pytest

from wholestep import engines
from wholestep.reports.diagnosis import look, unsound
from wholestep.state import State, Variables


def found(values, *, are_rows_left=True):
    """Return what is not sound, where these are the values of (kernel, shift, count)."""
    kernel = keras.Variable(np.array(values[0], "float32"), name="kernel")
    shift = keras.Variable(np.array(values[1], "float32"), name="shift")
    count = keras.Variable(np.array(values[2]), dtype="int32", trainable=False, name="count")
    variables, engine = Variables([kernel], [], [count, shift], []), engines.choose()
    params, slots, buffers = engine.read_variables(variables)
    seen = engine.fetch(look(engine, variables, State(params, slots, buffers, [], (), (), ())))
    assert len(seen) == 2  # whole numbers are always finite
    return unsound(variables, seen, are_rows_left=are_rows_left)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_parameter_that_is_not_finite_is_named(bad):
    assert found(([1, bad], [0.0], 3)) == ["kernel"]
    assert found(([1, bad], [0.0], 3), are_rows_left=False) == ["kernel"]


def test_a_buffer_counts_if_it_is_nan_or_no_row_is_left():
    assert found(([1.0], [0, -np.inf], 3)) == []
    assert found(([1.0], [0, -np.inf], 3), are_rows_left=False) == ["shift"]
    assert found(([1.0], [0, np.nan], 3)) == ["shift"]
    assert found(([np.inf], [-np.inf, np.nan], 3)) == ["kernel", "shift"]


def test_what_is_finite_is_not_blamed_though_no_row_is_left():
    assert found(([3e38, -1], [0.0], 3), are_rows_left=False) == []
