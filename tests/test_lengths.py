"""Lengths, boundaries and paddings that do not belong to the rows are refused by name."""

import numpy as np
import pytest

import wholestep as ws


def rows_of(lengths):
    return [{"text": np.arange(n), "label": i} for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"boundaries": [4, 8]},
            ws.BatchError,
            r"largest shape \(length 8\). Received: row 2, length 12. Try: a larger",
        ),
        ({"tokens": 11}, ws.BatchError, r"more places than tokens=11. Received: row 2, length 12, which takes 12"),
        ({"tokens": 11, "boundaries": [4, 12]}, ws.BatchError, "row 2, length 12, which takes 12 places in its shape"),
        ({"tokens": 0}, ws.SpecificationError, "tokens must be a whole number"),
        ({"batch_size": 3}, ws.SpecificationError, "measured in rows or in tokens"),
        ({"length": None}, ws.SpecificationError, "tokens needs the length"),
        ({"tokens": None}, ws.SpecificationError, "Batches by length need a token budget. Received: length without"),
        ({"truncate": True}, ws.SpecificationError, "truncate=True needs boundaries"),
        ({"boundaries": []}, ws.SpecificationError, "boundaries must be 1 to 254 shapes"),
        ({"boundaries": [4, 0]}, ws.SpecificationError, "whole number of at least 1"),
        ({"boundaries": [{"x": 4}]}, ws.SpecificationError, "or name boundary"),
        ({"length": [1, 2]}, ws.SpecificationError, "one for each of 3 rows. Received: shape .2,. of int64"),
        ({"length": [1.5, 2, 3]}, ws.SpecificationError, "whole numbers, one for each of 3 rows"),
        ({"length": [-1, 2, 3]}, ws.SpecificationError, "between 0 and"),
        ({"length": {"txt": [3, 2, 12]}}, ws.SpecificationError, r"length\['txt'\] must name a part of a row that has"),
        ({"length": {"label": [3, 2, 12]}}, ws.SpecificationError, r"length\['label'\] must name a part of a row that"),
        ({"pad": {"txt": 1}}, ws.SpecificationError, r"pad\['txt'\] must name a part of a row"),
        ({"pad": 0.5}, ws.SpecificationError, "a number that the leaf can hold. Received: 0.5 for int64"),
    ],
)
def test_what_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        ws.Batches(rows_of([3, 2, 12]), **{"tokens": 64, "length": np.array([3, 2, 12])} | arguments)


def test_a_shape_over_the_budget_though_its_rows_are_not():
    rows = [{"a": np.zeros(50), "b": np.zeros(5)}, {"a": np.zeros(5), "b": np.zeros(50)}]
    length = {"a": [50, 5], "b": [5, 50]}
    with pytest.raises(ws.BatchError, match=r"row 0, length\['a'\] 50, length\['b'\] 5, which takes 100 places"):
        ws.Batches(rows, tokens=60, length=length)
    boundaries = [{"a": 50, "b": 5}, {"a": 5, "b": 50}]
    assert len(ws.Batches(rows, tokens=60, length=length, boundaries=boundaries)) == 2


def test_a_length_that_is_not_the_row_s():
    data = ws.Batches(rows_of([3, 2]), tokens=64, length=[3, 4], boundaries=[4], shuffle=False)
    with pytest.raises(
        ws.BatchError, match=r"\['text'\] must be as long .* shape \(2,\) where the length is 4, in row 1"
    ):
        next(data)
    rows = [{"text": np.zeros(3), "image": np.zeros((4, 4))}]
    with pytest.raises(ws.BatchError, match=r"\['image'\] .* name the sequences"):
        next(ws.Batches(rows, tokens=64, length=[3]))


def test_rows_that_are_nested_otherwise():
    rows = [{"text": np.zeros(2)}, {"text": np.zeros(2), "more": np.zeros(2)}]
    with pytest.raises(ws.BatchError, match=r"nested alike. Received: 2 leaves in row 1, 1 in the first"):
        next(ws.Batches(rows, tokens=64, length=[2, 2]))


def test_arrays_that_do_not_go_with_their_lengths():
    with pytest.raises(ws.BatchError, match="equally wide"):
        ws.Batches((np.zeros((2, 5)), np.zeros((2, 3))), tokens=64, length=[3, 2])
    with pytest.raises(ws.BatchError, match=r"as wide as their longest row.* row 1, length 6"):
        ws.Batches(np.zeros((2, 5)), tokens=64, length=[3, 6])
    with pytest.warns(UserWarning, match="pad has no effect"):
        ws.Batches(np.zeros((2, 5)), tokens=64, length=[3, 5], pad=1)


@pytest.mark.parametrize("arguments", [{"tokens": 64, "length": len}, {"tokens": 64}, {"length": len}])
def test_ready_made_batches_have_no_budget(arguments):
    with pytest.raises(ws.SpecificationError, match=r"Ready-made batches have their own size|need a token budget"):
        ws.Batches(iter([np.zeros((2, 3))]), **arguments)
