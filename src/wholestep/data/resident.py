"""The feed of arrays that stay on the device: an update names their rows."""

from collections.abc import Callable, Iterator

import numpy as np

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block, Check, Plan, Planned, Table
from wholestep.data.sampler import FixedSize
from wholestep.engines import Devices

_MOST_NAMED = 1 << 16  # row numbers that are computed at once, unless a dispatch takes more


class Resident:
    """Arrays that stay on the device; a block names rows.

    Args:
        plan: returns the program of an update.
        check: raises an error for data that no update may use.
    """

    def __init__(self, devices: Devices, batches: Batches, plan: Plan, check: Check):
        assert isinstance(batches.sampler, FixedSize)
        self.order, self.size = batches.sampler.order, batches.sampler.size
        self.batches = batches
        self.where = f"The data stay on the device ({tree.num_bytes(batches.arrays) / 2**20:.1f} MiB)."
        self._devices = devices
        self._plan = plan
        self._check = check
        self._data = devices.resident(batches.arrays)
        self._num_full = self.order.num_rows // self.size
        self._named: tuple[tuple[int, int], int, Table] | None = None  # first update, number of updates, rows
        self._examples: dict[bool, Batch] = {}  # for full updates, and for the short one
        self._checked = False

    def blocks(
        self, num: int | None, size: Callable[[], int], *, once: bool = False, ahead: Callable[[], int] | None = None
    ) -> Iterator[Block]:
        """Yield blocks of at most size() updates, `num` updates in all (None: to the end of the epoch).

        Args:
            once: whether the blocks end with the epoch in any case.
            ahead: given if the state may be read after each block; its value is not used, as nothing is drawn.
        """
        (epoch, step), per_epoch = self.batches.position, len(self.batches)
        left = per_epoch - step if num is None else num
        left = min(left, per_epoch - step) if once else left
        while left:
            block = self._block(epoch, step, size(), min(left, per_epoch - step))
            yield block._replace(looks=ahead is not None)
            left, (epoch, step) = left - block.num, block.end

    def note_sent(self, block: Block) -> None:
        """Do nothing: the rows of the next updates are on the device."""

    def go_back(self, block: Block, done: int) -> None:
        """Move the position to after the first `done` updates of a block: the others were not applied."""
        self.batches.position = block.start[0], block.start[1] + done

    def _block(self, epoch: int, step: int, num: int, left: int) -> Block:
        is_full = step < self._num_full
        if is_full not in self._examples:
            self._examples[is_full] = self._example(epoch, step)
        batch = self._examples[is_full]
        program = self._plan(batch)
        if not self._checked:
            self._check(batch)
            self._checked = True
        num = min(num, left)
        first, named, table = self._table(program, epoch, step, num) if is_full else self._short(program, epoch, step)
        num, follow = min(num, named - first), min(left, named - first) - num
        end = (epoch + 1, 0) if step + num == len(self.batches) else (epoch, step + num)
        return Block(program, self._data, table, first, num, (batch,), (epoch, step), end, max(0, follow))

    def _example(self, epoch: int, step: int) -> Batch:
        rows = self._rows(epoch, step, 1)[0]
        return Batch(self.batches.arrays, self._data, rows, self.size, None, None, (epoch, step), (epoch, step + 1))

    def _rows(self, epoch: int, step: int, num: int) -> np.ndarray:
        """Return the rows of `num` updates of one size, int32 (updates, rows)."""
        stop = min((step + num) * self.size, self.order.num_rows)
        return self.order.rows(epoch, step * self.size, stop).astype(np.int32).reshape(num, -1)

    def _table(self, program: Planned, epoch: int, step: int, num: int) -> tuple[int, int, Table]:
        """Return the index of the update in a table, the number of updates in the table, and the table."""
        places = program.cut.places
        if self._named is not None:
            (known, start), many, table = self._named
            is_in = known == epoch and start <= step and min(step + num, self._num_full) <= start + many
            if is_in and table.rows.shape == (program.length, places):
                return step - start, many, table
        many = min(program.length, self._num_full - step, max(num, _MOST_NAMED // self.size))
        table = self._filled(self._rows(epoch, step, many), program)
        self._named = (epoch, step), many, table
        return 0, many, table

    def _short(self, program: Planned, epoch: int, step: int) -> tuple[int, int, Table]:
        """Return the same for the short last update of an epoch."""
        return 0, 1, self._filled(self._rows(epoch, step, 1), program)

    def _filled(self, rows: np.ndarray, program: Planned) -> Table:
        named = np.zeros((program.length, program.cut.places), np.int32)
        named[: len(rows)] = np.take(rows, np.arange(program.cut.places), axis=1, mode="wrap")
        counts = np.full((program.length,), rows.shape[1], np.int32)
        return Table(named, counts, self._devices.place((named, counts)))
