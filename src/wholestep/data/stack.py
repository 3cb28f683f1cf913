"""Batches that were drawn from their source, and several of them as the data of one dispatch."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from wholestep import tree
from wholestep.cut import Cut
from wholestep.data.block import Batch, Device, stage
from wholestep.safety.interrupts import uninterrupted


class Drawn:
    """What is drawn from an iterator: those that have left in a block, which may be wanted again, and those that wait.

    Args:
        items: the iterator; nobody else may draw from it.
    """

    def __init__(self, items: Iterator[Batch]):
        self.kept: list[Batch] = []
        self._items = items
        self._num_left = 0
        self._error: Exception | None = None

    def has(self, i: int) -> bool:
        """Whether there is an item i among those that wait; draws what is missing.

        An error in the iterator is raised when nothing waits any more: all that came before it is to be carried out.
        """
        while self._error is None and len(self.kept) <= self._num_left + i:
            try:
                # An interrupt inside of a generator would end the generator, and between two lines lose an item.
                with uninterrupted(twice=False):
                    if (item := next(self._items, None)) is None:
                        return False
                    self.kept.append(item)
            except Exception as error:
                self._error = error
        if self._error is not None and len(self.kept) == self._num_left:
            raise self._error
        return len(self.kept) > self._num_left + i

    def __getitem__(self, i: int) -> Batch:
        """Return item i of those that wait."""
        return self.kept[self._num_left + i]

    def leave(self, num: int, keep: int) -> None:
        """Let the first `num` of those that wait leave; of all that have left, the last `keep` are kept."""
        self._num_left += num
        spare = max(0, self._num_left - keep)
        self._num_left -= spare
        del self.kept[:spare]


def stack(engine: Device, batches: list[Batch], cut: Cut, room: int) -> tuple[Any, np.ndarray]:
    """Return the data of updates alike as a program with room for so many takes them, and the rows of every update.

    Returns:
        The data, and int32 (room, places); where no update is, the data are zeros.

    >>> import numpy as np
    >>> class Host:
    ...     num_replicas = 1
    ...     staged = staticmethod(lambda data: data)
    >>> batches = [Batch(np.array([i, i + 1]), None, np.arange(2), 2, None, None, (0, i), (0, i + 1)) for i in (4, 7)]
    >>> data, rows = stack(Host, batches, Cut(((1, 2),), 2), 3)
    >>> data.tolist(), rows.tolist()
    ([4, 5, 7, 8, 0, 0], [[0, 1], [2, 3], [4, 5]])
    """
    if room == 1:
        data, rows = stage(engine, batches[0], cut)
        return data, rows[None]
    size = batches[0].num_rows
    data = tree.map_leaves(partial(_one_after_another, room), *(batch.host for batch in batches))
    starts = np.arange(0, room * size, size, dtype=np.int32)
    return engine.staged(data), starts[:, None] + np.resize(batches[0].rows, cut.places)


def _one_after_another(room: int, *leaves: np.ndarray) -> np.ndarray:
    like, size = leaves[0], len(leaves[0])
    whole = _aligned_zeros((room * size, *like.shape[1:]), like.dtype)
    for i, leaf in enumerate(leaves):
        whole[i * size : (i + 1) * size] = leaf
    return whole


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros that begin at a multiple of 64 bytes: an engine on the host takes such an array without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)  # which costs nothing where nobody writes
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
