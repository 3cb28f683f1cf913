"""Batches on their way to the device: resident data are named by row numbers, others are loaded ahead by a thread."""

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from wholestep import tree
from wholestep.cut import Cut
from wholestep.data.batches import Batches
from wholestep.data.sampler import FixedSize
from wholestep.data.source import BatchStream
from wholestep.errors import BatchError, message
from wholestep.interrupts import uninterrupted

_AHEAD = 2
_UPDATES_AHEAD = 32


class Block(NamedTuple):
    """What one dispatch gets: the data, and for each of its updates the rows in it.

    Args:
        data: nested arrays on the device; None for loaded rows that are still to be spread over replicas.
        host: the same on the host, where they came from.
        is_resident: whether these are all rows there are, to be used again.
        rows: row numbers in `host`, int32 (updates, places); places beyond a count are padding.
        counts: the real rows of each update, int32 (updates,).
        full: the rows of an update of this shape that is not short; for ready-made batches the most so far.
        ids: row numbers in the user's source (None for ready-made batches), one array for each update; where rows are
            packed, an array of arrays.
        own: which rows of a loaded batch `host` holds, ascending; None if all.
        start: the position in the source of the first of these updates.
        end: the position after the last.
    """

    data: Any
    host: Any
    is_resident: bool
    rows: np.ndarray
    counts: np.ndarray
    full: int
    ids: list
    own: np.ndarray | None
    start: tuple[int, int]
    end: tuple[int, int]

    def some(self, update: int, places: Any) -> Any:
        """Return the rows at these places of an update, on the host; not of one that was loaded in part."""
        assert self.own is None
        rows = self.rows[update][places]
        return tree.map_leaves(lambda leaf: np.asarray(leaf)[rows], self.host)


class Resident:
    """Arrays that stay on the device; a block names rows. `most` updates can go in one dispatch."""

    def __init__(self, engine: Any, batches: Batches):
        assert isinstance(batches.sampler, FixedSize)
        self.order, self.size = batches.sampler.order, batches.sampler.size
        self.batches = batches
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.data = engine.resident(batches.arrays)
        self.where = f"The data stay on the device ({tree.num_bytes(batches.arrays) / 2**20:.1f} MiB)."
        self.most = len(batches)
        self._ahead = (-1, 0, np.zeros((0,), np.int64))  # the row numbers of some updates: epoch, first one, rows

    def blocks(self, num: int | None, size: Callable[[], int], *, once: bool = False) -> Iterator[Block]:
        """Yield blocks of at most size() updates, `num` updates in all (None: to the end of the epoch).

        Args:
            once: whether they end with the epoch in any case.
        """
        (epoch, step), per_epoch = self.batches.position, len(self.batches)
        left = per_epoch - step if num is None else num
        left = min(left, per_epoch - step) if once else left
        while left:
            several = min(left, size(), per_epoch - step)
            yield from self._blocks(epoch, step, several)
            left, step = left - several, step + several
            if step == per_epoch:
                epoch, step = epoch + 1, 0

    def go_back(self, block: Block, done: int) -> None:
        """Stand behind the first `done` updates of a block again: the others were not carried out."""
        self.batches.position = block.start[0], block.start[1] + done

    def _blocks(self, epoch: int, step: int, num: int) -> Iterator[Block]:
        size = self.size
        rows = self._rows(epoch, step, num)
        full = len(rows) // size
        if full:
            yield self._block(rows[: full * size].reshape(full, size), (epoch, step))
        if len(rows) > full * size:
            yield self._block(rows[None, full * size :], (epoch, step + full))

    def _rows(self, epoch: int, step: int, num: int) -> np.ndarray:
        """Return the row numbers of `num` updates; of single ones several at once, which takes hardly longer."""
        known, first, ahead = self._ahead
        if known != epoch or not first <= step <= step + num <= first + -(-len(ahead) // self.size):
            first, last = step, step + max(num, _UPDATES_AHEAD)
            ahead = self.order.rows(epoch, first * self.size, min(last * self.size, self.order.num_rows))
            self._ahead = epoch, first, ahead
        return ahead[(step - first) * self.size : (step - first + num) * self.size]

    def _block(self, rows: np.ndarray, position: tuple[int, int]) -> Block:
        counts = np.full((len(rows),), rows.shape[1], np.int32)
        epoch, step = position[0], position[1] + len(rows)
        after = (epoch + 1, 0) if step == len(self.batches) else (epoch, step)
        host = self.batches.arrays
        return Block(self.data, host, True, rows.astype(np.int32), counts, self.size, list(rows), None, position, after)


class Loaded:
    """Batches that are loaded, one update to a block, by a thread that keeps ahead.

    `cuts` says how updates of so many rows (full, real) are cut, as soon as that is known. Then, with several
    processes, each loads only the rows that its own replicas work on.
    """

    def __init__(self, engine: Any, batches: Batches, why: str = ""):
        self.engine = engine
        self.batches = batches
        self.where = f"Batches are loaded as they are needed{why and f' ({why})'}."
        self.most = 1
        self.cuts: dict[tuple[int, int], Cut] = {}
        self._largest: dict[tuple, int] = {}
        self._stop = threading.Event()

    def blocks(self, num: int | None, size: Callable[[], int], *, once: bool = False) -> Iterator[Block]:
        """Yield blocks of one update, `num` in all (None: to the end of the epoch).

        Whoever has used a block moves the batches' position to that after it.

        Args:
            once: whether they end with the epoch in any case.
        """
        ready: queue.Queue = queue.Queue(_AHEAD)
        latest: deque[Block] = deque(maxlen=2)  # the update that is under way, and the one before it
        self._end: tuple[int, int] | None = None  # the place after a stream that has ended
        self._in_hand: list[Block] = []
        self._stop.clear()
        thread = threading.Thread(target=self._work, args=(ready, num, once), name="wholestep-feed", daemon=True)
        leave = partial(_leave, self._stop, thread)
        try:
            thread.start()
            atexit.register(leave)
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                latest.append(item)
                yield item
            self.batches.position = max(self.batches.position, self._end or self.batches.position)
        finally:
            self._stop.set()
            atexit.unregister(leave)
            try:
                thread.join()
            finally:  # also after a second Ctrl-C, of somebody who does not want to wait for the thread
                with uninterrupted():
                    self._put_back([*latest, *_drain(ready), *self._in_hand])

    def in_hand(self, full: Callable[[Any], int]) -> Block:
        """Return the one batch there is, without a thread; `full` says to how many rows it may be filled up."""
        host, after = self.batches.take((0, 0))
        return self._block(host, None, (0, 0), after)._replace(full=full(host))

    def go_back(self, block: Block, done: int) -> None:
        """Stand behind the first `done` updates of a block again: the others were not carried out."""
        self.batches.position = block.start[0], block.start[1] + done
        if self._stop.is_set():
            self._put_back([block])

    def _work(self, ready: queue.Queue, num: int | None, once: bool) -> None:
        try:
            for block in self._load(num, once):
                if not _put(ready, block, self._stop):
                    self._in_hand.append(block)
                    return
            _put(ready, None, self._stop)
        except BaseException as error:  # handed to the loop, which raises it
            _put(ready, error, self._stop)

    def _put_back(self, loaded: list) -> None:
        """Let ready-made batches that were not used wait for the next call; others can be loaded again."""
        batches = self.batches
        unused = [item for item in loaded if isinstance(item, Block) and item.start >= batches.position]
        unused = [block._replace(data=None) for block in unused]
        batches.unused = unused + batches.unused if batches.is_ready else []

    def _load(self, num: int | None, once: bool) -> Iterator[Block]:
        batches, done, position = self.batches, 0, self.batches.position
        epoch = position[0]
        while batches.unused and done != num:
            block = batches.unused.pop(0)
            done, position = done + 1, block.end
            yield block._replace(data=self._placed(block.host))
        ends = once or num is None
        while done != num and (not ends or position[0] == epoch):
            try:
                own = self._own(position)
                host, after = batches.take(position, slice(None) if own is None else own)
            except StopIteration:
                assert isinstance(batches.source, BatchStream)
                self._end = (position[0] + 1, 0)
                if ends or not batches.source.begins_again or position[1] == 0:
                    return
                position = self._end
                continue
            done += 1
            yield self._block(host, own, position, after)
            position = after

    def _own(self, position: tuple[int, int]) -> np.ndarray | None:
        """Return which rows of a batch this process must load; None for all."""
        if self.engine.processes.count == 1 or self.batches.is_ready:
            return None
        sampler = self.batches.sampler
        count = len(sampler.ids(*position))
        cut = self.cuts.get((sampler.full_size(*position), count))
        if cut is None:
            return None
        return np.unique(share_out(cut, self.engine.num_replicas)[0][self.engine.own_replicas] % count)

    def _block(self, host: Any, own: np.ndarray | None, start: tuple[int, int], end: tuple[int, int]) -> Block:
        batches = self.batches
        ids = None if batches.is_ready else batches.sampler.ids(*start)
        count = tree.num_rows(host) if ids is None else len(ids)
        if count == 0:
            raise BatchError(message("A batch must have at least one row.", "0 rows", "leave empty batches out."))
        full = self._most_so_far(host, count) if batches.is_ready else batches.sampler.full_size(*start)
        rows, counts = np.arange(count, dtype=np.int32)[None], np.full((1,), count, np.int32)
        return Block(self._placed(host), host, False, rows, counts, full, [ids], own, start, end)

    def _placed(self, host: Any) -> Any:
        return self.engine.place(host) if self.engine.num_replicas == 1 else None

    def _most_so_far(self, host: Any, count: int) -> int:
        """Return the most rows that a ready-made batch of this shape has had."""
        shape = tuple(leaf.shape[1:] for leaf in tree.leaves(host))
        self._largest[shape] = max(self._largest.get(shape, 0), count)
        return self._largest[shape]


Feed = Resident | Loaded


def open_feed(engine: Any, batches: Batches, limit: int) -> Feed:
    """Return a feed; arrays of at most `limit` bytes become resident."""
    if batches.is_ready:
        return Loaded(engine, batches, "they come ready-made")
    if batches.arrays is None or batches.shapes:
        return Loaded(engine, batches, "of a few shapes" if batches.shapes else "rows come one by one")
    if (size := tree.num_bytes(batches.arrays)) <= limit:
        return Resident(engine, batches)
    return Loaded(engine, batches, f"arrays of {size / 2**20:.0f} MiB may not stay, beyond {limit / 2**20:.0f}")


def pad_to(engine: Any, block: Block, num_rows: int) -> Block:
    """Fill up the rows of every update, and loaded data with them, by repeating rows; they are to weigh nothing."""
    if block.rows.shape[1] == num_rows:
        return block
    block = block._replace(rows=np.take(block.rows, np.arange(num_rows), axis=1, mode="wrap"))
    if block.is_resident or block.data is None:
        return block
    host = tree.map_leaves(lambda leaf: np.take(leaf, block.rows[0], axis=0), block.host)
    return block._replace(data=engine.place(host), host=host, rows=np.arange(num_rows, dtype=np.int32)[None])


def stage(engine: Any, block: Block, cut: Cut) -> tuple[Any, np.ndarray]:
    """Return the data of a block on the device, and the rows there of every place of its updates, int32."""
    if block.data is not None:
        rows = np.take(block.rows, np.arange(cut.places), axis=1, mode="wrap")
        return block.data, rows
    shares, rows = share_out(cut, engine.num_replicas)
    shares = shares % block.counts[0]
    shares = shares if block.own is None else np.searchsorted(block.own, shares)
    return engine.shard(tree.map_leaves(np.asarray, block.host), shares), rows[None]


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


def _put(ready: queue.Queue, item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.05)
            return True
        except queue.Full:
            continue
    return False


def _leave(stop: threading.Event, thread: threading.Thread) -> None:
    """Stop a loop's thread when the script ends inside the loop: the interpreter may abort if it ends before."""
    stop.set()
    thread.join(timeout=2)  # it may wait for data that never come


def _drain(ready: queue.Queue) -> list:
    items = []
    while not ready.empty():
        items.append(ready.get_nowait())
    return items
