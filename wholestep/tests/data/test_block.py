"""A batch knows the numbers of its rows, the signature of its data, and its padding."""

import numpy as np
import pytest

from wholestep.data.block import Batch, Block, Table

X = np.arange(10.0, 16.0).reshape(3, 2)


def batch(**changes):
    made = Batch(
        {"x": X, "y": None}, None, np.arange(3, dtype=np.int32), 4, None, None, (0, 0), (0, 1)
    )
    return made._replace(**changes)


def resident(**changes):
    return (
        batch(data={"x": X, "y": None}, rows=np.array([2, 0], np.int32))
        if not changes
        else batch(**changes)
    )


def test_a_signature_has_all_shapes_except_the_number_of_loaded_rows():
    narrower = batch(host={"x": X[:2], "y": None})
    assert batch().signature == narrower.signature
    assert hash(batch().signature) == hash(narrower.signature)
    for other in (
        {"x": X[:, :1], "y": None},
        {"x": X.astype("int32"), "y": None},
        {"x": X, "y": X},
        {"z": X},
        (X, None),
    ):
        assert batch(host=other).signature != batch().signature


def test_a_signature_of_resident_data_holds_their_rows():
    assert resident().signature != batch(host={"x": X[:2], "y": None}, data=X).signature


def test_a_signature_does_not_depend_on_the_order_of_names():
    assert batch(host={"a": X, "b": X[0]}).signature == batch(host={"b": X[0], "a": X}).signature
    assert batch(host=[X, X[:, 0]]).signature != batch(host=(X, X[:, 0])).signature


@pytest.mark.parametrize(
    ("ids", "own", "names"),
    [
        (None, None, None),
        (np.array([7, 5, 9]), None, [7, 5, 9]),
        (None, np.array([0, 2]), [0, 2]),
        (np.array([7, 5, 9]), np.array([0, 2]), [7, 9]),
    ],
)
def test_rows_have_the_numbers_of_the_source(ids, own, names):
    found = batch(ids=ids, local=own).names
    assert (found if found is None else found.tolist()) == names


def test_some_rows_are_those_at_places_of_the_update():
    some = resident().rows_at(np.array([1, 0, 1]))
    assert some["y"] is None
    assert some["x"].tolist() == [[10, 11], [14, 15], [10, 11]]


def test_padding_repeats_rows_on_the_host_or_names_them_again():
    padded = batch().padded(5)
    assert padded.host["x"].tolist() == X[[0, 1, 2, 0, 1]].tolist()
    assert (padded.host["y"], padded.rows.tolist()) == (None, [0, 1, 2, 3, 4])
    named = resident().padded(5)
    assert (named.host["x"] is X, named.rows.tolist()) == (True, [2, 0, 2, 0, 2])
    part = batch(local=np.array([1])).padded(5)
    assert (part.host["x"] is X, part.num_rows) == (True, 5)


def test_a_block_returns_the_row_numbers_of_an_update():
    table = Table(np.array([[4, 3], [2, 1], [0, 0]], np.int32), np.array([2, 2, 1], np.int32), ())
    block = Block(None, None, table, 1, 2, (resident(),), (0, 1), (0, 3))
    assert [block.names(update).tolist() for update in range(2)] == [[2, 1], [0]]
    loaded = block._replace(batches=(batch(), batch(ids=np.array([7, 5, 9]))))
    assert [loaded.names(update).tolist() for update in range(2)] == [[0, 1, 2], [7, 5, 9]]
