"""Sample weights by which a mean cannot be divided are refused, by their first row."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.data.weights import check_weights

X = np.zeros(2)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, -1.0], "-1.0 in row 1"),
        ([np.nan, 1.0], "nan in row 0"),
        ([0.0, 0.0], "weigh at least one row"),
    ],
)
def test_bad_weights(weight, message):
    with pytest.raises(ws.BatchError, match=message):
        check_weights((X, X, np.array(weight)), all_zero=True)


def test_weights_of_zero_are_allowed_where_others_weigh():
    check_weights((X, X, np.zeros(2)), all_zero=False)
    check_weights((X, X, np.array([0.0, 1.0])), all_zero=True)


def test_what_is_no_batch_with_weights_is_left_alone():
    for batch in (
        X,
        (X, -X),
        {"sample_weight": np.array([-1.0])},
        [X, X, np.array([-1.0, np.nan])],
    ):
        check_weights(batch, all_zero=True)


def test_only_a_leaf_that_divides_must_not_be_negative():
    signed = np.array([[1.0, -1.0], [1.0, 1.0]])
    plain = np.ones(2)
    check_weights((X, X, (signed, plain)), all_zero=True, divisors={1})
    with pytest.raises(
        ws.BatchError, match=r"sample_weight\[0\] must be finite and not negative.*in row 0"
    ):
        check_weights((X, X, (signed, plain)), all_zero=True, divisors={0})
    with pytest.raises(
        ws.BatchError, match=r"sample_weight\[0\] must be finite\. .*inf.* in row 1"
    ):
        check_weights((X, X, (np.array([-1.0, np.inf]), plain)), all_zero=True, divisors={1})


def test_rows_may_have_numbers_of_their_own():
    with pytest.raises(ws.BatchError, match="in row 71"):
        check_weights((X, X, np.array([1.0, -1.0])), all_zero=True, numbers=np.array([70, 71]))


@pytest.mark.parametrize("between", ["update", "evaluate"])
def test_a_batch_without_weights_ends_no_check_of_later_weights(between):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    x = np.ones((4, 3), "float32")
    y = np.ones((4, 1), "float32")
    weight = np.ones(4, "float32")
    trainer = ws.Trainer(model)
    trainer.update((x, y, weight))
    if between == "update":
        trainer.update((x, y))
    else:
        trainer.evaluate(x, y, verbose=0)
    with pytest.raises(
        ws.BatchError,
        match="sample_weight must be finite and not negative: the loss is divided by it",
    ):
        trainer.update((x, y, -weight))
