"""Class numbers are checked against the outputs that a loss compares them with."""

import keras
import numpy as np
import pytest

import wholestep as ws
from wholestep.model.labels import LabelRange, check_labels, label_ranges
from wholestep.model.reduction import LossCall

ROWS, CLASSES = 6, 4
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
    with pytest.raises(ws.BatchError, match=r"Class numbers in y\['b'\] must be whole.*0\.\.3.* in row 2"):
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
