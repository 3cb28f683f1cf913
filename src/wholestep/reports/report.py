"""Report: what a dispatch of updates says, read when somebody asks."""

from functools import cached_property
from typing import Any

import numpy as np

from wholestep.data.block import Block
from wholestep.engines.protocol import Engine
from wholestep.errors import NonFiniteError
from wholestep.reports.layout import ReportLayout
from wholestep.sums import shown
from wholestep.tree import Tensor
from wholestep.update import APPLIED, OWN_LOSS


class Report:
    """The numbers of one dispatch. Reading them waits for the device; nothing else does.

    Args:
        first: the number of its first update.
    """

    def __init__(self, engine: Engine, layout: ReportLayout, values: Tensor, block: Block, first: int):
        self.block = block
        self.first = first
        self.error: NonFiniteError | None = None
        self.is_noted = False
        self._engine = engine
        self._layout = layout
        self._on_device = values

    @cached_property
    def values(self) -> np.ndarray:
        """One row of packed logs for each update that was sent."""
        values = self._engine.fetch(self._on_device)
        self._on_device = None
        return values[: self.block.num]

    @property
    def is_ready(self) -> bool:
        """Whether reading the numbers would not wait."""
        return "values" in vars(self) or self._engine.is_ready(self._on_device)

    @property
    def verdict(self) -> Any:
        """What is still on the device of a report that nobody has read; its last number is 1 if all was applied."""
        return self._on_device

    @property
    def first_failure(self) -> int | None:
        """The first of the updates that was not applied, if any."""
        return next((i for i, applied in enumerate(self.values[:, -1].tolist()) if applied != 1), None)

    @property
    def num_failures(self) -> int:
        """How many of the updates were not applied."""
        return int(np.sum(self.values[:, -1] != 1))

    def numbers(self, i: int) -> dict[str, Any]:
        """Return the numbers of the epoch up to update i: the loss, the metrics, and what the model makes of them."""
        numbers = self._layout.unpack(self.values[i])
        return {k: v for k, v in numbers.items() if k not in (OWN_LOSS, APPLIED)}

    def logs(self, i: int) -> dict[str, Any]:
        """Return what callbacks see of update i: the loss and the metrics over the epoch so far."""
        return shown(self.numbers(i))

    def loss(self, i: int) -> float:
        """Return the loss of update i alone."""
        return self._layout.unpack(self.values[i])[OWN_LOSS]
