"""Feeds bring batches to the device: as row numbers of resident data, or loaded as they are
needed.
"""

from collections.abc import Callable, Iterator

import numpy as np

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.block import (
    Batch,
    Block,
    Check,
    Known,
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
from wholestep.data.sampler import FixedSize
from wholestep.engines import Devices
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.safety import TerminatedWaiting, uninterrupted, waiting
from wholestep.tree import Tree

_MOST_NAMED = 1 << 16  # row numbers that are computed at once, unless a dispatch takes more
_PART = 16  # 1/16 of the updates that fit a dispatch are stacked: enough to hide its cost


class _Feed:
    """The batches of a call on their way to the device.

    Args:
        plan: returns the program of an update.
        check: raises an error for data that an update by its program may not use.
    """

    def __init__(self, devices: Devices, batches: Batches, plan: Plan, check: Check):
        self.batches = batches
        self._devices = devices
        self._plan = plan
        self._check = check
        self._num_moves = batches.num_moves

    def _begin(self) -> Position:
        """Begin a pass, and return its position."""
        self._num_moves = self.batches.num_moves
        return self.batches.position

    def _check_unmoved(self, block: Block) -> None:
        """Refuse to go on after a block if other code has moved the batches since the begin of the
        pass.

        Raises:
            SpecificationError: it has; the updates so far are kept.
        """
        if self.batches.num_moves != self._num_moves:
            must = (
                "Batches must not be moved during a loop over them: it would train rows twice, "
                "or leave some out."
            )
            last = (
                f"batch {block.start[1] + block.num - 1} of epoch {block.start[0]}, both "
                "counted from 0"
            )
            attempt = "end this loop first, or give the other loop Batches of its own."
            raise SpecificationError(message(must, f"a seek or another loop after {last}", attempt))

    def advance(self, block: Block) -> None:
        """Move the position to the end of a block."""
        self.batches.position = block.end

    def go_back(self, block: Block, done: int) -> None:
        """Move the position to after the first `done` updates of a block: the others were not
        applied.
        """
        self.batches.position = block.start[0], block.start[1] + done

    def note_read(self, block: Block) -> None:
        """Record that the results of a sent block were read."""


class Resident(_Feed):
    """Arrays that stay on the device; a block names rows."""

    def __init__(self, devices: Devices, batches: Batches, plan: Plan, check: Check):
        super().__init__(devices, batches, plan, check)
        assert isinstance(batches.sampler, FixedSize)
        self.order = batches.sampler.order
        self.batch_size = batches.sampler.size
        self.where = (
            f"The data stay on the device ({tree.num_bytes(batches.arrays) / 2**20:.1f} MiB)."
        )
        self._data, self._wait = devices.resident(batches.arrays)
        self._num_full = self.order.num_rows // self.batch_size
        self._num_ahead = min(self._num_full, _MOST_NAMED // self.batch_size)
        # first update, number of updates, rows
        self._named: tuple[Position, int, Table] | None = None
        self._examples: dict[bool, Batch] = {}  # for full updates, and for the short one
        self._checked = False

    def blocks(
        self,
        num: int | None,
        size: Callable[[], int],
        *,
        once: bool = False,
        ahead: Callable[[], int] | None = None,
    ) -> Iterator[Block]:
        """Yield blocks of at most size() updates, `num` updates in all (None: to the end of the
        epoch).

        Args:
            once: whether the blocks end with the epoch in any case.
            ahead: given if the state may be read after each block; its value is not used, as
                nothing is drawn.
        """
        (epoch, step), per_epoch = self._begin(), len(self.batches)
        left = per_epoch - step if num is None else num
        left = min(left, per_epoch - step) if once else left
        while left:
            block = self._block(epoch, step, size(), min(left, per_epoch - step))
            yield block._replace(may_be_read=ahead is not None)
            self._check_unmoved(block)
            left, (epoch, step) = left - block.num, block.end

    def note_sent(self, block: Block) -> None:
        """Compute the order of the next epoch while the device is busy; `Order` caches it."""
        epoch, step = block.end
        if step == 0 and self._num_ahead:
            self._rows(epoch, 0, self._num_ahead)

    def _block(self, epoch: int, step: int, num: int, left: int) -> Block:
        is_full = step < self._num_full
        if is_full not in self._examples:
            rows = self._rows(epoch, step, 1)[0]
            places = ((epoch, step), (epoch, step + 1))
            self._examples[is_full] = Batch(
                self.batches.arrays, self._data, rows, self.batch_size, None, None, *places
            )
        batch = self._examples[is_full]
        program = self._plan(batch)
        if not self._checked:
            self._check(batch, program)
            self._wait()
            self._checked = True
        num = min(num, left, program.most)
        if is_full:
            first, named, table = self._table(program, epoch, step, num)
        else:
            first = 0
            named = 1
            table = self._filled(self._rows(epoch, step, 1), program)
        most = min(left, named - first, program.most)
        num = min(num, most)
        end = (epoch + 1, 0) if step + num == len(self.batches) else (epoch, step + num)
        return Block(
            program, self._data, table, first, num, (batch,), (epoch, step), end, follow=most - num
        )

    def _rows(self, epoch: int, step: int, num: int) -> np.ndarray:
        """Return the rows of `num` updates of one size, int32 (updates, rows)."""
        stop = min((step + num) * self.batch_size, self.order.num_rows)
        return (
            self.order.rows(epoch, step * self.batch_size, stop).astype(np.int32).reshape(num, -1)
        )

    def _table(self, program: Planned, epoch: int, step: int, num: int) -> tuple[int, int, Table]:
        """Return the index of the update in a table, the number of updates in the table, and the
        table.
        """
        places = program.cut.places
        if self._named is not None:
            (known, start), many, table = self._named
            is_in = (
                known == epoch and start <= step and min(step + num, self._num_full) <= start + many
            )
            if is_in and table.rows.shape == (program.length, places):
                return step - start, many, table
        many = min(program.length, self._num_full - step, max(num, _MOST_NAMED // self.batch_size))
        table = self._filled(self._rows(epoch, step, many), program)
        self._named = (epoch, step), many, table
        return 0, many, table

    def _filled(self, rows: np.ndarray, program: Planned) -> Table:
        places = np.take(rows, np.arange(program.cut.places), axis=1, mode="wrap")
        return table_of(self._devices, program, places, rows.shape[1])


class BatchQueue:
    """The batches of a pass that were drawn and not sent; those that left are kept until dropped:
    they may come again.

    Args:
        start: the position of the first batch.
        num: the number of batches in all (None: to the end of the epoch).
        once: whether to end with the epoch in any case.

    Attributes:
        next: the position of the batch to draw next.
        end: the position after the end of a stream, once it has ended.
        error: the error that ended the drawing: all batches before it are computed first.
    """

    def __init__(self, start: Position = (0, 0), num: int | None = 0, *, once: bool = True):
        self.next = self.end = start
        self.error: Exception | TerminatedWaiting | None = None
        self._epoch = start[0] if once or num is None else None
        self._num_wanted = num
        self._num_drawn = self._num_left = 0
        self._has_ended = False
        self._kept: list[Batch] = []

    @property
    def is_open(self) -> bool:
        """Whether more batches are to be drawn."""
        if self._has_ended or self.error is not None or self._num_drawn == self._num_wanted:
            return False
        return self._epoch in (None, self.next[0])

    def __len__(self) -> int:
        """The number of batches in the queue."""
        return len(self._kept) - self._num_left

    def __getitem__(self, i: int) -> Batch:
        """Return batch i of the queue."""
        return self._kept[self._num_left + i]

    def add(self, batch: Batch) -> None:
        """Append the batch that was drawn."""
        self._kept.append(batch)
        self._num_drawn = self._num_drawn + 1
        self.next = batch.end

    def end_epoch(self, *, is_last: bool) -> None:
        """Go to the next epoch of a stream that has ended, unless this one is the last."""
        self.end = self.next = (self.next[0] + 1, 0)
        self._has_ended = is_last or self._epoch is not None

    def leave(self, num: int) -> list[Batch]:
        """Remove the first `num` batches from the queue, keep them, and return them."""
        self._num_left += num
        return self._kept[self._num_left - num : self._num_left]

    def take_since(self, position: Position) -> list[Batch]:
        """Remove and return the batches from this position on, once no more are drawn."""
        taken = [batch for batch in self._kept if batch.start >= position]
        del self._kept[len(self._kept) - len(taken) :]
        return taken

    def drop(self, num: int) -> None:
        """Forget the first `num` of the batches that have left."""
        self._num_left -= num
        del self._kept[:num]


class Loaded(_Feed):
    """Batches that are loaded while the device computes earlier ones; a block stacks batches of one
    program.

    With several processes, each loads only the rows of its replicas, as soon as the plan is known.

    Args:
        known: row tables and batch sizes of earlier feeds; updated.
        why: the reason why the data do not stay on the device.
    """

    def __init__(
        self,
        devices: Devices,
        batches: Batches,
        plan: Plan,
        check: Check,
        known: Known | None = None,
        why: str = "",
    ):
        super().__init__(devices, batches, plan, check)
        self.where = f"Batches are loaded as they are needed{why and f' ({why})'}."
        # by the rows of an update, full and real
        self._programs: dict[tuple[int, int], Planned] = {}
        self._known = known or Known({}, {})
        self._largest = dict(self._known.largest)  # counts drawn batches; `known` counts sent ones
        self._is_open = False
        self._queue = BatchQueue()

    def blocks(
        self,
        num: int | None,
        size: Callable[[], int],
        *,
        once: bool = False,
        ahead: Callable[[], int] | None = None,
    ) -> Iterator[Block]:
        """Yield blocks of at most size()/16 updates, at least one: a block waits for its last
        batch.

        The consumer of a block calls `advance`.

        Args:
            num: the number of updates in all (None: to the end of the epoch).
            once: whether the blocks end with the epoch in any case.
            ahead: if the state may be read after each block, returns the number of updates to send
                at once anyway: that many batches are drawn, unless a batch may depend on the
                updates before it.
        """
        self._queue = queue = BatchQueue(self._begin(), num, once=once)
        may_be_read = ahead is not None and not self.batches.may_depend_on_updates
        self._is_open = True
        try:
            while self._fill(1):
                program = self._planned(queue[0])
                early = ahead() if ahead is not None and may_be_read else 1
                most = min(program.num_stacked, max(1, size() // _PART, early))
                block = block_of(
                    self._devices, self._known.row_tables, program, self._alike(program, most)
                )
                block = block._replace(may_be_read=may_be_read)
                for part in [block] if ahead is None else _one_by_one(block, size):
                    yield part
                    self._check_unmoved(part)
            if queue.error is not None:
                raise queue.error
            self.batches.position = max(self.batches.position, queue.end)
        finally:
            self._is_open = False
            with uninterrupted():
                self._put_back()

    def note_sent(self, block: Block) -> None:
        """Record that a block was sent; if it is a part of a larger one, draw the next batches
        meanwhile.
        """
        for batch in block.batches:
            if batch.kind:
                self._known.largest[batch.kind] = max(
                    self._known.largest.get(batch.kind, 0), batch.full
                )
        if block.may_be_read and block.first == 0 and block.follow:
            self._fill(block.num + block.follow)

    def go_back(self, block: Block, done: int) -> None:
        """Move the position as in `Resident`; ready-made batches that were not used are kept for
        the next call.
        """
        super().go_back(block, done)
        if not self._is_open:
            self._put_back()

    def note_read(self, block: Block) -> None:
        """Drop the batches of a block, the oldest that was sent: all of its updates were applied or
        skipped.
        """
        self._queue.drop(block.num)

    def _planned(self, batch: Batch) -> Planned:
        """Return the program of an update, after checking its batch."""
        program = self._plan(batch)
        self._programs[batch.full, batch.num_rows] = program
        self._check(batch, program)
        return program

    def _alike(self, program: Planned, most: int) -> list[Batch]:
        """Return the next batch, which is planned, and the batches that fit its block, at most
        `most` in all.
        """
        queue = self._queue
        num = 1
        while (
            num < most
            and self._fill(num + 1) > num
            and self._follows(queue[num], queue[num - 1], program)
        ):
            num += 1
        return queue.leave(num)

    def _follows(self, batch: Batch, last: Batch, program: Planned) -> bool:
        """Whether a batch directly follows the last in its epoch, with as many rows and the same
        program.
        """
        if (
            batch.start != last.end
            or batch.start[0] != last.start[0]
            or batch.num_rows != last.num_rows
        ):
            return False
        # planning it may change the state that this block uses
        if batch.signature != last.signature:
            return False
        try:
            return self._planned(batch) is program
        except (
            Exception
        ):  # raised again when the batch comes first in its block, after all earlier updates
            return False

    def _put_back(self) -> None:
        """Keep ready-made batches that were not used for the next call; others can be loaded
        again.
        """
        if self.batches.num_moves == self._num_moves:  # else they belong to another place
            unused = self._queue.take_since(self.batches.position)
            self.batches.unused[:] = unused + self.batches.unused if self.batches.is_ready else []

    def _fill(self, num: int) -> int:
        """Draw batches until the queue has `num`, or the data end; return the number in it. Errors
        are kept.
        """
        batches = self.batches
        queue = self._queue
        while len(queue) < num and queue.is_open:
            position = queue.next
            try:
                with waiting():  # an interrupt between two of these lines would lose a batch
                    batch = batches.take_unused(position)
                    if batch is None:
                        selection = None if batches.is_ready else batches.select(*position)
                        own = self._own(selection)
                        batch = self._batch(
                            *batches.take(position, selection, own), selection, own, position
                        )
                    self._largest[batch.kind] = max(self._largest.get(batch.kind, 0), batch.full)
                    queue.add(batch)
            except StopIteration:
                queue.end_epoch(is_last=batches.is_iterator or position[1] == 0)
            except BatchError as error:
                queue.error = error.at(*position)
                queue.error.__cause__ = error.__cause__
            except (Exception, TerminatedWaiting) as error:
                queue.error = error
        return len(queue)

    def _own(self, selection: Selection | None) -> np.ndarray | None:
        """Return which rows of a batch this process must load; None for all."""
        if selection is None or len(self._devices.local_replicas) == self._devices.num_replicas:
            return None
        count = len(selection.names)
        program = self._programs.get((selection.full, count))
        if program is None:
            return None
        return np.unique(
            share_out(program.cut, self._devices.num_replicas)[0][self._devices.local_replicas]
            % count
        )

    def _batch(
        self,
        host: Tree,
        end: Position,
        selection: Selection | None,
        own: np.ndarray | None,
        start: Position,
    ) -> Batch:
        if selection is None:
            count = num_rows_of(host)
            kind = str([tuple(leaf.shape[1:]) for leaf in tree.leaves(host)])
            full = max(self._largest.get(kind, 0), count)
            names = None
        else:
            count = len(selection.names)
            kind = ""
            full = selection.full
            names = selection.names
        rows = np.arange(count, dtype=np.int32)
        return Batch(
            host, None, rows, full, names, own, start, end, self.batches.stream_state, kind
        )


def _one_by_one(block: Block, size: Callable[[], int]) -> Iterator[Block]:
    """Yield the updates of a block, at most size() at a time; each part says how many follow it."""
    done = 0
    while done < block.num:
        batches = block.batches[done : done + size()]
        part = block._replace(first=done, num=len(batches), batches=batches)
        done += part.num
        yield part._replace(start=batches[0].start, end=batches[-1].end, follow=block.num - done)


Feed = Resident | Loaded


def open_feed(
    devices: Devices,
    batches: Batches,
    limit: int,
    plan: Plan,
    check: Check,
    known: Known | None = None,
) -> Feed:
    """Return a feed; arrays of at most `limit` bytes become resident."""
    size = tree.num_bytes(batches.arrays)
    reasons = {
        "they come ready-made": batches.is_ready,
        "of a few shapes": bool(batches.shapes),
        "rows come one by one": batches.arrays is None,
        f"arrays of {size / 2**20:.0f} MiB may not stay, beyond {limit / 2**20:.0f}": size > limit,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return (
        Resident(devices, batches, plan, check)
        if why is None
        else Loaded(devices, batches, plan, check, known, why)
    )
