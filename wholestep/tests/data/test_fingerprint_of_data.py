"""Data are known again by their numbers, however these lie in memory. Needs no engine."""

import tracemalloc

import numpy as np
import pytest
import xxhash

import wholestep as ws
from wholestep.data.fingerprint import content_of

LAYOUTS = {
    "in order": lambda array: array,
    "every other row": lambda array: np.repeat(array, 2, axis=0)[::2],
    "backwards": lambda array: array[::-1].copy()[::-1],
    "by columns": np.asfortranarray,
    "part of the columns": lambda array: np.concatenate([array, array], axis=1)[
        :, : array.shape[1]
    ],
}


def digest(array):
    (found,) = content_of(ws.Batches({"x": array}, 2)).values()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_digest_is_of_the_numbers_and_not_of_where_they_lie(name, monkeypatch):
    array = np.random.default_rng(0).normal(size=(1001, 7)).astype("float32")
    laid = LAYOUTS[name](array)
    assert digest(laid) == xxhash.xxh3_128_hexdigest(array.tobytes())
    for most in (1, 100, 28 * 500):  # less than a row; rows that do not come out even
        monkeypatch.setattr("wholestep.data.fingerprint._MOST_COPIED", most)
        assert digest(laid) == xxhash.xxh3_128_hexdigest(array.tobytes())
    other = laid.copy()
    other[-1, -1] += 1
    assert digest(other) != digest(laid)


def test_no_array_is_copied_as_a_whole():
    rows = np.zeros((80, 1 << 20), "uint8")
    for laid in (rows, rows[:, 1:], rows[::-1]):
        tracemalloc.start()
        try:
            digest(laid)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 20 << 20
