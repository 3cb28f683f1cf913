"""A compiled loss before its reduction is the values and the weights that Keras itself reduces to
one number.
"""

import keras
import numpy as np
import pytest
from keras import ops

import wholestep as ws
from wholestep.model.losses import LossCall, unreduced
from wholestep.model.objective import ScalarTerm

Y = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], "float32")
# squared errors of the rows: 1, 4, 16, 64
P = Y + np.array([[1.0], [2.0], [4.0], [8.0]], "float32")
WEIGHT = np.array([1.0, 0.0, 3.0, 4.0], "float32")
COLUMN = WEIGHT[:, None]


def call(loss, weight=None, coefficient=1.0):
    return LossCall(
        loss, coefficient, "mse", ops.convert_to_tensor(Y), ops.convert_to_tensor(P), weight
    )


def number(term):
    total, weight = term.sums()
    return float(total) / float(weight)


@pytest.mark.parametrize("weight", [None, WEIGHT, COLUMN], ids=["none", "rows", "column"])
@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
)
def test_a_term_is_the_number_that_keras_reduces_to(reduction, weight):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    term = unreduced(call(loss, weight, coefficient=3.0))
    assert isinstance(term, ws.Sum if reduction == "sum" else ws.Mean)
    assert term.coefficient == 3.0
    assert number(term) == float(loss(Y, P, weight))


def test_what_a_mean_is_divided_by():
    over_rows = unreduced(call(keras.losses.MeanSquaredError(), WEIGHT))
    assert [float(part) for part in over_rows.sums()] == [305.0, 4.0]
    over_weights = unreduced(
        call(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), WEIGHT)
    )
    assert [float(part) for part in over_weights.sums()] == [305.0, 8.0]
    halved = unreduced(
        call(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), WEIGHT / 2)
    )
    assert [float(part) for part in halved.sums()] == [152.5, 4.0]


def test_a_value_of_weight_zero_is_never_looked_at():
    given = call(keras.losses.MeanSquaredError(), WEIGHT)
    hidden = given._replace(y_pred=ops.convert_to_tensor(np.where(COLUMN == 0, np.nan, P)))
    assert number(unreduced(hidden)) == number(unreduced(given))


def test_what_reduces_itself_stays_whole():
    class Own(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.max(ops.abs(y_true - y_pred))

    term = unreduced(call(Own(), coefficient=2.0))
    assert isinstance(term, ScalarTerm)
    assert (float(term.values), term.coefficient) == (8.0, 2.0)


def test_a_scalar_is_no_value_of_a_row():
    class Scalar(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.sum(ops.abs(y_true - y_pred))

    term = unreduced(call(Scalar()))
    assert isinstance(term, ScalarTerm)
    assert number(term) == 30.0


def test_weights_of_more_axes_than_the_values_are_refused():
    with pytest.raises(ws.BatchError, match=r"shape \(4, 2\) beside losses of shape \(4,\)"):
        unreduced(call(keras.losses.MeanSquaredError(), np.ones((4, 2), "float32")))


def test_a_loss_must_have_a_reduction():
    with pytest.raises(ws.SpecificationError, match="reduction='none'"):
        unreduced(call(keras.losses.MeanSquaredError(reduction="none")))
