"""The numbers of a dispatch of updates, read on demand, and their layout in a vector."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.data import Block
from wholestep.engines import Devices
from wholestep.errors import NonFiniteError, invalid
from wholestep.logged import LOGGED
from wholestep.nonfinite import ENDS, IS_APPLIED, IS_SKIPPED
from wholestep.sums import visible
from wholestep.tree import Tensor

# in a report, after the logs
UPDATE_LOSS = "+loss"
VERDICT = "+applied"  # see `wholestep.nonfinite`


@dataclass(frozen=True)
class ReportLayout:
    """The position of each name of the logs in a report.

    >>> import numpy as np
    >>> layout = ReportLayout.of({"loss": np.zeros(()), "per_class": np.zeros((2,))})
    >>> layout.unpack(np.array([0.5, 1.0, 2.0]))
    {'loss': 0.5, 'per_class': array([1., 2.])}
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, logs: Mapping[str, Tensor]) -> "ReportLayout":
        """Return the layout of logs, which may be shapes only."""
        return cls(tuple((name, tuple(value.shape)) for name, value in logs.items()))

    @property
    def added_up(self) -> "ReportLayout":
        """The layout of the logs that are added up over an epoch."""
        return ReportLayout(tuple(entry for entry in self.shapes if entry[0] not in LOGGED))

    def empty(self) -> np.ndarray:
        """Return a report of zeros."""
        size = sum(math.prod(shape) for _, shape in self.shapes)
        return np.zeros((size,), keras.config.floatx())

    def pack(self, logs: Mapping[str, Tensor]) -> Tensor:
        """Return the logs as one vector."""
        assert ReportLayout.of(logs) == self, "logs of another layout"
        dtype = keras.config.floatx()
        return ops.concatenate([ops.ravel(ops.cast(value, dtype)) for value in logs.values()])

    def unpack(self, report: np.ndarray) -> dict[str, Any]:
        """Return the logs of a vector: floats, and arrays where a metric has several values."""
        return {
            name: report[start:stop].reshape(shape) if shape else float(report[start])
            for name, start, stop, shape in self.entries
        }

    @cached_property
    def entries(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """(name, start, stop, shape) of each entry."""
        entries = []
        stop = 0
        for name, shape in self.shapes:
            start = stop
            stop += math.prod(shape)
            entries.append((name, start, stop, shape))
        return entries


NO_LOGS = ReportLayout()


def check_same_layout(before: ReportLayout | None, now: ReportLayout) -> None:
    """Refuse to add up logs whose names or shapes differ from the earlier ones.

    Raises:
        SpecificationError: the layouts differ.
    """
    if before is None or before.added_up == now.added_up:
        return
    earlier, later = (
        [name for name, _ in layout.shapes if not name.startswith("+")] for layout in (before, now)
    )
    raise invalid(
        "An objective must return the same terms and metrics for all batches of an epoch: "
        "they are added up.",
        f"{later} after {earlier}",
        "return a term with weights of 0 where it does not count.",
    )


class Report:
    """The numbers of a block of updates. Reading them waits for the device; nothing else does.

    Args:
        on_device: one row of packed logs for each update; its last number is the verdict, NaN if
            the update was not reached.
        first: the number of the first update.
        in_call: whether the updates belong to an epoch of `fit` or `steps`, and not to `update`.
    """

    def __init__(
        self,
        devices: Devices,
        on_device: Tensor,
        layout: ReportLayout,
        block: Block,
        first: int,
        *,
        in_call: bool = True,
    ):
        self.on_device = on_device
        self.block = block
        self.in_call = in_call
        self.first = first
        self.error: NonFiniteError | None = None
        self.is_noted = False
        self._devices = devices
        self._layout = layout

    @cached_property
    def values(self) -> np.ndarray:
        """One row of packed logs for each update. Waits for the device."""
        return self._devices.fetch(self.on_device)[: self.block.num]

    @property
    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return "values" in vars(self) or self._devices.is_ready(self.on_device)

    @property
    def first_failure(self) -> int | None:
        """The index of the first update that was not applied, if any."""
        return self._first(self._verdicts != IS_APPLIED)

    @property
    def end(self) -> int | None:
        """The index of the update that reached a bound of skips, and ends the run, if any."""
        return self._first(self._verdicts == ENDS)

    @property
    def num_skipped(self) -> int:
        """The number of updates that were skipped."""
        return int(np.sum(self._verdicts == IS_SKIPPED))

    @property
    def _verdicts(self) -> np.ndarray:
        return self.values[:, -1]

    def _first(self, are_found: np.ndarray) -> int | None:
        return next(iter(np.flatnonzero(are_found).tolist()), None)

    def row_counts(self, num: int) -> np.ndarray:
        """Return the rows of each of the first `num` updates, without padding. Does not wait."""
        first = self.block.first
        return self.block.table.counts[first : first + num]

    def numbers(self, i: int) -> dict[str, Any]:
        """Return the epoch's loss, metrics and custom results up to update i."""
        numbers = self._layout.unpack(self.values[i])
        return {k: v for k, v in numbers.items() if k not in (UPDATE_LOSS, VERDICT)}

    def column(self, name: str) -> np.ndarray:
        """Return a number of each update by its name, (updates,); NaN where it is not reported."""
        for entry, start, _, _ in self._layout.entries:
            if entry == name:
                return self.values[:, start]
        return np.full(len(self.values), np.nan)

    def logs(self, i: int) -> dict[str, Any]:
        """Return the logs of update i for callbacks: the epoch's loss and metrics so far."""
        return visible(self.numbers(i))

    def loss(self, i: int) -> float:
        """Return the loss of update i alone."""
        return self._layout.unpack(self.values[i])[UPDATE_LOSS]
