"""The order of rows in an epoch: a pure function of (seed, epoch), in O(1) memory.

A keyed bijection of 0..n-1 (a balanced Feistel network on the next power of four, walking its
cycles until the value is below n: Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). No permutation is ever stored, so a batch of a billion-row source costs as much as a batch of
a thousand.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

_ROUNDS = 6
_NUM_CACHED = 64  # chunks: two epochs of the rows that are named at once
_CHUNK = 4096  # row numbers that are computed at once: hardly slower than one batch
_GOLDEN = 0x9E3779B97F4A7C15
Places = ndarray | slice
ALL = slice(None)


class Selection(NamedTuple):
    """The rows of a batch, selected by a sampler and not loaded yet.

    Args:
        rows: row numbers in the source, int64 (rows,); packed rows have a number for each segment.
        names: the row numbers that errors show for each row of the batch, (rows,); of a packed row,
            several.
        full: the number of rows in a full batch of this shape; 0 if it is not known.
        layout: the place of the rows in the batch, in the sampler's format.
    """

    rows: ndarray
    names: ndarray
    full: int
    layout: Any = None


@dataclass(frozen=True)
class Order:
    """The order of `num_rows` rows in every epoch.

    Args:
        stream: distinguishes orders of one seed.
        block: the number of adjacent rows that are permuted among themselves; 0 for all rows.

    >>> order = Order(num_rows=10, seed=7)
    >>> sorted(order.rows(epoch=0, start=0, stop=10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> Order(num_rows=10, seed=7, shuffle=False).rows(epoch=3, start=4, stop=7).tolist()
    [4, 5, 6]
    >>> sorted(Order(num_rows=10, block=4).rows(epoch=0, start=4, stop=8).tolist())
    [4, 5, 6, 7]
    """

    num_rows: int
    seed: int = 0
    shuffle: bool = True
    stream: int = 0
    block: int = 0

    def rows(self, epoch: int, start: int, stop: int) -> ndarray:
        """Return the row numbers at places start..stop-1 of the epoch, int64 (stop - start,)."""
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if stop - start > _NUM_CACHED * _CHUNK // 2:
            return _permuted(self, epoch, start, stop)
        first = start // _CHUNK
        last = max(start, stop - 1) // _CHUNK
        chunks = [_chunk(self, epoch, number) for number in range(first, last + 1)]
        begin = first * _CHUNK
        return np.concatenate(chunks)[start - begin : stop - begin]

    def batch(self, epoch: int, step: int, size: int) -> ndarray:
        """Return the row numbers of batch `step` of the epoch; the last batch may be short."""
        start = step * size
        return self.rows(epoch, start, min(start + size, self.num_rows))


@lru_cache(maxsize=_NUM_CACHED)
def _chunk(order: Order, epoch: int, number: int) -> ndarray:
    """Return the row numbers of a chunk of an epoch, read-only, as they are cached."""
    start = number * _CHUNK
    rows = _permuted(order, epoch, start, min(start + _CHUNK, order.num_rows))
    rows.flags.writeable = False
    return rows


def _permuted(order: Order, epoch: int, start: int, stop: int) -> ndarray:
    places = np.arange(start, stop, dtype=np.uint64)
    if order.block == 0:
        rows = permute(places, order.num_rows, order.seed, epoch, order.stream)
    else:
        number, place = np.divmod(places, order.block)
        first = number * order.block
        sizes = np.minimum(order.num_rows - first, order.block)  # the last block may be short
        rows = first + permute(place, sizes, order.seed, epoch, number)
    return rows.astype(np.int64)


def permute(
    places: ndarray, num: int | ndarray, seed: int, epoch: int, stream: int | ndarray = 0
) -> ndarray:
    """Return the values at these places, uint64 (places,), of a permutation of 0..num-1.

    `num` and `stream` are numbers, or arrays with a number for each place: then places have
    separate permutations.
    """
    num = np.atleast_1d(np.asarray(num, np.uint64))
    assert np.all(places < num), "a place beyond the last: its cycle would never come back"
    keys = _keys(seed, epoch, stream)
    half = _half_bits(num)
    values = _feistel(places, keys, half)
    outside = np.flatnonzero(values >= num)
    while outside.size:
        moved = _feistel(values[outside], _at(keys, outside), _at(half, outside))
        values[outside] = moved
        outside = outside[moved >= _at(num, outside)]
    return values


def _at(values: ndarray, places: ndarray) -> ndarray:
    """Return the values at these places, or the single value for all places."""
    return values if values.shape[-1] == 1 else values[..., places]


def _half_bits(num: ndarray) -> ndarray:
    """Return half the number of bits, rounded up, of 0..num-1."""
    bits = np.frexp(np.maximum(num, 2) - 1)[1]
    return np.maximum((bits + 1) // 2, 1).astype(np.uint64)


def _keys(seed: int, epoch: int, stream: int | ndarray) -> ndarray:
    """Return the keys, uint64 (rounds, 1), or (rounds, places) for an array of streams."""
    entropy = [seed & 0xFFFFFFFFFFFFFFFF, epoch]
    keys = np.random.SeedSequence(entropy).generate_state(_ROUNDS, np.uint64)
    streams = np.atleast_1d(np.asarray(stream, np.uint64))
    return keys[:, None] ^ _mix(streams * _GOLDEN)


def _feistel(values: ndarray, keys: ndarray, half: ndarray) -> ndarray:
    low_bits = (1 << half) - 1
    left = values >> half
    right = values & low_bits
    for key in keys:
        mixed = _mix(right ^ key) & low_bits
        left, right = right, left ^ mixed
    return (left << half) | right


def _mix(values: ndarray) -> ndarray:
    """Return the finaliser of splitmix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)
