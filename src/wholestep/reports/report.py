"""The numbers of a dispatch of updates, read on demand."""

from functools import cached_property
from typing import Any

import numpy as np

from wholestep.data import Block
from wholestep.engines import Devices
from wholestep.errors import NonFiniteError
from wholestep.reports.layout import ReportLayout
from wholestep.sums import shown
from wholestep.tree import Tensor
from wholestep.update import APPLIED, OWN_LOSS


class Numbers:
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
        self, numbers: Numbers, at: int, layout: ReportLayout, block: Block, first: int, *, in_call: bool = True
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
        """The values on the device, see `Numbers.verdict`."""
        return self._numbers.verdict

    @property
    def first_failure(self) -> int | None:
        """The index of the first update that was not applied, if any."""
        return next((i for i, applied in enumerate(self.values[:, -1].tolist()) if applied != 1), None)

    @property
    def num_failures(self) -> int:
        """The number of updates that were not applied."""
        return int(np.sum(self.values[:, -1] != 1))

    def num_rows(self, num: int) -> int:
        """Return the number of rows of the first `num` updates, without padding. Does not wait."""
        first = self.block.first
        return int(self.block.table.counts[first : first + num].sum())

    def numbers(self, i: int) -> dict[str, Any]:
        """Return the numbers of the epoch up to update i: the loss, the metrics, and the model's custom results."""
        numbers = self._layout.unpack(self.values[i])
        return {k: v for k, v in numbers.items() if k not in (OWN_LOSS, APPLIED)}

    def logs(self, i: int) -> dict[str, Any]:
        """Return the logs of update i for callbacks: the loss and the metrics over the epoch so far."""
        return shown(self.numbers(i))

    def loss(self, i: int) -> float:
        """Return the loss of update i alone."""
        return self._layout.unpack(self.values[i])[OWN_LOSS]
