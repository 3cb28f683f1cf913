"""One root; three parts."""

import pytest

import wholestep as ws
from wholestep.errors import message


def test_one_root():
    for error in (ws.SpecificationError, ws.BatchError):
        assert issubclass(error, ws.WholestepError)
        assert issubclass(error, ValueError)
    assert issubclass(ws.NonFiniteError, ws.WholestepError)


def test_three_parts():
    assert message("A must be b.", 3, "b.") == "A must be b. Received: 3. Try: b."


def test_a_non_finite_error_knows_its_update_and_rows():
    with pytest.raises(ws.NonFiniteError) as caught:
        raise ws.NonFiniteError("no", 7, (1, 2))
    assert (caught.value.update, caught.value.rows) == (7, (1, 2))
