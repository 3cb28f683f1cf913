"""The state: everything that an update changes. A value, spent by the update that takes it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from wholestep.tree import Tensor

Failures = tuple[Tensor, ...]  # in a row, in the epoch; or ()


class State(NamedTuple):
    """The input and output of an update, as the engine's arrays.

    `params` and `slots` are empty where the engine updates Keras' variables in place. `sums` are
    the running sums of the epoch, see `EpochSums`; empty as long as the terms are not known.
    `stopped` is 1 from the update on that ended the run because it was not finite. `scratch` is
    room for `embeddings.rows.RowPlan.deduplicate`; its content does not matter. `captured` are the
    values of `Forward.inputs`: read anew at every dispatch, never changed, not spent. `failures`
    are the numbers of updates that were not applied, in a row and in the epoch; () where they have
    no bound.
    """

    params: Any
    slots: Any
    buffers: Any
    metrics: Any
    sums: Any
    stopped: Any
    scratch: Any
    captured: Any = ()
    failures: Failures = ()


def merged(moved: State, rest: State) -> State:
    """Return the two parts as one state."""
    return rest._replace(
        buffers=moved.buffers or rest.buffers, metrics=moved.metrics, sums=moved.sums
    )


class Values(NamedTuple):
    """The values with which a model is called. `captured`: None to read those variables as they are
    now.
    """

    params: list
    buffers: list
    metrics: list
    captured: Any = None


@dataclass(frozen=True)
class Variables:
    """The Keras variables behind a State."""

    params: list
    slots: list
    buffers: list
    metrics: list

    @property
    def all(self) -> list:
        """The variables of every group."""
        return [*self.params, *self.slots, *self.buffers, *self.metrics]

    @property
    def floats(self) -> list[bool]:
        """Which of the buffers are floating (moving statistics and the like)."""
        return ["float" in keras.backend.standardize_dtype(v.dtype) for v in self.buffers]


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table.

    Args:
        layer: the layer of the table.
        param: its index among the parameters.
        slots: the indices of the optimizer's variables that have an entry for each of its rows,
            found by a plan.
    """

    layer: keras.layers.Embedding
    param: int
    slots: tuple[int, ...] = ()

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
        row_slots: the index among them at which each row's gradients are summed, int32 (lookups,);
            equal rows share it.
    """

    table: EmbeddingTable
    rows: Tensor
    row_slots: Tensor
