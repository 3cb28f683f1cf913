"""Single batches, on which a trainer runs one update, or one evaluation, each."""

from collections.abc import Callable

import numpy as np

from wholestep.data.block import Batch, Block, Check, Plan, block_of, num_rows_of
from wholestep.engines import Devices
from wholestep.tree import Tree


class SingleBatches:
    """Brings single batches to the device. It has no position, and stays open from one to the next.

    Args:
        plan: returns the program of a batch.
        check: raises an error for data that no program may use.
        num_full: returns the number of rows up to which a batch of a number of rows may be padded.
        tables: the tables of earlier blocks, see `wholestep.data.block.Known`; completed.
    """

    where = "Batches are loaded as they are needed (they come ready-made)."

    def __init__(self, devices: Devices, plan: Plan, check: Check, num_full: Callable[[Tree, int], int], tables: dict):
        self._devices = devices
        self._plan = plan
        self._check = check
        self._num_full = num_full
        self._tables = tables

    def block(self, host: Tree) -> Block:
        """Return the block of a batch, numpy arrays of shape (rows, ...)."""
        num = num_rows_of(host)
        rows, full = np.arange(num, dtype=np.int32), self._num_full(host, num)
        batch = Batch(host, None, rows, full, None, None, (0, 0), (0, 1))
        program = self._plan(batch)
        self._check(batch)
        return block_of(self._devices, self._tables, program, [batch])

    def advance(self, block: Block) -> None:
        """Do nothing: a single batch has no position."""
