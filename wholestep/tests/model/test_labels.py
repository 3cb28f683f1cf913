"""Class numbers are checked against the outputs that a loss compares them with."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.model.losses import (
    LabelRange,
    LossCall,
    check_labels,
    label_ranges,
    warn_of_broadcast,
)

ROWS = 6
CLASSES = 4
LABELS = np.array([0, 3, 1, 2, 0, 3])
OUTPUTS = np.zeros((ROWS, CLASSES), "float32")


def called(loss, labels=LABELS):
    return LossCall(loss, 1.0, "loss", labels, OUTPUTS, None)


def test_a_range_is_that_of_the_outputs_and_names_the_leaf():
    sparse = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    assert label_ranges(called(sparse), [OUTPUTS, LABELS]) == [LabelRange(1, CLASSES, -1)]


def test_only_sparse_labels_that_the_loss_was_given_have_a_range():
    sparse = keras.losses.SparseCategoricalCrossentropy()
    assert label_ranges(called(sparse), [LABELS.copy()]) == []
    assert label_ranges(called(keras.losses.CategoricalCrossentropy()), [LABELS]) == []


@pytest.mark.parametrize("label", [-1, CLASSES, 2.5, np.nan])
def test_the_first_row_that_is_no_class_is_named(label):
    labels = LABELS.astype("float32")
    labels[2] = labels[4] = label
    with pytest.raises(
        ws.BatchError, match=r"Class numbers in y\['b'\] must be whole.*0\.\.3.* in row 2"
    ):
        check_labels([LabelRange(1, CLASSES, None)], (OUTPUTS, {"a": OUTPUTS, "b": labels}))


def test_rows_may_have_numbers_of_their_own():
    labels = np.where(np.arange(ROWS) == 5, CLASSES, LABELS)
    with pytest.raises(ws.BatchError, match="4 in row 105"):
        check_labels([LabelRange(0, CLASSES, None)], (OUTPUTS, labels), numbers=np.arange(100, 106))


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint8"])
def test_classes_pass_and_so_does_the_one_that_is_ignored(dtype):
    labels = np.where(np.arange(ROWS) == 5, 200, LABELS).astype(dtype)
    check_labels([LabelRange(0, CLASSES, None)], (OUTPUTS, labels[:5]))
    check_labels([LabelRange(0, CLASSES, 200)], (OUTPUTS, labels))
    check_labels([], (OUTPUTS, labels))


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ((6, 2), (6, 1)),
        ((6, 1), (6, 2)),
        ((6, 5, 1), (6, 5, 3)),
        ((6, 5), (6, 5, 3)),
        ((6,), (6, 3)),
    ],
)
@pytest.mark.parametrize(
    "loss", [keras.losses.MeanSquaredError(), keras.losses.Huber(), keras.losses.Poisson()]
)
def test_labels_that_a_loss_of_keras_broadcasts_are_named_with_both_shapes(loss, given, made):
    shapes = [", ".join(["rows", *map(str, shape[1:])]) for shape in (given, made)]
    words = (
        rf"The labels of the loss 'out' .* labels of shape \({shapes[0]}\), outputs of shape "
        rf"\({shapes[1]}\)"
    )
    with pytest.warns(UserWarning, match=words):
        assert warn_of_broadcast(LossCall(loss, 1.0, "out", np.zeros(given), np.zeros(made), None))


class Wide(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.abs(y_true[:, :1] - y_pred) * y_true[:, 1:]


@pytest.mark.parametrize(
    ("loss", "given", "made"),
    [
        (keras.losses.MeanSquaredError(), (6,), (6, 1)),
        (keras.losses.MeanSquaredError(), (6, 1), (6,)),
        (keras.losses.MeanSquaredError(), (6, 5, 1), (6, 5)),
        (keras.losses.MeanSquaredError(), (6, 3), (6, 3)),
        (keras.losses.SparseCategoricalCrossentropy(), (6,), (6, 4)),
        (keras.losses.SparseCategoricalCrossentropy(), (6, 5), (6, 5, 4)),
        (Wide(), (6, 2), (6, 1)),
    ],
)
def test_labels_that_are_meant_so_are_taken_without_a_word(loss, given, made):
    assert not warn_of_broadcast(LossCall(loss, 1.0, "out", np.zeros(given), np.zeros(made), None))


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_trainer_names_labels_that_broadcast_once_and_goes_on_as_keras(call):
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    trainer = ws.Trainer(made)
    data = (np.ones((6, 3), "float32"), np.ones((6, 2), "float32"))
    with pytest.warns(UserWarning, match=r"labels of shape \(rows, 2\)") as caught:
        getattr(trainer, call)(*data, batch_size=4, verbose=0)
    assert [warning.filename for warning in caught if "labels" in str(warning.message)] == [
        __file__
    ]
