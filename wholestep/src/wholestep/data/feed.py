"""Feeds bring batches to the device: as row numbers of resident data, or loaded when needed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.block import (
    Batch,
    Block,
    Check,
    FeedCache,
    Plan,
    Planned,
    Table,
    block_of,
    num_rows_of,
    share_out,
    table_of,
)
from wholestep.data.kinds import Position
from wholestep.data.order import Selection
from wholestep.data.sampler import FixedSize, GrowingSize
from wholestep.data.sizes import Run
from wholestep.engines import Devices
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.safety import TerminatedWaiting, uninterrupted, waiting
from wholestep.tree import Tree

_MOST_NAMED = 1 << 16  # row numbers that are computed at once, unless a dispatch takes more
Count = Callable[[], int]
_PART = 16  # 1/16 of the updates that fit a dispatch are stacked: enough to hide its cost


@dataclass(eq=False)
class _Feed:
    """The batches of a call on their way to the device.

    Args:
        plan: returns the program of an update.
        check: raises an error for data that an update by its program may not use.
    """

    devices: Devices
    batches: Batches
    plan: Plan
    check: Check
    _num_moves: int = field(default=0, init=False)

    def _begin(self) -> Position:
        """Begin a pass, and return its position."""
        self._num_moves = self.batches.num_moves
        return self.batches.position

    def _check_unmoved(self, block: Block) -> None:
        """Refuse to go on after a block if other code has moved the batches during the pass.

        Raises:
            SpecificationError: it has; the updates so far are kept.
        """
        if self.batches.num_moves != self._num_moves:
            must = (
                "Batches must not be moved during a loop over them: it would train rows twice, "
                "or leave some out."
            )
            epoch, step = block.start
            received = (
                f"a seek or another loop after batch {step + block.num - 1} of epoch {epoch}, both "
                "counted from 0"
            )
            attempt = "end this loop first, or give the other loop Batches of its own."
            raise SpecificationError(message(must, received, attempt))

    def advance(self, block: Block) -> None:
        """Move the position to the end of a block."""
        self.batches.position = block.end

    def go_back(self, block: Block, done: int) -> None:
        """Move the position to after the `done` updates of a block that were applied."""
        epoch, step = block.start
        self.batches.position = (epoch, step + done)

    def note_read(self, block: Block) -> None:
        """Record that the results of a sent block were read."""


class NamedRows(NamedTuple):
    """The table with the rows of updates `start` to `end` - 1 of an epoch."""

    epoch: int
    start: int
    end: int
    table: Table

    def hold(self, epoch: int, step: int, num: int) -> bool:
        """Whether these updates are in the table."""
        return self.epoch == epoch and self.start <= step and step + num <= self.end


@dataclass(eq=False)
class Resident(_Feed):
    """Arrays that stay on the device; a block names rows."""

    def __post_init__(self) -> None:
        sampler = self.batches.sampler
        arrays = self.batches.arrays
        assert isinstance(sampler, FixedSize | GrowingSize)
        self.sampler = sampler
        self.order = sampler.order
        self.where = f"The data stay on the device ({tree.num_bytes(arrays) / 2**20:.1f} MiB)."
        self._data, self._wait = self.devices.resident(arrays)
        self._named: NamedRows | None = None
        self._examples: dict[tuple[int, int], Batch] = {}  # by the rows of an update, full and real
        self._is_checked = False

    def blocks(
        self, num: int | None, size: Count, *, once: bool = False, reads_state: bool = False
    ) -> Iterator[Block]:
        """Yield blocks of at most size() updates, `num` in all (None: to the end of the epoch).

        Args:
            once: whether the blocks end with the epoch in any case.
            reads_state: not used, as nothing is drawn.
        """
        epoch, step = self._begin()
        left = self._num_batches(epoch) - step
        if num is not None:
            left = min(num, left) if once else num
        while left:
            block = self._block(epoch, step, size(), min(left, self._num_batches(epoch) - step))
            yield block
            self._check_unmoved(block)
            left -= block.num
            epoch, step = block.end

    def note_sent(self, block: Block) -> None:
        """Compute the order of the next epoch while the device is busy; `Order` caches it."""
        epoch, step = block.end
        if step == 0:
            run = self.sampler.run(epoch, 0)
            num = min(self._num_full(run, 0), _MOST_NAMED // run.size)
            if num:
                self._rows(run, epoch, 0, num)

    def _num_batches(self, epoch: int) -> int:
        num = self.batches.num_batches_in(epoch)
        assert num is not None
        return num

    def _num_full(self, run: Run, step: int) -> int:
        """Return the number of full batches from `step` to the end of the run."""
        in_epoch = (self.order.num_rows - run.place(step)) // run.size
        return min(run.first + run.num - step, in_epoch)

    def _block(self, epoch: int, step: int, num: int, left: int) -> Block:
        run = self.sampler.run(epoch, step)
        alike = max(1, self._num_full(run, step))
        batch = self._example(run, epoch, step)
        program = self.plan(batch)
        if not self._is_checked:
            self.check(batch, program)
            self._wait()
            self._is_checked = True
        left = min(left, alike, program.most)
        named = self._table(program, run, epoch, step, min(num, left), alike)
        num = min(num, left, named.end - step)
        is_last = step + num == self._num_batches(epoch)
        return Block(
            program,
            self._data,
            named.table,
            step - named.start,
            num,
            (batch,),
            (epoch, step),
            (epoch + 1, 0) if is_last else (epoch, step + num),
        )

    def _example(self, run: Run, epoch: int, step: int) -> Batch:
        """Return a batch of the size of this one, of which an update is planned."""
        key = run.size, min(run.size, self.order.num_rows - run.place(step))
        if key not in self._examples:
            rows = self._rows(run, epoch, step, 1)[0]
            start = (epoch, step)
            end = (epoch, step + 1)
            self._examples[key] = Batch(
                self.batches.arrays, self._data, rows, run.size, None, None, start, end
            )
        return self._examples[key]

    def _rows(self, run: Run, epoch: int, step: int, num: int) -> ndarray:
        """Return the rows of `num` updates of one size, int32 (updates, rows)."""
        start = run.place(step)
        stop = min(start + num * run.size, self.order.num_rows)
        rows = self.order.rows(epoch, start, stop)
        return rows.astype(np.int32).reshape(num, -1)

    def _table(
        self, program: Planned, run: Run, epoch: int, step: int, num: int, alike: int
    ) -> NamedRows:
        """Return a table that holds these updates, of the `alike` ones that begin with them."""
        places = program.cut.places
        named = self._named
        shape = (program.length, places)
        if named and named.table.rows.shape == shape and named.hold(epoch, step, num):
            return named
        num = min(program.length, alike, max(num, _MOST_NAMED // run.size))
        rows = self._rows(run, epoch, step, num)
        padded = np.take(rows, np.arange(places), axis=1, mode="wrap")
        table = table_of(self.devices, program, padded, rows.shape[1])
        self._named = NamedRows(epoch, step, step + num, table)
        return self._named


class BatchQueue:
    """The batches of a pass that were drawn; sent ones are kept until dropped, to come again.

    Args:
        start: the position of the first batch.
        num: the number of batches in all (None: to the end of the epoch).
        once: whether to end with the epoch in any case.

    Attributes:
        drawn: the batches that were drawn and not sent.
        next: the position of the batch to draw next.
        end: the position after the end of a stream, once it has ended.
        error: the error that ended the drawing: all batches before it are computed first.
    """

    def __init__(self, start: Position = (0, 0), num: int | None = 0, *, once: bool = True):
        self.drawn: list[Batch] = []
        self.next = self.end = start
        self.error: Exception | TerminatedWaiting | KeyboardInterrupt | None = None
        self._epoch = start[0] if once or num is None else None
        self._left = -1 if num is None else num
        self._has_ended = False
        self._sent: list[Batch] = []

    @property
    def is_open(self) -> bool:
        """Whether more batches are to be drawn."""
        if self._has_ended or self.error is not None or not self._left:
            return False
        return self._epoch in (None, self.next[0])

    def add(self, batch: Batch) -> None:
        """Append the batch that was drawn."""
        self.drawn.append(batch)
        self._left -= 1
        self.next = batch.end

    def end_epoch(self, *, is_last: bool) -> None:
        """Go to the next epoch of a stream that has ended, unless this one is the last."""
        self.end = self.next = (self.next[0] + 1, 0)
        self._has_ended = is_last or self._epoch is not None

    def send(self) -> Batch:
        """Return the first batch, and keep it among the sent ones."""
        batch = self.drawn.pop(0)
        self._sent.append(batch)
        return batch

    def take_since(self, position: Position) -> list[Batch]:
        """Remove and return the batches from this position on, once no more are drawn."""
        batches = self._sent + self.drawn
        self._sent = [batch for batch in batches if batch.start < position]
        self.drawn = []
        return batches[len(self._sent) :]

    def drop(self, num: int) -> None:
        """Forget the first `num` of the batches that were sent."""
        del self._sent[:num]


@dataclass(eq=False)
class Loaded(_Feed):
    """Batches that are loaded while the device computes; a block stacks batches of one program.

    With several processes, each loads only the rows of its replicas, as soon as the plan is known.

    Args:
        cache: row tables and batch sizes of earlier feeds; updated.
        why: the reason why the data do not stay on the device.
    """

    cache: FeedCache = field(default_factory=lambda: FeedCache({}, {}))
    why: str = ""

    def __post_init__(self) -> None:
        why = self.why and f" ({self.why})"
        self.where = f"Batches are loaded as they are needed{why}."
        # by the rows of an update, full and real
        self._programs: dict[tuple[int, int], Planned] = {}
        self._largest = dict(self.cache.largest)  # counts drawn batches; the cache counts sent ones
        self._is_open = self._draws_early = False
        self._queue = BatchQueue()

    def blocks(
        self, num: int | None, size: Count, *, once: bool = False, reads_state: bool = False
    ) -> Iterator[Block]:
        """Yield blocks of at most size()/16 updates, or one: a block waits for its last batch.

        The consumer of a block calls `advance`.

        Args:
            num: the number of updates in all (None: to the end of the epoch).
            once: whether the blocks end with the epoch in any case.
            reads_state: whether the state may be read after each block: it then has all size()
                updates. While the device computes it, the next batch is drawn, unless it may depend
                on the updates before it.
        """
        self._queue = queue = BatchQueue(self._begin(), num, once=once)
        self._draws_early = reads_state and not self.batches.may_depend_on_updates
        self._is_open = True
        try:
            while self._fill(1):
                program = self._planned(queue.drawn[0])
                most = size() if reads_state else max(1, size() // _PART)
                batches = self._alike(program, min(program.num_stacked, most))
                block = block_of(self.devices, self.cache.row_tables, program, batches)
                yield block
                self._check_unmoved(block)
            if queue.error is not None:
                raise queue.error
            self.batches.position = max(self.batches.position, queue.end)
        finally:
            self._is_open = False
            with uninterrupted():
                self._put_back()

    def note_sent(self, block: Block) -> None:
        """Record that a block was sent; draw the next batch, if that is early."""
        for batch in block.batches:
            if batch.kind:
                _note_size(self.cache.largest, batch)
        if self._draws_early:
            try:
                self._fill(1)
            except KeyboardInterrupt as error:  # raised once the callbacks have received the block
                self._queue.error = error

    def go_back(self, block: Block, done: int) -> None:
        """Move the position; ready-made batches that were not used are kept for the next call."""
        super().go_back(block, done)
        if not self._is_open:
            self._put_back()

    def note_read(self, block: Block) -> None:
        """Drop the batches of a block, the oldest that was sent: all were applied or skipped."""
        self._queue.drop(block.num)

    def _planned(self, batch: Batch) -> Planned:
        """Return the program of an update, after checking its batch."""
        program = self.plan(batch)
        self._programs[batch.full, batch.num_rows] = program
        self.check(batch, program)
        return program

    def _alike(self, program: Planned, most: int) -> list[Batch]:
        """Send the next batch, which is planned, and at most `most` in all that fit its block."""
        queue = self._queue
        batches = [queue.send()]
        while len(batches) < most and self._fill(1):
            if not self._follows(queue.drawn[0], batches[-1], program):
                break
            batches.append(queue.send())
        return batches

    def _follows(self, batch: Batch, last: Batch, program: Planned) -> bool:
        """Whether a batch directly follows the last in its epoch, with its size and program."""
        if batch.start != last.end or batch.start[0] != last.start[0]:
            return False
        # planning it may change the state that this block uses
        if batch.num_rows != last.num_rows or batch.signature != last.signature:
            return False
        try:
            return self._planned(batch) is program
        except Exception:  # raised again when the batch comes first in its block
            return False

    def _put_back(self) -> None:
        """Keep unused ready-made batches for the next call; others can be loaded again."""
        batches = self.batches
        if batches.num_moves == self._num_moves:  # else they belong to another place
            unused = self._queue.take_since(batches.position)
            batches.unused[:] = unused + batches.unused if batches.is_ready else []

    def _fill(self, num: int) -> int:
        """Draw batches until the queue has `num`, or the data end; return the number in it.

        Errors are kept in the queue.
        """
        batches = self.batches
        queue = self._queue
        while len(queue.drawn) < num and queue.is_open:
            position = queue.next
            try:
                with waiting():  # an interrupt between two of these lines would lose a batch
                    batch = batches.take_unused(position)
                    if batch is None:
                        selection = None if batches.is_ready else batches.select(*position)
                        local = self._local_rows(selection)
                        host, end = batches.take(position, selection, local)
                        batch = self._batch(host, selection, local, position, end)
                    _note_size(self._largest, batch)
                    queue.add(batch)
            except StopIteration:
                queue.end_epoch(is_last=batches.is_iterator or position[1] == 0)
            except BatchError as error:
                queue.error = error.at(*position)
                queue.error.__cause__ = error.__cause__
            except (Exception, TerminatedWaiting) as error:
                queue.error = error
        return len(queue.drawn)

    def _local_rows(self, selection: Selection | None) -> ndarray | None:
        """Return which rows of a batch this process must load; None for all."""
        devices = self.devices
        if selection is None or len(devices.local_replicas) == devices.num_replicas:
            return None
        count = len(selection.names)
        program = self._programs.get((selection.full, count))
        if program is None:
            return None
        shares = share_out(program.cut, devices.num_replicas)[0]
        return np.unique(shares[devices.local_replicas] % count)

    def _batch(
        self,
        host: Tree,
        selection: Selection | None,
        local: ndarray | None,
        start: Position,
        end: Position,
    ) -> Batch:
        if selection is None:
            count = num_rows_of(host)
            row_shapes = [tuple(leaf.shape[1:]) for leaf in tree.leaves(host)]
            kind = str(row_shapes)
            full = max(self._largest.get(kind, 0), count)
            names = None
        else:
            names = selection.names
            count = len(names)
            kind = ""
            full = selection.full
        rows = np.arange(count, dtype=np.int32)
        state = self.batches.stream_state
        return Batch(host, None, rows, full, names, local, start, end, state, kind)


def _note_size(largest: dict[str, int], batch: Batch) -> None:
    largest[batch.kind] = max(largest.get(batch.kind, 0), batch.full)


Feed = Resident | Loaded


def open_feed(
    devices: Devices, batches: Batches, limit: int, plan: Plan, check: Check, cache: FeedCache
) -> Feed:
    """Return a feed; arrays of at most `limit` bytes become resident."""
    size = tree.num_bytes(batches.arrays)
    reasons = {
        "they come ready-made": batches.is_ready,
        "of a few shapes": batches.shapes,
        "rows come one by one": batches.arrays is None,
        f"arrays of {size / 2**20:.0f} MiB may not stay, beyond {limit / 2**20:.0f}": size > limit,
    }
    for why, holds in reasons.items():
        if holds:
            return Loaded(devices, batches, plan, check, cache, why)
    return Resident(devices, batches, plan, check)
