"""The layout of an update's report: the position of each number."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
from keras import ops

from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor


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
        return np.zeros((sum(int(np.prod(shape, dtype=int)) for _, shape in self.shapes),), keras.config.floatx())

    def pack(self, logs: Mapping[str, Tensor]) -> Tensor:
        """Return the logs as one vector."""
        assert ReportLayout.of(logs) == self, "logs of another layout"
        return ops.concatenate([ops.reshape(ops.cast(value, keras.config.floatx()), (-1,)) for value in logs.values()])

    def unpack(self, report: np.ndarray) -> dict[str, Any]:
        """Return the logs that a vector holds: floats, and arrays where a metric has several values."""
        return {
            name: report[start:stop].reshape(shape) if shape else float(report[start])
            for name, start, stop, shape in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """(name, start, stop, shape) of each entry."""
        ends = [0, *itertools.accumulate(math.prod(shape) for _, shape in self.shapes)]
        return [
            (name, start, stop, shape) for (name, shape), start, stop in zip(self.shapes, ends, ends[1:], strict=False)
        ]


NOTHING_TOLD = ReportLayout()


def check_same(before: ReportLayout | None, now: ReportLayout) -> None:
    """Refuse to add up logs whose names or shapes differ from the earlier ones.

    Raises:
        SpecificationError: the layouts differ.
    """
    if before is not None and before is not now and before != now:
        names = [[name for name, _ in layout.shapes if not name.startswith("+")] for layout in (before, now)]
        must = "An objective must return the same terms and metrics for all batches of an epoch: they are added up."
        received = f"{names[1]} after {names[0]}"
        raise SpecificationError(message(must, received, "return a term with weights of 0 where it does not count."))
