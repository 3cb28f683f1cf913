"""Arrays that are sharded over processes, and the choice of the process that writes each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from wholestep.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """A part of an array."""

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
    pieces: list[Shard]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part of the array, joined from the pieces; `...` for the full array."""
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        slices = (*given, *(slice(None) for _ in self.shape[len(given) :]))
        spans = [part.indices(size)[:2] for part, size in zip(slices, self.shape, strict=True)]
        bounds = [(begin, max(begin, end)) for begin, end in spans]
        found = np.empty([end - begin for begin, end in bounds], self.dtype)
        missing = found.size
        for piece in self.pieces:
            spans = list(zip(bounds, piece.begin, piece.shape, strict=True))
            common = [(max(begin, at), min(end, at + size)) for (begin, end), at, size in spans]
            if all(first < last for first, last in common):
                to = _moved(common, [begin for begin, _ in bounds])
                found[to] = piece.read()[_moved(common, piece.begin)]
                missing -= found[to].size
        if missing:
            raise CheckpointError(
                f"An array must have all its pieces. {missing} numbers of {found.size} are missing."
            )
        return found


def _moved(bounds: list[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first - at, last - at) for (first, last), at in zip(bounds, origin, strict=True)
    )


Numbers: TypeAlias = np.ndarray | ShardedArray


def is_whole(value: Any) -> bool:
    """Whether this process holds all of a tensor; JAX's arrays may be sharded over processes."""
    return getattr(value, "is_fully_addressable", True) or value.is_fully_replicated


def hollow(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def on_host(value: Any) -> Numbers:
    """Return a tensor as numpy, without a copy on a CPU; for a tensor sharded over processes, its
    pieces.
    """
    if is_whole(value):
        return np.asarray(value)
    pieces: dict[tuple[Any, ...], Shard] = {}
    for shard in value.addressable_shards:
        begin = tuple(
            part.indices(size)[0] for part, size in zip(shard.index, value.shape, strict=True)
        )
        known = pieces.get(begin)
        if known is None or shard.replica_id == 0:
            pieces[begin] = Shard(
                begin, shard.data.shape, partial(np.asarray, shard.data), shard.replica_id == 0
            )
    return ShardedArray(tuple(value.shape), np.dtype(value.dtype), list(pieces.values()))


def copied(
    numbers: Numbers, copy: Callable[[str, np.ndarray], np.ndarray], *, are_own: bool
) -> Numbers:
    """Return a copy of an array, or of its pieces; if `are_own`, only of the pieces that this
    process writes.

    Args:
        copy: returns a copy of an array, given a suffix that identifies the piece.
    """
    if isinstance(numbers, np.ndarray):
        return copy("", numbers)
    pieces = [piece for piece in numbers.pieces if piece.is_own or not are_own]
    arrays = [copy(str([*piece.begin]), piece.read()) for piece in pieces]
    kept = [
        replace(piece, read=partial(np.asarray, array))
        for piece, array in zip(pieces, arrays, strict=True)
    ]
    return replace(numbers, pieces=kept)


def own_copy(name: str, value: Any) -> Numbers:
    """Return a copy of a tensor, or of its pieces; the name is not used."""
    return copied(on_host(value), lambda _, array: np.array(array), are_own=False)
