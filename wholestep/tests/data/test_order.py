"""An epoch's order is a permutation, another one each epoch, and a pure function of (seed,
epoch).
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.data.order import Order, permute


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(num_rows, seed, epoch):
    rows = Order(num_rows, seed).rows(epoch, 0, num_rows)
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_rows))


@given(st.integers(1, 500), st.integers(0, 9), st.data())
def test_any_part_is_that_part_of_the_epoch(num_rows, epoch, data):
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    order = Order(num_rows, 3)
    np.testing.assert_array_equal(
        order.rows(epoch, start, stop), order.rows(epoch, 0, num_rows)[start:stop]
    )


def test_epochs_and_seeds_differ():
    orders = {tuple(Order(64, seed).rows(epoch, 0, 64)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 9))
def test_several_permutations_at_once_are_each_of_them_alone(sizes, epoch):
    streams = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(n) for n in sizes])
    together = permute(places.astype(np.uint64), np.array(sizes)[streams], 3, epoch, streams)
    alone = [Order(n, 3, stream=stream).rows(epoch, 0, n) for stream, n in enumerate(sizes)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_streams_of_one_seed_differ():
    orders = {
        tuple(Order(64, 1, stream=stream).rows(epoch, 0, 64))
        for stream in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_a_billion_rows_cost_no_memory():
    rows = Order(10**9, 1).rows(5, 123_456_789, 123_456_789 + 64)
    assert len(set(rows.tolist())) == 64
    assert 0 <= rows.min() <= rows.max() < 10**9


@pytest.mark.parametrize("num_rows", [1000, 1024, 1025, 60_000])
def test_rows_travel_as_far_as_in_a_uniform_permutation(num_rows):
    places = np.arange(num_rows)
    moved = [
        np.abs(Order(num_rows, 7).rows(epoch, 0, num_rows) - places).mean() / num_rows
        for epoch in range(20)
    ]
    # |i - p(i)| / n of a uniform permutation has mean 1/3; its mean over n rows and 20 epochs
    # hardly varies.
    assert np.mean(moved) == pytest.approx(1 / 3, abs=4 * np.sqrt(1 / 18 / num_rows / 20) + 1e-3)


def test_each_row_is_equally_likely_anywhere():
    rows = np.stack([Order(16, 5).rows(epoch, 0, 16) for epoch in range(4000)])
    counts = np.stack([np.bincount(rows[:, place], minlength=16) for place in range(16)])
    chi_square = ((counts - 250) ** 2 / 250).sum()
    assert chi_square < 225 + 5 * np.sqrt(2 * 225)


def test_without_shuffling_rows_stay():
    np.testing.assert_array_equal(Order(9, shuffle=False).rows(4, 2, 6), [2, 3, 4, 5])


def test_a_place_beyond_the_last_does_not_walk_for_ever():
    with pytest.raises(AssertionError, match="beyond the last"):
        permute(np.array([3, 10], np.uint64), 10, 3, 0)


@pytest.mark.parametrize(("num", "block"), [(10, 4), (12, 4), (3, 4), (5, 1)])
def test_rows_of_blocks_are_permuted_among_themselves(num, block):
    orders = [Order(num, seed=5, block=block).rows(epoch, 0, num) for epoch in range(8)]
    for rows in orders:
        for start in range(0, num, block):
            assert sorted(rows[start : start + block].tolist()) == list(
                range(start, min(start + block, num))
            )
    assert len({tuple(rows) for rows in orders}) > 1 or block == 1
    if num > 2 * block:
        first, second = (
            np.stack([rows[start : start + block] for rows in orders]) for start in (0, block)
        )
        assert block == 1 or np.any(first + block != second)  # each block has an order of its own
    parts = [Order(num, seed=5, block=block).rows(0, i, i + 1) for i in range(num)]
    np.testing.assert_array_equal(np.concatenate(parts), orders[0])
