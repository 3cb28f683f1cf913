"""Embedding tables in an update: their indices in the state, and their touched rows."""

from dataclasses import dataclass
from typing import NamedTuple

import keras

from wholestep.tree import Tensor


@dataclass(frozen=True)
class Table:
    """An embedding table.

    Args:
        layer: the layer of the table.
        param: its index among the parameters.
        slots: the indices of the optimizer's variables that have an entry for each of its rows.
    """

    layer: keras.layers.Embedding
    param: int
    slots: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The size of the vocabulary."""
        return self.layer.input_dim

    def places(self, params: list, slots: list) -> list[tuple[list, int]]:
        """Return (list, index in it) of all arrays with a row for each row of the table."""
        return [(params, self.param), *((slots, slot) for slot in self.slots)]


class TableRows(NamedTuple):
    """The rows of one table that an update touches.

    Args:
        rows: their indices in the table, int32 (lookups,), with repetitions.
        row_slots: the index among them at which each row's gradients are summed, int32 (lookups,); equal rows share it.
    """

    table: Table
    rows: Tensor
    row_slots: Tensor
