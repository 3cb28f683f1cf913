"""Embedding tables as an update sees them: where each lies in the state, and which of its rows are touched."""

from dataclasses import dataclass
from typing import NamedTuple

import keras

from wholestep.tree import Tensor


@dataclass(frozen=True)
class Table:
    """An embedding table.

    Args:
        layer: the layer that looks up in it.
        param: its place among the parameters.
        slots: the places, among the optimizer's variables, of those that keep something for each of its rows.
    """

    layer: keras.layers.Embedding
    param: int
    slots: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The size of the vocabulary."""
        return self.layer.input_dim

    def places(self, params: list, slots: list) -> list[tuple[list, int]]:
        """Return (list, place in it) of everything that has a row for each of the table's."""
        return [(params, self.param), *((slots, slot) for slot in self.slots)]


class TableRows(NamedTuple):
    """The rows of one table that an update touches.

    Args:
        rows: their numbers in the table, int32 (lookups,), with repetitions.
        row_slots: where among them the gradients of each row are summed, int32 (lookups,): equal rows share a home.
    """

    table: Table
    rows: Tensor
    row_slots: Tensor
