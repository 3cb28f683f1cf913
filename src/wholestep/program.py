"""A compiled program: what carries out updates of one shape; what is wanted of it, and what a user may say of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import keras

from wholestep.cut import Cut
from wholestep.model.forward import Forward
from wholestep.reports.layout import ReportLayout


class Options(NamedTuple):
    """What a user may say of how updates are carried out."""

    microbatch_size: int | str
    memory_limit: int | None
    on_nonfinite: str
    replicas: int | str | None = None
    jit_compile: bool | str = "auto"


@dataclass(frozen=True)
class Program:
    """A compiled program for updates of one shape, and how it carries them out."""

    call: Callable
    cut: Cut
    length: int
    num_stacked: int
    memory: int | None
    tables: list[str]
    forward: Forward
    layout: ReportLayout
    how: str

    @cached_property
    def captured(self) -> list[keras.Variable]:
        """The variables whose newest values the program takes as input."""
        return self.forward.inputs


class Wanted(NamedTuple):
    """What is known of all updates of a feed.

    Args:
        short: whether shorter updates may come, to be filled up with rows of weight 0.
        most: how many updates will be wanted in one dispatch.
        num_shapes: how many shapes they have, if that is known: then a short one may be a row alone, which tells
            nothing of others, and a full one is asked.
    """

    short: bool
    most: int
    num_shapes: int
