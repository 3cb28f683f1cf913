"""Batches on their way to the device: resident data are named by row numbers, others are loaded ahead by a thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from wholestep import tree
from wholestep.batches import Batches
from wholestep.errors import BatchError, say
from wholestep.grouping import Even
from wholestep.source import Stream

_AHEAD = 2


class Block(NamedTuple):
    """What one dispatch gets: the data, and for each of its updates the rows in it.

    Args:
        data: nested arrays on the device.
        rows: row numbers in `data`, int32 (updates, places); places beyond a count are padding.
        counts: the real rows of each update, int32 (updates,).
        full: the rows of an update of this shape that is not short; for ready-made batches the most so far.
        ids: row numbers in the user's source (None for ready-made batches), one array for each update; where rows are
            packed, an array of arrays.
        host: the batch on the host, if it was loaded; what is checked before it is used.
        place: the place in the source of the first of these updates.
        position: the place after the last.
    """

    data: Any
    rows: np.ndarray
    counts: np.ndarray
    full: int
    ids: list
    host: Any
    place: tuple[int, int]
    position: tuple[int, int]


class Resident:
    """Arrays that stay on the device; a block names rows. `most` updates can go in one dispatch."""

    def __init__(self, engine: Any, batches: Batches):
        assert isinstance(batches.grouping, Even)
        self.order, self.size = batches.grouping.order, batches.grouping.size
        self.batches = batches
        self.data = engine.place(batches.arrays)
        self.most = len(batches)

    def blocks(self, num: int | None, size: Callable[[], int]) -> Iterator[Block]:
        """Yield blocks of at most size() updates, `num` updates in all (None: to the end of the epoch)."""
        (epoch, step), per_epoch = self.batches.position, len(self.batches)
        left = per_epoch - step if num is None else num
        while left:
            several = min(left, size(), per_epoch - step)
            yield from self._blocks(epoch, step, several)
            left, step = left - several, step + several
            if step == per_epoch:
                epoch, step = epoch + 1, 0

    def _blocks(self, epoch: int, step: int, num: int) -> Iterator[Block]:
        size, order = self.size, self.order
        rows = order.rows(epoch, step * size, min((step + num) * size, order.num_rows))
        full = len(rows) // size
        if full:
            yield self._block(rows[: full * size].reshape(full, size), (epoch, step))
        if len(rows) > full * size:
            yield self._block(rows[None, full * size :], (epoch, step + full))

    def _block(self, rows: np.ndarray, place: tuple[int, int]) -> Block:
        counts = np.full((len(rows),), rows.shape[1], np.int32)
        epoch, step = place[0], place[1] + len(rows)
        after = (epoch + 1, 0) if step == len(self.batches) else (epoch, step)
        return Block(self.data, rows.astype(np.int32), counts, self.size, list(rows), None, place, after)


class Loaded:
    """Batches that are loaded, one update to a block, by a thread that keeps ahead."""

    def __init__(self, engine: Any, batches: Batches):
        self.engine = engine
        self.batches = batches
        self.most = 1
        self._largest: dict[tuple, int] = {}
        self._stop = threading.Event()

    def blocks(self, num: int | None, size: Callable[[], int]) -> Iterator[Block]:
        """Yield blocks of one update, `num` in all (None: to the end of the epoch)."""
        ready: queue.Queue = queue.Queue(_AHEAD)
        place = self.batches.position
        self._end: tuple[int, int] | None = None  # the place after a stream that has ended
        self._stop.clear()
        thread = threading.Thread(target=self._work, args=(ready, num), name="wholestep-feed", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                place = item.position
                yield item
            place = self._end or place
        finally:
            self._stop.set()
            thread.join()
            self._put_back(ready, place)

    def _work(self, ready: queue.Queue, num: int | None) -> None:
        try:
            for block in self._load(num):
                if not _put(ready, block, self._stop):
                    self.batches.unused.append(block)
                    return
            _put(ready, None, self._stop)
        except BaseException as error:  # handed to the loop, which raises it
            _put(ready, error, self._stop)

    def _put_back(self, ready: queue.Queue, place: tuple[int, int]) -> None:
        """Go back to the place after the last used block; a stream cannot, so its blocks wait for the next call."""
        batches = self.batches
        unused = [item for item in _drain(ready) if isinstance(item, Block)] + batches.unused
        batches.unused = unused if isinstance(batches.source, Stream) else []
        batches.position = place

    def _load(self, num: int | None) -> Iterator[Block]:
        batches, done, place = self.batches, 0, self.batches.position
        epoch = place[0]
        while batches.unused and done != num:
            block = batches.unused.pop(0)
            done, place = done + 1, block.position
            yield block
        while done != num and (num is not None or place[0] == epoch):
            try:
                host, after = batches.take(place)
            except StopIteration:
                assert isinstance(batches.source, Stream)
                self._end = (place[0] + 1, 0)
                if num is None or not batches.source.begins_again or place[1] == 0:
                    return
                place = self._end
                continue
            done += 1
            yield self._block(host, place, after)
            place = after

    def _block(self, host: Any, place: tuple[int, int], position: tuple[int, int]) -> Block:
        count, batches = tree.num_rows(host), self.batches
        if count == 0:
            raise BatchError(say("A batch must have at least one row.", "0 rows", "leave empty batches out."))
        ids = None if batches.is_ready else batches.grouping.ids(*place)
        full = self._most_so_far(host, count) if batches.is_ready else batches.grouping.full_size(*place)
        rows, counts = np.arange(count, dtype=np.int32)[None], np.full((1,), count, np.int32)
        return Block(self.engine.place(host), rows, counts, full, [ids], host, place, position)

    def _most_so_far(self, host: Any, count: int) -> int:
        """Return the most rows that a ready-made batch of this shape has had."""
        shape = tuple(leaf.shape[1:] for leaf in tree.leaves(host))
        self._largest[shape] = max(self._largest.get(shape, 0), count)
        return self._largest[shape]


Feed = Resident | Loaded


def open_feed(engine: Any, batches: Batches, limit: int) -> Feed:
    """Return a feed; arrays of at most `limit` bytes become resident."""
    if batches.arrays is not None and not batches.shapes and tree.num_bytes(batches.arrays) <= limit:
        return Resident(engine, batches)
    return Loaded(engine, batches)


def fill(engine: Any, block: Block, num_rows: int) -> Block:
    """Fill up the rows of every update, and loaded data with them, by repeating rows; they are to weigh nothing."""
    block = fill_places(block, num_rows)
    if block.host is None:
        return block
    data = tree.map_leaves(lambda leaf: np.take(leaf, np.arange(num_rows), axis=0, mode="wrap"), block.host)
    return block._replace(data=engine.place(data))


def fill_places(block: Block, places: int) -> Block:
    """Fill up the row numbers of every update to as many places as its microbatches hold."""
    return block._replace(rows=np.take(block.rows, np.arange(places), axis=1, mode="wrap"))


def _put(ready: queue.Queue, item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False


def _drain(ready: queue.Queue) -> list:
    items = []
    while not ready.empty():
        items.append(ready.get_nowait())
    return items
