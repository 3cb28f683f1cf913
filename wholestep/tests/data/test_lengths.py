"""Lengths, boundaries and paddings that do not belong to the rows are refused by name."""

import keras
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
        (
            {"tokens": 11},
            ws.BatchError,
            r"more places than tokens=11. Received: row 2, length 12, which takes 12",
        ),
        (
            {"tokens": 11, "boundaries": [4, 12]},
            ws.BatchError,
            "row 2, length 12, which takes 12 places in its shape",
        ),
        ({"tokens": 0}, ws.SpecificationError, "tokens must be a whole number"),
        ({"batch_size": 3}, ws.SpecificationError, "measured in rows or in tokens"),
        ({"length": None}, ws.SpecificationError, "tokens needs the length"),
        (
            {"tokens": None},
            ws.SpecificationError,
            "Batches by length need a token budget. Received: length without",
        ),
        ({"truncate": True}, ws.SpecificationError, "truncate=True needs boundaries"),
        ({"boundaries": []}, ws.SpecificationError, "boundaries must be 1 to 254 shapes"),
        ({"boundaries": [4, 0]}, ws.SpecificationError, "whole number of at least 1"),
        ({"boundaries": [{"x": 4}]}, ws.SpecificationError, "or name boundary"),
        (
            {"length": [1, 2]},
            ws.SpecificationError,
            "one for each of 3 rows. Received: shape .2,. of int64",
        ),
        ({"length": [1.5, 2, 3]}, ws.SpecificationError, "whole numbers, one for each of 3 rows"),
        ({"length": [3, -1, 3]}, ws.SpecificationError, "between 0 and .* Received: -1 for row 1"),
        ({"boundaries": [4, 2**27 + 1]}, ws.SpecificationError, "at most 134217728"),
        ({"boundaries": [2**31], "truncate": True}, ws.SpecificationError, "at most 134217728"),
        ({"boundaries": [2**70]}, ws.SpecificationError, "at most 134217728"),
        ({"boundaries": "12"}, ws.SpecificationError, "Received: 12"),
        (
            {"length": {"txt": [3, 2, 12]}},
            ws.SpecificationError,
            r"length\['txt'\] must name a part of a row that has",
        ),
        (
            {"length": {"label": [3, 2, 12]}},
            ws.SpecificationError,
            r"length\['label'\] must name a part of a row that",
        ),
        ({"pad": {"txt": 1}}, ws.SpecificationError, r"pad\['txt'\] must name a part of a row"),
        (
            {"pad": 0.5},
            ws.SpecificationError,
            "a number that the leaf can hold. Received: 0.5 for int64",
        ),
    ],
)
def test_invalid_lengths_boundaries_and_paddings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ws.Batches(
            rows_of([3, 2, 12]), **{"tokens": 64, "length": np.array([3, 2, 12])} | arguments
        )


def test_a_shape_over_the_budget_though_its_rows_are_not():
    rows = [{"a": np.zeros(50), "b": np.zeros(5)}, {"a": np.zeros(5), "b": np.zeros(50)}]
    length = {"a": [50, 5], "b": [5, 50]}
    with pytest.raises(
        ws.BatchError, match=r"row 0, length\['a'\] 50, length\['b'\] 5, which takes 100 places"
    ):
        ws.Batches(rows, tokens=60, length=length)
    boundaries = [{"a": 50, "b": 5}, {"a": 5, "b": 50}]
    assert len(ws.Batches(rows, tokens=60, length=length, boundaries=boundaries)) == 2


def test_a_length_that_is_not_the_row_s():
    data = ws.Batches(rows_of([3, 2]), tokens=64, length=[3, 4], boundaries=[4], shuffle=False)
    with pytest.raises(
        ws.BatchError,
        match=r"\['text'\] must be as long .* shape \(2,\) where the length is 4, in row 1",
    ):
        next(data)
    rows = [{"text": np.zeros(3), "image": np.zeros((4, 4))}]
    with pytest.raises(ws.BatchError, match=r"\['image'\] .* name every sequence"):
        next(ws.Batches(rows, tokens=64, length=[3]))


@pytest.mark.parametrize("arguments", [{"tokens": 64, "length": [2, 2]}, {"batch_size": 2}])
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["more", "text"], r"row\['more'\], row\['text'\]"),
        (["txt"], r"row\['txt'\]"),
        ([], ""),
        (["a", "b"], "row"),
    ],
)
def test_rows_that_are_nested_otherwise(arguments, keys, named):
    rows = [{"text": np.zeros(2)}, {key: np.zeros(2) for key in keys}]
    with pytest.raises(
        ws.BatchError, match=rf"nested alike. Received: {named}.* in row 1, row\['text'\] in others"
    ):
        next(ws.Batches(rows, shuffle=False, **arguments))


BY_KEY = {"tokens": 64, "length": {"s": [2, 2]}}


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (
            [3, 4],
            {"batch_size": 2},
            r"row must have one shape .* \(4,\) in row 1, \(3,\) in row 0. Try: tokens",
        ),
        (
            [{"s": 3}, {"s": 4}],
            {"batch_size": 2},
            r"row\['s'\] must have one shape .* in row 1, .* Try: tokens",
        ),
        (
            [{"s": 2, "t": 3}, {"s": 2, "t": 4}],
            BY_KEY,
            r"row\['t'\] must have one shape .* \(4,\) in row 1, .* Try: name every sequence",
        ),
    ],
)
def test_uneven_parts_without_a_length(rows, arguments, message):
    rows = keras.tree.map_structure(np.zeros, rows)
    for form in (rows, keras.tree.map_structure(lambda part: part.tolist(), rows)):
        with pytest.raises(ws.BatchError, match=message):
            next(ws.Batches(Sequence(form), shuffle=False, **arguments))


class Sequence:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@pytest.mark.parametrize(
    "part", [None, *(["foo"] if keras.backend.backend() == "jax" else [])]
)  # TensorFlow takes text
def test_parts_that_are_no_numbers(part):
    rows = [{"s": np.arange(2), "t": part}, {"s": np.arange(2), "t": part}]
    with pytest.raises(ws.BatchError, match=r"batch\['t'\] must hold numbers"):
        next(ws.Batches(rows, **BY_KEY))

    def encoded(batch):
        return batch | {"t": np.array([t == "foo" for t in batch["t"]])}

    assert next(ws.Batches(rows, **BY_KEY, transform=encoded))["t"].tolist() == [part == "foo"] * 2


def test_vectors_are_rows_where_a_length_is_needed():
    rows = [np.arange(3), np.arange(5)]
    assert ws.Batches(rows, tokens=80, length=len).shapes == [(1, 3), (1, 5)]
    assert ws.Batches([[1, 2, 3], [4]], tokens=80, length=len).shapes == [(1, 1), (1, 3)]
    with pytest.raises(
        ws.BatchError,
        match=r"must hold numbers. Received: rows of uneven length. Try: .* as a list",
    ):
        ws.Batches(np.array(rows, object), tokens=80, length=[3, 5])


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (lambda row: 2.5, "length must be a whole number from 0 to .* Received: 2.5 for row 0"),
        (lambda row: True, "Received: True for row 0"),
        (lambda row: None, "Received: None for row 0"),
        (lambda row: -1 if row["label"] else 3, "Received: -1 for row 1"),
        (lambda row: 10**30, "Received: 10+ for row 0"),
        (lambda row: row["text"], r"Received: shape \(3,\) for row 0. Try: length=lambda row: len"),
        (lambda row: row["words"], "every row's length. Received: KeyError: 'words', for row 0"),
        (
            lambda row: {"text": 3} | ({"label": 1} if row["label"] else {}),
            r"the same parts .* length\['label'\].* row 1",
        ),
        (
            lambda row: {"label" if row["label"] else "text": 3},
            r"length\['label'\] for row 1, length\['text'\] for row",
        ),
    ],
)
def test_a_function_that_does_not_tell_a_length(length, message):
    with pytest.raises(ws.BatchError, match=message):
        ws.Batches(rows_of([3, 2]), tokens=64, length=length)


@pytest.mark.parametrize(
    "source", [rows_of([2, 2]), {"text": np.zeros((2, 2)), "label": np.zeros(2)}]
)
def test_len_of_a_row_would_count_its_parts(source):
    message = (
        r"count the parts of a row. Received: 2 parts. Try: length=lambda row: len\(row\['text'\]\)"
    )
    with pytest.raises(ws.SpecificationError, match=message):
        ws.Batches(source, tokens=64, length=len)


def test_a_generator_of_rows_has_no_lengths():
    with pytest.raises(
        ws.SpecificationError, match=r"need __len__ and __getitem__. Received: tokens=64. Try: list"
    ):
        ws.Batches((row for row in rows_of([3])), tokens=64, length=lambda row: len(row["text"]))


def test_arrays_that_do_not_go_with_their_lengths():
    with pytest.raises(ws.BatchError, match="equally wide"):
        ws.Batches((np.zeros((2, 5)), np.zeros((2, 3))), tokens=64, length=[3, 2])
    with pytest.raises(ws.BatchError, match=r"as wide as their longest row.* row 1, length 6"):
        ws.Batches(np.zeros((2, 5)), tokens=64, length=[3, 6])
    with pytest.warns(UserWarning, match="pad has no effect"):
        ws.Batches(np.zeros((2, 5)), tokens=64, length=[3, 5], pad=1)


@pytest.mark.parametrize(
    "arguments", [{"tokens": 64, "length": len}, {"tokens": 64}, {"length": len}]
)
def test_ready_made_batches_have_no_budget(arguments):
    with pytest.raises(
        ws.SpecificationError, match=r"Ready-made batches have their own size|need a token budget"
    ):
        ws.Batches(iter([np.zeros((2, 3))]), **arguments)


def test_a_part_of_arrays_that_is_none_stays_none():
    wide = {"a": np.ones((4, 5)), "unused": None}
    batch = ws.Batches(wide, tokens=20, length={"a": np.array([3, 4, 5, 2])}).example()
    assert batch["unused"] is None
    assert batch["a"].ndim == 2
