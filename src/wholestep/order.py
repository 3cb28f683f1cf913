"""Which rows make update t of epoch e: a pure function of (seed, epoch), O(1) memory for any number of rows.

A keyed bijection of 0..n-1 (a balanced Feistel network on the next power of four, walking its cycles until the value
is below n: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). No permutation is ever stored, so a batch
of a billion-row source costs as much as a batch of a thousand.
"""

from dataclasses import dataclass

import numpy as np

_ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Order:
    """The order of `num_rows` rows in every epoch.

    >>> order = Order(num_rows=10, seed=7)
    >>> sorted(order.rows(epoch=0, start=0, stop=10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> Order(num_rows=10, seed=7, shuffle=False).rows(epoch=3, start=4, stop=7).tolist()
    [4, 5, 6]
    """

    num_rows: int
    seed: int = 0
    shuffle: bool = True

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the row numbers at places start..stop-1 of the epoch, an int64 array (stop - start,)."""
        places = np.arange(start, stop, dtype=np.uint64)
        return (self._permute(places, epoch) if self.shuffle else places).astype(np.int64)

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        half = max(1, (max(self.num_rows - 1, 1).bit_length() + 1) // 2)
        keys = _keys(self.seed, epoch)
        values = _feistel(places, keys, half)
        outside = np.flatnonzero(values >= self.num_rows)
        while outside.size:
            values[outside] = _feistel(values[outside], keys, half)
            outside = outside[values[outside] >= self.num_rows]
        return values


def _keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, epoch]).generate_state(_ROUNDS, np.uint64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    shift, low_bits = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low_bits
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low_bits)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
