"""The plan of a large cluster, played through: every row once, equal work, a place of two
integers.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cut import Cut
from wholestep.data.block import share_out
from wholestep.data.order import Order

PAGE = (Path(__file__).parents[2] / "docs" / "notes" / "011-large-cluster.md").read_text()
HOSTS = 4096
REPLICAS = 8
ROWS = 16
NUM_ROWS = 10**12
PARAMETERS = 10**9
BATCH = HOSTS * REPLICAS * ROWS


def loaded(order, step, size, hosts, replicas):
    """Return the row numbers that each replica works on in an update, (replicas, rows), and which
    are padding.
    """
    rows = order.rows(0, step * size, min((step + 1) * size, order.num_rows))
    shares, _ = share_out(Cut(((1, size),), size, padded=True), hosts * replicas)
    return rows[shares % len(rows)], shares >= len(rows)


def test_the_page_says_what_follows():
    steps = -(-NUM_ROWS // BATCH)
    last = NUM_ROWS - (steps - 1) * BATCH
    wire = 2 * 4 * PARAMETERS * (1 - 1 / (HOSTS * REPLICAS)) / 1e9
    for figure in (
        f"{BATCH:,}",
        f"{steps:,}, the last of {last:,}",
        f"{ROWS * REPLICAS},",
        f"{wire:.2f} GB",
    ):
        assert figure.replace(",", " ").strip() in PAGE.replace(",", " "), figure


@pytest.mark.parametrize("step", [0, 10**6, -1])
def test_every_replica_has_as_many_rows_as_the_others(step):
    steps = -(-NUM_ROWS // BATCH)
    order = Order(NUM_ROWS, seed=7, shuffle=True)
    rows, padding = loaded(order, step % steps, BATCH, HOSTS, REPLICAS)
    assert rows.shape == (HOSTS * REPLICAS, ROWS)
    real = rows[~padding]
    assert (
        len(np.unique(real))
        == len(real)
        == (BATCH if step >= 0 else NUM_ROWS - (steps - 1) * BATCH)
    )
    assert (real.min() >= 0, real.max() < NUM_ROWS) == (True, True)
    # The place is two integers: another process that knows (epoch, step) finds the same rows, in
    # any order of asking.
    np.testing.assert_array_equal(rows, loaded(order, step % steps, BATCH, HOSTS, REPLICAS)[0])


@given(st.integers(1, 400), st.integers(1, 6), st.integers(1, 4), st.integers(1, 7))
def test_every_row_is_loaded_once_an_epoch(num_rows, hosts, replicas, each):
    order = Order(num_rows, seed=3, shuffle=True)
    size = hosts * replicas * each
    seen = []
    for step in range(-(-num_rows // size)):
        rows, padding = loaded(order, step, size, hosts, replicas)
        assert rows.shape == (hosts * replicas, each)
        seen.extend(rows[~padding])
    assert sorted(seen) == list(range(num_rows))
