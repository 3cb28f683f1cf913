"""Attributes that have other values for a while."""

from types import SimpleNamespace

import pytest

from wholestep.patches import replaced


def test_an_owner_that_comes_twice_and_an_attribute_that_is_deleted_meanwhile_are_restored():
    one = SimpleNamespace(size=1)
    two = SimpleNamespace()

    def change():
        with replaced(one, one, two, size=2):
            assert (one.size, two.size) == (2, 2)
            del two.size
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        change()
    assert vars(one) == {"size": 1}
    assert vars(two) == {}
