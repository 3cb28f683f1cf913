"""Class weights become the weight of every row, by its class; other values are refused."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.data.weights import class_weighted


def test_class_weights_of_numbers_and_one_hot_labels():
    weigh = class_weighted({0: 2.0, 3: 0.5})
    labels = np.array([0, 1, 3])
    for y in (labels, labels[:, None], np.eye(4)[labels]):
        np.testing.assert_array_equal(weigh((np.zeros(3), y))[2], [2, 1, 0.5])


@pytest.mark.parametrize(
    "batch",
    [(np.zeros(2), np.zeros(2), np.ones(2)), np.zeros(2), (np.zeros(2), np.zeros((2, 3, 4)))],
)
def test_class_weights_that_have_no_meaning(batch):
    with pytest.raises(ws.BatchError, match="class_weight needs"):
        class_weighted({0: 1.0})(batch)


def test_the_weights_are_floatx_and_the_batch_stays():
    x = np.zeros((2, 3))
    y = np.array([1.0, 0.0])
    batch = class_weighted({1: 3})((x, y))
    assert batch[0] is x
    assert batch[1] is y
    assert (batch[2].dtype, batch[2].tolist()) == (np.float32, [3.0, 1.0])


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, "a weight for each class"),
        ({0: np.nan}, "a weight for each class"),
        ({0: "1"}, "a weight for each class"),
        ({"a": 1.0}, "the classes' numbers"),
        ({0.5: 1.0}, "the classes' numbers"),
        ([1.0, 2.0], r"dict\(enumerate\(weights\)\)"),
        (3.0, "a weight for each class"),
    ],
)
def test_what_does_not_map_classes_to_weights_is_refused_at_once(given, way):
    with pytest.raises(
        ws.SpecificationError, match=f"must map class numbers to finite weights.*Try: .*{way}"
    ):
        class_weighted(given)


def test_classes_that_are_no_numbers_are_refused_in_words():
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    for labels in (np.array(["a", "b"] * 4), np.array([None, 1] * 4)):
        with pytest.raises(ws.BatchError, match=r"class_weight needs classes that are numbers\."):
            ws.Trainer(made).fit(np.ones((8, 1)), labels, class_weight={0: 1.0, 1: 2.0}, verbose=0)
