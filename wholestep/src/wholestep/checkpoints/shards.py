"""Arrays that are sharded over processes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from wholestep.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """A piece of an array."""

    begin: tuple[int, ...]  # its start along every axis
    shape: tuple[int, ...]  # the shape of the piece
    read: Callable[[], np.ndarray]  # returns its numbers
    is_own: bool = True  # whether this process writes the piece; other processes may hold copies


@dataclass(frozen=True)
class ShardedArray:
    """An array whose pieces this process holds, or can read.

    >>> halves = [Shard((i,), (2,), lambda i=i: np.arange(i, i + 2)) for i in (0, 2)]
    >>> ShardedArray((4,), np.dtype(int), halves)[1:3]
    array([1, 2])
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shards: list[Shard]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part of the array, joined from the pieces; `...` for the full array."""
        parts = () if index is ... else index if isinstance(index, tuple) else (index,)
        parts += (slice(None),) * (len(self.shape) - len(parts))
        spans = [range(size)[part] for size, part in zip(self.shape, parts, strict=True)]
        joined = np.empty([len(span) for span in spans], self.dtype)
        missing = joined.size
        for shard in self.shards:
            bounds = zip(spans, shard.begin, shard.shape, strict=True)
            common = [
                range(max(span.start, begin), min(span.stop, begin + size))
                for span, begin, size in bounds
            ]
            if all(common):
                target = _slices(common, [span.start for span in spans])
                joined[target] = shard.read()[_slices(common, shard.begin)]
                missing -= math.prod(map(len, common))
        if missing:
            must = "An array must have all its pieces."
            raise CheckpointError(f"{must} {missing} numbers of {joined.size} are missing.")
        return joined


def _slices(spans: list[range], origin: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(spans, origin, strict=True)
    return tuple(slice(span.start - begin, span.stop - begin) for span, begin in pairs)


Numbers: TypeAlias = np.ndarray | ShardedArray


def is_whole(value: Any) -> bool:
    """Whether this process holds all of a tensor; JAX's arrays may be sharded over processes."""
    return getattr(value, "is_fully_addressable", True) or value.is_fully_replicated


def hollow(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def on_host(value: Any) -> Numbers:
    """Return a tensor as numpy, on a CPU without a copy; for a sharded tensor, its pieces here."""
    if is_whole(value):
        return np.asarray(value)
    shards: dict[tuple[int, ...], Shard] = {}
    for shard in value.addressable_shards:
        parts = zip(shard.index, value.shape, strict=True)
        begin = tuple(part.indices(size)[0] for part, size in parts)
        is_own = shard.replica_id == 0
        if is_own or begin not in shards:
            read = partial(np.asarray, shard.data)
            shards[begin] = Shard(begin, shard.data.shape, read, is_own)
    return ShardedArray(tuple(value.shape), np.dtype(value.dtype), list(shards.values()))


def copied(
    numbers: Numbers, copy: Callable[[str, np.ndarray], np.ndarray], *, are_own: bool
) -> Numbers:
    """Return a copy of an array, or of its pieces; if `are_own`, of those that this process writes.

    Args:
        copy: returns a copy of an array, given a suffix that identifies the piece.
    """
    if isinstance(numbers, np.ndarray):
        return copy("", numbers)
    shards = []
    for shard in numbers.shards:
        if shard.is_own or not are_own:
            array = copy(str([*shard.begin]), shard.read())
            shards.append(replace(shard, read=partial(np.asarray, array)))
    return replace(numbers, shards=shards)


def own_copy(name: str, value: Any) -> Numbers:
    """Return a copy of a tensor, or of its pieces; the name is not used."""
    return copied(on_host(value), lambda _, array: np.array(array), are_own=False)
