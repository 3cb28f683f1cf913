"""Batches drawn from their source, and stacked as the data of one dispatch."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.cut import Cut
from wholestep.data.block import Batch
from wholestep.engines import Devices
from wholestep.safety import TerminatedWaiting, waiting

MOST_STACKED = 16
_MOST_BYTES = 1 << 20  # of stacked data: a single update is sent in arrays with room for all


class Drawn:
    """A queue of batches drawn from an iterator; it also keeps the last that left, which may be needed again.

    Args:
        items: the iterator; it must have no other consumer.
    """

    def __init__(self, items: Iterator[Batch]):
        self.kept: list[Batch] = []
        self._items = items
        self._num_left = 0
        self._error: Exception | TerminatedWaiting | None = None

    def has(self, i: int) -> bool:
        """Whether item i is in the queue, after drawing up to it.

        An error in the iterator is raised once the queue is empty: all batches before the error are computed first.
        """
        self.draw(i + 1)
        if self._error is not None and len(self.kept) == self._num_left:
            raise self._error
        return len(self.kept) > self._num_left + i

    def draw(self, num: int) -> None:
        """Fill the queue up to `num` items, if the iterator has them."""
        while self._error is None and len(self.kept) < self._num_left + num:
            try:
                # An interrupt inside of a generator would end the generator, and between two lines lose an item.
                with waiting():
                    if (item := next(self._items, None)) is None:
                        return
                    self.kept.append(item)
            except (Exception, TerminatedWaiting) as error:
                self._error = error

    def __getitem__(self, i: int) -> Batch:
        """Return item i of the queue."""
        return self.kept[self._num_left + i]

    def leave(self, num: int, keep: int) -> None:
        """Remove the first `num` items from the queue, and keep the last `keep` of all removed items."""
        self._num_left += num
        spare = max(0, self._num_left - keep)
        self._num_left -= spare
        del self.kept[:spare]


def most_stacked(batch: Batch, most: int) -> int:
    """Return how many updates on batches of this size the data of a dispatch can hold, at most `most`."""
    return max(1, min(most, MOST_STACKED, _MOST_BYTES // max(1, tree.num_bytes(batch.host))))


def stack(devices: Devices, batches: list[Batch], room: int) -> Any:
    """Return the stacked data of batches for a program with this room; unused room holds arbitrary values.

    >>> import numpy as np
    >>> class Host:
    ...     num_replicas = 1
    ...     stage = staticmethod(lambda data: data)
    >>> batches = [Batch(np.array([i, i + 1]), None, np.arange(2), 2, None, None, (0, i), (0, i + 1)) for i in (4, 7)]
    >>> stack(Host, batches, 3)[:4].tolist()
    [4, 5, 7, 8]
    >>> stacked_rows(batches[0], Cut(((1, 2),), 2), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    return devices.stage(tree.map_leaves(partial(_one_after_another, room), *[batch.host for batch in batches]))


def stacked_rows(batch: Batch, cut: Cut, room: int) -> np.ndarray:
    """Return the row indices of every update in stacked data, int32 (room, places)."""
    starts = np.arange(0, room * batch.num_rows, batch.num_rows, dtype=np.int32)
    return starts[:, None] + np.resize(batch.rows, cut.places)


def _one_after_another(room: int, *leaves: np.ndarray) -> np.ndarray:
    size, like = len(leaves[0]), leaves[0]
    if like.dtype == object:  # text or ragged rows: there is no neutral value for unused room
        return np.resize(np.concatenate(leaves), (room * size, *like.shape[1:]))
    whole = _aligned((room * size, *like.shape[1:]), like.dtype)
    for i, leaf in enumerate(leaves):
        whole[i * size : (i + 1) * size] = leaf
    if like.dtype.kind in "iu":  # an engine may check the range of the numbers
        whole[len(leaves) * size :] = 0
    return whole


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array aligned to 64 bytes, which an engine on the host uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
