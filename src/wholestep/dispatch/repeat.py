"""Several updates, or batches of an evaluation, as one program: how many of a table's is known only when it runs.

So one program serves a whole epoch, its tail and a user's own loop: how updates are grouped into dispatches cannot
change a bit of them.
"""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from wholestep.engines.protocol import Engine
from wholestep.state import State
from wholestep.tree import Tensor, Tree

MOST_UPDATES = 256  # in one dispatch
NONE = np.zeros((3,), np.int32)

Each = Callable[..., tuple[State, Tree]]


GOES_ON, EPOCH, ALONE = range(3)  # how an update begins: with all sums there are, without, or without metrics as well


def span(first: int, num: int, begins: int = GOES_ON) -> np.ndarray:
    """Return which updates of a table a program carries out, and how the first of them begins, int32 (3,).

    >>> span(2, 5, EPOCH).tolist()
    [2, 5, 1]
    """
    return np.array([first, num, begins], np.int32)


def several(engine: Engine, each: Each, found: Tree | None, length: int, unreached: float = 0) -> Callable:
    """Return the program (state, given, data, rows, counts, span) -> (state, what was found of each).

    Args:
        each: (state, given, data, rows, count, begins) -> (state, what was found): one update.
        found: shapes and dtypes of what is found of one; None for a program of one update, without a loop.
        length: how many updates a table names, and how many at most are carried out.
        unreached: what stands for an update that was not reached.
    """

    def program(state: State, given: Tree, data: Tree, rows: Tensor, counts: Tensor, which: Tensor) -> tuple:
        def one(i: Tensor, state: State) -> tuple[State, Tree]:
            own = engine.gather((rows, counts), which[0] + i)
            return each(state, given, data, *own, ops.where(i == 0, which[2], GOES_ON))

        state = state._replace(stopped=ops.where(which[2] > GOES_ON, ops.zeros_like(state.stopped), state.stopped))
        if found is None:
            state, alone = one(ops.zeros((), "int32"), state)
            return state, keras.tree.map_structure(lambda leaf: leaf[None], alone)
        empty = keras.tree.map_structure(lambda leaf: ops.full((length, *leaf.shape), unreached, leaf.dtype), found)
        return engine.repeat(one, which[1], state, empty)

    return program


def compiled(
    engine: Engine, program: Callable, state: State, given: Tree, data: Tree, table: tuple[int, int], *, repeats: bool
) -> Callable:
    """Return what `several` made, compiled for a table of such a shape: how many updates it names, and their rows."""
    rows, counts = engine.place((np.zeros(table, np.int32), np.zeros(table[:1], np.int32)))
    return engine.compile(program, (state, given, data, rows, counts, engine.place(NONE)), repeats=repeats)


def begun(state: State, begins: Tensor, sums: tuple, metrics: list[np.ndarray]) -> State:
    """Return the state with these sums if an epoch begins, and with these metrics for an update that stands alone.

    Whoever begins an epoch has reset Keras' metrics, which may keep something; here that is not known.
    """

    def or_empty(value: Tensor, empty: np.ndarray, where: Tensor) -> Tensor:
        return ops.where(where, ops.cast(empty, value.dtype), value)

    pairs = zip(state.metrics, metrics, strict=True)
    return state._replace(
        sums=tuple(or_empty(value, empty, begins > GOES_ON) for value, empty in zip(state.sums, sums, strict=True)),
        metrics=[or_empty(value, empty, begins == ALONE) for value, empty in pairs],
    )
