"""The shapes that pad least, against trying them all."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.data.shapes import NONE, assign_shapes, best_shapes, user_shapes


def places(lengths, shapes):
    return sum(min(shape for shape in shapes if shape >= length) for length in lengths)


@given(st.lists(st.sampled_from([1, 3, 4, 9, 10, 17, 25, 33]), min_size=1, max_size=60))
def test_no_choice_of_shapes_pads_less(lengths):
    kinds = sorted(set(lengths))
    least = [
        min(places(lengths, [*few, kinds[-1]]) for few in combinations(kinds[:-1], k))
        for k in range(len(kinds))
    ]
    shapes = best_shapes(np.array([lengths], np.int32), tokens=10**6).ravel().tolist()
    enough = next(k for k, places in enumerate(least) if places <= 1.05 * least[-1])
    assert len(shapes) == enough + 1
    assert places(lengths, shapes) == least[enough]


def test_at_most_a_dozen_for_any_lengths():
    lengths = np.random.default_rng(0).integers(0, 100_000, (2, 20_000)).astype(np.int32)
    shapes = best_shapes(lengths, tokens=10**6)
    assert len(shapes) <= 12
    assert NONE not in assign_shapes(lengths, shapes)


def test_no_shape_is_over_the_budget_if_its_rows_are_not():
    """Two rare rows that would share a shape, if their places were not over the budget together."""
    common = np.repeat(np.arange(1, 41), 1000)
    lengths = np.array([[*common, 90, 1], [*np.ones_like(common), 1, 120]], np.int32)
    assert best_shapes(lengths, tokens=150).sum(axis=1).max() == 121
    assert best_shapes(lengths, tokens=1500).sum(axis=1).max() == 210


def test_a_row_goes_where_it_takes_the_fewest_places():
    shapes = user_shapes([(8, 8), (2, 9), (5, 5), (2, 9)], ((0,), (1,)))
    assert shapes.tolist() == [[5, 5], [2, 9], [8, 8]]
    lengths = np.array([[5, 2, 2, 6, 2, 0], [5, 6, 9, 1, 10, 0]], np.int32)
    assert assign_shapes(lengths, shapes).tolist() == [0, 1, 1, 2, NONE, 0]


@pytest.mark.parametrize(
    "boundaries", [range(8, 32, 8), (8, 16, 24), np.array([8, 16, 24]), {24, 8, 16}]
)
def test_any_sequence_of_boundaries(boundaries):
    assert user_shapes(boundaries, ((),)).ravel().tolist() == [8, 16, 24]
