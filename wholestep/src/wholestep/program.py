"""A compiled program for batches of one shape: several updates, or batches of an evaluation.

Their number is an argument of the program. So one program serves a full epoch, its tail and a
custom loop: how updates are grouped into dispatches cannot change a bit of them.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from wholestep.cut import Cut
from wholestep.data import Batch
from wholestep.engines import Compiled, Engine
from wholestep.logged import Logged
from wholestep.model import Forward
from wholestep.nonfinite import Skip, restarted
from wholestep.reports.report import ReportLayout
from wholestep.state import State
from wholestep.tree import Tensor, Tree


class Options(NamedTuple):
    """The user's options for running updates."""

    microbatch_size: int | str
    memory_limit: int | None
    on_nonfinite: Skip
    replicas: int | str | None = None
    jit_compile: bool | str = "auto"
    dense_gradients: bool = False
    log: tuple[Logged, ...] = ()


@dataclass(frozen=True)
class Program:
    """A compiled program for batches of one shape (see `engines.protocol.Compiled`), and its plan.

    Args:
        length: the number of updates in a table.
        most: the most updates in one dispatch.
        table_notes: how embedding tables are updated, in sentences.
        function: the update, or the evaluation or prediction of a batch, with the properties found
            by its trace.
    """

    call: Callable
    memory: int | None
    how: str
    cut: Cut
    length: int
    most: int
    num_stacked: int
    table_notes: list[str]
    function: Any

    @cached_property
    def forward(self) -> Forward:
        """The forward pass of the function."""
        return self.function.forward

    @cached_property
    def layout(self) -> ReportLayout:
        """The layout of the function's numbers."""
        return self.function.layout

    @cached_property
    def captured(self) -> list[keras.Variable]:
        """The variables whose newest values the program takes as input."""
        return self.forward.inputs


class ProgramCache(dict[tuple, Any]):
    """Values by kind and shape, such as programs. Past `most` values, the oldest is dropped.

    >>> programs = ProgramCache(most=2)
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


class FeedSpec(NamedTuple):
    """Common properties of all updates of a feed.

    Args:
        short: whether shorter updates may come, to be padded with rows of weight 0.
        most: the most updates in one dispatch.
        num_shapes: the number of shapes, 0 if unknown. If known, a short batch may be a single row,
            which shows nothing about coupling, so a full batch is probed.
        singly: whether the state may be read after every update; then batches that are loaded go
            one by one.
    """

    short: bool
    most: int
    num_shapes: int
    singly: bool = False

    def most_of(self, batch: Batch) -> int:
        """Return the most updates in one dispatch, on batches like this one."""
        return 1 if self.singly and not batch.is_resident else self.most


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Context in which Python does not search for garbage, for tracing.

    A trace makes objects by the hundred thousand, for which Python would search all objects of
    Keras and the engine again and again: 5 % of the time to trace and compile (measured).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


MOST_UPDATES = 256  # in one dispatch
NONE = np.zeros((3,), np.int32)

OneUpdate = Callable[..., tuple[State, Tree]]
Begin = Callable[[State, Tensor], State]

# an update's begin: with the epoch's sums, empty sums, or empty sums and metrics
GOES_ON, EPOCH, ALONE = range(3)


def span(first: int, num: int, begins: int = GOES_ON) -> np.ndarray:
    """Return the updates of a table that a program runs, and how the first begins, int32 (3,).

    >>> span(2, 5, EPOCH).tolist()
    [2, 5, 1]
    """
    return np.array([first, num, begins], np.int32)


def loop_updates(
    engine: Engine,
    update: OneUpdate,
    results: Tree | None,
    length: int,
    *,
    begin: Begin | None = None,
    unreached: float = 0,
) -> Callable:
    """Return the program (state, given, data, rows, counts, span) -> (state, results of updates).

    Args:
        update: (state, given, data, rows, count) -> (state, results).
        results: shapes and dtypes of an update's results; None for a program of one update, without
            a loop.
        length: the number of updates in a table, and the most that are run.
        begin: (state, begins) -> the state from which an update starts; None: unchanged.
        unreached: the value of the results of updates that were not reached.
    """

    def program(
        state: State, given: Tree, data: Tree, rows: Tensor, counts: Tensor, span: Tensor
    ) -> tuple:
        first, num, begins = span[0], span[1], span[2]

        def one(i: Tensor, state: State) -> tuple[State, Tree]:
            row_numbers, count = engine.ops.gather((rows, counts), first + i)
            # Not before the loop: there each choice would be a kernel, here the compiler fuses it
            # into another.
            if begin is not None:
                state = begin(state, ops.where(i == 0, begins, GOES_ON))
            return update(state, given, data, row_numbers, count)

        state = restarted(state, begins > GOES_ON)
        if results is None:
            state, result = one(ops.zeros((), "int32"), state)
            return state, keras.tree.map_structure(lambda leaf: leaf[None], result)
        empty = keras.tree.map_structure(
            lambda leaf: ops.full((length, *leaf.shape), unreached, leaf.dtype), results
        )
        return engine.ops.repeat(one, num, state, empty)

    return program


def compiled(
    engine: Engine, program: Callable, arguments: tuple, table: tuple[int, int], **how: bool
) -> Compiled:
    """Return a program of `loop_updates`, compiled.

    Args:
        arguments: (state, given, data).
        table: the shape of the table of rows, (updates, rows).
    """
    rows = np.zeros(table, np.int32)
    counts = np.zeros(table[:1], np.int32)
    placed = engine.devices.place((rows, counts, NONE))
    return engine.programs.compile(program, (*arguments, *placed), **how)


def with_epoch_start(
    state: State, begins: Tensor, *, sums: tuple, metrics: list[np.ndarray]
) -> State:
    """Return the state with these sums if an epoch begins; with these metrics if it is `ALONE`.

    At an epoch's begin, the caller has reset Keras' metrics, which may keep a part; this function
    cannot know it.
    """

    def replaced(values: Iterable[Tensor], empty: Iterable[np.ndarray], where: Any) -> list[Tensor]:
        pairs = zip(values, empty, strict=True)
        return [ops.where(where, ops.cast(e, value.dtype), value) for value, e in pairs]

    return state._replace(
        sums=tuple(replaced(state.sums, sums, begins > GOES_ON)),
        metrics=replaced(state.metrics, metrics, begins == ALONE),
    )
