"""The state: everything that an update changes. A value, spent by the update that takes it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import keras


class State(NamedTuple):
    """The input and output of an update, as the engine's arrays.

    `params` and `slots` are empty where the engine updates Keras' variables in place. `sums` are the running sums of
    the epoch, see `EpochSums`; empty as long as the terms are not known. `stopped` is 1 from the first update that was
    not applied because it was not finite. `scratch` is room for `embeddings.rows.RowPlan.deduplicate`; its content does
    not matter. `captured` are the values of `Forward.inputs`: read anew at every dispatch, never changed, not spent.
    """

    params: Any
    slots: Any
    buffers: Any
    metrics: Any
    sums: Any
    stopped: Any
    scratch: Any
    captured: Any = ()


def merged(moved: State, rest: State) -> State:
    """Return the two parts as one state."""
    return rest._replace(buffers=moved.buffers or rest.buffers, metrics=moved.metrics, sums=moved.sums)


class Values(NamedTuple):
    """The values with which a model is called. `captured`: None to read those variables as they are now."""

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
