"""Schedules of the learning rate where batches grow."""

import math
from typing import Any, Self

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from wholestep.data import BatchSize, SizeSteps, size_schedule
from wholestep.errors import invalid, shown
from wholestep.tree import Tensor


@keras.saving.register_keras_serializable("wholestep")
class RowSchedule(LearningRateSchedule):
    """A schedule of the learning rate that counts rows in place of updates.

    A plain schedule counts updates: batches that grow take it through fewer steps per epoch. Here
    its steps are rows: those of all updates before, each counted with its full size.

    Args:
        schedule: a Keras schedule whose steps are meant as rows.
        batch_size: the rows of each update as for `Batches`: a number, or a list of (update,
            rows).

    Raises:
        SpecificationError: no schedule, or sizes that are a function.

    >>> halves = keras.optimizers.schedules.PiecewiseConstantDecay([640, 1280], [1.0, 0.5, 0.25])
    >>> by_rows = RowSchedule(halves, [(0, 64), (12, 256)])
    >>> [float(by_rows(update)) for update in (10, 11, 13, 15)]
    [1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, schedule: LearningRateSchedule, batch_size: BatchSize):
        if not isinstance(schedule, LearningRateSchedule):
            must = "RowSchedule needs a schedule of the learning rate."
            attempt = "RowSchedule(keras.optimizers.schedules.CosineDecay(1e-3, 10**6), 64)."
            raise invalid(must, shown(schedule), attempt)
        changes = batch_size if isinstance(batch_size, list | tuple) else [(0, batch_size)]
        sizes = size_schedule(changes)
        if callable(batch_size) or not isinstance(sizes, SizeSteps):
            must = "RowSchedule needs sizes that are known by the update."
            attempt = "a list of (update, rows): [(0, 64), (1000, 256)]."
            raise invalid(must, shown(batch_size), attempt)
        self.schedule = schedule
        self.changes = sizes.changes

    def __call__(self, step: Tensor) -> Tensor:
        """Return the rate of an update, by its number from 0."""
        update = ops.cast(step, "float32")
        ends = [at for at, _ in self.changes[1:]] + [math.inf]
        rows = ops.zeros((), "float32")
        for (begin, size), end in zip(self.changes, ends, strict=True):
            rows += size * ops.clip(update - begin, 0.0, end - begin)
        return self.schedule(rows)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras' files."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "batch_size": [list(change) for change in self.changes]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the schedule of such arguments."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["batch_size"])
