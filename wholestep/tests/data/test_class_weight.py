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
    [(np.zeros(2),) * 4, np.zeros(2), (np.zeros(2), np.zeros((2, 3, 4)))],
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


def test_sample_weights_multiply():
    weigh = class_weighted({1: 3.0})
    labels = np.array([0, 1])
    assert weigh((np.zeros(2), labels, np.array([2.0, 5.0])))[2].tolist() == [2, 15]
    assert weigh((np.zeros(2), labels, np.ones((2, 2))))[2].tolist() == [[1, 1], [3, 3]]


def test_several_outputs_have_their_own_classes():
    labels = {"animal": np.array([0, 1]), "age": np.array([5.0, 7.0])}
    weigh = class_weighted({"animal": {1: 3.0}}, ["animal", "age"])
    found = weigh((np.zeros(2), labels))[2]
    assert {name: weight.tolist() for name, weight in found.items()} == {
        "animal": [1, 3],
        "age": [1, 1],
    }
    listed = weigh((np.zeros(2), tuple(labels.values()), np.array([2.0, 5.0])))[2]
    assert [weight.tolist() for weight in listed] == [[2, 15], [2, 5]]
    named = weigh((np.zeros(2), labels, {"age": np.array([2.0, 0.0])}))[2]
    assert [weight.tolist() for weight in named.values()] == [[1, 3], [2, 0]]


def test_outputs_that_do_not_exist_are_refused():
    with pytest.raises(ws.SpecificationError, match=r"must name outputs.*Received: \['animals'\]"):
        class_weighted({"animals": {1: 3.0}}, ["animal", "age"])
    with pytest.raises(ws.BatchError, match=r"needs labels of the outputs \['animal'\]"):
        class_weighted({"animal": {1: 3.0}})((np.zeros(2), {"age": np.zeros(2)}))


def test_fit_weighs_the_classes_of_each_output_and_the_rows():
    def trained(**options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in ("one", "two")}
        made = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile("sgd", {"one": loss, "two": loss})
        numbers = np.random.default_rng(1)
        x = numbers.normal(size=(8, 3))
        y = {name: numbers.integers(0, 2, 8) for name in ("one", "two")}
        if options.pop("by_hand", False):
            rows = options["sample_weight"]
            options["sample_weight"] = {"one": rows * np.where(y["one"] == 1, 3.0, 1), "two": rows}
        ws.Trainer(made).fit(x, y, batch_size=4, verbose=0, **options)
        return made.get_weights()

    rows = np.linspace(0.5, 2, 8)
    both = trained(class_weight={"one": {1: 3.0}}, sample_weight={"one": rows, "two": rows})
    for a, b in zip(both, trained(sample_weight=rows, by_hand=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
