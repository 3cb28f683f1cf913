"""What a feed yields: the rows of an update as they were loaded, and the block of updates that is made of such."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from wholestep import tree
from wholestep.cut import Cut
from wholestep.tree import Tree


class Batch(NamedTuple):
    """The rows of one update on the host, before it is known how the update is carried out.

    Args:
        host: nested arrays; of resident data all rows there are.
        data: the same on the device, if they are resident.
        rows: row numbers in `host`, int32 (rows,).
        full: the rows of an update of this shape that is not short; for ready-made batches the most so far.
        ids: row numbers in the user's source, (rows,); None for ready-made batches. A packed row has several.
        own: which rows of a loaded batch `host` holds, ascending; None if all.
        start: the position in the source.
        end: the position after it.
        state: where a stream stood after it, if the stream can tell.
        kind: the shapes of its rows, of a ready-made batch whose `full` is the most so far of these.
    """

    host: Tree
    data: Tree
    rows: np.ndarray
    full: int
    ids: Any
    own: np.ndarray | None
    start: tuple[int, int]
    end: tuple[int, int]
    state: Any = None
    kind: str = ""

    @property
    def is_resident(self) -> bool:
        """Whether `host` is all rows there are, to be used again."""
        return self.data is not None

    @property
    def num_rows(self) -> int:
        """The number of rows of the update."""
        return len(self.rows)

    @property
    def signature(self) -> tuple:
        """What programs depend on: how the arrays are nested, their dtypes and shapes; of loaded ones not the rows."""
        return _signature(self.host, 0 if self.is_resident else 1)

    @property
    def names(self) -> np.ndarray | None:
        """What the rows in `host` are called in an error; None for their places."""
        if self.is_resident or self.ids is None:
            return self.own
        return self.ids if self.own is None else self.ids[self.own]

    def some(self, places: np.ndarray | slice) -> Tree:
        """Return the rows at these places of the update, on the host; not of one that was loaded in part."""
        assert self.own is None
        rows = self.rows[places]
        return tree.map_leaves(lambda leaf: np.asarray(leaf)[rows], self.host)

    def padded(self, num_rows: int) -> "Batch":
        """Return the update with so many rows, by repeating them, and loaded arrays with it; they are to weigh nothing.

        >>> import numpy as np
        >>> batch = Batch(np.array([7, 8]), None, np.arange(2), 2, None, None, (0, 0), (0, 1))
        >>> batch.padded(3).host.tolist()
        [7, 8, 7]
        """
        if self.num_rows == num_rows:
            return self
        rows = np.resize(self.rows, num_rows)
        if self.is_resident:
            return self._replace(rows=rows)
        host = tree.map_leaves(lambda leaf: np.take(leaf, rows, axis=0), self.host) if self.own is None else self.host
        return self._replace(host=host, rows=np.arange(num_rows, dtype=np.int32))


class Planned(Protocol):
    """What a feed must know of how an update is carried out."""

    @property
    def cut(self) -> Cut:
        """How its rows are shared out."""

    @property
    def length(self) -> int:
        """How many updates a table names."""

    @property
    def num_stacked(self) -> int:
        """How many updates that were loaded have room in its data; of resident data 1."""


Plan = Callable[[Batch], Planned]
Check = Callable[[Batch], None]


class Device(Protocol):
    """What a feed must know of an engine."""

    @property
    def num_replicas(self) -> int:
        """How many replicas share the rows of an update."""

    @property
    def own_replicas(self) -> list[int]:
        """The replicas whose rows this process must load."""

    def place(self, data: Tree) -> Tree:
        """Put host arrays on the device."""

    def resident(self, data: Tree) -> Tree:
        """Put arrays on the device, or on each of several, to be used again and again."""

    def staged(self, data: Tree) -> Tree:
        """Return host arrays in the form that a program takes soonest."""

    def shard(self, data: Tree, shares: np.ndarray) -> Any:
        """Put rows on the replicas that work on them: int (replicas, rows of a replica)."""


class Table(NamedTuple):
    """The rows of some updates.

    Args:
        rows: int32 (updates, places); places beyond a count are padding.
        counts: the real rows of each update, int32 (updates,).
        placed: both as a program takes them.
    """

    rows: np.ndarray
    counts: np.ndarray
    placed: tuple


class Known(NamedTuple):
    """What feeds leave to the next ones.

    Args:
        tables: by the length of a program, its cut, and the rows of an update.
        largest: by the shapes of a row, the most rows that a ready-made batch has had.
    """

    tables: dict[tuple[int, Cut, int], Table]
    largest: dict[str, int]


class Block(NamedTuple):
    """What one dispatch gets, finished: nothing of it is left to be decided.

    Args:
        program: carries the block out.
        data: nested arrays, as the program takes them.
        table: names the rows of these updates in the data, and of others.
        first: the first of these updates in the table.
        num: how many they are.
        follow: how many others of the table are wanted next.
        looks: whether somebody may look at the state between these updates and those that follow.
        batches: the data on the host: of each update, or one that stands for all where data are resident.
        start: the position in the source of the first of these updates.
        end: the position after the last.
    """

    program: Any
    data: Tree
    table: Table
    first: int
    num: int
    batches: tuple[Batch, ...]
    start: tuple[int, int]
    end: tuple[int, int]
    follow: int = 0
    looks: bool = False

    def names(self, update: int) -> np.ndarray:
        """Return what the rows of an update are called in the user's source, (rows,); places, if they have no name."""
        if self.batches[0].is_resident:
            return self.table.rows[self.first + update][: self.table.counts[self.first + update]]
        batch = self.batches[update]
        return batch.rows if batch.ids is None else batch.ids


def stage(engine: Device, batch: Batch, cut: Cut) -> tuple[Any, np.ndarray]:
    """Return the data of an update as a program takes them, and the rows there of every place, int32 (places,)."""
    if batch.is_resident:
        return batch.data, np.resize(batch.rows, cut.places)
    if engine.num_replicas == 1:
        return engine.staged(batch.host), np.resize(batch.rows, cut.places)
    shares, rows = share_out(cut, engine.num_replicas)
    shares = shares % batch.num_rows
    shares = shares if batch.own is None else np.searchsorted(batch.own, shares)
    return engine.shard(tree.map_leaves(np.asarray, batch.host), shares), rows


@lru_cache(maxsize=64)
def share_out(cut: Cut, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Share out the places of an update to replicas: of each microbatch, the first part to the first, and so on.

    Returns:
        The places of each replica, int (replicas, places of a replica), and where every place lies in its replica's
        share, int32 (places,). Parts are of one size; what a microbatch lacks for that is filled with its last place.

    >>> shares, rows = share_out(Cut(((2, 3),), 6), 2)
    >>> shares.tolist(), rows.tolist()
    ([[0, 1, 3, 4], [2, 2, 5, 5]], [0, 1, 0, 2, 3, 2])
    """
    shares, rows, start, width = [], [], 0, 0
    for size in (size for count, size in cut.sections for _ in range(count)):
        each = -(-size // num)
        places = np.minimum(np.arange(num * each), size - 1)
        shares.append(start + places.reshape(num, each))
        rows.append(width + np.arange(size) % each)
        start, width = start + size, width + each
    return np.concatenate(shares, axis=1), np.concatenate(rows).astype(np.int32)


def _signature(part: Tree, first_axis: int) -> Any:
    if isinstance(part, dict):
        names = sorted(part, key=str)
        return dict, *((name, _signature(part[name], first_axis)) for name in names)
    if isinstance(part, list | tuple):
        return type(part), *(_signature(each, first_axis) for each in part)
    if part is not None and part.dtype == object and tree.is_ragged(part):
        return "ragged", part.shape[first_axis:1], _signature(part[0], 1)
    return None if part is None else (part.shape[first_axis:], part.dtype)
