"""A compiled program for batches of one shape, the properties of the feed it serves, and the user's options."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import keras

from wholestep.cut import Cut
from wholestep.model import Forward
from wholestep.reports.layout import ReportLayout


class Options(NamedTuple):
    """The user's options for running updates."""

    microbatch_size: int | str
    memory_limit: int | None
    on_nonfinite: str
    replicas: int | str | None = None
    jit_compile: bool | str = "auto"


@dataclass(frozen=True)
class Program:
    """A compiled program for batches of one shape (see `engines.protocol.Compiled`), and its plan.

    Args:
        length: the number of updates in a table.
        most: the most updates in one dispatch.
        step: the update, or the evaluation or prediction of a batch, with the properties that its trace has found.
    """

    call: Callable
    again: Callable | None
    memory: int | None
    how: str
    cut: Cut
    length: int
    most: int
    num_stacked: int
    tables: list[str]
    step: Any

    @cached_property
    def forward(self) -> Forward:
        """The forward pass of the step."""
        return self.step.forward

    @cached_property
    def layout(self) -> ReportLayout:
        """The layout of the step's numbers."""
        return self.step.layout

    @cached_property
    def captured(self) -> list[keras.Variable]:
        """The variables whose newest values the program takes as input."""
        return self.forward.inputs


class Programs(dict[tuple, Any]):
    """Programs, or their parts, by kind and shape. The oldest of more than `most` makes room for a new one.

    >>> programs = Programs(most=2)
    >>> programs["a"], programs["b"], programs["c"] = 1, 2, 3
    >>> list(programs)
    ['b', 'c']
    """

    def __init__(self, most: int = 512):
        self._most = most

    def __setitem__(self, key: tuple, value: Any) -> None:
        while key not in self and len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class Wanted(NamedTuple):
    """Common properties of all updates of a feed.

    Args:
        short: whether shorter updates may come, to be padded with rows of weight 0.
        most: the most updates in one dispatch.
        num_shapes: the number of shapes, 0 if unknown. If known, a short batch may be a single row, which shows
            nothing about coupling, so a full batch is probed.
    """

    short: bool
    most: int
    num_shapes: int
