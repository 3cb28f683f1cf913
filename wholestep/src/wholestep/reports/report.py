"""The numbers of a dispatch of updates, read on demand, and the position of each number in a
report.
"""

import itertools
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
from wholestep.errors import NonFiniteError, SpecificationError, message
from wholestep.sums import visible
from wholestep.tree import Tensor

OWN_LOSS = "+loss"
APPLIED = "+applied"  # in a report, after the logs: the loss of the update; 1 if it was applied


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

    def empty(self) -> np.ndarray:
        """Return a report of zeros."""
        return np.zeros(
            (sum(int(np.prod(shape, dtype=int)) for _, shape in self.shapes),),
            keras.config.floatx(),
        )

    def pack(self, logs: Mapping[str, Tensor]) -> Tensor:
        """Return the logs as one vector."""
        assert ReportLayout.of(logs) == self, "logs of another layout"
        return ops.concatenate(
            [ops.reshape(ops.cast(value, keras.config.floatx()), (-1,)) for value in logs.values()]
        )

    def unpack(self, report: np.ndarray) -> dict[str, Any]:
        """Return the logs that a vector holds: floats, and arrays where a metric has several
        values.
        """
        return {
            name: report[start:stop].reshape(shape) if shape else float(report[start])
            for name, start, stop, shape in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """(name, start, stop, shape) of each entry."""
        ends = [0, *itertools.accumulate(math.prod(shape) for _, shape in self.shapes)]
        return [
            (name, start, stop, shape)
            for (name, shape), start, stop in zip(self.shapes, ends, ends[1:], strict=False)
        ]


NOTHING_TOLD = ReportLayout()


def check_same(before: ReportLayout | None, now: ReportLayout) -> None:
    """Refuse to add up logs whose names or shapes differ from the earlier ones.

    Raises:
        SpecificationError: the layouts differ.
    """
    if before is not None and before is not now and before != now:
        names = [
            [name for name, _ in layout.shapes if not name.startswith("+")]
            for layout in (before, now)
        ]
        must = (
            "An objective must return the same terms and metrics for all batches of an epoch: "
            "they are added up."
        )
        received = f"{names[1]} after {names[0]}"
        raise SpecificationError(
            message(must, received, "return a term with weights of 0 where it does not count.")
        )


class PackedLogs:
    """The packed logs of all updates of one dispatch, fetched once on first use."""

    def __init__(self, devices: Devices, values: Tensor):
        self._devices = devices
        self._on_device = values

    @cached_property
    def values(self) -> np.ndarray:
        """One row for each update. Waits for the device."""
        return self._devices.fetch(self._on_device)

    @property
    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return "values" in vars(self) or self._devices.is_ready(self._on_device)

    @property
    def verdict(self) -> Any:
        """The values on the device; the last number of a row is 1 if the update was applied."""
        return self._on_device


class Report:
    """The numbers of a block of updates. Reading them waits for the device; nothing else does.

    Args:
        numbers: the numbers of a dispatch.
        at: the index in the dispatch of the block's first update.
        first: the number of that update.
        in_call: whether the updates belong to an epoch of `fit` or `steps`, and not to `update`.
    """

    def __init__(
        self,
        numbers: PackedLogs,
        at: int,
        layout: ReportLayout,
        block: Block,
        first: int,
        *,
        in_call: bool = True,
    ):
        self.block = block
        self.in_call = in_call
        self.first = first
        self.error: NonFiniteError | None = None
        self.is_noted = False
        self._numbers = numbers
        self._at = at
        self._layout = layout

    @property
    def values(self) -> np.ndarray:
        """One row of packed logs for each update."""
        return self._numbers.values[self._at : self._at + self.block.num]

    @property
    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return self._numbers.is_ready

    @property
    def verdict(self) -> Any:
        """The values on the device, see `PackedLogs.verdict`."""
        return self._numbers.verdict

    @property
    def first_failure(self) -> int | None:
        """The index of the first update that was not applied, if any."""
        return next(
            (i for i, applied in enumerate(self.values[:, -1].tolist()) if applied != 1), None
        )

    @property
    def num_failures(self) -> int:
        """The number of updates that were not applied."""
        return int(np.sum(self.values[:, -1] != 1))

    def num_rows(self, num: int) -> int:
        """Return the number of rows of the first `num` updates, without padding. Does not wait."""
        first = self.block.first
        return int(self.block.table.counts[first : first + num].sum())

    def numbers(self, i: int) -> dict[str, Any]:
        """Return the numbers of the epoch up to update i: the loss, the metrics, and the model's
        custom results.
        """
        numbers = self._layout.unpack(self.values[i])
        return {k: v for k, v in numbers.items() if k not in (OWN_LOSS, APPLIED)}

    def logs(self, i: int) -> dict[str, Any]:
        """Return the logs of update i for callbacks: the loss and the metrics over the epoch so
        far.
        """
        return visible(self.numbers(i))

    def loss(self, i: int) -> float:
        """Return the loss of update i alone."""
        return self._layout.unpack(self.values[i])[OWN_LOSS]
