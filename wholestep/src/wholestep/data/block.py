"""The batch of an update as it was loaded, and the block of updates made from batches."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.cut import Cut
from wholestep.data.kinds import Position
from wholestep.engines import Devices
from wholestep.errors import BatchError, message
from wholestep.tree import Tree

_MOST_STACKED = 16
_MOST_BYTES = 1 << 20  # of stacked data: a single update is sent in arrays with room for all


class Batch(NamedTuple):
    """The rows of one update on the host, before the update is planned.

    Args:
        host: nested arrays of the update's rows; for resident data, of all rows.
        data: the same arrays on the device, if they are resident.
        rows: row numbers in `host`, int32 (rows,).
        full: the rows of a full batch of this shape; for ready-made batches, the most so far.
        ids: row numbers in the user's source, (rows,); None for ready-made batches. A packed row
            has several.
        local: which rows of a loaded batch `host` holds, ascending; None if all.
        start: the position in the source.
        end: the position after it.
        state: the stream's state after this batch, if the stream has one.
        kind: the row shapes of a ready-made batch, for which `full` is counted; else empty.
    """

    host: Tree
    data: Tree
    rows: ndarray
    full: int
    ids: Any
    local: ndarray | None
    start: Position
    end: Position
    state: Any = None
    kind: str = ""

    @property
    def is_resident(self) -> bool:
        """Whether `host` holds all rows of the data."""
        return self.data is not None

    @property
    def num_rows(self) -> int:
        """The number of rows of the update."""
        return len(self.rows)

    @property
    def signature(self) -> tuple:
        """The nesting, dtypes and shapes on which programs depend; of loaded arrays, of a row."""
        return _signature(self.host, 0 if self.is_resident else 1)

    @property
    def program_key(self) -> tuple:
        """The properties by which programs are kept: a loaded row may look like resident data."""
        return self.signature, self.is_resident

    @property
    def names(self) -> ndarray | None:
        """The row numbers that errors show for the rows in `host`; None to show their indices."""
        if self.is_resident or self.ids is None:
            return self.local
        return self.ids if self.local is None else self.ids[self.local]

    def rows_at(self, places: ndarray | slice) -> Tree:
        """Return the rows at these places of the update, on the host; it must be loaded in full."""
        assert self.local is None
        rows = self.rows[places]
        return tree.map_leaves(lambda leaf: np.asarray(leaf)[rows], self.host)

    def padded(self, num_rows: int) -> "Batch":
        """Return the update filled up to `num_rows` by repeating its rows.

        The caller gives the repeats weight 0.

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
        host = self.host
        if self.local is None:
            host = tree.map_leaves(lambda leaf: np.take(leaf, rows, axis=0), host)
        return self._replace(host=host, rows=np.arange(num_rows, dtype=np.int32))


class Planned(Protocol):
    """The part of an update's program that a feed uses."""

    @property
    def cut(self) -> Cut:
        """The cut of its rows into microbatches."""

    @property
    def length(self) -> int:
        """The number of updates in a table."""

    @property
    def most(self) -> int:
        """The most updates in one dispatch."""

    @property
    def num_stacked(self) -> int:
        """The number of loaded updates that its data can hold; 1 for resident data."""


Plan = Callable[[Batch], Planned]
Check = Callable[[Batch, Any], None]


class Table(NamedTuple):
    """The row indices of some updates.

    Args:
        rows: int32 (updates, places); places beyond a count are padding.
        counts: the number of rows of each update without padding, int32 (updates,).
        placed: both arrays as a program takes them.
    """

    rows: ndarray
    counts: ndarray
    placed: tuple


class FeedCache(NamedTuple):
    """The row tables and batch sizes that later feeds reuse.

    Args:
        row_tables: by the length of a program, its cut, and the number of rows of an update.
        largest: by row shapes, the most rows of a ready-made batch so far.
    """

    row_tables: dict[tuple[int, Cut, int], Table]
    largest: dict[str, int]


class Block(NamedTuple):
    """Updates that are handed out together, and their input.

    Args:
        program: computes the updates of the block.
        data: nested arrays, as the program takes them.
        table: the row indices of these updates, and of others, in the data.
        first: the first of these updates in the table.
        num: the number of these updates.
        batches: the batch of each update; for resident data, a single example.
        start: the position in the source of the first of these updates.
        end: the position after the last.
    """

    program: Any
    data: Tree
    table: Table
    first: int
    num: int
    batches: tuple[Batch, ...]
    start: Position
    end: Position

    def names(self, update: int) -> ndarray:
        """Return the numbers of an update's rows in the user's source, (rows,), or indices."""
        if self.batches[0].is_resident:
            place = self.first + update
            return self.table.rows[place, : self.table.counts[place]]
        batch = self.batches[update]
        return batch.rows if batch.ids is None else batch.ids


def stage(devices: Devices, batch: Batch, cut: Cut) -> tuple[Any, ndarray]:
    """Return the data of an update as a program takes them, and the row index of every place.

    Returns:
        The data, and int32 (places,).
    """
    return _data_of(devices, batch, cut), _rows_of(devices, batch, cut)


def _data_of(devices: Devices, batch: Batch, cut: Cut) -> Any:
    if batch.is_resident:
        return batch.data
    if devices.num_replicas == 1:
        return devices.stage(batch.host)
    shares = share_out(cut, devices.num_replicas)[0] % batch.num_rows
    if batch.local is not None:
        shares = np.searchsorted(batch.local, shares)
    return devices.stage(tree.map_leaves(np.asarray, batch.host), shares)


def _rows_of(devices: Devices, batch: Batch, cut: Cut) -> ndarray:
    if batch.is_resident or devices.num_replicas == 1:
        return np.resize(batch.rows, cut.places)
    return share_out(cut, devices.num_replicas)[1]


@lru_cache(maxsize=64)
def share_out(cut: Cut, num: int) -> tuple[ndarray, ndarray]:
    """Share out the places of an update to replicas: replica r works on part r of each microbatch.

    Returns:
        The places of each replica, int (replicas, places of a replica), and the index of every
        place in its replica's share, int32 (places,). Parts have one size; a microbatch that is too
        short for that repeats its last place.

    >>> shares, rows = share_out(Cut(((2, 3),), 6), 2)
    >>> shares.tolist(), rows.tolist()
    ([[0, 1, 3, 4], [2, 2, 5, 5]], [0, 1, 0, 2, 3, 2])
    """
    shares = []
    rows = []
    width = 0
    for start, size in cut.pieces:
        share = -(-size // num)
        places = np.minimum(np.arange(num * share), size - 1)
        shares.append(start + places.reshape(num, share))
        rows.append(width + np.arange(size) % share)
        width += share
    return np.concatenate(shares, axis=1), np.concatenate(rows).astype(np.int32)


def num_rows_of(host: Tree) -> int:
    """Return the number of rows of a ready-made batch.

    Raises:
        BatchError: there is none, or the leaves differ in their number.
    """
    num_rows = tree.num_rows(host)
    if num_rows == 0:
        must = "A batch must have at least one row."
        raise BatchError(message(must, "0 rows", "leave empty batches out."))
    return num_rows


def block_of(devices: Devices, row_tables: dict, program: Planned, batches: list[Batch]) -> Block:
    """Return the block of batches of one program: padded, and placed for the program.

    Args:
        row_tables: the tables of earlier blocks, see `FeedCache`; completed.
    """
    first = batches[0]
    last = batches[-1]
    cut = program.cut
    padded = batches
    if devices.num_replicas == 1:
        padded = [batch.padded(cut.rows) for batch in batches]
    room = program.num_stacked
    data = devices.stage(stack(padded, room)) if room > 1 else _data_of(devices, padded[0], cut)
    key = (program.length, cut, first.num_rows)
    if key not in row_tables:
        if room > 1:
            rows = stacked_rows(padded[0], cut, room)
        else:
            rows = _rows_of(devices, padded[0], cut)[None]
        row_tables[key] = table_of(devices, program, rows, first.num_rows)
    table = row_tables[key]
    return Block(program, data, table, 0, len(batches), tuple(batches), first.start, last.end)


def table_of(devices: Devices, program: Planned, rows: ndarray, num_rows: int) -> Table:
    """Return a table of updates of `num_rows` rows: int32 (updates, places)."""
    named = np.zeros((program.length, rows.shape[1]), np.int32)
    counts = np.full((program.length,), num_rows, np.int32)
    named[: len(rows)] = rows
    return Table(named, counts, devices.place((named, counts)))


def most_in_a_dispatch(devices: Devices, batch: Batch, most: int) -> int:
    """Return how many updates on batches like this one a dispatch may run, at most `most`.

    Loaded batches are stacked, except for several replicas: each receives its share of one batch.
    """
    if batch.is_resident:
        return most
    if devices.num_replicas > 1:
        return 1
    fitting = _MOST_BYTES // max(1, tree.num_bytes(batch.host))
    return max(1, min(most, _MOST_STACKED, fitting))


def stack(batches: list[Batch], room: int) -> Any:
    """Return the data of batches, stacked for a program with this room; the rest is arbitrary.

    >>> import numpy as np
    >>> def batch(i):
    ...     x = np.array([i, i + 1])
    ...     return Batch(x, None, np.arange(2), 2, None, None, (0, i), (0, i + 1))
    >>> batches = [batch(4), batch(7)]
    >>> stack(batches, 3)[:4].tolist()
    [4, 5, 7, 8]
    >>> stacked_rows(batches[0], Cut(((1, 2),), 2), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    return tree.map_leaves(partial(_one_after_another, room), *[batch.host for batch in batches])


def stacked_rows(batch: Batch, cut: Cut, room: int) -> ndarray:
    """Return the row indices of every update in stacked data, int32 (room, places)."""
    starts = np.arange(0, room * batch.num_rows, batch.num_rows, dtype=np.int32)
    return starts[:, None] + np.resize(batch.rows, cut.places)


def _one_after_another(room: int, *leaves: ndarray) -> ndarray:
    like = leaves[0]
    size = len(like)
    shape = (room * size, *like.shape[1:])
    if like.dtype == object:  # text or ragged rows: there is no neutral value for unused room
        return np.resize(np.concatenate(leaves), shape)
    stacked = tree.aligned(shape, like.dtype)
    for i, leaf in enumerate(leaves):
        stacked[i * size : (i + 1) * size] = leaf
    if like.dtype.kind in "iu":  # an engine may check the range of the numbers
        stacked[len(leaves) * size :] = 0
    return stacked


def _signature(part: Any, first_axis: int) -> Any:
    if isinstance(part, ndarray) and part.dtype.kind != "O":  # as most are
        return part.shape[first_axis:], part.dtype
    if part is None:
        return None
    if isinstance(part, dict):
        names = sorted(part, key=str)
        return dict, *((name, _signature(part[name], first_axis)) for name in names)
    if isinstance(part, list | tuple):
        return type(part), *[_signature(item, first_axis) for item in part]
    if part.dtype == object and tree.is_ragged(part):
        return "ragged", part.shape[first_axis:1], _signature(part[0], 1)
    return part.shape[first_axis:], part.dtype


class SingleBatches:
    """Feed of single batches. It has no position, and stays open from one batch to the next.

    Args:
        row_tables: the tables of earlier blocks, see `wholestep.data.block.FeedCache`; completed.
    """

    where = "Batches are loaded as they are needed (they come ready-made)."

    def __init__(self, devices: Devices, row_tables: dict):
        self._devices = devices
        self._row_tables = row_tables

    def block(
        self,
        host: Tree,
        plan: Plan,
        check: Check,
        num_full: Callable[[Tree, int], int] | None = None,
    ) -> Block:
        """Return the block of a batch.

        Args:
            host: numpy arrays of shape (rows, ...).
            plan: returns the program of the batch.
            check: raises an error for data that its program may not use.
            num_full: returns the number of rows up to which a batch of a number of rows may be
                padded; None: not.
        """
        num = num_rows_of(host)
        rows = np.arange(num, dtype=np.int32)
        full = num if num_full is None else num_full(host, num)
        batch = Batch(host, None, rows, full, None, None, (0, 0), (0, 1))
        program = plan(batch)
        check(batch, program)
        return block_of(self._devices, self._row_tables, program, [batch])

    def advance(self, block: Block) -> None:
        """Do nothing: a single batch has no position."""
